// Error texts: everything that was wrong, with its values.
#pragma once

#include <sstream>
#include <string>

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

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(Status status, const Parts&... parts) {
  throw Error(status, message(parts...));
}

}  // namespace octile
