// The instruction sets that the CPU kernels are written for, which of them this machine has, and which may be used.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace octile::cpu {

// From narrow to wide; a machine has those of its architecture. neon and i8mm are 64-bit Arm's: NEON itself is its
// baseline, `neon` is the dot product in it, i8mm the product of two rows by two. On x86-64 each needs those before it,
// but none needs avxvnni: AVX-VNNI is AVX2 with the dot product of 32 bytes, which processors without AVX-512 have. amx
// is tiles of int8 and of bf16: all processors with one have the other, and a virtual machine that hides one has none.
enum class Isa : std::uint8_t { baseline, neon, i8mm, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx };
inline constexpr int kIsaCount = 9;

std::string_view name(Isa isa);

// Whether the processor and the operating system can run it.
bool machine_has(Isa isa);

// Beside the environment variable OCTILE_ISA, a limit to what may be used. Tests lower it.
inline constinit std::atomic<Isa> isa_ceiling = Isa::amx;

// Whether a kernel for it may be chosen; if not, why not. Empty: it may.
bool usable(Isa isa);
std::string reason_against(Isa isa);

// The widest usable one, for each ceiling; null before the first use, which may come before main.
inline constinit std::atomic<const Isa*> widest_usable = nullptr;
const Isa* find_widest_usable();
inline Isa isa() {
  const Isa* widest = widest_usable.load(std::memory_order_acquire);
  if (!widest) widest = find_widest_usable();
  return widest[static_cast<std::size_t>(isa_ceiling.load(std::memory_order_relaxed))];
}

// Bytes; 1 MiB where the system does not tell.
std::int64_t second_level_cache();

// One line for people: which was chosen, and why.
std::string explain_isa();

// What is wrong with OCTILE_ISA: it is not the name of an instruction set that this machine has, or it was set after
// the library had read it. Empty: nothing.
std::string reason_against_requested_isa();
// Throws it.
void check_requested_isa(std::string_view function);

}  // namespace octile::cpu
