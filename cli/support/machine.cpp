#include "cli/support/machine.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <stdexcept>

#include "base/thread_pool.h"
#include "cli/support/console.h"
#include "cpu/support/processor.h"
#include "cuda/devices.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace octile::cli {

namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// The register sets that the operating system saves and restores: XCR0.
std::uint64_t saved_registers() {
  constexpr unsigned kOsxsave = 1u << 27;
  if (!(cpuid(1, 0).ecx & kOsxsave)) return 0;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

// Bits of XCR0.
constexpr std::uint64_t kNone = 0;
constexpr std::uint64_t kYmm = 0x6;
constexpr std::uint64_t kZmm = 0xe6;
constexpr std::uint64_t kTiles = 0x60000;

struct Feature {
  const char* name;
  unsigned leaf;
  unsigned subleaf;
  unsigned Registers::*word;
  unsigned bit;
  std::uint64_t saved;
};

constexpr Feature kFeatures[] = {
    {"sse2", 1, 0, &Registers::edx, 26, kNone},        {"ssse3", 1, 0, &Registers::ecx, 9, kNone},
    {"sse4.1", 1, 0, &Registers::ecx, 19, kNone},      {"avx", 1, 0, &Registers::ecx, 28, kYmm},
    {"f16c", 1, 0, &Registers::ecx, 29, kYmm},         {"fma", 1, 0, &Registers::ecx, 12, kYmm},
    {"avx2", 7, 0, &Registers::ebx, 5, kYmm},          {"avx512f", 7, 0, &Registers::ebx, 16, kZmm},
    {"avx512bw", 7, 0, &Registers::ebx, 30, kZmm},     {"avx512vl", 7, 0, &Registers::ebx, 31, kZmm},
    {"avx512_vnni", 7, 0, &Registers::ecx, 11, kZmm},  {"avx_vnni", 7, 1, &Registers::eax, 4, kYmm},
    {"avx512_bf16", 7, 1, &Registers::eax, 5, kZmm},   {"avx512_fp16", 7, 0, &Registers::edx, 23, kZmm},
    {"avx_vnni_int8", 7, 1, &Registers::edx, 4, kYmm}, {"amx_tile", 7, 0, &Registers::edx, 24, kTiles},
    {"amx_int8", 7, 0, &Registers::edx, 25, kTiles},   {"amx_bf16", 7, 0, &Registers::edx, 22, kTiles},
};

std::vector<Isa> usable_isas() {
  const std::uint64_t saved = saved_registers();
  std::vector<Isa> isas;
  for (const Feature& f : kFeatures) {
    const bool present = cpuid(f.leaf, f.subleaf).*f.word >> f.bit & 1;
    isas.push_back({f.name, present && (saved & f.saved) == f.saved});
  }
  return isas;
}

#elif defined(__aarch64__) && defined(__linux__)

std::vector<Isa> usable_isas() {
  constexpr unsigned long kAdvancedSimd = 1ul << 1, kHalf = 1ul << 10, kDotProduct = 1ul << 20, kSve = 1ul << 22;
  constexpr unsigned long kSve2 = 1ul << 1, kI8mm = 1ul << 13, kBf16 = 1ul << 14;  // of the second word
  const unsigned long first = getauxval(AT_HWCAP);
  const unsigned long second = getauxval(AT_HWCAP2);
  return {{"neon", (first & kAdvancedSimd) != 0},  {"fp16", (first & kHalf) != 0},
          {"dotprod", (first & kDotProduct) != 0}, {"i8mm", (second & kI8mm) != 0},
          {"bf16", (second & kBf16) != 0},         {"sve", (first & kSve) != 0},
          {"sve2", (second & kSve2) != 0}};
}

#else

std::vector<Isa> usable_isas() { return {}; }

#endif

Cache cache_at(const std::filesystem::path& folder) {
  const std::string level = cpu::trimmed(read_file(folder / "level"));
  const std::string type = cpu::trimmed(read_file(folder / "type"));
  const std::string size = cpu::trimmed(read_file(folder / "size"));  // "48K"
  const std::int64_t unit = size.ends_with('K') ? 1 << 10 : size.ends_with('M') ? 1 << 20 : 1;
  const char* side = type == "Data" ? "d" : type == "Instruction" ? "i" : "";
  return {"L" + level + side, std::stoll(size) * unit};
}

std::vector<Cache> described_caches() {
  std::vector<Cache> caches;
  for (int i = 0; i < 16; ++i) {
    const std::filesystem::path folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i);
    if (!std::filesystem::exists(folder)) break;
    try {
      caches.push_back(cache_at(folder));
    } catch (const std::exception&) {  // a cache whose size the system keeps to itself
    }
  }
  return caches;
}

}  // namespace

std::int64_t Machine::last_cache_bytes() const {
  std::int64_t bytes = 0;
  for (const Cache& cache : caches) bytes = std::max(bytes, cache.bytes);
  return bytes;
}

Machine this_machine() { return {cpu::processor_name(), cpu::hardware_threads(), usable_isas(), described_caches()}; }

void require_gpu(const std::string& verb) {
  const CudaDevices cuda = cuda_devices();
  if (cuda.devices.empty()) throw std::runtime_error(verb + " --device cuda: " + cuda.reason);
}

}  // namespace octile::cli
