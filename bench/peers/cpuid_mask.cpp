// Hides instruction sets from a library that asks the processor itself and has no switch for it. mask_cpuid.py makes a
// copy of the library in which every cpuid is ud2, of the same two bytes; this, preloaded, answers in its place.
// The environment variable PEERS_CPUID is the widest set to be seen: baseline avx2 avxvnni avx512 avx512vnni avx512bf16
// amx.
#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Registers {
  std::uint32_t eax, ebx, ecx, edx;
};

enum Isa { kBaseline, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };
constexpr const char* kNames[] = {"baseline", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"};

Isa widest = kAmx;

constexpr std::uint32_t bit(int at) { return std::uint32_t{1} << at; }

// Bits by the tables of the processors' manuals.
void hide(std::uint32_t leaf, std::uint32_t subleaf, Registers* r) {
  if (leaf == 1 && widest < kAvx2) r->ecx &= ~(bit(12) | bit(28) | bit(29));  // FMA, AVX, F16C
  if (leaf == 7 && subleaf == 0) {
    if (widest < kAvx2) r->ebx &= ~bit(5);
    if (widest < kAvx512) {
      // F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, BITALG, VPOPCNTDQ; 4VNNIW, 4FMAPS, VP2INTERSECT, FP16
      r->ebx &= ~(bit(16) | bit(17) | bit(21) | bit(26) | bit(27) | bit(28) | bit(30) | bit(31));
      r->ecx &= ~(bit(1) | bit(6) | bit(12) | bit(14));
      r->edx &= ~(bit(2) | bit(3) | bit(8) | bit(23));
    }
    if (widest < kAvx512Vnni) r->ecx &= ~bit(11);
    if (widest < kAmx) r->edx &= ~(bit(22) | bit(24) | bit(25));
  }
  if (leaf == 7 && subleaf == 1) {
    if (widest < kAvxVnni) r->eax &= ~bit(4);
    if (widest < kAmx) r->eax &= ~bit(21);                                         // AMX-FP16
    if (widest < kAvx512Bf16) r->eax &= ~bit(5);                                   // AVX512-BF16
    if (widest < kAmx) r->edx &= ~(bit(4) | bit(5) | bit(8) | bit(10) | bit(19));  // AVX-VNNI-INT8, -INT16, AVX10
  }
}

void answer(int, siginfo_t*, void* context) {
  auto& g = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* at = reinterpret_cast<const unsigned char*>(g[REG_RIP]);
  if (at[0] != 0x0f || at[1] != 0x0b) abort();
  const auto leaf = static_cast<std::uint32_t>(g[REG_RAX]);
  const auto subleaf = static_cast<std::uint32_t>(g[REG_RCX]);
  Registers r = {leaf, 0, subleaf, 0};
  asm volatile("cpuid" : "+a"(r.eax), "=b"(r.ebx), "+c"(r.ecx), "=d"(r.edx));
  hide(leaf, subleaf, &r);
  g[REG_RAX] = r.eax;
  g[REG_RBX] = r.ebx;
  g[REG_RCX] = r.ecx;
  g[REG_RDX] = r.edx;
  g[REG_RIP] += 2;
}

__attribute__((constructor)) void install() {
  const char* wish = getenv("PEERS_CPUID");
  if (!wish) return;
  for (int i = 0; i <= kAmx; ++i) {
    if (std::strcmp(wish, kNames[i]) == 0) widest = static_cast<Isa>(i);
  }
  struct sigaction action = {};
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace
