// Fuzz target: any bytes become a plan's description and the arguments of one run, mostly legal, sometimes not.
//
// What must hold, whatever the bytes:
//   - nothing but octile::Error is thrown, and never with Status::internal;
//   - the C++ and the C interface give the same answer;
//   - legal arguments are accepted; can_implement and run agree;
//   - nothing is read or written outside the tensors: their memory is exactly as large as they are, for ASan;
//   - nothing but the outputs' elements changes, and not even those when the run is refused;
//   - the result is the reference's, bit for bit, where the plan says so, and the same on a second run.
//
// The kernels run at each of the instruction sets that this machine has, so the bits are compared across them too.
//
// It is linked with libFuzzer, or with standalone.cpp.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/access.h"
#include "check/cases.h"
#include "check/operands.h"
#include "cpu/support/isa.h"
#include "octile/octile.h"
#include "octile/octile.hpp"
#include "target.h"

namespace {

using namespace octile;

constexpr std::int64_t kMaxBytes = 1 << 20;            // of one tensor or workspace
constexpr std::int64_t kMaxMultiplications = 1 << 17;  // of one run: milliseconds, even under sanitizers

#define REQUIRE(condition, text)                                                                                   \
  do {                                                                                                             \
    if (!(condition)) {                                                                                            \
      std::fprintf(stderr, "%s:%d: %s is false: %s\n", __FILE__, __LINE__, #condition, std::string(text).c_str()); \
      std::abort();                                                                                                \
    }                                                                                                              \
  } while (0)

// ---- Decisions from bytes. Zeros, and what comes after the end, are the plain and legal choices ----

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {
    for (std::size_t i = 0; i < size; ++i) state_ = (state_ ^ data[i]) * 0x100000001b3u;
  }

  std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  std::uint64_t word() {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }
  int below(int count) { return byte() % count; }
  // True for one byte value in `count`, never for 0.
  bool rarely(int count) { return byte() % count == count - 1; }

  template <class T, std::size_t kCount>
  T pick(const T (&values)[kCount]) {
    return values[byte() % kCount];
  }
  template <class Enum>
  Enum choice(int count) {
    const std::uint8_t b = byte();
    return static_cast<Enum>(b >= 252 ? b : b % count);
  }
  std::int64_t size() {
    const std::uint8_t b = byte();
    if (b < 160) return b % 20;
    if (b < 220) return b % 70;
    if (b < 250) return byte() + 1;
    constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
    return pick<std::int64_t>({-1, 131071, 131072, 1 << 20, std::int64_t{1} << 31, std::int64_t{1} << 33,
                               std::int64_t{1} << 55, std::int64_t{1} << 57, std::int64_t{1} << 62, kMax, kMax - 1,
                               -kMax - 1, static_cast<std::int64_t>(word())});
  }
  double real() {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const std::uint8_t b = byte();
    if (b < 200) return (b + 1) / 64.0;
    return pick<double>({0.0, -1.0, 1e-300, 1e300, 1e-40, 3.5e38, -0.0, kInfinity, -kInfinity, std::nan("")});
  }
  // For contents, of which there would never be bytes enough.
  std::uint64_t random() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
  std::uint64_t state_ = 0xcbf29ce484222325u;
};

void common_choices(Bytes& in, Device& device, int& threads, std::string& kernel) {
  if (in.rarely(40)) device = {static_cast<DeviceType>(in.byte()), in.below(3) - 1};
  threads = in.rarely(10) ? in.pick<int>({-1, 1024, 1025, 1 << 30, 0}) : in.below(4);
  if (!in.rarely(4)) return;
  const std::vector<KernelInfo> rows = kernels();
  switch (in.below(4)) {
    case 0:
      kernel = "reference";
      break;
    case 1:
      kernel = "portable";
      break;
    case 2:
      kernel = rows[in.byte() % rows.size()].name;
      break;
    default:
      for (int i = in.below(40); i > 0; --i) kernel += static_cast<char>(in.byte());
  }
}

QuantizeDescription quantize_description(Bytes& in, bool forward) {
  QuantizeDescription d;
  d.rows = in.size();
  d.cols = in.size();
  d.x = in.choice<DType>(4);
  d.q = in.rarely(50) ? in.choice<DType>(9) : in.pick<DType>({DType::s8, DType::u8, DType::s4});
  d.granularity = in.choice<Granularity>(4);
  if (d.granularity == Granularity::group || in.rarely(20)) {
    d.group = in.rarely(10) ? in.size() : in.pick<std::int64_t>({32, 1, 2, 3, 8, 64, 128, 5});
    if (!in.rarely(10) && d.group > 0 && d.group < 1000) d.cols = d.group * in.below(5);
  }
  d.scale = in.choice<ScaleSource>(2);
  d.mapping = in.choice<Mapping>(2);
  d.rounding = in.choice<Rounding>(2);
  if (forward || in.rarely(50)) {
    d.orientation = in.choice<Orientation>(3);
    d.multiplier = in.choice<Multiplier>(3);
  }
  d.mask = in.choice<Mask>(2);
  if (in.rarely(4)) {
    d.q_min = in.rarely(8) ? static_cast<int>(in.word()) : -in.below(129);
    d.q_max = in.rarely(8) ? static_cast<int>(in.word()) : in.below(128);
  }
  common_choices(in, d.device, d.threads, d.kernel);
  return d;
}

constexpr WeightFormat kFormats[] = {WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor, WeightFormat::s4_group,
                                     WeightFormat::s8_group};  // by their numbers in C

WeightFormat weight_format(Bytes& in) { return in.pick(kFormats); }

LinearDescription linear_description(Bytes& in) {
  LinearDescription d;
  d.m = in.size();
  d.n = in.size();
  d.k = in.size();
  d.x = in.choice<DType>(5);
  d.y = d.x;
  if (d.x == DType::s8 || (d.x != DType::f64 && in.rarely(3))) d.y = in.choice<DType>(d.x == DType::s8 ? 4 : 3);
  d.weight = weight_format(in);
  const bool float_x = in.below(2) == 1;
  d.activation = float_x ? Activation::none : static_cast<Activation>(1 + in.below(3));
  if (d.x == DType::s8 && float_x) d.x = d.y;
  d.static_scale = in.real();
  if (d.weight.granularity == Granularity::group) {
    d.weight.group = in.pick<std::int64_t>({32, 64, 128, 0});
    if (d.weight.group != 0 && !in.rarely(10)) d.k = d.weight.group * in.below(4);
    d.weight.zero_point = d.weight.type == DType::s4 && in.below(2) == 1;
  } else if (!float_x) {
    d.weight_layout = in.choice<WeightLayout>(2);
  }
  d.x_multiplier = d.x != DType::s8 && !float_x && in.below(2) == 1;
  d.bias = in.below(2) == 1;
  if (in.rarely(20)) {  // anything at all
    d.activation = in.choice<Activation>(5);
    d.y = in.choice<DType>(9);
    d.weight_layout = in.choice<WeightLayout>(3);
    d.x_multiplier = in.below(2) == 1;
    d.weight.zero_point = in.below(2) == 1;
    d.weight.group = in.size();
    d.weight.type = in.choice<DType>(9);
    d.weight.granularity = in.choice<Granularity>(4);
  }
  common_choices(in, d.device, d.threads, d.kernel);
  return d;
}

GroupedLinearDescription grouped_linear_description(Bytes& in) {
  const LinearDescription e = linear_description(in);
  GroupedLinearDescription d{.experts = in.rarely(30) ? in.size() : in.below(6), .m = e.m, .n = e.n, .k = e.k};
  d.gather = in.below(2) == 1;
  d.slots = in.rarely(30) ? in.size() : in.below(4);
  if (d.gather || d.slots > 0) d.tokens = in.rarely(30) ? in.size() : in.below(12);
  d.x = e.x, d.y = e.y, d.activation = e.activation, d.static_scale = e.static_scale, d.weight = e.weight;
  if (d.activation == Activation::dynamic_per_tensor && !in.rarely(20)) d.activation = Activation::dynamic_per_token;
  d.bias = e.bias, d.device = e.device, d.threads = e.threads, d.kernel = e.kernel;
  return d;
}

LinearBackwardDescription linear_backward_description(Bytes& in) {
  LinearBackwardDescription d;
  d.m = in.size();
  d.n = in.size();
  d.k = in.size();
  d.dy = in.choice<DType>(4);
  if (in.rarely(3)) d.dw_dtype = in.rarely(10) ? in.choice<DType>(9) : d.dy == DType::f64 ? DType::f64 : DType::f32;
  d.dx = in.choice<Product>(3);
  d.dw = in.choice<Product>(3);
  d.db = in.below(2) == 1;
  d.activation = static_cast<Activation>(1 + in.below(3));
  if (in.rarely(40)) d.activation = in.choice<Activation>(5);
  d.static_scale = in.real();
  d.x_transposed = in.below(2) == 1;
  d.weight = in.rarely(40) ? weight_format(in) : kFormats[in.below(2)];
  d.weight.group = 0;  // which C does not give
  d.weight_layout = in.choice<WeightLayout>(2);
  d.rounding = in.choice<Rounding>(2);
  if (in.below(2) == 1)
    d.gradient_block = in.rarely(10) ? in.below(2000) : in.pick<std::int64_t>({128, 256, 512, 1024});
  common_choices(in, d.device, d.threads, d.kernel);
  return d;
}

// ---- Operands: a view each, in the order of the argument structures' fields ----

struct Operand : check::Operand {
  Tensor view = {};
  std::size_t block = 0;
  std::size_t offset = 0;  // of view.data in its block
};

using Operands = std::vector<Operand>;

template <class Args, class Description>
std::vector<check::Operand> described(const Description& d, std::int64_t rows, Bytes&) {
  return check::operands<Args>(d, rows);
}

// Some rows are nobody's, some experts have none, some slots no row.
template <>
std::vector<check::Operand> described<GroupedLinearArgs>(const GroupedLinearDescription& d, std::int64_t rows,
                                                         Bytes& in) {
  check::GroupedLinearCase c;
  c.description = d;
  c.rows = d.gather && d.tokens == 0 ? 0 : rows;
  const auto below = [&](std::int64_t count) {
    return static_cast<std::int32_t>(in.random() % static_cast<std::uint64_t>(count));
  };
  for (std::int64_t e = 0; e <= d.experts; ++e) c.offsets.push_back(below(c.rows + 1));
  std::sort(c.offsets.begin(), c.offsets.end());
  for (std::int64_t r = 0; d.gather && r < c.rows; ++r) c.token.push_back(below(d.tokens));
  // Without values place has random ones, which are legal.
  const bool few = d.slots < 100 && d.tokens < 100;
  for (std::int64_t i = 0; few && i < d.slots * d.tokens; ++i) c.place.push_back(below(c.rows + 2) - 1);
  return check::operands(c);
}

// The operands of a legal run. Those that a caller may leave out come by chance.
template <class Args, class Description>
Operands operands_of(const Description& d, std::int64_t rows, Bytes& in) {
  Operands all;
  for (const check::Operand& o : described<Args>(d, rows, in)) {
    Operand& operand = all.emplace_back(Operand{o});
    if (!o.present() || (o.optional && in.below(2) == 0)) continue;
    const std::int64_t cols = o.size.cols.value_or(0);
    const std::int64_t pitch = o.dtype == DType::s4 ? cols + cols % 2 : cols;
    operand.view = {nullptr, o.dtype, d.device, o.size.cols ? 2 : 1, {o.size.rows, cols}, {1, 0}};
    if (o.size.cols) operand.view.strides = {pitch, 1};
  }
  return all;
}

template <class Args>
Args args_of(const Operands& operands, std::uint64_t seed) {
  std::vector<Tensor> views;
  for (const Operand& o : operands) views.push_back(o.view);
  return check::args_of<Args>(views, seed);
}

// One specialization per plan: its description and its C functions.
template <class Args>
struct Kind;

#define OCTILE_KIND(args, kind, description, from_bytes)                  \
  template <>                                                             \
  struct Kind<args> : check::Kind<args> {                                 \
    using CArgs = octile_##kind##_args;                                   \
    using CDescription = octile_##description##_description;              \
    static constexpr auto init = octile_##description##_description_init; \
    static constexpr auto create = octile_##kind##_plan_create;           \
    static constexpr auto can_implement = octile_##kind##_can_implement;  \
    static constexpr auto run = octile_##kind##_run;                      \
    static constexpr const char* name = #kind;                            \
    static auto describe(Bytes& in) { return from_bytes; }                \
  }

OCTILE_KIND(QuantizeArgs, quantize, quantize, quantize_description(in, true));
OCTILE_KIND(DequantizeArgs, dequantize, quantize, quantize_description(in, false));
OCTILE_KIND(QuantizeBackwardArgs, quantize_backward, quantize, quantize_description(in, false));
OCTILE_KIND(DequantizeBackwardArgs, dequantize_backward, quantize, quantize_description(in, false));
OCTILE_KIND(FakeQuantizeArgs, fake_quantize, quantize, quantize_description(in, false));
OCTILE_KIND(FakeQuantizeBackwardArgs, fake_quantize_backward, quantize, quantize_description(in, false));
OCTILE_KIND(LinearArgs, linear, linear, linear_description(in));
OCTILE_KIND(LinearBackwardArgs, linear_backward, linear_backward, linear_backward_description(in));
OCTILE_KIND(GroupedLinearArgs, grouped_linear, grouped_linear, grouped_linear_description(in));

std::int64_t rows_of(const QuantizeDescription& d) { return d.rows; }
std::int64_t rows_of(const LinearDescription& d) { return d.m; }
std::int64_t rows_of(const LinearBackwardDescription& d) { return d.m; }
std::int64_t rows_of(const GroupedLinearDescription& d) { return d.m; }

// Multiplications of one run, or a number that is too many.
double work_of(const QuantizeDescription& d, std::int64_t rows) {
  return static_cast<double>(rows) * static_cast<double>(d.cols);
}
double work_of(const LinearDescription& d, std::int64_t rows) {
  return static_cast<double>(rows) * static_cast<double>(d.n) * static_cast<double>(d.k);
}
double work_of(const GroupedLinearDescription& d, std::int64_t rows) {
  return static_cast<double>(rows + d.tokens * d.slots) * static_cast<double>(d.n) * static_cast<double>(d.k + 1);
}
double work_of(const LinearBackwardDescription& d, std::int64_t rows) {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(d.n) * static_cast<double>(d.k);
}

// ---- Memory: each block exactly as large as what lies in it ----

struct Block {
  std::unique_ptr<std::uint8_t[]> bytes;
  std::size_t size = 0;
};

Block block_of(std::size_t size) { return {std::make_unique<std::uint8_t[]>(size), size}; }

Block copy_of(const Block& block) {
  Block copy = block_of(block.size);
  std::copy_n(block.bytes.get(), block.size, copy.bytes.get());
  return copy;
}

struct Memory {
  std::vector<Block> blocks;

  Memory copy() const {
    Memory other;
    for (const Block& block : blocks) other.blocks.push_back(copy_of(block));
    return other;
  }
  // Points the views at this memory; a view without backing stays null.
  void bind(Operands& operands) const {
    for (Operand& o : operands)
      o.view.data = o.block < blocks.size() ? blocks[o.block].bytes.get() + o.offset : nullptr;
  }
};

constexpr std::size_t kNoBlock = ~std::size_t{0};

// Bytes from the first element to the end of the last one; nothing if they, or the elements, are too many.
std::optional<std::size_t> extent(const Tensor& t) {
  if ((t.rank != 1 && t.rank != 2) || bits(t.dtype) == 0) return {};
  const __int128 rows = t.shape[0];
  const __int128 cols = t.rank == 2 ? t.shape[1] : 1;
  if (rows < 0 || cols < 0) return {};
  if (rows == 0 || cols == 0) return 0;
  const __int128 last_row = (rows - 1) * t.strides[0];
  const __int128 last_col = (cols - 1) * (t.rank == 2 ? t.strides[1] : 0);
  const __int128 max = kMaxBytes;
  if (last_row < 0 || last_col < 0 || last_row > max || last_col > max || rows * cols > max) return {};
  return static_cast<std::size_t>((last_row * bits(t.dtype) + 7) / 8 + ((last_col + 1) * bits(t.dtype) + 7) / 8);
}

std::size_t element_bytes(DType dtype) { return static_cast<std::size_t>(std::max(1, bits(dtype) / 8)); }

// Calls visit(first byte from view.data) for each element; the bytes of one are element_bytes(dtype).
template <class Visit>
void for_each_element(const Tensor& t, const Visit& visit) {
  if ((t.rank != 1 && t.rank != 2) || (t.rank == 2 && t.shape[1] == 0)) return;
  for (std::int64_t r = 0; r < t.shape[0]; ++r) {
    for (std::int64_t c = 0; c < (t.rank == 2 ? t.shape[1] : 1); ++c) {
      const std::int64_t i = r * t.strides[0] + (t.rank == 2 ? c * t.strides[1] : 0);
      visit(static_cast<std::size_t>(t.dtype == DType::s4 ? i / 2 : i * bits(t.dtype) / 8));
    }
  }
}

double random_real(Bytes& in, int mode) {
  const std::uint64_t bits = in.random();
  const double uniform = static_cast<double>(bits >> 11) * 0x1p-52 - 1;  // -1..1
  switch (mode) {
    case 0:
      return uniform * 4;
    case 1:
      return std::ldexp(uniform, static_cast<int>(bits & 63) - 32);
    case 2:
      return std::floor(uniform * 200) + 0.5;  // ties
    case 3:
      return 0;
    default:
      break;
  }
  if (bits % 8 != 0) return uniform * 4;
  constexpr double kSpecial[] = {-0.0,          1e-45, 6e-8,   65504,    65520,     3.4028235e38,
                                 -3.4028235e38, 1e308, 1e-310, HUGE_VAL, -HUGE_VAL, NAN};
  return kSpecial[in.random() % std::size(kSpecial)];
}

double random_scale(Bytes& in, bool wild) {
  if (wild && in.random() % 4 == 0) {
    constexpr double kWild[] = {0, -1, -0.0, HUGE_VAL, NAN};
    return kWild[in.random() % std::size(kWild)];
  }
  return std::ldexp(1 + static_cast<double>(in.random() & 0xffffff) * 0x1p-24, static_cast<int>(in.random() % 24) - 16);
}

// One element of any type, in memory of its own: operands may begin at any byte.
struct Element {
  explicit Element(DType dtype) : view{bytes, dtype, {}, 1, {1, 0}, {1, 0}} {}
  std::size_t size() const { return static_cast<std::size_t>(bits(view.dtype) / 8); }

  alignas(8) std::uint8_t bytes[8] = {};
  Tensor view;
};

void put_real(std::uint8_t* at, DType dtype, double value) {
  // A double beyond f32 becomes an infinity first; the cast alone would be undefined.
  const bool beyond = dtype != DType::f64 && std::abs(value) > std::numeric_limits<float>::max();
  Element element(dtype);
  store(element.view, 0, 0, beyond ? std::copysign(HUGE_VAL, value) : value);
  std::memcpy(at, element.bytes, element.size());
}

void fill(const Operand& o, Bytes& in, bool wild) {
  auto* const data = static_cast<std::uint8_t*>(o.view.data);
  const int mode = in.below(5);
  std::size_t next = 0;
  for_each_element(o.view, [&](std::size_t at) {
    std::uint8_t* const element = data + at;
    if (next < o.values.size() && o.view.dtype == DType::s32 && !(wild && in.random() % 8 == 0)) {
      std::memcpy(element, &o.values[next++], sizeof(std::int32_t));
    } else if (o.content == check::Content::zero_point && o.view.dtype == DType::s32) {
      const auto span = static_cast<std::uint64_t>(std::max(o.range[1] - o.range[0], 0)) + 1;
      const std::int32_t value = wild && in.random() % 4 == 0
                                     ? static_cast<std::int32_t>(in.random())
                                     : o.range[0] + static_cast<std::int32_t>(in.random() % span);
      std::memcpy(element, &value, sizeof value);
    } else if (is_float(o.view.dtype)) {
      const bool scale = o.content == check::Content::scale || o.content == check::Content::given_scale;
      put_real(element, o.view.dtype, scale ? random_scale(in, wild) : random_real(in, mode));
    } else {
      for (std::size_t i = 0; i < element_bytes(o.view.dtype); ++i) element[i] = static_cast<std::uint8_t>(in.random());
    }
  });
}

// ---- What may be wrong with the arguments ----

struct Mistakes {
  bool any = false;          // an operand is not as the description has it
  bool wild_values = false;  // scales or zero points that may be refused
  bool short_workspace = false;
  bool null_workspace = false;
};

// Legal variety: padded rows, strided vectors, repeated inputs.
void vary_layout(Operand& o, Bytes& in) {
  const std::uint8_t b = in.byte();
  Tensor& t = o.view;
  if (!t.present() || b < 128) return;
  if (b >= 240 && !o.output) {
    t.strides[0] = 0;
  } else if (t.rank == 2) {
    t.strides[0] += t.dtype == DType::s4 ? b % 8 / 2 * 2 : b % 8;
  } else {
    t.strides[0] = 1 + b % 4;
  }
}

// A wild size plus a little may be beyond the type.
std::int64_t wrapping_sum(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

void spoil(Operand& o, Bytes& in) {
  Tensor& t = o.view;
  const std::size_t axis = in.byte() % 2;
  switch (in.below(7)) {
    case 0:
      t.rank = in.pick<int>({0, 1, 2, 3, -1, 1 << 30});
      break;
    case 1:
      t.shape[axis] = in.size();
      break;
    case 2:
      t.shape[axis] = wrapping_sum(t.shape[axis], in.below(3) - 1);
      break;
    case 3:
      t.strides[axis] = in.size();
      break;
    case 4:
      t.strides[axis] = wrapping_sum(t.strides[axis], in.below(5) - 2);
      break;
    case 5:
      t.dtype = in.choice<DType>(9);
      break;
    case 6:
      t.device = {static_cast<DeviceType>(in.below(3)), in.below(4) - 1};
      break;
  }
}

// Memory for each view, exactly; none for one that would be large, which stays null and so has to be refused.
Memory allocate(Operands& operands, Bytes& in, Mistakes& mistakes) {
  Memory memory;
  for (Operand& o : operands) {
    o.block = kNoBlock;
    const std::optional<std::size_t> size = extent(o.view);
    if (!size || *size > kMaxBytes) {
      if (o.view.present()) mistakes.any = true;
      continue;
    }
    o.block = memory.blocks.size();
    o.offset = in.byte() % 4 * element_bytes(o.view.dtype);
    memory.blocks.push_back(block_of(o.offset + *size));
  }
  if (!in.rarely(12)) return memory;

  mistakes.any = true;
  Operand& o = operands[in.byte() % operands.size()];
  const Operand& other = operands[in.byte() % operands.size()];
  const int what = in.below(3);
  if (o.block == kNoBlock) return memory;
  if (what == 0) {
    o.block = kNoBlock;    // null
  } else if (what == 1) {  // misaligned, where an element has more than one byte
    memory.blocks[o.block] = block_of(memory.blocks[o.block].size + 1);
    o.offset += 1;
  } else if (other.block != kNoBlock) {  // on top of another
    const std::size_t offset = other.offset + in.byte() % 16 * element_bytes(o.view.dtype);
    const std::size_t needed = offset + *extent(o.view);
    Block& shared = memory.blocks[other.block];
    if (needed > shared.size) shared = block_of(needed);
    o.block = other.block;
    o.offset = offset;
  }
  return memory;
}

// What the headers forbid, decided here a second time and one tensor at a time. Wrong shapes are not among it: with
// other rows in each tensor it may be another legal run.
bool forbidden(const Operand& o, const Tensor& wanted) {
  const Tensor& t = o.view;
  if (!wanted.present() || (o.optional && !t.present())) return false;
  if (t.rank != wanted.rank || t.dtype != wanted.dtype || t.device != wanted.device) return true;
  const std::int64_t rows = t.shape[0];
  const std::int64_t cols = t.rank == 2 ? t.shape[1] : 1;
  if (rows < 0 || cols < 0) return true;
  if (rows == 0 || cols == 0) return false;
  if (t.data == nullptr || reinterpret_cast<std::uintptr_t>(t.data) % element_bytes(t.dtype) != 0) return true;
  if (t.strides[0] < 0 || (cols > 1 && t.strides[1] != 1)) return true;
  const bool repeated = t.strides[0] == 0 && !o.output;
  return rows > 1 && ((t.strides[0] < cols && !repeated) || (t.dtype == DType::s4 && t.strides[0] % 2 != 0));
}

// Whether an output shares a byte with another tensor.
bool overlapping(const Operands& operands, const Memory& memory) {
  constexpr int kNobody = -1;
  std::vector<std::vector<int>> writer(memory.blocks.size());
  for (std::size_t b = 0; b < writer.size(); ++b) writer[b].assign(memory.blocks[b].size, kNobody);
  const auto for_each_byte = [&](const Operand& o, const auto& visit) {
    if (o.block == kNoBlock) return;
    for_each_element(o.view, [&](std::size_t at) {
      for (std::size_t i = 0; i < element_bytes(o.view.dtype); ++i) visit(writer[o.block][o.offset + at + i]);
    });
  };
  bool shared = false;
  for (std::size_t index = 0; index < operands.size(); ++index) {
    if (!operands[index].output) continue;
    for_each_byte(operands[index], [&](int& owner) {
      shared = shared || (owner != kNobody && owner != static_cast<int>(index));
      owner = static_cast<int>(index);
    });
  }
  for (const Operand& o : operands) {
    if (!o.output) for_each_byte(o, [&](const int& owner) { shared = shared || owner != kNobody; });
  }
  return shared;
}

// ---- The C interface ----

octile_device c_device(Device device) {
  return {device.type == DeviceType::cpu    ? OCTILE_DEVICE_CPU
          : device.type == DeviceType::cuda ? OCTILE_DEVICE_CUDA
                                            : static_cast<std::int32_t>(device.type) + 1,
          device.index};
}

// A tensor for C; shape and strides on the heap, exactly as long as the rank says, for ASan.
struct CTensor {
  octile_tensor tensor{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;

  explicit CTensor(const Tensor& t) {
    const std::size_t rank = t.rank == 1 || t.rank == 2 ? static_cast<std::size_t>(t.rank) : 0;
    shape.assign(t.shape.begin(), t.shape.begin() + static_cast<std::ptrdiff_t>(rank));
    strides.assign(t.strides.begin(), t.strides.begin() + static_cast<std::ptrdiff_t>(rank));
    shape.shrink_to_fit();
    strides.shrink_to_fit();
    const std::uint8_t code = is_float(t.dtype)      ? t.dtype == DType::bf16 ? 4 : 2
                              : t.dtype == DType::u8 ? 1
                              : bits(t.dtype) != 0   ? 0
                                                     : 9;
    tensor.data = t.data;
    tensor.device = c_device(t.device);
    tensor.ndim = t.rank;
    tensor.dtype = {code, static_cast<std::uint8_t>(bits(t.dtype)), 1};
    tensor.shape = shape.data();
    tensor.strides = strides.data();
  }
};

template <class Enum>
std::int32_t number(Enum value) {
  return static_cast<std::int32_t>(value);
}

void describe(const QuantizeDescription& d, octile_quantize_description& c) {
  c.rows = d.rows, c.cols = d.cols, c.group = d.group;
  c.x = number(d.x), c.q = number(d.q), c.granularity = number(d.granularity), c.scale = number(d.scale);
  c.mapping = number(d.mapping), c.rounding = number(d.rounding), c.orientation = number(d.orientation);
  c.multiplier = number(d.multiplier), c.mask = number(d.mask), c.q_min = d.q_min, c.q_max = d.q_max;
}

// A format's number in C; one beyond them where C has no name for it.
std::int32_t number(const WeightFormat& weight) {
  const auto same = [&](const WeightFormat& f) { return f.type == weight.type && f.granularity == weight.granularity; };
  return static_cast<std::int32_t>(std::find_if(std::begin(kFormats), std::end(kFormats), same) - kFormats);
}

void describe(const LinearDescription& d, octile_linear_description& c) {
  c.m = d.m, c.n = d.n, c.k = d.k, c.group = d.weight.group, c.static_scale = d.static_scale;
  c.x = number(d.x), c.y = number(d.y), c.activation = number(d.activation), c.weight = number(d.weight);
  c.weight_layout = number(d.weight_layout), c.weight_zero_point = d.weight.zero_point, c.bias = d.bias;
  c.x_multiplier = d.x_multiplier;
}

void describe(const GroupedLinearDescription& d, octile_grouped_linear_description& c) {
  c.experts = d.experts, c.m = d.m, c.n = d.n, c.k = d.k, c.tokens = d.tokens, c.slots = d.slots;
  c.group = d.weight.group, c.static_scale = d.static_scale, c.x = number(d.x), c.y = number(d.y);
  c.activation = number(d.activation), c.weight = number(d.weight), c.weight_zero_point = d.weight.zero_point;
  c.bias = d.bias, c.gather = d.gather;
}

void describe(const LinearBackwardDescription& d, octile_linear_backward_description& c) {
  c.m = d.m, c.n = d.n, c.k = d.k, c.static_scale = d.static_scale;
  c.dy = number(d.dy), c.dw_dtype = d.dw_dtype ? number(*d.dw_dtype) : OCTILE_DTYPE_SAME;
  c.dx = number(d.dx), c.dw = number(d.dw), c.db = d.db, c.activation = number(d.activation);
  c.x_transposed = d.x_transposed, c.weight = number(d.weight), c.weight_layout = number(d.weight_layout);
  c.rounding = number(d.rounding), c.gradient_block = static_cast<std::int32_t>(d.gradient_block);
}

struct CPlan {
  octile_plan* plan = nullptr;
  ~CPlan() { octile_plan_destroy(plan); }
};

// The same plan through C, which must be refused with the same status.
template <class K, class Description>
void create(const Description& d, Status expected, CPlan& plan) {
  typename K::CDescription c;
  REQUIRE(K::init(&c, sizeof c) == OCTILE_OK, octile_last_error());
  describe(d, c);
  c.threads = d.threads;
  c.device = c_device(d.device);
  c.kernel = d.kernel.c_str();
  const octile_status status = K::create(&c, &plan.plan);
  // A NUL ends a C string early, so that may be another request.
  if (d.kernel.find('\0') != std::string::npos) return;
  // With several mistakes each may find another one first: C looks at the device and the weight before the plan looks
  // at anything.
  bool known = d.device.type <= DeviceType::cuda;
  if constexpr (requires { d.weight; }) known = known && number(d.weight) < std::ssize(kFormats);
  REQUIRE(known ? status == number(expected) : status != OCTILE_OK, std::string(K::name) + ": " + octile_last_error());
  REQUIRE((status == OCTILE_OK) == (plan.plan != nullptr), K::name);
}

// A description of any size and content: an answer, and no byte read beyond it.
template <class K>
void create_from_bytes(Bytes& in) {
  typename K::CDescription c;
  K::init(&c, sizeof c);
  const std::size_t size = in.rarely(4) ? in.word() : in.byte() % 16 * 8;
  std::vector<std::uint8_t> bytes(std::clamp<std::size_t>(size, sizeof(std::size_t), 4096));
  std::copy_n(reinterpret_cast<const std::uint8_t*>(&c), std::min(sizeof c, bytes.size()), bytes.begin());
  for (int i = in.below(6); i > 0; --i) {
    const std::size_t at = in.byte() % bytes.size();
    // Not the pointer: any address would do there, and none but ours may be read.
    if (at < offsetof(typename K::CDescription, kernel) || at >= sizeof c) bytes[at] = in.byte();
  }
  std::memcpy(bytes.data(), &size, sizeof size);
  const auto given = block_of(bytes.size());
  std::copy(bytes.begin(), bytes.end(), given.bytes.get());
  CPlan plan;
  void* const memory = given.bytes.get();
  const octile_status status = K::create(static_cast<const typename K::CDescription*>(memory), &plan.plan);
  REQUIRE((status == OCTILE_OK) == (plan.plan != nullptr), K::name);
  REQUIRE(status != OCTILE_INTERNAL, octile_last_error());
}

// ---- One input ----

// How far the inputs came.
struct Counts {
  std::uint64_t plans = 0;
  std::uint64_t refused = 0;
  std::uint64_t ran = 0;
  std::uint64_t compared = 0;
} counts;

template <class Body>
Status status_of(const Body& body) {
  try {
    body();
    return Status::ok;
  } catch (const Error& error) {
    REQUIRE(error.status() != Status::ok && error.status() != Status::internal, error.what());
    REQUIRE(std::strlen(error.what()) > 0, "an error without a text");
    return error.status();
  }
}

struct Outcome {
  Status verdict = Status::ok;
  Status run = Status::ok;
};

template <class Args>
Outcome run_cpp(const typename Kind<Args>::Plan& plan, const Operands& operands, Workspace workspace,
                std::uint64_t seed) {
  const auto args = args_of<Args>(operands, seed);
  const Verdict verdict = plan.can_implement(args);
  REQUIRE(static_cast<bool>(verdict) == verdict.reason.empty(), verdict.reason);
  return {verdict.status, status_of([&] { plan.run(args, workspace); })};
}

template <class Args>
Outcome run_c(const octile_plan* plan, const Operands& operands, Workspace workspace, std::uint64_t seed) {
  std::vector<CTensor> tensors;
  for (const Operand& o : operands) tensors.emplace_back(o.view);
  // The structure is a size, one pointer for each operand, and where there is one the seed.
  typename Kind<Args>::CArgs args{};
  std::vector<std::uint64_t> words = {sizeof args};
  for (std::size_t i = 0; i < operands.size(); ++i) {
    words.push_back(operands[i].view.rank == 0 ? 0 : reinterpret_cast<std::uintptr_t>(&tensors[i].tensor));
  }
  words.push_back(seed);
  static_assert(sizeof args % 8 == 0);
  REQUIRE(sizeof args == words.size() * 8 || sizeof args == words.size() * 8 - 8, Kind<Args>::name);
  std::memcpy(&args, words.data(), sizeof args);
  const auto verdict = static_cast<Status>(Kind<Args>::can_implement(plan, &args));
  const auto run = static_cast<Status>(Kind<Args>::run(plan, &args, workspace.data, workspace.size, nullptr));
  REQUIRE(verdict != Status::internal && run != Status::internal, octile_last_error());
  return {verdict, run};
}

// Which bytes a run may change.
std::vector<std::vector<bool>> writable(const Operands& operands, const Memory& memory) {
  std::vector<std::vector<bool>> may(memory.blocks.size());
  for (std::size_t b = 0; b < may.size(); ++b) may[b].resize(memory.blocks[b].size);
  for (const Operand& o : operands) {
    if (!o.output || o.block == kNoBlock) continue;
    for_each_element(o.view, [&](std::size_t at) {
      for (std::size_t i = 0; i < element_bytes(o.view.dtype); ++i) may[o.block][o.offset + at + i] = true;
    });
  }
  return may;
}

void require_untouched(const char* kind, const Operands& operands, const Memory& before, const Memory& after,
                       bool refused) {
  const auto may = writable(operands, after);
  for (std::size_t b = 0; b < may.size(); ++b) {
    for (std::size_t i = 0; i < may[b].size(); ++i) {
      if (before.blocks[b].bytes[i] == after.blocks[b].bytes[i]) continue;
      REQUIRE(!refused, std::string(kind) + ": a refused run wrote");
      REQUIRE(may[b][i], std::string(kind) + ": wrote outside its outputs");
    }
  }
}

bool is_nan(const std::uint8_t* at, DType dtype) {
  if (!is_float(dtype)) return false;
  Element element(dtype);
  std::memcpy(element.bytes, at, element.size());
  return std::isnan(load<double>(ConstTensor(element.view), 0));
}

// A NaN's payload is not in the contract.
void require_same(const std::string& what, const Operands& operands, const Memory& a, const Memory& b) {
  for (std::size_t index = 0; index < operands.size(); ++index) {
    const Operand& o = operands[index];
    if (!o.output || o.block == kNoBlock) continue;
    for_each_element(o.view, [&](std::size_t at) {
      const std::uint8_t* const x = a.blocks[o.block].bytes.get() + o.offset + at;
      const std::uint8_t* const y = b.blocks[o.block].bytes.get() + o.offset + at;
      if (std::memcmp(x, y, element_bytes(o.view.dtype)) == 0) return;
      if (is_nan(x, o.view.dtype) && is_nan(y, o.view.dtype)) return;
      char text[96];
      std::snprintf(text, sizeof text, "operand %zu, byte %zu: %02x.. and %02x..", index, at, x[0], y[0]);
      REQUIRE(false, what + ": " + text);
    });
  }
}

template <class Args>
void fuzz_one(Bytes& in) {
  using K = Kind<Args>;
  if (in.rarely(30)) return create_from_bytes<K>(in);

  const auto description = K::describe(in);
  std::optional<typename K::Plan> plan;
  const Status selected = status_of([&] { plan = K::Plan::select(description); });
  CPlan c_plan;
  create<K>(description, selected, c_plan);
  if (!plan) return;
  ++counts.plans;
  const PrecisionGuarantee guarantee = plan->precision_guarantee();
  REQUIRE(!plan->sku().empty() || std::string(K::name) == "linear_backward", "a plan without kernels");
  REQUIRE(!plan->explain().empty(), "a plan that explains nothing");

  std::int64_t rows = rows_of(description);
  if (rows > 64 || in.rarely(4)) rows = std::min<std::int64_t>(rows, in.below(20));
  if (plan->workspace_size() > kMaxBytes || work_of(description, rows) > kMaxMultiplications) return;
  Operands operands = operands_of<Args>(description, rows, in);
  Mistakes mistakes;
  for (Operand& o : operands) {
    const std::optional<std::size_t> size = extent(o.view);
    if (o.view.present() && (!size || *size > kMaxBytes / 8)) return;
    vary_layout(o, in);
  }
  const Operands wanted_operands = operands;
  if (in.rarely(3)) {
    mistakes.any = true;
    for (int i = 1 + in.below(2); i > 0; --i) spoil(operands[in.byte() % operands.size()], in);
  }
  Memory memory = allocate(operands, in, mistakes);
  mistakes.wild_values = in.rarely(6);
  memory.bind(operands);
  for (const Operand& o : operands) {
    if (o.block != kNoBlock) fill(o, in, mistakes.wild_values);
  }
  const std::uint64_t seed = in.word();

  std::size_t workspace_size = plan->workspace_size();
  mistakes.short_workspace = workspace_size > 0 && in.rarely(10);
  if (mistakes.short_workspace) workspace_size -= 1 + in.byte() % workspace_size;
  mistakes.null_workspace = workspace_size > 0 && in.rarely(30);
  const std::size_t shift = in.byte() % 4;
  const Block scratch = block_of(workspace_size + shift);
  std::memset(scratch.bytes.get(), 0xa5, scratch.size);
  const Workspace workspace = {mistakes.null_workspace ? nullptr : scratch.bytes.get() + shift, workspace_size};

  const Memory before = memory.copy();
  const bool through_c = c_plan.plan != nullptr && in.below(2) == 1;
  const auto run_on = [&](Memory& on) {
    on.bind(operands);
    return through_c ? run_c<Args>(c_plan.plan, operands, workspace, seed)
                     : run_cpp<Args>(*plan, operands, workspace, seed);
  };
  const Outcome outcome = run_on(memory);
  const bool refused = outcome.run != Status::ok;
  bool illegal = overlapping(operands, memory);
  for (std::size_t i = 0; i < operands.size(); ++i) illegal |= forbidden(operands[i], wanted_operands[i].view);
  REQUIRE(!illegal || outcome.verdict != Status::ok, std::string(K::name) + ": forbidden arguments were taken");
  ++(refused ? counts.refused : counts.ran);
  require_untouched(K::name, operands, before, memory, refused);
  if (outcome.verdict != Status::ok) {
    REQUIRE(outcome.run == outcome.verdict, std::string(K::name) + ": can_implement and run differ");
    REQUIRE(mistakes.any || mistakes.wild_values, std::string(K::name) + ": legal arguments refused: " +
                                                      plan->can_implement(args_of<Args>(operands, seed)).reason);
    return;
  }
  if (mistakes.short_workspace || mistakes.null_workspace) {
    REQUIRE(outcome.run == Status::workspace_too_small, std::string(K::name) + ": a short workspace was taken");
    return;
  }
  REQUIRE(!refused, std::string(K::name) + ": can_implement says yes, run says no");

  Memory again = before.copy();
  REQUIRE(run_on(again).run == Status::ok, K::name);
  require_same(plan->sku() + " twice", operands, memory, again);
  if (!guarantee.bit_stable) return;
  auto reference = description;
  reference.kernel = "reference";
  const auto oracle = K::Plan::select(reference);
  Memory wanted = before.copy();
  wanted.bind(operands);
  std::vector<std::uint8_t> oracle_scratch(oracle.workspace_size());
  oracle.run(args_of<Args>(operands, seed), {oracle_scratch.data(), oracle_scratch.size()});
  require_same(plan->sku() + " and " + oracle.sku(), operands, memory, wanted);
  ++counts.compared;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in(data, size);
  using cpu::Isa;
  cpu::isa_ceiling = in.pick<Isa>({Isa::amx, Isa::baseline, Isa::avx2, Isa::avxvnni, Isa::avx512, Isa::avx512vnni});
  switch (in.below(9)) {
    case 0:
      fuzz_one<LinearArgs>(in);
      break;
    case 1:
      fuzz_one<LinearBackwardArgs>(in);
      break;
    case 2:
      fuzz_one<QuantizeArgs>(in);
      break;
    case 3:
      fuzz_one<DequantizeArgs>(in);
      break;
    case 4:
      fuzz_one<QuantizeBackwardArgs>(in);
      break;
    case 5:
      fuzz_one<DequantizeBackwardArgs>(in);
      break;
    case 6:
      fuzz_one<FakeQuantizeArgs>(in);
      break;
    case 7:
      fuzz_one<GroupedLinearArgs>(in);
      break;
    default:
      fuzz_one<FakeQuantizeBackwardArgs>(in);
      break;
  }
  return 0;
}

std::string octile::fuzz::reached(std::uint64_t) {
  return "plans " + std::to_string(counts.plans) + ", runs refused " + std::to_string(counts.refused) + ", done " +
         std::to_string(counts.ran) + ", compared with the reference " + std::to_string(counts.compared);
}
