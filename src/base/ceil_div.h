// a / b rounded up, of integers a >= 0 and b > 0, on host and device.
#pragma once

#include <type_traits>

namespace octile {

template <class A, class B>
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr std::common_type_t<A, B>
    ceil_div(A a, B b) {
  return (static_cast<std::common_type_t<A, B>>(a) + b - 1) / b;
}

}  // namespace octile
