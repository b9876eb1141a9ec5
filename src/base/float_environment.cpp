// A file of its own: no compiler may move the arithmetic of a caller across these calls.
#include "base/float_environment.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace octile::cpu {

#if defined(__x86_64__)

namespace {
constexpr std::uint32_t kDefault = 0x1f80;  // all exceptions masked
constexpr std::uint32_t kFlags = 0x3f;
constexpr std::uint16_t kX87Default = 0x37f;
}  // namespace

FloatEnvironment::FloatEnvironment() noexcept : control_(_mm_getcsr()) {
  if ((control_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  asm volatile("fnstcw %0" : "=m"(x87_control_));
  if (x87_control_ != kX87Default) asm volatile("fldcw %0" ::"m"(kX87Default));
}

FloatEnvironment::~FloatEnvironment() {
  if (_mm_getcsr() != control_) _mm_setcsr(control_);
  if (x87_control_ != kX87Default) asm volatile("fldcw %0" ::"m"(x87_control_));
}

#elif defined(__aarch64__)

FloatEnvironment::FloatEnvironment() noexcept {
  asm volatile("mrs %0, fpcr" : "=r"(control_));
  asm volatile("mrs %0, fpsr" : "=r"(flags_));
  if (control_ != 0) asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
}

FloatEnvironment::~FloatEnvironment() {
  asm volatile("msr fpcr, %0" ::"r"(control_));
  asm volatile("msr fpsr, %0" ::"r"(flags_));
}

#else

FloatEnvironment::FloatEnvironment() noexcept {
  std::fegetenv(&saved_);
  std::fesetenv(FE_DFL_ENV);
}

FloatEnvironment::~FloatEnvironment() { std::fesetenv(&saved_); }

#endif

}  // namespace octile::cpu
