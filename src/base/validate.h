// The checks that every plan makes on the caller's values. Each throws octile::Error with the function, the name of the
// value and everything that was wrong with it; none allocates when all is well.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "octile/tensor.h"

namespace octile {

enum class Access : std::uint8_t { read, write };

// Checks the tensors of one call, and that no output overlaps anything else.
class TensorChecks {
 public:
  TensorChecks(std::string_view function, Device device) : function_(function), device_(device) {}

  // A matrix (rows, cols): dtype, shape, strides, device, null and misaligned pointers. A Tensor is an output, a
  // ConstTensor an input. Returns it with definite strides where a single row or column leaves them open. Not expected:
  // it must be absent, as this plan has no use for it.
  template <class Void>
  BasicTensor<Void> matrix(std::string_view name, const BasicTensor<Void>& t, DType dtype,
                           std::array<std::int64_t, 2> shape, bool expected = true) {
    if (!expected) return absent(name, t), BasicTensor<Void>{};
    check(name, t, dtype, {2, shape, kAccess<Void>});
    BasicTensor<Void> plain = t;
    plain.strides[1] = 1;
    if (shape[0] <= 1) plain.strides[0] = row_elements(dtype, shape[1]);
    return plain;
  }
  // A vector (size), in the same way.
  template <class Void>
  BasicTensor<Void> vector(std::string_view name, const BasicTensor<Void>& t, DType dtype, std::int64_t size,
                           bool expected = true) {
    if (!expected) return absent(name, t), BasicTensor<Void>{};
    check(name, t, dtype, {1, {size, 0}, kAccess<Void>});
    return t;
  }
  // A tensor that this plan has no use for.
  void absent(std::string_view name, const ConstTensor& t);
  // The bytes of a workspace that a run uses: written, as an output is.
  void workspace(const void* data, std::size_t size);
  // Checks every output, and the workspace, against all tensors seen so far. Call it last.
  void no_overlap() const;

  std::string_view function() const { return function_; }

 private:
  struct Extent {
    std::uintptr_t begin;
    std::uintptr_t end;
    std::int64_t pitch;  // bytes between rows, 0 where there are no gaps
    std::int64_t width;  // bytes of one row
  };
  struct Seen {
    std::string_view name;
    ConstTensor tensor;
    Access access;
    Extent extent;
  };
  struct Wanted {
    int rank;
    std::array<std::int64_t, 2> shape;
    Access access;
  };
  template <class Void>
  static constexpr Access kAccess = std::is_const_v<Void> ? Access::read : Access::write;
  static Extent extent_of(const ConstTensor& t);
  static bool overlap(Extent a, Extent b);
  void check(std::string_view name, const ConstTensor& t, DType dtype, const Wanted& wanted);

  std::string_view function_;
  Device device_;
  std::array<Seen, 12> seen_{};
  std::size_t count_ = 0;
};

// Calls visit(i, r, c) for every element (r, c) of a view, data[i].
template <class Visit>
void for_each_element(const ConstTensor& t, const Visit& visit) {
  const std::int64_t cols = t.rank == 2 ? t.shape[1] : 1;
  if (cols == 0) return;  // however many rows there are
  for (std::int64_t r = 0; r < t.shape[0]; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) visit(r * t.strides[0] + c * t.strides[1], r, c);
  }
}

// Where in a vector or a matrix, for a message: "3", "3, 0".
std::string place_in(const ConstTensor& t, std::int64_t row, std::int64_t col);
// Every value of an s32 tensor in host memory is in low..high.
void check_values_within(const TensorChecks& checks, std::string_view name, const ConstTensor& t, int low, int high);
// Every value of an f32 vector in host memory is positive, or 0 where that will do, and finite.
void check_positive(std::string_view function, std::string_view name, const ConstTensor& t, bool or_zero);
// A size: not negative.
void check_size(std::string_view function, std::string_view name, std::int64_t size);
// A matrix that a plan will need: its bytes fit in 63 bits.
void check_bytes(std::string_view function, std::string_view name, std::int64_t rows, std::int64_t cols);
// A choice: one of the first `count` values of its enumeration.
void check_choice(std::string_view function, std::string_view name, int value, int count);
void check_threads(std::string_view function, int threads);
// The format of a weight with k columns.
void check_weight_format(std::string_view function, const WeightFormat& weight, std::int64_t k);
void check_device(std::string_view function, Device device);
// A static scale: positive and finite when converted to the scale type.
void check_static_scale(std::string_view function, double scale, DType type);

template <class Enum>
void check_choice(std::string_view function, std::string_view name, Enum value, Enum last) {
  check_choice(function, name, static_cast<int>(value), static_cast<int>(last) + 1);
}

}  // namespace octile
