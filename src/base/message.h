// Error texts: everything that was wrong, with its values.
#pragma once

#include <charconv>
#include <sstream>
#include <string>
#include <type_traits>

#include "octile/error.h"
#include "octile/tensor.h"

namespace octile {

inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name(dtype); }
inline std::ostream& operator<<(std::ostream& out, Device device) {
  out << name(device.type);
  return device.type == DeviceType::cuda || device.index != 0 ? out << ':' << device.index : out;
}

// "f32 (4, 8) strides (8, 1) on cpu"
template <class Void>
std::ostream& operator<<(std::ostream& out, const BasicTensor<Void>& t) {
  if (!t.present()) return out << "absent";
  out << t.dtype << " (";
  for (int i = 0; i < t.rank && i < 2; ++i) out << (i ? ", " : "") << t.shape[static_cast<std::size_t>(i)];
  out << ") strides (";
  for (int i = 0; i < t.rank && i < 2; ++i) out << (i ? ", " : "") << t.strides[static_cast<std::size_t>(i)];
  out << ") on " << t.device;
  return t.rank < 0 || t.rank > 2 ? out << " of rank " << t.rank : out;
}

// A number with as many digits as tell it from every other: 1.0000001 is not written as 1.
template <class Part>
void write_part(std::ostream& out, const Part& part) {
  if constexpr (std::is_floating_point_v<Part>) {
    char digits[32];
    out.write(digits, std::to_chars(digits, digits + sizeof digits, part).ptr - digits);
  } else {
    out << part;
  }
}

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream out;
  (write_part(out, parts), ...);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(Status status, const Parts&... parts) {
  throw Error(status, message(parts...));
}

}  // namespace octile
