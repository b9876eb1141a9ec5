#include "puzzles/products.h"

#include "puzzles/products_kernels.h"
#include "puzzles/registry.h"

namespace octile::tile::puzzles {

Facts Convolution::facts() {
  return {10,
          "convolution",
          "convolution of images: z[n, r, s] = sum of k[a, b] * x[n, r + a, s + b], 0 beyond the border",
          {"n0", "h", "w", "kh", "kw"},
          "x f32 [n0, h, w], k f32 [kh, kw], z f32 [n0, h, w]",
          "grid (cdiv(n0, b0)); b0 = 1, 2 or 4 images; kh, kw are known to the compiler; b1 = 8, for a part of a row",
          "The mask tests the row and the column; one on the place in the image would wrap around.",
          "a sum of kh kw products in any order: (kh kw + 1) u times the sum of their magnitudes",
          "auto& t, auto x, auto k, auto z, int n0, int h, int w, auto kh, auto kw, auto b0, auto b1",
          Cases({4, 8, 8, 4, 4})
              .with(Values::negative, {{4, 8, 8, 4, 4}})
              .with(Values::large, {{5, 8, 8, 4, 4}}, 1)
              .sizes({{3, 7, 13, 4, 4}, {2, 3, 131, 4, 4}, {0, 8, 8, 4, 4}, {2, 0, 3, 4, 4}})
              .sizes({{2, 67, 3, 4, 4}, {37, 2, 9, 4, 4}, {1, 1, 1, 4, 4}}, 1)
              .sizes({{7, 5, 19, 2, 8}, {3, 1, 41, 2, 8}, {2, 29, 1, 2, 8}}, 2)};
}

Facts BatchedMatmul::facts() {
  return {
      11,
      "batched_matmul",
      "matrix products: z[n] = x[n] @ y[n]",
      {"n0", "n1", "n2", "middle"},
      "x f32 [n2, n0, middle], y f32 [n2, middle, n1], z f32 [n2, n0, n1]",
      "grid (cdiv(n0, b0), cdiv(n1, b1), cdiv(n2, b2)); b0 = b1 = 16, b2 = 1 or 2, b_middle = 16",
      "dot(a, b, total) multiplies plane by plane; col(col(v)) makes planes. Three strides: middle, n1, n1.",
      "a sum of `middle` products in any order: (middle + 1) u times the sum of their magnitudes",
      "auto& t, auto x, auto y, auto z, int n0, int n1, int n2, int middle, auto b0, auto b1, auto b2, auto b_middle",
      Cases({32, 32, 4, 32})
          .with(Values::negative, {{32, 32, 4, 32}})
          .with(Values::large, {{17, 19, 2, 40}})
          .sizes({{48, 32, 2, 64},
                  {5, 70, 1, 53},
                  {3, 5, 2, 257},
                  {131, 2, 1, 7},
                  {1, 263, 1, 17},
                  {16, 16, 2, 0},
                  {0, 16, 2, 16},
                  {16, 16, 0, 16}})
          .sizes({{17, 33, 3, 40}, {2, 3, 3, 1031}, {2, 3, 67, 5}, {1, 1, 1, 1}}, 1)};
}

Facts QuantizedMatmul::facts() {
  return {
      12,
      "quantized_matmul",
      "a matrix product with weights of 4 bits: z = (scale * (w - shift)) @ activation",
      {"n0", "n1", "middle"},
      "scale f32 [n0, middle / 8], offset s32 [n0, cdiv(middle, 64)], weight s32 [n0, middle / 8], activation f32 "
      "[middle, n1], z f32 [n0, n1]; middle is a multiple of 8. Weight l of row j is bits 4 (l % 8) and up of "
      "weight[j, l / 8]; its scale is scale[j, g] and its shift bits 4 (g % 8) and up of offset[j, g / 8], with the "
      "group g = l / 8",
      "grid (cdiv(n0, b0), cdiv(n1, b1)); b0 = b1 = 16, b_middle = 64",
      "(col(words) >> t.arange(c<8>) * 4) & 15 takes eight weights out of each word; reshape() puts them in a row.",
      "a sum of `middle` products of a rounded factor: (middle + 2) u times the sum of their magnitudes",
      "auto& t, auto scale, auto offset, auto weight, auto activation, auto z, int n0, int n1, int middle, auto b0, "
      "auto b1, auto b_middle",
      Cases({32, 32, 64})
          .with(Values::negative, {{32, 32, 64}})
          .with(Values::large, {{17, 19, 72}})
          .sizes({{17, 33, 200},
                  {48, 16, 128},
                  {3, 5, 264},
                  {2, 3, 1032},
                  {131, 2, 8},
                  {1, 131, 56},
                  {5, 7, 72},
                  {1, 1, 8},
                  {16, 16, 0},
                  {0, 16, 64}})};
}

std::vector<Puzzle> product_puzzles() {
  namespace p = products;
  constexpr Problem kOutside = Problem::out_of_bounds;
  using Conv = p::ConvolutionBut;
  using Matmul = p::MatmulBut;
  using Quantized = p::QuantizedBut;
  using Pixels = p::ConvolutionByPixel;
  const auto conv = mistakes<Convolution, Conv>();
  const auto pixels = mistakes<Convolution, Pixels>();
  const auto matmul = mistakes<BatchedMatmul, Matmul>();
  const auto quantized = mistakes<QuantizedMatmul, Quantized>();
  return {
      puzzle<Convolution>(
          {pixels("ImagesWithoutMask", Pixels::images_without_mask, "right with one image a program", kOutside),
           pixels("WrapsAround", Pixels::wraps_around, "tests the place in the image and not the column"),
           leaves_out(conv("ConvolutionBut.at_most_24_columns", Conv::at_most_24_columns,
                           "right for images of up to 24 columns")),
           conv("ConvolutionBut.into_the_next_image", Conv::into_the_next_image,
                "the lower border continues in the next image"),
           conv("ConvolutionBut.taps_transposed", Conv::taps_transposed, "the strides of the taps are swapped")},
          p::Convolution{}),
      puzzle<BatchedMatmul>(
          {wrong<BatchedMatmul>("SquareOnly", kOutside, "strides that are right only for square matrices",
                                p::SquareOnly{}),
           matmul("WholeBlocksOfTheMiddle", Matmul::whole_blocks_of_the_middle,
                  "leaves out what does not fill a block"),
           matmul("TailTimesZero", Matmul::tail_times_zero, "undefined elements of x times zeros of y",
                  Problem::undefined_value),
           matmul("MatmulBut.at_most_128_terms", Matmul::at_most_128_terms, "right for sums of up to 128 terms"),
           matmul("MatmulBut.batch_before_the_columns", Matmul::batch_before_the_columns,
                  "the first two dimensions of x are swapped"),
           matmul("MatmulBut.y_in_rows_of_middle", Matmul::y_in_rows_of_middle,
                  "rows of y of the wrong length, within y"),
           matmul("MatmulBut.in_half", Matmul::in_half, "rounds the sum to f16 after each block")},
          p::BatchedMatmul{}),
      puzzle<QuantizedMatmul>(
          {quantized("WithoutShiftAndScale", Quantized::without_shift_and_scale, "multiplies the bare levels"),
           quantized("ScalesWithoutMask", Quantized::scales_without_mask, "right where the blocks divide the sizes",
                     kOutside),
           quantized("QuantizedBut.at_most_256_terms", Quantized::at_most_256_terms,
                     "right for rows of up to 256 weights"),
           quantized("QuantizedBut.signed_weights", Quantized::signed_weights, "takes the levels for signed ones"),
           quantized("QuantizedBut.shifts_of_the_first_word", Quantized::shifts_of_the_first_word,
                     "right for rows of up to 64 weights"),
           quantized("QuantizedBut.scaled_before_the_shift", Quantized::scaled_before_the_shift, "scale * w - shift")},
          p::QuantizedMatmul{}),
  };
}

}  // namespace octile::tile::puzzles
