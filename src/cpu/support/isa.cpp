#include "cpu/support/isa.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/message.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octile::cpu {

namespace {

constexpr std::array<std::string_view, kIsaCount> kNames = {"baseline", "neon",       "i8mm",       "avx2", "avxvnni",
                                                            "avx512",   "avx512vnni", "avx512bf16", "amx"};

// Those that a machine of this architecture may have.
bool of_this_architecture(Isa isa) {
#if defined(__x86_64__)
  return isa == Isa::baseline || isa >= Isa::avx2;
#elif defined(__aarch64__)
  return isa < Isa::avx2;
#else
  return isa == Isa::baseline;
#endif
}

#if defined(__x86_64__)

// Leaf 7, subleaf 1, EAX: bit 4 is AVX-VNNI, bit 5 AVX-512 BF16.
bool newer_feature(int bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> bit & 1);
}

// Linux gives a process the tile registers when it asks for them; they are 8 KiB more to save at each switch.
bool amx() {
#if defined(__linux__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kAll) != kAll) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Compilers' own test does not know it everywhere.
bool f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

// In the order of Isa.
std::array<bool, kIsaCount> detect() {
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx512vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool avxvnni = avx2 && newer_feature(4);
  const bool avx512bf16 = avx512vnni && newer_feature(5);
  return {true, false, false, avx2, avxvnni, avx512, avx512vnni, avx512bf16, avx512bf16 && amx()};
}

#elif defined(__aarch64__) && defined(__linux__)

std::array<bool, kIsaCount> detect() {
  constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
  constexpr unsigned long kI8mm = 1ul << 13;        // HWCAP2_I8MM
  const bool neon = (getauxval(AT_HWCAP) & kDotProduct) != 0;
  return {true, neon, neon && (getauxval(AT_HWCAP2) & kI8mm) != 0};
}

#else

std::array<bool, kIsaCount> detect() { return {true}; }

#endif

// The widest that OCTILE_ISA allows.
Isa requested_limit(std::string_view text) {
  const auto* found = std::find(kNames.begin(), kNames.end(), text);
  return found == kNames.end() ? Isa::amx : static_cast<Isa>(found - kNames.begin());
}

std::string requested_isa() {
  const char* text = std::getenv("OCTILE_ISA");
  return text ? text : "";
}

struct Machine {
  std::array<bool, kIsaCount> has = detect();
  std::string requested = requested_isa();
  Isa limit = requested_limit(requested);
  std::array<Isa, kIsaCount> widest{};  // for each ceiling

  Machine() {
    for (std::size_t i = 1; i < widest.size(); ++i) {
      const auto isa = static_cast<Isa>(i);
      widest[i] = has[i] && isa <= limit ? isa : widest[i - 1];
    }
  }
};

// At the first use, which may be in the static initializers of a program that has the library inside; and for ever,
// since it may be used in their destructors too.
const Machine& machine() {
  static const Machine& found = *new Machine;
  return found;
}

Isa ceiling() { return std::min(isa_ceiling.load(std::memory_order_relaxed), machine().limit); }

}  // namespace

const Isa* find_widest_usable() {
  const Isa* const widest = machine().widest.data();
  widest_usable.store(widest, std::memory_order_release);
  return widest;
}

std::string_view name(Isa isa) { return kNames[static_cast<std::size_t>(isa)]; }

bool machine_has(Isa wanted) { return machine().has[static_cast<std::size_t>(wanted)]; }

bool usable(Isa wanted) { return wanted <= ceiling() && machine_has(wanted); }

std::int64_t second_level_cache() {
#if defined(__linux__)
  static const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  constexpr std::int64_t kUsual = 1 << 20;
  return kUsual;
}

std::string reason_against(Isa wanted) {
  if (!machine_has(wanted)) {
    return message("this machine has no ", name(wanted), wanted == Isa::neon ? " dot product" : "");
  }
  if (!usable(wanted)) return message("OCTILE_ISA is ", name(ceiling()));
  return {};
}

std::string explain_isa() {
  std::string wider;
  for (int i = static_cast<int>(isa()) + 1; i < kIsaCount; ++i) {
    const auto other = static_cast<Isa>(i);
    if (!of_this_architecture(other)) continue;
    wider += message("; not ", name(other), ": ", reason_against(other));
  }
  return message(name(isa()), ", the widest that may be used", wider);
}

std::string reason_against_requested_isa() {
  const std::string& first = machine().requested;  // read here at the latest
  const std::string text = requested_isa();
  if (text.empty()) return {};
  if (text != first) {
    const std::string before = first.empty() ? "not set" : first;
    return message("the environment variable OCTILE_ISA is ", text, ", but was ", before,
                   " when the library read it: set it before the first call");
  }
  std::string here;
  std::string missing;
  for (int i = 0; i < kIsaCount; ++i) {
    const auto isa = static_cast<Isa>(i);
    if (!of_this_architecture(isa)) continue;
    if (machine_has(isa) && name(isa) == text) return {};
    std::string& list = machine_has(isa) ? here : missing;
    list += message(list.empty() ? "" : ", ", name(isa));
  }
  return message("the environment variable OCTILE_ISA is ", text, ", expected one of ", here,
                 missing.empty() ? "" : "; this machine has no ", missing);
}

void check_requested_isa(std::string_view function) {
  const std::string reason = reason_against_requested_isa();
  if (!reason.empty()) fail(Status::invalid_argument, function, ": ", reason);
}

}  // namespace octile::cpu
