// A small model made from bytes, for the fuzz target of checkpoints.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "octile/checkpoint/safetensors.h"

namespace octile::checkpoint {

// Choices from bytes: zeros after their end, which give the plain, legal choices.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  bool more() const { return at_ < size_; }
  template <std::size_t kCount>
  std::string pick(const char* const (&texts)[kCount]) {
    return texts[byte() % kCount];
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

// Mostly plain numbers.
inline std::vector<float> numbers(Input& in, std::size_t count) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kOdd[] = {0, -1, 65504, 1e30f, 1e-30f, 1e-45f, kInfinity, -kInfinity, NAN, 3e38f};
  const std::uint8_t odd = in.byte();
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>((i * 37 + odd) % 101 + 1) / 64;
  if (odd >= 200 && count > 0) values[in.byte() % count] = kOdd[in.byte() % std::size(kOdd)];
  return values;
}

// One LLaMA block, mostly valid, with its calibration.
class SmallModel {
 public:
  explicit SmallModel(Input& in) : in_(in) {
    constexpr ElementType kTypes[] = {ElementType::f32, ElementType::f16, ElementType::bf16, ElementType::f64};
    type_ = kTypes[in.byte() % 4];
    const std::string attention = "m.0.self_attn.";
    add("m.0.input_layernorm.weight", {kWidth});
    if (in.byte() % 2 == 0) add("m.0.input_layernorm.bias", {kWidth});
    for (const char* const part : {"q_proj", "k_proj", "v_proj", "o_proj"})
      add(attention + part + ".weight", {kWidth, kWidth});
    if (in.byte() % 2 == 0) add(attention + "v_proj.bias", {kWidth});
    add("m.0.mlp.up_proj.weight", {kInner, kWidth});
    add("m.0.mlp.down_proj.weight", {kWidth, kInner});
    add("embed.weight", {3, kWidth});
  }

  void write(const std::filesystem::path& path) const { write_all(path, tensors_, {}); }

  void write_calibration(const std::filesystem::path& path) const {
    std::vector<Tensor> all;
    for (const Tensor& tensor : tensors_) {
      if (tensor.spec.shape.size() != 2 || !tensor.spec.name.ends_with(".weight") || in_.byte() >= 250) continue;
      const std::string name = tensor.spec.name.substr(0, tensor.spec.name.rfind('.'));
      const std::int64_t k = tensor.spec.shape[1];
      const auto width = static_cast<std::size_t>(k);
      std::vector<float> moments(width * width);
      const std::vector<float> diagonal = numbers(in_, width), most = numbers(in_, width);
      for (std::size_t j = 0; j < width; ++j) moments[j * width + j] = diagonal[j];
      const std::int64_t rows[] = {in_.byte() < 250 ? 5 : -1};
      const Bytes row_bytes = std::as_bytes(std::span(rows));
      all.push_back({{name + ".input_channel_max", ElementType::f32, {k}}, write_values(ElementType::f32, most)});
      const float largest[] = {most.empty() ? 0 : *std::max_element(most.begin(), most.end())};
      all.push_back({{name + ".input_max", ElementType::f32, {1}}, write_values(ElementType::f32, largest)});
      all.push_back({{name + ".rows", ElementType::s64, {1}}, {row_bytes.begin(), row_bytes.end()}});
      all.push_back(
          {{name + ".input_second_moments", ElementType::f32, {k, k}}, write_values(ElementType::f32, moments)});
    }
    write_all(path, all, {{"format", "octile-calibration"}, {"version", "1"}});
  }

 private:
  struct Tensor {
    TensorSpec spec;
    std::vector<std::byte> bytes;
  };

  static constexpr std::int64_t kWidth = 32, kInner = 64;

  // Sometimes of another type, or with another extent.
  void add(const std::string& name, std::vector<std::int64_t> shape) {
    ElementType type = type_;
    const std::uint8_t oddity = in_.byte();
    if (oddity >= 240) shape[oddity % shape.size()] = in_.byte() % 70;
    if (oddity >= 248) type = static_cast<ElementType>(in_.byte() % 13);
    if (oddity == 239) shape.push_back(2);
    std::size_t count = 1;
    for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    std::vector<std::byte> bytes = is_float(type)
                                       ? write_values(type, numbers(in_, count))
                                       : std::vector<std::byte>(size_of(type, shape, name), std::byte{in_.byte()});
    tensors_.push_back({{name, type, std::move(shape)}, std::move(bytes)});
  }

  static void write_all(const std::filesystem::path& path, const std::vector<Tensor>& tensors,
                        const Metadata& metadata) {
    std::vector<TensorSpec> specs;
    for (const Tensor& tensor : tensors) specs.push_back(tensor.spec);
    SafetensorsWriter writer(path, specs, metadata);
    for (const Tensor& tensor : tensors) writer.append(tensor.spec.name, tensor.bytes);
    writer.finish(true);
  }

  Input& in_;
  ElementType type_;
  std::vector<Tensor> tensors_;
};

}  // namespace octile::checkpoint
