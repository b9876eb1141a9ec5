#include "cli/bench/peaks.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "cpu/support/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace octile::cli {

namespace {

constexpr double kBurstSeconds = 3e-3;
constexpr int kBursts = 12;

// Independent sums: enough to hide the latency of a multiply-add on two ports, and with their operands in 16 registers.
constexpr int kSums = 12;

// One way to add up products.
struct Route {
  const char* how;
  cpu::Isa isa;  // OCTILE_ISA holds for the peaks too, so that a kernel is measured against what it may use
  double operations_per_step;
  void (*run)(std::int64_t steps);
};

constexpr double per_step(int products) { return 2.0 * products * kSums; }

// `steps` times, kSums updates of a[i] from x and w. The compiler must not see that x stays the same, or it would form
// a product once for all sums, nor that the sums are unused.
#define OCTILE_PEAK_LOOP(function, attributes, constraint, Vector, value, update) \
  attributes void function(std::int64_t steps) {                                  \
    Vector x = value, w = value, a[kSums] = {};                                   \
    for (; steps > 0; --steps) {                                                  \
      _Pragma("GCC unroll 12") for (int i = 0; i < kSums; ++i) {                  \
        asm volatile("" : "+" constraint(x));                                     \
        a[i] = update;                                                            \
        asm volatile("" : "+" constraint(a[i]));                                  \
      }                                                                           \
    }                                                                             \
  }

#define OCTILE_FOR(isa) __attribute__((target(isa)))

#if defined(__x86_64__)

OCTILE_PEAK_LOOP(dot_512, OCTILE_FOR("avx512f,avx512bw,avx512vnni"), "v", __m512i, _mm512_set1_epi8(93),
                 _mm512_dpbusd_epi32(a[i], x, w))
OCTILE_PEAK_LOOP(dot_256, OCTILE_FOR("avx2,avxvnni"), "x", __m256i, _mm256_set1_epi8(93),
                 _mm256_dpbusd_avx_epi32(a[i], x, w))
OCTILE_PEAK_LOOP(pairs_512, OCTILE_FOR("avx512f,avx512bw"), "v", __m512i, _mm512_set1_epi16(93),
                 _mm512_add_epi32(a[i], _mm512_madd_epi16(x, w)))
// |w| times (x with the sign of w): exact for x in -127..127, as two products then fit 16 bits.
OCTILE_PEAK_LOOP(signs_256, OCTILE_FOR("avx2"), "x", __m256i, _mm256_set1_epi8(93),
                 _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w, _mm256_sign_epi8(x, w)),
                                                          _mm256_set1_epi16(1))))
OCTILE_PEAK_LOOP(pairs_256, OCTILE_FOR("avx2"), "x", __m256i, _mm256_set1_epi16(93),
                 _mm256_add_epi32(a[i], _mm256_madd_epi16(x, w)))
OCTILE_PEAK_LOOP(pairs_128, , "x", __m128i, _mm_set1_epi16(93), _mm_add_epi32(a[i], _mm_madd_epi16(x, w)))
OCTILE_PEAK_LOOP(fused_512, OCTILE_FOR("avx512f"), "v", __m512, _mm512_set1_ps(0.7f), _mm512_fmadd_ps(x, w, a[i]))
OCTILE_PEAK_LOOP(bf16_512, OCTILE_FOR("avx512f,avx512bf16"), "v", __m512, _mm512_set1_ps(0.7f),
                 _mm512_dpbf16_ps(a[i], reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w)))
OCTILE_PEAK_LOOP(fused_256, OCTILE_FOR("avx2,fma"), "x", __m256, _mm256_set1_ps(0.7f), _mm256_fmadd_ps(x, w, a[i]))
OCTILE_PEAK_LOOP(product_128, , "x", __m128, _mm_set1_ps(0.7f), _mm_add_ps(a[i], _mm_mul_ps(x, w)))

struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};

// Four tiles of sums, each three times a step: 12 products of (16, 64) by (64, 16) s8, or half as many terms of bf16.
template <bool kBf16>
OCTILE_FOR("amx-tile,amx-int8,amx-bf16")
void tiles(std::int64_t steps) {
  static constexpr TileConfiguration kConfiguration;
  alignas(64) static const std::array<std::int8_t, 1024> values = [] {
    std::array<std::int8_t, 1024> v{};
    v.fill(kBf16 ? 0x3f : 93);  // 0x3f3f: 0.75
    return v;
  }();
  _tile_loadconfig(&kConfiguration);
  _tile_loadd(4, values.data(), 64);
  _tile_loadd(5, values.data(), 64);
  for (; steps > 0; --steps) {
    for (int i = 0; i < 3; ++i) {
      if constexpr (kBf16) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
      } else {
        _tile_dpbssd(0, 4, 5);
        _tile_dpbssd(1, 4, 5);
        _tile_dpbssd(2, 4, 5);
        _tile_dpbssd(3, 4, 5);
      }
    }
  }
  _tile_release();
}

constexpr Route kInt8Routes[] = {
    {"tdpbssd", cpu::Isa::amx, per_step(16 * 16 * 64), tiles<false>},
    {"vpdpbusd zmm", cpu::Isa::avx512vnni, per_step(64), dot_512},
    {"vpdpbusd ymm", cpu::Isa::avxvnni, per_step(32), dot_256},
    {"vpmaddwd + vpaddd zmm", cpu::Isa::avx512, per_step(32), pairs_512},
    {"vpsignb + vpmaddubsw + vpmaddwd + vpaddd ymm", cpu::Isa::avx2, per_step(32), signs_256},
    {"vpmaddwd + vpaddd ymm", cpu::Isa::avx2, per_step(16), pairs_256},
    {"pmaddwd + paddd xmm", cpu::Isa::baseline, per_step(8), pairs_128},
};
constexpr Route kFloatRoutes[] = {
    {"vfmadd231ps zmm", cpu::Isa::avx512, per_step(16), fused_512},
    {"vfmadd231ps ymm", cpu::Isa::avx2, per_step(8), fused_256},
    {"mulps + addps xmm", cpu::Isa::baseline, per_step(4), product_128},
};
constexpr Route kBf16Instructions[] = {
    {"tdpbf16ps", cpu::Isa::amx, per_step(16 * 16 * 32), tiles<true>},
    {"vdpbf16ps zmm", cpu::Isa::avx512bf16, per_step(32), bf16_512},
};
constexpr std::span<const Route> kBf16Routes = kBf16Instructions;

#elif defined(__aarch64__)

OCTILE_PEAK_LOOP(dot_128, OCTILE_FOR("arch=armv8.2-a+dotprod"), "w", int8x16_t, vdupq_n_s8(93),
                 vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(a[i]), x, w)))
OCTILE_PEAK_LOOP(rows_128, OCTILE_FOR("arch=armv8.2-a+i8mm"), "w", int8x16_t, vdupq_n_s8(93),
                 vreinterpretq_s8_s32(vmmlaq_s32(vreinterpretq_s32_s8(a[i]), x, w)))
OCTILE_PEAK_LOOP(integers_128, , "w", int32x4_t, vdupq_n_s32(93), vmlaq_s32(a[i], x, w))
OCTILE_PEAK_LOOP(fused_128, , "w", float32x4_t, vdupq_n_f32(0.7f), vfmaq_f32(a[i], x, w))

constexpr Route kInt8Routes[] = {
    {"smmla", cpu::Isa::i8mm, per_step(32), rows_128},
    {"sdot", cpu::Isa::neon, per_step(16), dot_128},
    {"mla, 4 x s32", cpu::Isa::baseline, per_step(4), integers_128},
};
constexpr Route kFloatRoutes[] = {{"fmla, 4 x f32", cpu::Isa::baseline, per_step(4), fused_128}};

#else

// Elsewhere, what the compiler makes of 16-byte vectors.
typedef std::int32_t Integers __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));

OCTILE_PEAK_LOOP(integers_128, , "w", Integers, (Integers{93, 94, 95, 96}), a[i] + x * w)
OCTILE_PEAK_LOOP(floats_128, , "w", Floats, (Floats{0.7f, 0.8f, 0.9f, 1.0f}), a[i] + x * w)

constexpr Route kInt8Routes[] = {{"s32 multiply and add, 16 bytes", cpu::Isa::baseline, per_step(4), integers_128}};
constexpr Route kFloatRoutes[] = {{"f32 multiply and add, 16 bytes", cpu::Isa::baseline, per_step(4), floats_128}};

#endif

#if !defined(__x86_64__)
constexpr std::span<const Route> kBf16Routes;
#endif

template <class Work>
double seconds_of(const Work& work) {
  const double start = seconds_now();
  work();
  return seconds_now() - start;
}

template <class Work>
double fastest(const Work& work) {
  double best = seconds_of(work);
  for (int i = 1; i < kBursts; ++i) best = std::min(best, seconds_of(work));
  return best;
}

double rate_of(const Route& route, int threads) {
  std::int64_t steps = 1000;
  double seconds = seconds_of([&] { route.run(steps); });
  while (seconds < kBurstSeconds) {
    steps *= 2;
    seconds = seconds_of([&] { route.run(steps); });
  }
  // Four parts per thread, so that a thread that is interrupted does not hold up the burst by its whole share.
  const int parts = 4 * threads;
  const double best = fastest([&] { cpu::parallel_for(threads, parts, [&](std::int64_t) { route.run(steps / 4); }); });
  return route.operations_per_step * static_cast<double>(steps / 4) * parts / best;
}

Peak fastest_route(std::span<const Route> routes, int threads) {
  Peak peak;
  for (const Route& route : routes) {
    if (!cpu::usable(route.isa)) continue;
    const double rate = rate_of(route, threads);
    if (rate > peak.rate) peak = {rate, route.how};
  }
  return peak;
}

// The bytes [begin, end) of a part, whole cache lines.
constexpr std::size_t kPart = std::size_t{1} << 18;

template <class Body>
void for_each_part(int threads, std::size_t bytes, const Body& body) {
  const auto parts = static_cast<std::int64_t>((bytes + kPart - 1) / kPart);
  cpu::parallel_for(threads, parts, [&](std::int64_t part) {
    const std::size_t begin = static_cast<std::size_t>(part) * kPart;
    body(begin, std::min(kPart, bytes - begin));
  });
}

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void parallel_copy(int threads, void* to, const void* from, std::size_t bytes) {
  for_each_part(threads, bytes, [&](std::size_t begin, std::size_t size) {
    std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, size);
  });
}

void parallel_read(int threads, const void* data, std::size_t bytes) {
  for_each_part(threads, bytes, [&](std::size_t begin, std::size_t size) {
    // Eight bytes of each line bring the line.
    const std::byte* line = static_cast<const std::byte*>(data) + begin;
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at + 64 <= size; at += 64) {
      std::uint64_t word;
      std::memcpy(&word, line + at, sizeof word);
      sum += word;
    }
    asm volatile("" : : "r"(sum));
  });
}

Peaks measure_peaks(const Machine& machine, int threads) {
  Peaks peaks;
  peaks.int8 = fastest_route(kInt8Routes, threads);
  peaks.f32 = fastest_route(kFloatRoutes, threads);
  peaks.bf16 = fastest_route(kBf16Routes, threads);

  constexpr std::int64_t kMinBytes = std::int64_t{64} << 20;
  constexpr std::int64_t kMaxBytes = std::int64_t{512} << 20;
  const auto bytes = static_cast<std::size_t>(std::clamp(4 * machine.last_cache_bytes(), kMinBytes, kMaxBytes));
  // Written once, so that every page is a page of its own.
  std::vector<char> from(bytes, 1), to(bytes, 2);
  const double traffic = static_cast<double>(bytes);
  peaks.read = {traffic / fastest([&] { parallel_read(threads, from.data(), bytes); }), "read from memory"};
  peaks.copy = {2 * traffic / fastest([&] { parallel_copy(threads, to.data(), from.data(), bytes); }),
                "memcpy in memory, bytes read and written"};
  return peaks;
}

}  // namespace octile::cli
