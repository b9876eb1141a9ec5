// The two interfaces agree: the constants of octile.h are the values of the C++ enumerations, and its structures have
// no padding that could hold garbage. Checked by the compiler; nothing here runs.
#include <cstddef>
#include <type_traits>

#include "c/convert.h"
#include "octile/octile.h"
#include "octile/octile.hpp"

namespace octile {

namespace {

template <class Enum>
constexpr bool same(int c, Enum value) {
  return c == static_cast<int>(value);
}

static_assert(same(OCTILE_OK, Status::ok) && same(OCTILE_INVALID_ARGUMENT, Status::invalid_argument) &&
              same(OCTILE_SHAPE_MISMATCH, Status::shape_mismatch) && same(OCTILE_UNSUPPORTED, Status::unsupported) &&
              same(OCTILE_MISALIGNED, Status::misaligned) &&
              same(OCTILE_WORKSPACE_TOO_SMALL, Status::workspace_too_small) &&
              same(OCTILE_CUDA_ERROR, Status::cuda_error) && same(OCTILE_INTERNAL, Status::internal));
static_assert(same(OCTILE_DTYPE_F16, DType::f16) && same(OCTILE_DTYPE_BF16, DType::bf16) &&
              same(OCTILE_DTYPE_F32, DType::f32) && same(OCTILE_DTYPE_F64, DType::f64) &&
              same(OCTILE_DTYPE_S8, DType::s8) && same(OCTILE_DTYPE_U8, DType::u8) &&
              same(OCTILE_DTYPE_S4, DType::s4) && same(OCTILE_DTYPE_S32, DType::s32));
static_assert(same(OCTILE_GRADIENT_DX, Gradient::dx) && same(OCTILE_GRADIENT_DW, Gradient::dw) &&
              same(OCTILE_GRADIENT_DB, Gradient::db));
static_assert(same(OCTILE_GRANULARITY_TENSOR, Granularity::tensor) && same(OCTILE_GRANULARITY_ROW, Granularity::row) &&
              same(OCTILE_GRANULARITY_COLUMN, Granularity::column) &&
              same(OCTILE_GRANULARITY_GROUP, Granularity::group));
static_assert(same(OCTILE_SCALE_DYNAMIC, ScaleSource::dynamic) && same(OCTILE_SCALE_GIVEN, ScaleSource::given));
static_assert(same(OCTILE_MAPPING_SYMMETRIC, Mapping::symmetric) && same(OCTILE_MAPPING_AFFINE, Mapping::affine));
static_assert(same(OCTILE_ROUNDING_NEAREST, Rounding::nearest) &&
              same(OCTILE_ROUNDING_STOCHASTIC, Rounding::stochastic));
static_assert(same(OCTILE_ORIENTATION_ROW_MAJOR, Orientation::row_major) &&
              same(OCTILE_ORIENTATION_TRANSPOSED, Orientation::transposed) &&
              same(OCTILE_ORIENTATION_BOTH, Orientation::both));
static_assert(same(OCTILE_MULTIPLIER_NONE, Multiplier::none) &&
              same(OCTILE_MULTIPLIER_PER_COLUMN, Multiplier::per_column) &&
              same(OCTILE_MULTIPLIER_PER_ROW, Multiplier::per_row));
static_assert(same(OCTILE_PROLOGUE_NONE, Prologue::none) && same(OCTILE_PROLOGUE_GELU_TANH, Prologue::gelu_tanh) &&
              same(OCTILE_PROLOGUE_SILU, Prologue::silu) && same(OCTILE_PROLOGUE_RMS_NORM, Prologue::rms_norm) &&
              same(OCTILE_PROLOGUE_LAYER_NORM, Prologue::layer_norm));
static_assert(same(OCTILE_MASK_INCLUSIVE, Mask::inclusive) && same(OCTILE_MASK_EXCLUSIVE, Mask::exclusive));
static_assert(same(OCTILE_ACTIVATION_NONE, Activation::none) &&
              same(OCTILE_ACTIVATION_DYNAMIC_PER_TOKEN, Activation::dynamic_per_token) &&
              same(OCTILE_ACTIVATION_DYNAMIC_PER_TENSOR, Activation::dynamic_per_tensor) &&
              same(OCTILE_ACTIVATION_STATIC_PER_TENSOR, Activation::static_per_tensor));
static_assert(c_interface::kWeightFormats[OCTILE_WEIGHT_S8_PER_CHANNEL] == WeightFormat::s8_per_channel &&
              c_interface::kWeightFormats[OCTILE_WEIGHT_S8_PER_TENSOR] == WeightFormat::s8_per_tensor &&
              c_interface::kWeightFormats[OCTILE_WEIGHT_S4_GROUP] == WeightFormat::s4_group &&
              c_interface::kWeightFormats[OCTILE_WEIGHT_S8_GROUP] == WeightFormat::s8_group);
static_assert(same(OCTILE_LAYOUT_OUT_IN, WeightLayout::out_in) && same(OCTILE_LAYOUT_IN_OUT, WeightLayout::in_out));
static_assert(same(OCTILE_PRODUCT_NONE, Product::none) && same(OCTILE_PRODUCT_DEQUANTIZED, Product::dequantized) &&
              same(OCTILE_PRODUCT_INT8, Product::int8));

// No field is cut by a struct_size that is a multiple of 8, and no padding can hold garbage that a later field would
// read.
static_assert(sizeof(void*) == 8 && sizeof(std::size_t) == 8, "the structures are laid out for 64 bits");
template <class Struct>
constexpr bool kNoPadding = std::has_unique_object_representations_v<Struct> && sizeof(Struct) % 8 == 0;
static_assert(kNoPadding<octile_precision> && kNoPadding<octile_kernel>);
static_assert(kNoPadding<octile_quantize_args> && kNoPadding<octile_dequantize_args> &&
              kNoPadding<octile_quantize_backward_args> && kNoPadding<octile_dequantize_backward_args> &&
              kNoPadding<octile_fake_quantize_args> && kNoPadding<octile_fake_quantize_backward_args> &&
              kNoPadding<octile_linear_args> && kNoPadding<octile_linear_pack_args> &&
              kNoPadding<octile_linear_backward_args> && kNoPadding<octile_grouped_linear_args> &&
              kNoPadding<octile_grouped_linear_backward_args>);
// These hold a double, which the trait does not count; their fields are added up instead.
static_assert(sizeof(octile_quantize_description) == 4 * 8 + 12 * 4 + 8 + 2 * 8 + 2 * 4 + 8 + 2 * 4);
static_assert(sizeof(octile_linear_description) == 6 * 8 + 12 * 4 + 8);
static_assert(sizeof(octile_linear_backward_description) == 5 * 8 + 14 * 4 + 8 + 2 * 4);
static_assert(sizeof(octile_grouped_linear_description) == 9 * 8 + 10 * 4 + 8 + 8);
static_assert(sizeof(octile_grouped_linear_backward_description) == 6 * 8 + 12 * 4 + 8 + 8);
static_assert(offsetof(octile_quantize_description, kernel) == 4 * 8 + 12 * 4 + 8);
static_assert(offsetof(octile_linear_description, kernel) == 6 * 8 + 12 * 4);
static_assert(offsetof(octile_linear_backward_description, kernel) == 5 * 8 + 14 * 4);

}  // namespace

}  // namespace octile
