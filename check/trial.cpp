// The trials of the quantizer family, and the one entry to all.
#include "check/trial.h"

#include "base/access.h"
#include "check/runner.h"
#include "reference/oracle.h"

namespace octile::check {

namespace {

// The quantizer family: everything is bit for bit.
template <class Args>
Trial quantizer_trial(const QuantizerCase& c, std::uint64_t seed,
                      void (*oracle)(const QuantizeDescription&, const Args&)) {
  const QuantizeDescription& d = c.description;
  const auto tensors = std::make_shared<Tensors>(c, seed);
  std::vector<Operand> list = operands<Args>(d, c.rows);
  for (Operand& o : list) {
    if (o.content == Content::scale || o.content == Content::given_scale) {
      o.typical = tensors->typical_scale(d.x, o.range[1]);
    }
    if (o.optional && !c.scale_out) o = {};
  }
  const std::vector<Tensor> views = tensors->add(list);
  const Args args = args_of<Args>(views, tensors->random());
  if (c.data == Data::near_ties || c.data == Data::sparse_ties) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i].content != Content::scale && list[i].content != Content::given_scale) continue;
      tensors->put_near_ties([&](std::int64_t row, std::int64_t col) {
        return load<double>(views[i], d.granularity == Granularity::row ? row : col);
      });
    }
  }
  expect(*tensors, c, d, args, oracle);
  return {tensors, runner(tensors, d, args)};
}

}  // namespace

Trial trial_of(const QuantizerCase& c, std::uint64_t seed) {
  switch (c.operation) {
    case Operation::dequantize:
      return quantizer_trial(c, seed, oracle::dequantize);
    case Operation::quantize_backward:
      return quantizer_trial(c, seed, oracle::quantize_backward);
    case Operation::dequantize_backward:
      return quantizer_trial(c, seed, oracle::dequantize_backward);
    case Operation::fake_quantize:
      return quantizer_trial(c, seed, oracle::fake_quantize);
    case Operation::fake_quantize_backward:
      return quantizer_trial(c, seed, oracle::fake_quantize_backward);
    default:
      return quantizer_trial(c, seed, oracle::quantize);
  }
}

Trial make_trial(const Case& c, std::uint64_t seed) {
  return std::visit([seed](const auto& one) { return trial_of(one, seed); }, c);
}

}  // namespace octile::check
