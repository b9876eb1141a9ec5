#include "base/validate.h"

#include <cassert>
#include <cmath>
#include <utility>

#include "base/float_rows.h"
#include "base/message.h"
#include "cpu/support/isa.h"

namespace octile {

namespace {

bool empty(const ConstTensor& t) { return t.shape[0] == 0 || (t.rank == 2 && t.shape[1] == 0); }

}  // namespace

TensorChecks::Extent TensorChecks::extent_of(const ConstTensor& t) {
  const auto begin = reinterpret_cast<std::uintptr_t>(t.data);
  const std::int64_t element = bits(t.dtype);
  const std::int64_t width = ((t.rank == 2 ? t.shape[1] : 1) * element + 7) / 8;
  const std::int64_t pitch = t.strides[0] * element / 8;
  const std::int64_t all = (t.shape[0] - 1) * pitch + width;
  const std::uintptr_t end = begin + static_cast<std::uintptr_t>(all);
  if (t.shape[0] == 1 || pitch <= width) return {begin, end, 0, all};
  return {begin, end, pitch, width};
}

// Column slices of one padded matrix have extents that interleave without a shared byte: same pitch, different columns.
// So does memory between two rows.
bool TensorChecks::overlap(Extent a, Extent b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  if (a.pitch == 0) std::swap(a, b);
  if (a.pitch == 0 || (b.pitch != 0 && a.pitch != b.pitch)) return true;
  const auto pitch = static_cast<std::uintptr_t>(a.pitch);
  const std::uintptr_t shift =
      b.begin >= a.begin ? (b.begin - a.begin) % pitch : (pitch - (a.begin - b.begin) % pitch) % pitch;
  const auto offset = static_cast<std::int64_t>(shift);
  return offset < a.width || offset + b.width > a.pitch;
}

void TensorChecks::check(std::string_view name, const ConstTensor& t, DType dtype, const Wanted& wanted) {
  const auto& [rank, shape, access] = wanted;
  if (t.rank != rank || t.dtype != dtype || t.device != device_ || t.shape[0] != shape[0] ||
      (rank == 2 && t.shape[1] != shape[1])) {
    const std::int64_t leading = rank == 2 ? shape[1] : 1;
    const ConstTensor expected{nullptr, dtype, device_, rank, shape, {leading, 1}};
    fail(Status::shape_mismatch, function_, ": ", name, " is ", t, ", expected ", expected);
  }
  if (empty(t)) return;

  const bool rows_repeat = t.strides[0] == 0 && access == Access::read;
  const std::int64_t least = rank == 2 ? shape[1] : 1;
  if (rank == 2 && shape[1] > 1 && t.strides[1] != 1) {
    fail(Status::shape_mismatch, function_, ": ", name, " is ", t, ": its columns must be contiguous (stride 1)");
  }
  if (shape[0] > 1 && t.strides[0] < least && !rows_repeat) {
    fail(Status::shape_mismatch, function_, ": ", name, " is ", t, ": its first stride must be at least ", least,
         access == Access::read ? ", or 0 to repeat" : "");
  }
  // The bytes of a packed weight, which are read as one piece.
  if (rank == 1 && dtype == DType::u8 && shape[0] > 1 && t.strides[0] != 1) {
    fail(Status::shape_mismatch, function_, ": ", name, " is ", t, ": bytes have the stride 1");
  }
  if (t.strides[0] < 0 || (shape[0] > 1 && t.strides[0] % per_byte(dtype) != 0)) {
    fail(Status::shape_mismatch, function_, ": ", name, " is ", t, ": its first stride must not be negative",
         is_packed(dtype) ? message(", and must be a multiple of ", per_byte(dtype), " for ", dtype) : "");
  }
  std::int64_t last = 0;
  if (__builtin_mul_overflow(shape[0], t.strides[0], &last) || __builtin_mul_overflow(last, 64, &last) ||
      __builtin_add_overflow(last, least * 64, &last)) {
    fail(Status::invalid_argument, function_, ": ", name, " is ", t, ": its size in bytes overflows");
  }
  if (t.data == nullptr) fail(Status::invalid_argument, function_, ": ", name, " is ", t, " with a null pointer");
  const auto size = static_cast<std::uintptr_t>(bits(dtype) / 8);
  if (size > 1 && reinterpret_cast<std::uintptr_t>(t.data) % size != 0) {
    fail(Status::misaligned, function_, ": ", name, " is ", t, " at ", t.data, ", not a multiple of ", size,
         " bytes; see docs/how-to/errors.md#alignment");
  }
  assert(count_ < seen_.size());
  seen_[count_++] = {name, t, access, extent_of(t)};
}

void TensorChecks::absent(std::string_view name, const ConstTensor& t) {
  if (t.present()) fail(Status::shape_mismatch, function_, ": ", name, " is ", t, ", but this plan has no use for it");
}

void TensorChecks::workspace(const void* data, std::size_t size) {
  assert(count_ < seen_.size());
  const ConstTensor bytes{data, DType::u8, device_, 1, {static_cast<std::int64_t>(size), 0}, {1, 0}};
  seen_[count_++] = {"workspace", bytes, Access::write, extent_of(bytes)};
}

void TensorChecks::no_overlap() const {
  for (std::size_t i = 0; i < count_; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (seen_[i].access == Access::read && seen_[j].access == Access::read) continue;
      if (!overlap(seen_[i].extent, seen_[j].extent)) continue;
      fail(Status::invalid_argument, function_, ": ", seen_[j].name, " at ", seen_[j].tensor.data, ", ",
           seen_[j].tensor, ", overlaps ", seen_[i].name, " at ", seen_[i].tensor.data, ", ", seen_[i].tensor,
           "; see docs/how-to/errors.md#two-tensors-overlap");
    }
  }
}

std::string place_in(const ConstTensor& t, std::int64_t row, std::int64_t col) {
  return t.rank == 1 ? message(row) : message(row, ", ", col);
}

void check_values_within(const TensorChecks& checks, std::string_view name, const ConstTensor& t, int low, int high) {
  for_each_element(t, [&](std::int64_t i, std::int64_t r, std::int64_t c) {
    const std::int32_t value = static_cast<const std::int32_t*>(t.data)[i];
    if (low <= value && value <= high) return;
    fail(Status::invalid_argument, checks.function(), ": ", name, "[", place_in(t, r, c), "] = ", value, " is outside ",
         low, "..", high);
  });
}

void check_positive(std::string_view function, std::string_view name, const ConstTensor& t, bool or_zero) {
  for (std::int64_t j = 0; j < t.shape[0]; ++j) {
    const float value = read_f32(t, j);
    if ((or_zero ? value >= 0 : value > 0) && std::isfinite(value)) continue;
    fail(Status::invalid_argument, function, ": ", name, "[", j, "] = ", value, ", expected ",
         or_zero ? "finite and not negative" : "positive and finite");
  }
}

void check_size(std::string_view function, std::string_view name, std::int64_t size) {
  if (size < 0) fail(Status::invalid_argument, function, ": ", name, " = ", size, " is negative");
}

void check_bytes(std::string_view function, std::string_view name, std::int64_t rows, std::int64_t cols) {
  // 128 bytes an element: the widest type, and room for its padding and packing.
  std::int64_t bytes = 0;
  std::int64_t padded_rows = 0;
  std::int64_t padded_cols = 0;
  if (__builtin_add_overflow(rows, 1, &padded_rows) || __builtin_add_overflow(cols, 1, &padded_cols) ||
      __builtin_mul_overflow(padded_rows, padded_cols, &bytes) || __builtin_mul_overflow(bytes, 128, &bytes)) {
    fail(Status::invalid_argument, function, ": ", name, " of ", rows, " x ", cols, ": its size in bytes overflows");
  }
}

void check_choice(std::string_view function, std::string_view name, int value, int count) {
  if (value < 0 || value >= count) {
    fail(Status::invalid_argument, function, ": ", name, " = ", value, " is not one of its ", count, " values");
  }
}

void check_threads(std::string_view function, int threads) {
  if (threads < 0 || threads > 1024) {
    fail(Status::invalid_argument, function, ": threads = ", threads, ", expected 0 (all) to 1024");
  }
}

void check_device(std::string_view function, Device device) {
  check_choice(function, "device.type", device.type, DeviceType::cuda);
  if (device.index < 0 || (device.type == DeviceType::cpu && device.index != 0)) {
    fail(Status::invalid_argument, function, ": there is no device ", device, " with index ", device.index);
  }
  if (device.type == DeviceType::cpu) cpu::check_requested_isa(function);
}

void check_weight_format(std::string_view function, const WeightFormat& weight, std::int64_t k) {
  check_choice(function, "weight.type", weight.type, kLastDType);
  check_choice(function, "weight.granularity", weight.granularity, Granularity::group);
  const bool packed = is_packed(weight.type);
  const bool grouped = weight.granularity == Granularity::group;
  if (!packed && weight.type != DType::s8) {
    fail(Status::unsupported, function, ": a weight of ", weight.type, ", expected s8 or s4");
  }
  if (weight.granularity == Granularity::column || (packed && !grouped)) {
    fail(Status::unsupported, function, ": weight = ", name(weight), ", expected ",
         packed ? "" : "s8_per_channel, s8_per_tensor or ", weight.type, "_group");
  }
  if (weight.zero_point && !packed) {
    fail(Status::unsupported, function, ": weight_zero_point with weight = ", name(weight), ", expected s4_group");
  }
  if (!grouped || weight.group == 0) return;
  if (weight.group != 32 && weight.group != 64 && weight.group != 128) {
    fail(Status::unsupported, function, ": group = ", weight.group, ", expected 32, 64, 128, or 0 for a whole row");
  }
  if (k % weight.group != 0) {
    fail(Status::invalid_argument, function, ": group = ", weight.group, " does not divide k = ", k);
  }
}

void check_static_scale(std::string_view function, double scale, DType type) {
  const double value = type == DType::f64 ? scale : static_cast<double>(static_cast<float>(scale));
  if (!(value > 0) || !std::isfinite(value)) {
    fail(Status::invalid_argument, function, ": static_scale = ", scale, ", expected positive and finite in ", type);
  }
}

}  // namespace octile
