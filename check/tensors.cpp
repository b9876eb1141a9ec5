#include "check/tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "base/access.h"
#include "base/message.h"

namespace octile::check {

namespace {

constexpr std::size_t kGuard = 64;
constexpr std::byte kGap{0xff};           // NaN in every float format, -1 in the integers
constexpr std::int64_t kPitch = 64;       // of Layout::pitched, in elements
constexpr std::size_t kNormals = 65'521;  // of a large case

struct FloatFormat {
  int precision;     // bits of the significand, the hidden one too
  int min_exponent;  // of the smallest normal
  int max_exponent;  // of the largest power of two
};

// By memcmp: == on vectors of std::byte is a loop over bytes, which sanitizers make slow.
bool same_bytes(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

FloatFormat format(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return {11, -14, 15};
    case DType::bf16:
      return {8, -126, 127};
    case DType::f32:
      return {24, -126, 127};
    default:
      return {53, -1022, 1023};
  }
}

// Half the distance from |value| to the next larger one: what one rounding to nearest can be off. Not above half of the
// smallest subnormal where the value is 0.
double half_ulp(DType dtype, double value) {
  const FloatFormat f = format(dtype);
  const int exponent = value == 0 ? f.min_exponent : std::max(std::ilogb(value), f.min_exponent);
  return std::ldexp(0.5, exponent - f.precision + 1);
}

// What the oracle may be off, which sums in f64 and rounds once; and what a product below the normal numbers loses in
// either, a subnormal unit that an integer of up to 128 may multiply afterwards.
double oracle_error(const SumFacts& sum) {
  const double n = static_cast<double>(sum.terms) + 4;
  const double subnormal = sum.a == DType::f64 ? std::numeric_limits<double>::denorm_min() : 0x1p-149;
  return n * 0x1p-53 / (1 - n * 0x1p-53) * sum.magnitude + 128 * n * subnormal;
}

// An infinity that results from rounding may be anything from the midpoint above the largest number on; taken as the
// next power of two, it is no farther from a finite neighbour than one unit of its last place.
double finite_stand_in(DType dtype, double value) {
  if (!std::isinf(value)) return value;
  const double next =
      dtype == DType::f64 ? std::numeric_limits<double>::max() : std::ldexp(1.0, format(dtype).max_exponent + 1);
  return std::copysign(next, value);
}

std::size_t bytes_of(DType dtype, std::int64_t elements) {
  return static_cast<std::size_t>((elements * bits(dtype) + 7) / 8);
}

// A view in this layout, without its memory, and the bytes before its first element and in all.
struct Placement {
  Tensor view;
  std::size_t offset;
  std::size_t size;
};

Placement place(Layout layout, DType dtype, const Size& size) {
  Placement p{{nullptr, dtype, {}, size.cols ? 2 : 1, {size.rows, size.cols.value_or(0)}, {}}, 0, 0};
  std::int64_t first = 0;  // elements before the first
  if (!size.cols) {
    p.view.strides = {layout == Layout::padded      ? 2
                      : layout == Layout::sliced    ? 3
                      : layout == Layout::repeating ? 0
                                                    : 1,
                      0};
    first = layout == Layout::sliced ? 1 : 0;
  } else {
    const bool packed = is_packed(dtype);
    const std::int64_t whole = row_elements(dtype, *size.cols);
    first = layout == Layout::sliced ? (packed ? 3 * per_byte(dtype) : 5) : 0;
    const std::int64_t pitch = layout == Layout::padded    ? whole + (packed ? 2 * per_byte(dtype) : 3)
                               : layout == Layout::pitched ? (whole / kPitch + 1) * kPitch
                                                           : whole + first + (first ? 8 : 0);
    p.view.strides = {layout == Layout::repeating ? 0 : pitch, 1};
  }
  const std::int64_t row = size.cols ? *size.cols : 1;
  const std::int64_t last = size.rows == 0 ? 0 : (size.rows - 1) * p.view.strides[0] + row;
  p.offset = bytes_of(dtype, first);
  p.size = p.offset + bytes_of(dtype, last);
  return p;
}

template <class Visit>
void for_each(const ConstTensor& t, const Visit& visit) {
  // Of a repeated row or value there is one.
  const std::int64_t rows = t.strides[0] == 0 ? std::min<std::int64_t>(t.shape[0], 1) : t.shape[0];
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < (t.rank == 2 ? t.shape[1] : 1); ++c) visit(r, c);
  }
}

double load_any(const ConstTensor& t, std::int64_t r, std::int64_t c) {
  return is_float(t.dtype) ? load<double>(t, r, c) : load_integer(t, r, c);
}

const std::byte* address(const ConstTensor& t, std::int64_t r, std::int64_t c) {
  return static_cast<const std::byte*>(t.data) + place_of(t, r, c) * bits(t.dtype) / 8;
}

// The same bits, or both NaN.
bool same(const ConstTensor& a, const ConstTensor& b, std::int64_t r, std::int64_t c) {
  if (is_packed(a.dtype)) return load_integer(a, r, c) == load_integer(b, r, c);
  if (std::memcmp(address(a, r, c), address(b, r, c), bytes_of(a.dtype, 1)) == 0) return true;
  return is_float(a.dtype) && std::isnan(load<double>(a, r, c)) && std::isnan(load<double>(b, r, c));
}

}  // namespace

double Tensors::uniform() { return static_cast<double>(random_() >> 11) * 0x1p-52 - 1; }

double Tensors::normal() {
  // Box and Muller's.
  const auto draw = [](const auto& uniform) {
    return std::sqrt(-2 * std::log((1 - uniform()) / 2)) * std::cos(std::acos(-1.0) * uniform());
  };
  if (!large_) return draw([this] { return uniform(); });
  // Millions of logarithms would take longer than all the rest.
  static const std::vector<double> values = [&] {
    Tensors source(CaseBase{}, 1);
    std::vector<double> drawn(kNormals);
    for (double& value : drawn) value = draw([&] { return source.uniform(); });
    return drawn;
  }();
  return values[random_() % kNormals];
}

double Tensors::largest(DType dtype) const {
  // 2^60 times 2^7 for a weight, times a scale, times any number of terms is far from 2^127.
  if (sums_finite_ && dtype != DType::f16) return dtype == DType::f64 ? 0x1p500 : 0x1p60;
  const FloatFormat f = format(dtype);
  return std::ldexp(2 - std::ldexp(1.0, 1 - f.precision), f.max_exponent);
}

double Tensors::typical_scale(DType dtype, int q_max) const {
  switch (data_) {
    case Data::heavy_tailed:
      return 20.0 / q_max;
    case Data::tiny:
      return 1e-6 / q_max;
    case Data::huge:
      return std::min(largest(dtype) / 4 / q_max, dtype == DType::f64 ? 0x1p1020 : 0x1p120);
    default:
      return 2.0 / q_max;
  }
}

double Tensors::float_value(DType dtype, std::int64_t row, std::int64_t col) {
  switch (data_) {
    case Data::normal:
      return normal();
    case Data::heavy_tailed:
      return 3 * std::pow(normal(), 3);
    case Data::ties:
      return (row + col) % 5 == 0 ? 127 : static_cast<double>(static_cast<int>(random_() % 509) - 254) / 2;
    case Data::constant:
      return -1.3671875;
    case Data::tiny: {
      const FloatFormat f = format(dtype);
      return row % 2 ? uniform() * 2.54e-6 : std::ldexp(std::rint(1000 * uniform()), f.min_exponent - f.precision + 1);
    }
    case Data::zero_rows:
      return row % 3 == 1 || col % 4 == 2 ? std::copysign(0.0, uniform()) : normal();
    case Data::huge:
      return uniform() * largest(dtype);
    case Data::poisoned:
      if (!one_in(large_ ? 20'011 : 23)) return normal();  // so that a few of a large case's segments are
      if (!one_in(2)) return std::copysign(INFINITY, uniform());
      return std::bit_cast<double>(0x7ff8000000000000u |
                                   static_cast<std::uint64_t>(row * 31 + col + 1) * 0x9e3779b97f4a7c15u >> 13);
    case Data::near_ties:
    case Data::sparse_ties:  // the scales come first: put_near_ties() fills them in
    case Data::every_value:
      break;
  }
  return 0;
}

double Tensors::scale(const Operand& operand, std::int64_t row) {
  const double s = operand.typical * std::exp2(2 * uniform());
  switch (data_) {
    case Data::ties:
      return one_in(2) ? 1 : 0.5;
    case Data::constant:
      return operand.typical;
    case Data::tiny:
      return one_in(2) ? 1e-8 : s;
    case Data::near_ties:
    case Data::sparse_ties:
      // From a subnormal to nearly the largest f32, all of one size.
      if (!exponent_) exponent_ = std::min(static_cast<int>(random_() % 280) - 148, one_in(8) ? 126 : 110);
      return std::ldexp(1.5 + uniform() / 2, *exponent_);
    case Data::every_value:
      return std::array{1.0, 0.7, 3e-5, 1e30}[static_cast<std::size_t>(row / 64 % 4)];
    default:
      return s;
  }
}

Tensor Tensors::add_input(const Operand& o) {
  const Placement p = place(layout_, o.dtype, o.size);
  Input& input = *inputs_.emplace_back(std::make_unique<Input>());
  input.bytes.assign(p.size, kGap);  // no more than the view needs, so that AddressSanitizer sees a read beyond it
  input.view = p.view;
  input.view.data = input.bytes.data() + p.offset;
  input.content = o.content;
  const auto fill = [&](const auto& value) {
    for_each(input.view, [&](std::int64_t r, std::int64_t c) { store(input.view, r, c, double{value(r, c)}); });
  };
  switch (o.content) {
    case Content::real:
      fill([&](std::int64_t r, std::int64_t c) { return float_value(o.dtype, r, c); });
      if (data_ == Data::every_value && bits(o.dtype) == 16) {
        auto* const values = reinterpret_cast<std::uint16_t*>(input.bytes.data());
        for (std::size_t i = 0; i < input.bytes.size() / 2; ++i) values[i] = static_cast<std::uint16_t>(i);
      }
      break;
    case Content::integer:
    case Content::zero_point:
      for_each(input.view, [&](std::int64_t r, std::int64_t c) {
        if (!o.values.empty()) {
          store_integer(input.view, r, c, o.values[static_cast<std::size_t>(r * o.size.cols.value_or(1) + c)]);
          return;
        }
        const auto [low, high] = o.range;
        const int value = low + static_cast<int>(random_() % static_cast<std::uint64_t>(high - low + 1));
        store_integer(input.view, r, c, data_ == Data::constant ? low : value);
      });
      break;
    default:
      fill([&](std::int64_t r, std::int64_t) { return scale(o, r); });
      if (data_ != Data::poisoned || o.content == Content::given_scale) break;
      for_each(input.view, [&](std::int64_t r, std::int64_t c) {
        if (one_in(9)) store(input.view, r, c, std::numeric_limits<double>::quiet_NaN());
      });
      break;
  }
  input.before = input.bytes;
  return input.view;
}

Tensor Tensors::add_output(const Operand& o) {
  // An output cannot repeat.
  const Placement p = place(layout_ == Layout::repeating ? Layout::compact : layout_, o.dtype, o.size);
  Output& output = *outputs_.emplace_back(std::make_unique<Output>());
  output.name = o.name;
  output.bytes.assign(p.size + 2 * kGuard, kCanary);
  output.view = p.view;
  output.view.data = output.bytes.data() + kGuard + p.offset;
  if (o.accumulates) {
    for_each(output.view,
             [&](std::int64_t r, std::int64_t c) { store(output.view, r, c, float_value(o.dtype, r, c)); });
  }
  output.first = output.bytes;
  return output.view;
}

std::vector<Tensor> Tensors::add(const std::vector<Operand>& operands) {
  std::vector<Tensor> views;
  for (const Operand& o : operands) {
    views.push_back(!o.present() ? Tensor{} : o.output ? add_output(o) : add_input(o));
  }
  return views;
}

void Tensors::put_near_ties(const std::function<double(std::int64_t, std::int64_t)>& scale) {
  for (auto& input : inputs_) {
    if (input->content != Content::real) continue;
    for_each(input->view, [&](std::int64_t r, std::int64_t c) {
      const bool tie = data_ == Data::near_ties || one_in(90);
      const double half = static_cast<double>(random_() % 260) - 130 + (tie ? 0.5 : 0.25);
      auto value = static_cast<float>(half * scale(r, c));
      for (std::uint64_t ulps = random_() % 3; ulps > 0; --ulps) {
        value = std::nextafter(value, one_in(2) ? HUGE_VALF : -HUGE_VALF);
      }
      store(input->view, r, c, std::isfinite(value) ? double{value} : 0.0);
    });
    input->before = input->bytes;
  }
}

void Tensors::spoil() {
  for (auto& output : outputs_) std::copy(output->first.begin(), output->first.end(), output->bytes.begin());
}

void Tensors::keep_expected(const Bounds& bounds) {
  expected_bounds_ = bounds;
  for (auto& output : outputs_) output->expected = output->bytes;
}

void Tensors::set_facts(std::string_view name, Task task, const Facts& facts) {
  for (auto& output : outputs_) {
    if (output->name != name) continue;
    output->task = task;
    output->facts = facts;
  }
}

bool Tensors::sums_in_float() const {
  return std::any_of(outputs_.begin(), outputs_.end(), [](const auto& output) { return output->facts != nullptr; });
}

ConstTensor Tensors::Output::expected_view() const {
  ConstTensor t = view;
  t.data = expected.data() + (static_cast<const std::byte*>(view.data) - bytes.data());
  return t;
}

std::string Tensors::Output::compare_elements(const Bounds& bounds, const Bounds& expected_bounds,
                                              double& worst) const {
  const ConstTensor want = expected_view();
  const auto of_output = [&](const Bounds& all) {
    const auto found = all.find(task);
    return facts && found != all.end() ? found->second : std::vector<Bound>();
  };
  const std::vector<Bound> mine = of_output(bounds);
  const std::vector<Bound> of_expected = of_output(expected_bounds);
  std::string text;
  double text_share = 0;  // of the element in the text
  std::int64_t wrong = 0;
  const bool infinities_may_be_nan = std::any_of(mine.begin(), mine.end(), may_turn_infinity_into_nan);
  for_each(view, [&](std::int64_t r, std::int64_t c) {
    const double e = load_any(want, r, c);
    const double a = load_any(view, r, c);
    const double near_e = finite_stand_in(view.dtype, e);
    const double near_a = finite_stand_in(view.dtype, a);
    double share = 0;
    double bound = 0;
    double e_sum = 0;
    for (const Bound b : mine) {
      const SumFacts sum = facts(b, r, c);
      e_sum = std::max(e_sum, max_error(b, sum) + oracle_error(sum));
    }
    double e_expected = 0;
    for (const Bound b : of_expected) e_expected = std::max(e_expected, max_error(b, facts(b, r, c)));
    e_sum += e_expected;
    if (mine.empty() || std::isnan(e) || std::isnan(a) || !std::isfinite(e_sum)) {
      // Where a term is not finite, neither is the sum, and in any order it is the same infinity, or NaN.
      const bool fine = same(want, view, r, c) || (infinities_may_be_nan && std::isinf(e) && std::isnan(a));
      share = fine ? 0 : std::numeric_limits<double>::infinity();
    } else if (a != e) {
      // Both went through one rounding to the output's type.
      bound = e_sum + half_ulp(view.dtype, near_e) + half_ulp(view.dtype, near_a);
      share = std::abs(near_a - near_e) / bound;
    }
    worst = std::max(worst, share);
    if (share <= 1) return;
    ++wrong;
    if (share <= text_share) return;
    text_share = share;
    std::ostringstream out;
    out.precision(17);
    out << name << '[' << r;
    if (view.rank == 2) out << ", " << c;
    out << "] = " << a << ", expected " << e;
    if (bound > 0) out << " within " << bound;
    text = out.str();
  });
  return wrong == 0 ? text : message(text, " (the worst of ", wrong, " wrong elements of ", view, ")");
}

Tensors::Comparison Tensors::Output::compare(const Bounds& bounds, const Bounds& expected_bounds) const {
  if (same_bytes(bytes, expected)) return {};
  Comparison result;
  result.difference = compare_elements(bounds, expected_bounds, result.worst);
  if (!result.difference.empty()) return result;
  // The elements are fine; with them made equal, any remaining difference is in a canary.
  std::vector<std::byte> rest = bytes;
  if (!is_packed(view.dtype)) {
    for_each(view, [&](std::int64_t r, std::int64_t c) {
      const auto at = static_cast<std::size_t>(address(view, r, c) - bytes.data());
      std::copy_n(expected.begin() + static_cast<std::ptrdiff_t>(at), bytes_of(view.dtype, 1),
                  rest.begin() + static_cast<std::ptrdiff_t>(at));
    });
    if (same_bytes(rest, expected)) return result;
  }
  const auto [first, unused] = std::mismatch(rest.begin(), rest.end(), expected.begin());
  result.difference = message(name, ": wrote outside of its elements, the first time ",
                              first - rest.begin() - (static_cast<const std::byte*>(view.data) - bytes.data()),
                              " bytes from the start of ", view);
  return result;
}

Tensors::Comparison Tensors::compare(const Bounds& bounds) const {
  Comparison all;
  for (const auto& output : outputs_) {
    const Comparison one = output->compare(bounds, expected_bounds_);
    all.worst = std::max(all.worst, one.worst);
    if (!one.difference.empty()) all.difference += (all.difference.empty() ? "" : "; ") + one.difference;
  }
  return all;
}

std::vector<std::vector<std::byte>> Tensors::snapshot() const {
  std::vector<std::vector<std::byte>> all;
  for (const auto& output : outputs_) all.push_back(output->bytes);
  return all;
}

std::uint64_t Tensors::digest(std::uint64_t before) const {
  std::uint64_t digest = before;
  for (const auto& output : outputs_) {
    for_each(output->view, [&](std::int64_t r, std::int64_t c) {
      const double value = load_any(output->view, r, c);
      const std::uint64_t bits = std::isnan(value) ? ~std::uint64_t{0} : std::bit_cast<std::uint64_t>(value);
      digest = (digest ^ bits) * 0x100000001b3u;  // FNV-1a, a word at a time,
      digest ^= digest >> 29;                     // whose high bits reach the low ones too
    });
  }
  return digest;
}

bool Tensors::outputs_are(const std::vector<std::vector<std::byte>>& snapshot) const {
  return std::equal(outputs_.begin(), outputs_.end(), snapshot.begin(), snapshot.end(),
                    [](const auto& output, const auto& bytes) { return same_bytes(output->bytes, bytes); });
}

bool Tensors::inputs_changed() const {
  return std::any_of(inputs_.begin(), inputs_.end(),
                     [](const auto& input) { return !same_bytes(input->bytes, input->before); });
}

std::vector<Tensors::Block> Tensors::blocks() {
  std::vector<Block> all;
  for (auto& input : inputs_) all.push_back({input->bytes.data(), input->bytes.size(), 0, kGap});
  for (auto& output : outputs_) all.push_back({output->bytes.data(), output->bytes.size(), kGuard, kCanary});
  return all;
}

bool all_canaries(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == kCanary; });
}

GuardedWorkspace::GuardedWorkspace(std::size_t size) : bytes_(size + 2 * kGuard, kCanary) {}

bool GuardedWorkspace::intact() const {
  return all_canaries({bytes_.data(), kGuard}) && all_canaries({bytes_.data() + bytes_.size() - kGuard, kGuard});
}

}  // namespace octile::check
