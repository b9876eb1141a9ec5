// Errors in files: throws a FileError whose text is the concatenation of its arguments.
#pragma once

#include <string>
#include <string_view>

#include "base/message.h"
#include "octile/checkpoint/safetensors.h"

namespace octile::checkpoint {

template <class... Parts>
[[noreturn]] void reject(const Parts&... parts) {
  throw FileError(message(parts...));
}

inline std::string quoted(std::string_view name) { return '"' + printable(name) + '"'; }

// "F32 (384, 1536)"
inline std::string described(const TensorInfo& tensor) {
  return message(name(tensor.type), ' ', shape_text(tensor.shape));
}

}  // namespace octile::checkpoint
