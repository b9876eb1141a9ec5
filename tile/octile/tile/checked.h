// The checked executor: one program after the other on one thread, every access observed. With its value, a lane
// carries whether the value is defined.
#pragma once

#include <algorithm>
#include <deque>
#include <tuple>
#include <typeinfo>

#include "octile/tile/checked_index.h"
#include "octile/tile/cpu_tile.h"
#include "octile/tile/recorder.h"

namespace octile::tile {

struct CheckedCpu {
  WarpLayout layout{};                 // what coalescing is counted for
  std::int64_t max_records = 200'000;  // of the report; what is beyond is counted only
  std::int64_t max_steps = 0;          // accesses of a program; one with more ends the launch. 0: any number

  template <class T, class S>
  struct Storage : CpuValues<T, S::kSize> {
    bool any_undefined = false;  // only if so, `undefined` says which
    CpuValues<Origin, S::kSize> undefined;

    Storage() {
      // A few elements are kept in registers and copied whole: g++ would warn that they may be uninitialized.
      if constexpr (S::kSize <= 4) {
        for (T& value : this->values) value = T{};
        for (Origin& origin : undefined.values) origin = kDefined;
      }
    }
    Origin origin(int lane) const { return any_undefined ? undefined.values[lane] : kDefined; }
    void set_undefined(int lane, Origin origin) {
      if (!any_undefined) std::fill_n(undefined.values, S::kSize, kDefined);
      any_undefined = true;
      undefined.values[lane] = origin;
    }
  };
  template <class I>
  using Index = s64;

  using Overflow = CheckedOverflow;
  struct Memory {
    Shadow* shadow = nullptr;
  };

  template <class A>
  static bool any_undefined(const A& a) {
    if constexpr (is_tile<A>) return a.any_undefined;
    if constexpr (requires { a.overflow; }) return a.overflow.happened();
    if constexpr (LazyMask<A> && requires { a.b; }) return any_undefined(a.a) || any_undefined(a.b);
    if constexpr (LazyMask<A> && requires { a.a; }) return any_undefined(a.a);
    return false;
  }
  // Of element (p, r, c) of an operand: of a value, an index or a mask.
  template <class A>
  static Origin origin_at(const A& a, int p, int r, int c) {
    if constexpr (is_tile<A>) {
      using S = typename A::Shape;
      return a.origin(((S::kPlanes == 1 ? 0 : p) * S::kRows + (S::kRows == 1 ? 0 : r)) * S::kColumns +
                      (S::kColumns == 1 ? 0 : c));
    } else if constexpr (requires { a.overflow; }) {
      return !a.overflow.at(p, r, c) ? kDefined : a.overflow.by_zero() ? kDivision : kOverflow;
    } else if constexpr (LazyMask<A> && requires { a.b; }) {
      using F = std::conditional_t<is_either<A>, scalar::Or, scalar::And>;
      return decided<F>(p, r, c, a.a, a.b) ? kDefined : first_of(origin_at(a.a, p, r, c), origin_at(a.b, p, r, c));
    } else if constexpr (LazyMask<A> && requires { a.a; }) {
      return origin_at(a.a, p, r, c);
    } else {
      return kDefined;
    }
  }
  template <class... O>
  static Origin first_of(O... origins) {
    Origin first = kDefined;
    ((first = first != kDefined ? first : origins), ...);
    return first;
  }
  // 0 & x and ~0 | x do not depend on x.
  template <class F, class... A>
  static bool decided(int p, int r, int c, const A&... a) {
    const auto decides = [&](const auto& side) {
      const auto value = element_of(side, p, r, c);
      using T = std::remove_const_t<decltype(value)>;
      return origin_at(side, p, r, c) == kDefined && value == static_cast<T>(std::is_same_v<F, scalar::And> ? 0 : -1);
    };
    return (decides(a) || ...);
  }
  template <class A>
  static auto element_of(const A& a, int p, int r, int c) {
    if constexpr (LazyMask<A>) {
      return a.at(p, r, c);
    } else {
      return cpu::row_of(a, p, r)(c);
    }
  }

  template <class S, class Visit>
  static void each_lane(Visit visit) {
    for (int p = 0; p < S::kPlanes; ++p) {
      for (int r = 0; r < S::kRows; ++r) {
        for (int c = 0; c < S::kColumns; ++c) visit(p, r, c);
      }
    }
  }

  template <class S, class F, class... A>
  static auto map(F f, const A&... a) {
    Tile<CheckedCpu, cpu::MapType<F, A...>, S> out;
    cpu::map<S>(out.values, f, a...);
    constexpr bool kPartial = requires { F::undefined(widen(std::declval<typename A::Type>())...); };
    if (kPartial || (any_undefined(a) || ...)) mark_undefined<S, F>(out, a...);
    return out;  // the one: no copy
  }
  template <class S, class F, class Out, class... A>
  static void mark_undefined(Out& out, const A&... a) {
    constexpr bool kPartial = requires { F::undefined(widen(std::declval<typename A::Type>())...); };
    constexpr bool kShifts = std::is_same_v<F, scalar::ShiftLeft> || std::is_same_v<F, scalar::ShiftRight>;
    each_lane<S>([&](int p, int r, int c) {
      Origin origin = kDefined;
      if constexpr (std::is_same_v<F, scalar::Select>) {
        origin = origin_of_select(p, r, c, a...);
      } else {
        origin = first_of(origin_at(a, p, r, c)...);
        if constexpr (std::is_same_v<F, scalar::And> || std::is_same_v<F, scalar::Or>) {
          if (origin != kDefined && decided<F>(p, r, c, a...)) origin = kDefined;
        }
      }
      if constexpr (kPartial) {
        if (origin == kDefined && F::undefined(cpu::row_of(a, p, r)(c)...)) origin = kShifts ? kShift : kDivision;
      }
      if (origin != kDefined) out.set_undefined(SameOrder::of<S>(p, r, c), origin);
    });
  }
  // Of where(), the side that is not taken does not matter.
  template <class M, class A, class B>
  static Origin origin_of_select(int p, int r, int c, const M& condition, const A& a, const B& b) {
    const Origin origin = origin_at(condition, p, r, c);
    if (origin != kDefined) return origin;
    return element_of(condition, p, r, c) ? origin_at(a, p, r, c) : origin_at(b, p, r, c);
  }

  template <int Axis, class F, class A>
  static auto reduce(F f, const A& operand) {
    using S = typename A::Shape;
    using R = Reduced<S, Axis>;
    const auto& a = cpu::stored(operand);
    Tile<CheckedCpu, Common<typename A::Type, typename A::Type>, R> out;
    cpu::reduce_tile<Axis, S>(f, a.values, out.values);
    for (int lane = 0; a.any_undefined && lane < S::kSize; ++lane) {
      const int p = lane / (S::kRows * S::kColumns), r = lane / S::kColumns % S::kRows, c = lane % S::kColumns;
      const int to = SameOrder::of<R>(Axis == 0 ? 0 : p, Axis == 1 ? 0 : r, Axis == 2 ? 0 : c);
      if (a.origin(lane) != kDefined) out.set_undefined(to, first_of(out.origin(to), a.origin(lane)));
    }
    return out;
  }

  template <class S, class A, class Source>
  static auto rearrange(const A& a, Source) {
    Tile<CheckedCpu, typename A::Type, S> out;
    each_lane<S>([&](int p, int r, int c) {
      const int from = Source::template of<S>(p, r, c), to = SameOrder::of<S>(p, r, c);
      out.values[to] = a.values[from];
      if (a.origin(from) != kDefined) out.set_undefined(to, a.origin(from));
    });
    return out;
  }

  template <class A, class B, class C>
  static C dot(const A& a, const B& b, C sum) {
    using SA = typename A::Shape;
    using SC = typename C::Shape;
    constexpr int K = SA::kColumns;
    cpu::dot(a, b, sum);
    if (recorder_ != nullptr) recorder_->add_flops(std::int64_t{2} * SC::kSize * K);
    if (!a.any_undefined && !b.any_undefined) return sum;
    each_lane<SC>([&](int p, int r, int c) {
      const int to = SameOrder::of<SC>(p, r, c);
      Origin origin = sum.origin(to);
      for (int k = 0; k < K; ++k) origin = first_of(origin, origin_at(a, p, r, k), origin_at(b, p, k, c));
      if (origin != kDefined) sum.set_undefined(to, origin);
    });
    return sum;
  }

  template <class T>
  Pointer<CheckedCpu, T> pointer(const Tensor<T>& tensor) {
    TensorUse use{.name = tensor.name, .dtype = dtype_of<std::remove_const_t<T>>(), .shape = tensor.shape};
    use.element_bytes = sizeof(T);
    return {tensor.data, {recorder_->add_tensor(std::move(use), tensor.data, tensor.written)}};
  }

  class Program;

  inline static thread_local Recorder* recorder_ = nullptr;  // of the launch under way
  class Under {
   public:
    explicit Under(Recorder& recorder) : outer_(std::exchange(recorder_, &recorder)) {}
    ~Under() {
      recorder_ = outer_;
      if (outer_ == nullptr) CheckedOverflow::forget();
    }
    Under(const Under&) = delete;
    Under& operator=(const Under&) = delete;

   private:
    Recorder* outer_;
  };
};

class CheckedCpu::Program {
 public:
  Program(Recorder& recorder, const Grid& grid, std::int64_t number)
      : recorder_(recorder),
        ids_{static_cast<int>(number % grid.x), static_cast<int>(number / grid.x % grid.y),
             static_cast<int>(number / grid.x / grid.y)},
        counts_{grid.x, grid.y, grid.z} {}

  CheckedIndex id(int axis) const { return {ids_[grid_axis(axis)], {}}; }
  int count(int axis) const { return counts_[grid_axis(axis)]; }
  void barrier() { recorder_.barrier(); }

  template <class P, class M, class Other>
  auto load(const P& p, const M& mask, Other other, Where where) {
    using T = std::remove_const_t<typename P::Element>;
    using S = typename P::Shape;
    Tile<CheckedCpu, T, S> out;
    // Undefined values are visibly wrong.
    if constexpr (!std::is_same_v<Other, Nothing>) {
      const T rest = scalar::Cast<T, Round::unstated>{}(other);
      std::fill_n(out.values, S::kSize, rest);
    } else if constexpr (!std::is_same_v<M, Everything>) {
      if (!holds_everywhere(mask)) {
        memset(static_cast<void*>(out.values),
               std::is_same_v<T, bool> ? 1
               : is_float_type<T>      ? 0xFF
                                       : 0xA5,
               S::kSize * sizeof(T));
        std::fill_n(out.undefined.values, S::kSize, Origin{1});
        out.any_undefined = true;
      }
    }
    access(Access::load, p, mask, where, [&](int lane, s64 index, bool valid) {
      out.values[lane] = valid ? p.tensor.data[index] : out_of_bounds_value<T>();
      if (out.any_undefined) out.undefined.values[lane] = kDefined;
    });
    if (out.any_undefined) {
      const Origin here = recorder_.origin();
      std::replace_if(
          out.undefined.values, out.undefined.values + S::kSize, [](Origin origin) { return origin != kDefined; },
          here);
    }
    return out;
  }

  template <class P, class V, class M>
  void store(const P& p, const V& value, const M& mask, Where where) {
    using S = typename P::Shape;
    access(Access::store, p, mask, where, [&](int lane, s64 index, bool valid) {
      if (!valid) return;
      p.tensor.data[index] = value.values[lane];
      if (value.origin(lane) != kDefined) undefined_value<S>(lane, index, value.origin(lane));
    });
  }

  template <AtomicOp kOp, class P, class V, class M>
  void atomic(const P& p, const V& value, const M& mask, Where where) {
    using S = typename P::Shape;
    access(Access::atomic, p, mask, where, [&](int lane, s64 index, bool valid) {
      if (!valid) return;
      auto& element = p.tensor.data[index];
      if constexpr (kOp == AtomicOp::add) element = scalar::Add{}(element, value.values[lane]);
      if constexpr (kOp == AtomicOp::max) element = scalar::Maximum{}(element, value.values[lane]);
      if (value.origin(lane) != kDefined) undefined_value<S>(lane, index, value.origin(lane));
    });
  }

  // As on a GPU, steps are staged before the bodies of earlier ones have run, and a step may be staged again. So a
  // stage that depends on more than its step goes wrong here too.
  template <class Context, class Stages, class Steps, class Stage, class Body>
  void pipeline(Context& t, Stages stages, Steps number, Stage& stage, Body& body) {
    const int steps = static_cast<int>(number);
    const std::uint32_t epoch = recorder_.epoch();
    const auto load = [&](const auto& fetch, auto) {
      recorder_.begin_fetch(epoch);
      auto loaded = t.load_fetch(fetch);
      recorder_.end_fetch();
      return loaded;
    };
    recorder_.mute(true);
    if (steps > 0) (void)stage(0);
    recorder_.mute(false);
    std::deque<decltype(stage(0))> ahead;
    for (int k = 0, staged = 0; k < steps; ++k) {
      for (; staged < steps && staged < k + larger(stages, 2); ++staged) ahead.push_back(stage(staged));
      ahead.front().each(load, body, k);
      ahead.pop_front();
    }
  }

 private:
  template <class T>
  static T out_of_bounds_value() {
    T value{};
    if constexpr (is_float_type<T>) memset(&value, 0xFF, sizeof(value));
    return value;
  }
  template <class S>
  void undefined_value(int lane, s64 index, Origin origin) {
    recorder_.undefined(Problem::undefined_value, origin, lane / (S::kRows * S::kColumns),
                        lane / S::kColumns % S::kRows, lane % S::kColumns, index);
  }

  // The one gate: visit(lane, index, in bounds) of each lane that is not masked off.
  template <class P, class M, class Visit>
  void access(Access kind, const P& p, const M& mask, Where where, Visit visit) {
    using S = typename P::Shape;
    using Index = decltype(p.index);
    if (recorder_.muted()) return;
    AccessTile tile;
    tile.access = kind;
    tile.shadow = p.tensor.memory.shadow;
    tile.planes = S::kPlanes;
    tile.rows = S::kRows;
    tile.columns = S::kColumns;
    tile.where = where;
    tile.masked = !std::is_same_v<M, Everything>;
    if constexpr (AffineTile<Index>) {
      tile.affine = true;
      tile.unit = Index::kUnit || p.index.column == 1;
      tile.base = p.index.base;
      tile.plane_stride = p.index.plane;
      tile.row_stride = p.index.row;
      tile.column_stride = p.index.column;
    }
    recorder_.begin(tile);
    for (int plane = 0; plane < S::kPlanes; ++plane) {
      for (int row = 0; row < S::kRows; ++row) visit_row(p, mask, plane, row, visit);
    }
    recorder_.end();
  }

  // Splits a row into runs: unmasked neighbours whose indices are evenly spaced. An undefined mask or index is
  // reported, and its lane left out.
  template <class P, class M, class Visit>
  void visit_row(const P& p, const M& mask, int plane, int row, Visit& visit) {
    using S = typename P::Shape;
    constexpr bool kAffine = is_affine<std::remove_const_t<decltype(p.index)>>;
    const auto index = cpu::row_of(p.index, plane, row);
    const auto lane = mask_row<S>(mask, plane, row);
    const bool all_defined = !any_undefined(mask) && !any_undefined(p.index);
    const auto origin_of = [&](int c) {
      if (all_defined) return kDefined;
      const Origin of_mask = origin_at(mask, plane, row, c);
      return of_mask != kDefined || !lane(c) ? of_mask : origin_at(p.index, plane, row, c);
    };
    for (int c = 0; c < S::kColumns;) {
      if (const Origin origin = origin_of(c); origin != kDefined) {
        recorder_.undefined(Problem::undefined_index, origin, plane, row, c, static_cast<s64>(index(c)));
        visit((plane * S::kRows + row) * S::kColumns + c, 0, false);
        ++c;
        continue;
      }
      if (!lane(c)) {
        ++c;
        continue;
      }
      Run run{plane, row, c, 1, static_cast<s64>(index(c)), 1};
      if constexpr (kAffine) run.step = p.index.column;
      int end = c + 1;
      if constexpr (kAffine) {
        if (all_defined) {
          end = last_lane<S>(lane, c);
        } else {
          while (end < S::kColumns && origin_of(end) == kDefined && lane(end)) ++end;
        }
      }
      run.count = end - c;
      visit_run<S>(run, visit);
      c = end;
    }
  }

  template <class S, class M>
  static auto mask_row(const M& mask, int plane, int row) {
    if constexpr (std::is_same_v<M, Everything>) {
      return cpu::IntervalRow{0, S::kColumns};
    } else {
      return cpu::row_of(mask, plane, row);
    }
  }
  template <class S, class Row>
  static int last_lane(const Row& lane, int c) {
    if constexpr (requires { lane.high; }) return lane.high;
    if constexpr (requires { lane.value; }) return S::kColumns;
    int end = c + 1;
    while (end < S::kColumns && lane(end)) ++end;
    return end;
  }

  template <class S, class Visit>
  void visit_run(const Run& run, Visit& visit) {
    const int first = (run.plane * S::kRows + run.row) * S::kColumns + run.column;
    if (recorder_.run(run)) {
      if (run.step == 1) {  // known to the compiler: neighbours
        for (int i = 0; i < run.count; ++i) visit(first + i, run.index + i, true);
      } else {
        for (int i = 0; i < run.count; ++i) visit(first + i, run.index + run.step * i, true);
      }
    } else {
      for (int i = 0; i < run.count; ++i) {
        const s64 index = run.index + run.step * i;
        visit(first + i, index, recorder_.in_bounds(index));
      }
    }
  }

  Recorder& recorder_;
  int ids_[3], counts_[3];
};

std::string type_name(const std::type_info& type);

template <class Kernel, class... Args>
Report launch(CheckedCpu executor, Grid grid, const Kernel& kernel, Args&&... args) {
  check_grid(grid);
  Recorder recorder(type_name(typeid(Kernel)), grid, executor.layout, executor.max_records, executor.max_steps);
  const CheckedCpu::Under under(recorder);
  const auto run = [&](const auto&... a) {
    try {
      for (std::int64_t number = 0; number < grid.size(); ++number) {
        recorder.begin_program(number);
        Context<CheckedCpu> t{CheckedCpu::Program(recorder, grid, number)};
        kernel(t, a...);
      }
    } catch (const Recorder::Endless&) {  // which is in the report
    }
  };
  // The braces keep the order of the arguments, which is the order of the tensors in the report.
  std::apply(run, std::tuple{argument(executor, std::forward<Args>(args))...});
  return recorder.finish();
}

}  // namespace octile::tile
