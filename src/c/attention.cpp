// octile_attend_one_query: checks, and nothing else.
#include "plan/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/float_environment.h"
#include "base/validate.h"
#include "c/guard.h"
#include "octile/octile.h"

namespace octile {

namespace {

using namespace c_interface;

static_assert(sizeof(octile_attend_one_query_args) == 7 * 8 + 2 * 4);

constexpr std::size_t kMaxRank = 4;
constexpr double kMaxScale = 0x1p127;  // times log2(e) it fits an f32

// A tensor of up to four dimensions.
struct View {
  DType dtype = {};
  Device device = {};
  std::size_t rank = 0;
  std::array<std::int64_t, kMaxRank> shape = {}, strides = {};
  std::uintptr_t begin = 0, end = 0;  // the bytes that it spans

  bool empty() const { return begin == end; }  // its strides then say nothing
};

void write(std::ostream& out, const std::array<std::int64_t, kMaxRank>& values, std::size_t rank) {
  out << '(';
  for (std::size_t i = 0; i < rank; ++i) out << (i > 0 ? ", " : "") << values[i];
  out << ')';
}

std::ostream& operator<<(std::ostream& out, const View& view) {
  write(out << view.dtype << ' ', view.shape, view.rank);
  write(out << " strides ", view.strides, view.rank);
  return out << " on " << view.device;
}

// The tensors of one call. Sizes that are not known yet are -1.
class Tensors {
 public:
  explicit Tensors(std::string_view function) : function_(function), convert_(function) {}

  View read(std::string_view name, const octile_tensor* given, std::int32_t rank) const {
    if (given == nullptr) fail(Status::invalid_argument, function_, ": ", name, " is NULL");
    if (given->ndim != rank) {
      fail(Status::shape_mismatch, function_, ": ", name, " has ndim = ", given->ndim, ", expected ", rank);
    }
    if (given->shape == nullptr) fail(Status::invalid_argument, function_, ": the shape of ", name, " is NULL");
    View view{convert_.dtype(name, given->dtype), convert_.device(name, given->device), static_cast<std::size_t>(rank)};
    std::int64_t dense = 1;
    bool fits = true, empty = false;
    for (std::size_t i = view.rank; i-- > 0;) {
      view.shape[i] = given->shape[i];
      view.strides[i] = given->strides ? given->strides[i] : dense;
      fits = fits && !__builtin_mul_overflow(dense, std::max<std::int64_t>(view.shape[i], 1), &dense);
      empty = empty || view.shape[i] == 0;
    }
    std::int64_t last = 0;  // element
    for (std::size_t i = 0; i < view.rank; ++i) {
      if (view.shape[i] < 0)
        fail(Status::invalid_argument, function_, ": ", name, " is ", view, ", with a negative size");
      if (view.shape[i] <= 1) continue;
      if (view.strides[i] < 0)
        fail(Status::shape_mismatch, function_, ": ", name, " is ", view, ", with a negative stride");
      std::int64_t step = 0;
      fits = fits && !__builtin_mul_overflow(view.shape[i] - 1, view.strides[i], &step) &&
             !__builtin_add_overflow(last, step, &last);
    }
    const int size = bits(view.dtype) / 8;
    std::int64_t bytes = 0;
    fits = fits && !__builtin_add_overflow(last, 1, &bytes) && !__builtin_mul_overflow(bytes, size, &bytes);
    view.begin = reinterpret_cast<std::uintptr_t>(given->data) + given->byte_offset;
    if (!fits || __builtin_add_overflow(view.begin, static_cast<std::uintptr_t>(bytes), &view.end)) {
      fail(Status::invalid_argument, function_, ": ", name, " is ", view, ", whose size overflows");
    }
    if (empty) view.end = view.begin;
    if (!empty && given->data == nullptr) fail(Status::invalid_argument, function_, ": the data of ", name, " is NULL");
    if (size > 0 && view.begin % static_cast<std::uintptr_t>(size) != 0) {
      fail(Status::misaligned, function_, ": ", name, " is at ", reinterpret_cast<const void*>(view.begin),
           ", no multiple of ", size);
    }
    return view;
  }

  void expect(std::string_view name, const View& view, const View& wanted) const {
    if (view.dtype != wanted.dtype || view.shape != wanted.shape || view.device != Device::cpu()) {
      fail_with(name, view, wanted);
    }
    const std::size_t last = view.rank - 1;
    if (is_float(view.dtype) && !view.empty() && view.shape[last] > 1 && view.strides[last] != 1) {
      fail(Status::shape_mismatch, function_, ": ", name, " is ", view, ", not contiguous along its last dimension");
    }
  }

  [[noreturn]] void fail_with(std::string_view name, const View& view, const View& wanted) const {
    std::ostringstream shape;
    write(shape << wanted.dtype << ' ', wanted.shape, wanted.rank);
    fail(Status::shape_mismatch, function_, ": ", name, " is ", view, ", expected ", shape.str(), " on cpu");
  }

 private:
  std::string_view function_;
  Converter convert_;
};

OneQuery checked(std::string_view function, const octile_attend_one_query_args* given) {
  const auto args = read_struct(function, "args", given);
  if (args.reserved != 0) fail(Status::invalid_argument, function, ": reserved = ", args.reserved, ", expected 0");
  if (!(std::abs(args.scale) <= kMaxScale)) {
    fail(Status::invalid_argument, function, ": scale = ", args.scale, ", expected -2^127 to 2^127");
  }
  const Tensors tensors(function);
  const View query = tensors.read("query", args.query, 3), key = tensors.read("key", args.key, 4);
  const View value = tensors.read("value", args.value, 4), y = tensors.read("y", args.y, 3);
  const auto [batch, heads, size, none] = query.shape;
  const std::int64_t kv_heads = key.shape[1], positions = key.shape[2];
  if (query.dtype != DType::f16 && query.dtype != DType::bf16 && query.dtype != DType::f32) {
    fail(Status::unsupported, function, ": query is ", query, ", expected f16, bf16 or f32");
  }
  if (size < 1 || size > kMaxHeadSize) {
    fail(Status::unsupported, function, ": query is ", query, ", expected a size of 1 to ", kMaxHeadSize);
  }
  tensors.expect("query", query, {query.dtype, {}, 3, query.shape});
  if (kv_heads < 1 || heads % kv_heads != 0) {
    fail(Status::shape_mismatch, function, ": key is ", key, ", whose heads do not divide the ", heads, " of query");
  }
  if (positions > std::numeric_limits<std::int32_t>::max()) {
    fail(Status::unsupported, function, ": key is ", key, ", expected fewer than 2^31 positions");
  }
  const View cache{query.dtype, {}, 4, {batch, kv_heads, positions, size}};
  tensors.expect("key", key, cache);
  tensors.expect("value", value, cache);
  View out{query.dtype, {}, 3, query.shape};
  tensors.expect("y", y, out);
  if (!y.empty() && ((heads > 1 && y.strides[1] != size) || (batch > 1 && y.strides[0] != heads * size))) {
    fail(Status::shape_mismatch, function, ": y is ", y, ", expected a compact one");
  }
  check_device(function, query.device);
  check_threads(function, args.threads);
  OneQuery o{};
  View mask;
  if (args.mask != nullptr) {
    mask = tensors.read("mask", args.mask, 2);
    const std::int64_t masks = mask.shape[0] == 1 ? 1 : batch;
    tensors.expect("mask", mask, {DType::u8, {}, 2, {masks, positions}});
    o.mask = reinterpret_cast<const std::uint8_t*>(mask.begin);
    o.mask_batch_stride = masks == 1 ? 0 : mask.strides[0];
    o.mask_position_stride = mask.strides[1];
  }
  for (const auto& [name, view] : {std::pair{"query", query}, {"key", key}, {"value", value}, {"mask", mask}}) {
    if (y.empty() || y.begin >= view.end || view.begin >= y.end) continue;
    fail(Status::invalid_argument, function, ": y at ", reinterpret_cast<const void*>(y.begin), ", ", y, ", overlaps ",
         name, " at ", reinterpret_cast<const void*>(view.begin), ", ", view,
         "; see docs/how-to/errors.md#two-tensors-overlap");
  }
  const auto cached = [](const View& v) {
    return OneQuery::Cache{reinterpret_cast<const void*>(v.begin), v.strides[0], v.strides[1], v.strides[2]};
  };
  o.dtype = query.dtype;
  o.batch = batch, o.kv_heads = kv_heads, o.group = heads / kv_heads, o.positions = positions, o.size = size;
  o.query = reinterpret_cast<const void*>(query.begin);
  o.query_batch_stride = query.strides[0], o.query_head_stride = query.strides[1];
  o.key = cached(key), o.value = cached(value);
  o.y = reinterpret_cast<void*>(y.begin);
  o.scale = static_cast<float>(args.scale);
  o.threads = args.threads;
  return o;
}

}  // namespace

}  // namespace octile

octile_status octile_attend_one_query(const octile_attend_one_query_args* args) {
  return octile::guarded([&, function = __func__] {
    const octile::cpu::FloatEnvironment environment;
    const octile::OneQuery o = octile::checked(function, args);
    if (o.batch == 0 || o.group == 0) return;
#if OCTILE_SCALAR
    octile::reference::attend_one_query(o);
#else
    octile::cpu::attend_one_query(o);
#endif
  });
}
