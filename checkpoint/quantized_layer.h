// The quantized layers of a file: which tensors, of which types and shapes, and what quantization_config says of them.
// All readers of checkpoints share these checks, the Python package too.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "octile/checkpoint/layers.h"
#include "reject.h"
#include "scheme.h"

namespace octile::checkpoint {

// Throws FileError with the file's and the layer's name.
template <class... Parts>
[[noreturn]] void layer_error(const Checkpoint& checkpoint, const std::string& layer, const Parts&... what) {
  reject(checkpoint.path().string(), ": ", quoted(layer), ": ", what...);
}

// Errors in the headers throw FileError with the layer's name and the values. A layer without inputs or outputs is not
// checked further.
class QuantizedLayers {
 public:
  explicit QuantizedLayers(const Checkpoint& checkpoint) : checkpoint_(checkpoint), schemes_(checkpoint) {}

  // The layer that this tensor belongs to, if it is the one that a layer is known by.
  std::optional<Layer> of(const TensorInfo& tensor);

 private:
  using Shape = std::vector<std::int64_t>;

  Layer int_quantized(const std::string& module, const TensorInfo& weight);
  Layer pack_quantized(const std::string& module);
  Layer transposed_words(const std::string& module);
  void check_scale_of_none(const std::string& module);

  template <class... Parts>
  [[noreturn]] void fail(const std::string& module, const Parts&... what) const {
    layer_error(checkpoint_, module, what...);
  }
  const TensorInfo& get(const Layer& layer, const std::string& suffix) const;
  bool has(const Layer& layer, const std::string& suffix) const;
  // nullopt: any float type.
  void expect(const Layer& layer, const std::string& suffix, std::optional<ElementType> type,
              const std::vector<Shape>& shapes) const;
  Shape matrix(const Layer& layer, const std::string& suffix, std::optional<ElementType> type) const;
  void check_method(const Layer& layer) const;
  const QuantizationGroup* choose_group(Layer& layer);
  void check_input(Layer& layer, const QuantizationGroup* group) const;
  std::int64_t count_groups(const Layer& layer, std::int64_t length) const;
  void check_scale(Layer& layer, const QuantizationGroup* group) const;
  void check_words(const Layer& layer, const std::string& zero_points, const Shape& zero_shape,
                   const std::string& order) const;
  // Lists the layer's tensors, and checks that no others are there that a quantized layer could have.
  void take(Layer& layer, std::initializer_list<const char*> suffixes) const;

  const Checkpoint& checkpoint_;
  Schemes schemes_;
};

// The module's name, if `tensor` ends in the suffix.
std::optional<std::string> before(const std::string& tensor, std::string_view suffix);
bool is_one_of(std::string_view text, std::initializer_list<std::string_view> list);

// Throws FileError unless the method is one whose layers are read.
void check_method(const Checkpoint& checkpoint);

// Checks the values that belong to the levels: scales that are finite and above 0, zero points in range, groups in
// order. read_quantized and read_weight check them too. Throws FileError.
void check_values(const Checkpoint& checkpoint, const Layer& layer);

}  // namespace octile::checkpoint
