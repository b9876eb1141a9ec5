// The C interface of calibration, SmoothQuant and the weight quantizer (octile_calibration.h): conversion and nothing
// else.
#include <type_traits>

#include "c/guard.h"
#include "octile/octile_calibration.h"

struct octile_calibrator {
  octile::Calibrator calibrator;
};

namespace octile {

namespace {

using namespace c_interface;

template <class Enum>
constexpr bool same(int number, Enum value) {
  return number == static_cast<int>(value);
}
static_assert(same(OCTILE_METHOD_NEAREST, WeightMethod::nearest) &&
              same(OCTILE_METHOD_CLIP_SEARCH, WeightMethod::clip_search) &&
              same(OCTILE_METHOD_ERROR_FEEDBACK, WeightMethod::error_feedback));
static_assert(same(OCTILE_ORDER_AS_THEY_LIE, ColumnOrder::as_they_lie) &&
              same(OCTILE_ORDER_BY_MOMENT, ColumnOrder::by_moment));
// A struct_size that is a multiple of 8 cuts no field; doubles are counted by hand (agreement.cpp).
static_assert(sizeof(octile_calibrator_description) == 2 * 8 + 2 * 4);
static_assert(sizeof(octile_smoothing_args) == 6 * 8 && sizeof(octile_smooth_before_args) == 4 * 8);
static_assert(sizeof(octile_smoothing_search_description) == 7 * 8 + 6 * 4);
static_assert(sizeof(octile_smoothing_search_args) == 8 * 8 && sizeof(octile_smoothing_search_result) == 4 * 8 + 2 * 4);
static_assert(sizeof(octile_weight_quantizer_description) == 6 * 8 + 8 * 4);
static_assert(sizeof(octile_weight_quantizer_args) == 7 * 8 && sizeof(octile_weight_error_result) == 3 * 8);

template <class Calibrator>
auto& calibrator_of(std::string_view function, Calibrator* given) {
  if (given == nullptr) fail(Status::invalid_argument, function, ": calibrator is NULL");
  return given->calibrator;
}

template <class Result>
void check_pointer(std::string_view function, std::string_view what, const Result* given) {
  if (given == nullptr) fail(Status::invalid_argument, function, ": ", what, " is NULL");
}

// Checks a structure that is written at the end, before the work.
template <class Result>
void check_result(std::string_view function, std::string_view what, const Result* given) {
  check_pointer(function, what, given);
  checked_size(function, what, given->struct_size);
}

}  // namespace

template <>
inline constexpr auto kFields<SmoothingArgs> = OCTILE_FIELDS(a.alpha, a.input_channel_max, a.weight_channel_max,
                                                             a.factors, a.multiplier);
template <>
inline constexpr auto kFields<SmoothBeforeArgs> = OCTILE_FIELDS(a.factors, a.weight, a.bias);
template <>
inline constexpr auto kFields<SmoothingSearchDescription> = OCTILE_FIELDS(a.n, a.k, a.first_alpha, a.last_alpha, a.x,
                                                                          a.w, a.activation, a.weight, a.steps,
                                                                          a.threads, a.calibration_rows);
template <>
inline constexpr auto kFields<SmoothingSearchArgs> = OCTILE_FIELDS(a.weight, a.input_channel_max, a.x, a.second_moments,
                                                                   a.rows, a.input_excess, a.errors);
template <>
inline constexpr auto kFields<WeightQuantizerDescription> = OCTILE_FIELDS(a.n, a.k, a.damping, a.min_clip, a.w,
                                                                          a.weight, a.scale, a.method, a.order,
                                                                          a.clip_steps, a.threads);
template <>
inline constexpr auto kFields<WeightQuantizerArgs> = OCTILE_FIELDS(a.weight, a.second_moments, a.importance, a.q,
                                                                   a.scale, a.zero_point);
template <>
inline constexpr auto kFields<WeightErrorArgs> = OCTILE_FIELDS(a.weight, a.second_moments, a.importance, a.q, a.scale,
                                                               a.zero_point);

}  // namespace octile

extern "C" {

using octile::guarded;
using octile::c_interface::convert;
using octile::c_interface::Converter;
using octile::c_interface::read_struct;
using octile::c_interface::write_struct;

octile_status octile_calibrator_create(const octile_calibrator_description* description,
                                       octile_calibrator** calibrator) {
  return guarded([&, function = __func__] {
    octile::check_pointer(function, "calibrator", calibrator);
    const auto c = read_struct(function, "description", description);
    const bool moments = Converter(function).boolean("second_moments", c.second_moments);
    *calibrator = new octile_calibrator{octile::Calibrator({c.features, moments, c.threads})};
  });
}

void octile_calibrator_destroy(octile_calibrator* calibrator) { delete calibrator; }

octile_status octile_calibrator_observe(octile_calibrator* calibrator, const octile_tensor* x) {
  return guarded([&, function = __func__] {
    octile::calibrator_of(function, calibrator).observe(Converter(function).tensor("x", x));
  });
}

octile_status octile_calibrator_merge(octile_calibrator* calibrator, const octile_calibrator* other) {
  return guarded([&, function = __func__] {
    octile::calibrator_of(function, calibrator).merge(octile::calibrator_of(function, other));
  });
}

int64_t octile_calibrator_rows(const octile_calibrator* calibrator) {
  return calibrator ? calibrator->calibrator.rows() : 0;
}

float octile_calibrator_max(const octile_calibrator* calibrator) {
  return calibrator ? calibrator->calibrator.max() : 0.0f;
}

// What a calibrator has found, into `out`.
#define OCTILE_FOUND(name)                                                                                \
  octile_status octile_calibrator_##name(const octile_calibrator* calibrator, const octile_tensor* out) { \
    return guarded([&, function = __func__] {                                                             \
      octile::calibrator_of(function, calibrator).name(Converter(function).tensor("out", out));           \
    });                                                                                                   \
  }
OCTILE_FOUND(channel_max)
OCTILE_FOUND(excess)
OCTILE_FOUND(second_moments)

octile_status octile_smoothing_factors(const octile_smoothing_args* args, float* smoothed_max) {
  return guarded([&, function = __func__] {
    octile::check_pointer(function, "smoothed_max", smoothed_max);
    *smoothed_max = octile::smoothing_factors(convert<octile::SmoothingArgs>(function, args));
  });
}

octile_status octile_smooth_weight(const octile_tensor* weight, const octile_tensor* factors) {
  return guarded([&] {
    const Converter in("octile_smooth_weight");
    octile::smooth_weight(in.tensor("weight", weight), in.tensor("factors", factors));
  });
}

octile_status octile_smooth_before(const octile_smooth_before_args* args) {
  return guarded([&] { octile::smooth_before(convert<octile::SmoothBeforeArgs>("octile_smooth_before", args)); });
}

OCTILE_DESCRIPTION(smoothing_search, SmoothingSearch)
OCTILE_DESCRIPTION(weight_quantizer, WeightQuantizer)

octile_status octile_search_smoothing(const octile_smoothing_search_description* description,
                                      const octile_smoothing_search_args* args,
                                      octile_smoothing_search_result* result) {
  return guarded([&, function = __func__] {
    octile::check_result(function, "result", result);
    const auto d = convert<octile::SmoothingSearchDescription>(function, description);
    const auto found = octile::search_smoothing(d, convert<octile::SmoothingSearchArgs>(function, args));
    write_struct(function, "result", result, {0, found.alpha, found.error, found.unsmoothed_error, found.smooth, 0});
  });
}

octile_status octile_quantize_weight(const octile_weight_quantizer_description* description,
                                     const octile_weight_quantizer_args* args) {
  return guarded([&, function = __func__] {
    const auto d = convert<octile::WeightQuantizerDescription>(function, description);
    octile::quantize_weight(d, convert<octile::WeightQuantizerArgs>(function, args));
  });
}

octile_status octile_weight_error(const octile_weight_quantizer_description* description,
                                  const octile_weight_quantizer_args* args, octile_weight_error_result* result) {
  return guarded([&, function = __func__] {
    octile::check_result(function, "result", result);
    const auto d = convert<octile::WeightQuantizerDescription>(function, description);
    const auto error = octile::weight_error(d, convert<octile::WeightErrorArgs>(function, args));
    write_struct(function, "result", result, {0, error.noise, error.signal});
  });
}

}  // extern "C"
