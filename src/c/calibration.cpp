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

octile_smoothing_search_description defaults_of_search() {
  const SmoothingSearchDescription d;
  octile_smoothing_search_description c = {};
  c.group = WeightFormat::s4_group.group;
  c.first_alpha = d.first_alpha;
  c.last_alpha = d.last_alpha;
  c.x = static_cast<std::int32_t>(d.x);
  c.w = static_cast<std::int32_t>(d.w);
  c.activation = static_cast<std::int32_t>(d.activation);
  c.weight = OCTILE_WEIGHT_S8_PER_CHANNEL;
  c.steps = d.steps;
  return c;
}

octile_weight_quantizer_description defaults_of_quantizer() {
  const WeightQuantizerDescription d;
  octile_weight_quantizer_description c = {};
  c.group = WeightFormat::s4_group.group;
  c.damping = d.damping;
  c.min_clip = d.min_clip;
  c.w = static_cast<std::int32_t>(d.w);
  c.weight = OCTILE_WEIGHT_S8_PER_CHANNEL;
  c.scale = static_cast<std::int32_t>(d.scale);
  c.method = static_cast<std::int32_t>(d.method);
  c.order = static_cast<std::int32_t>(d.order);
  c.clip_steps = d.clip_steps;
  return c;
}

SmoothingSearchDescription convert(std::string_view function, const octile_smoothing_search_description* given) {
  const auto c = read_struct(function, "description", given, defaults_of_search());
  const Converter in(function);
  SmoothingSearchDescription d;
  d.n = c.n;
  d.k = c.k;
  d.first_alpha = c.first_alpha;
  d.last_alpha = c.last_alpha;
  in.choice(d.x, "x", c.x);
  in.choice(d.w, "w", c.w);
  in.choice(d.activation, "activation", c.activation);
  d.weight = in.weight(c.weight, c.group);
  d.steps = c.steps;
  d.threads = c.threads;
  d.calibration_rows = c.calibration_rows;
  return d;
}

WeightQuantizerDescription convert(std::string_view function, const octile_weight_quantizer_description* given) {
  const auto c = read_struct(function, "description", given, defaults_of_quantizer());
  const Converter in(function);
  WeightQuantizerDescription d;
  d.n = c.n;
  d.k = c.k;
  d.damping = c.damping;
  d.min_clip = c.min_clip;
  in.choice(d.w, "w", c.w);
  d.weight = in.weight(c.weight, c.group, in.boolean("zero_point", c.zero_point));
  in.choice(d.scale, "scale", c.scale);
  in.choice(d.method, "method", c.method);
  in.choice(d.order, "order", c.order);
  d.clip_steps = c.clip_steps;
  d.threads = c.threads;
  return d;
}

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

}  // namespace octile

extern "C" {

using octile::guarded;
using octile::c_interface::Converter;
using octile::c_interface::read_struct;
using octile::c_interface::write_struct;

octile_status octile_calibrator_create(const octile_calibrator_description* description,
                                       octile_calibrator** calibrator) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_calibrator_create";
    octile::check_pointer(kFunction, "calibrator", calibrator);
    const auto c = read_struct(kFunction, "description", description);
    const bool moments = Converter(kFunction).boolean("second_moments", c.second_moments);
    *calibrator = new octile_calibrator{octile::Calibrator({c.features, moments, c.threads})};
  });
}

void octile_calibrator_destroy(octile_calibrator* calibrator) { delete calibrator; }

octile_status octile_calibrator_observe(octile_calibrator* calibrator, const octile_tensor* x) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_calibrator_observe";
    octile::calibrator_of(kFunction, calibrator).observe(Converter(kFunction).tensor("x", x));
  });
}

octile_status octile_calibrator_merge(octile_calibrator* calibrator, const octile_calibrator* other) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_calibrator_merge";
    octile::calibrator_of(kFunction, calibrator).merge(octile::calibrator_of(kFunction, other));
  });
}

int64_t octile_calibrator_rows(const octile_calibrator* calibrator) {
  return calibrator ? calibrator->calibrator.rows() : 0;
}

float octile_calibrator_max(const octile_calibrator* calibrator) {
  return calibrator ? calibrator->calibrator.max() : 0.0f;
}

octile_status octile_calibrator_channel_max(const octile_calibrator* calibrator, const octile_tensor* out) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_calibrator_channel_max";
    octile::calibrator_of(kFunction, calibrator).channel_max(Converter(kFunction).tensor("out", out));
  });
}

octile_status octile_calibrator_excess(const octile_calibrator* calibrator, const octile_tensor* out) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_calibrator_excess";
    octile::calibrator_of(kFunction, calibrator).excess(Converter(kFunction).tensor("out", out));
  });
}

octile_status octile_calibrator_second_moments(const octile_calibrator* calibrator, const octile_tensor* out) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_calibrator_second_moments";
    octile::calibrator_of(kFunction, calibrator).second_moments(Converter(kFunction).tensor("out", out));
  });
}

octile_status octile_smoothing_factors(const octile_smoothing_args* args, float* smoothed_max) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_smoothing_factors";
    octile::check_pointer(kFunction, "smoothed_max", smoothed_max);
    const auto c = read_struct(kFunction, "args", args);
    const Converter in(kFunction);
    *smoothed_max =
        octile::smoothing_factors({.alpha = c.alpha,
                                   .input_channel_max = in.tensor("input_channel_max", c.input_channel_max),
                                   .weight_channel_max = in.tensor("weight_channel_max", c.weight_channel_max),
                                   .factors = in.tensor("factors", c.factors),
                                   .multiplier = in.tensor("multiplier", c.multiplier)});
  });
}

octile_status octile_smooth_weight(const octile_tensor* weight, const octile_tensor* factors) {
  return guarded([&] {
    const Converter in("octile_smooth_weight");
    octile::smooth_weight(in.tensor("weight", weight), in.tensor("factors", factors));
  });
}

octile_status octile_smooth_before(const octile_smooth_before_args* args) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_smooth_before";
    const auto c = read_struct(kFunction, "args", args);
    const Converter in(kFunction);
    octile::smooth_before({.factors = in.tensor("factors", c.factors),
                           .weight = in.tensor("weight", c.weight),
                           .bias = in.tensor("bias", c.bias)});
  });
}

octile_status octile_smoothing_search_description_init(octile_smoothing_search_description* description, size_t size) {
  return octile::init_struct("octile_smoothing_search_description_init", description, size,
                             octile::defaults_of_search());
}

octile_status octile_search_smoothing(const octile_smoothing_search_description* description,
                                      const octile_smoothing_search_args* args,
                                      octile_smoothing_search_result* result) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_search_smoothing";
    octile::check_result(kFunction, "result", result);
    const auto d = octile::convert(kFunction, description);
    const auto c = read_struct(kFunction, "args", args);
    const Converter in(kFunction);
    const octile::SmoothingSearchResult found =
        octile::search_smoothing(d, {.weight = in.tensor("weight", c.weight),
                                     .input_channel_max = in.tensor("input_channel_max", c.input_channel_max),
                                     .x = in.tensor("x", c.x),
                                     .second_moments = in.tensor("second_moments", c.second_moments),
                                     .rows = c.rows,
                                     .input_excess = in.tensor("input_excess", c.input_excess),
                                     .errors = in.tensor("errors", c.errors)});
    write_struct(kFunction, "result", result, {0, found.alpha, found.error, found.unsmoothed_error, found.smooth, 0});
  });
}

octile_status octile_weight_quantizer_description_init(octile_weight_quantizer_description* description, size_t size) {
  return octile::init_struct("octile_weight_quantizer_description_init", description, size,
                             octile::defaults_of_quantizer());
}

octile_status octile_quantize_weight(const octile_weight_quantizer_description* description,
                                     const octile_weight_quantizer_args* args) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_quantize_weight";
    const auto d = octile::convert(kFunction, description);
    const auto c = read_struct(kFunction, "args", args);
    const Converter in(kFunction);
    octile::quantize_weight(d, {.weight = in.tensor("weight", c.weight),
                                .second_moments = in.tensor("second_moments", c.second_moments),
                                .importance = in.tensor("importance", c.importance),
                                .q = in.tensor("q", c.q),
                                .scale = in.tensor("scale", c.scale),
                                .zero_point = in.tensor("zero_point", c.zero_point)});
  });
}

octile_status octile_weight_error(const octile_weight_quantizer_description* description,
                                  const octile_weight_quantizer_args* args, octile_weight_error_result* result) {
  return guarded([&] {
    constexpr std::string_view kFunction = "octile_weight_error";
    octile::check_result(kFunction, "result", result);
    const auto d = octile::convert(kFunction, description);
    const auto c = read_struct(kFunction, "args", args);
    const Converter in(kFunction);
    const octile::WeightError error =
        octile::weight_error(d, {.weight = in.tensor("weight", c.weight),
                                 .second_moments = in.tensor("second_moments", c.second_moments),
                                 .importance = in.tensor("importance", c.importance),
                                 .q = in.tensor("q", c.q),
                                 .scale = in.tensor("scale", c.scale),
                                 .zero_point = in.tensor("zero_point", c.zero_point)});
    write_struct(kFunction, "result", result, {0, error.noise, error.signal});
  });
}

}  // extern "C"
