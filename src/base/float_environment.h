// The floating-point environment that docs/reference/contract.md assumes: rounding to nearest, subnormal numbers kept,
// no exception trapped. The caller's may differ, and a new thread inherits its creator's.
#pragma once

#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <cfenv>
#endif

namespace octile::cpu {

// In force on this thread while the object lives; then the caller's is restored, including its sticky flags.
// Every public function that computes begins with one (Zen 5: 4 ns), and so does every thread of the pool.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept;
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
  ~FloatEnvironment();

 private:
#if defined(__x86_64__)
  std::uint32_t control_;      // and the flags
  std::uint16_t x87_control_;  // of no instruction of ours, but fegetround reads it, and some libraries' fma asks that
#elif defined(__aarch64__)
  std::uint64_t control_;
  std::uint64_t flags_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace octile::cpu
