// The scalar twin of src/cpu/attention/one_query.cpp.
#include "plan/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/access.h"

namespace octile::reference {

namespace {

// Of element i.
double value_of(const OneQuery& o, const void* data, std::int64_t i) {
  const ConstTensor t{data, o.dtype, {}, 1, {i + 1, 0}, {1, 0}};
  return load<float>(t, i);
}

double score(const OneQuery& o, std::int64_t query, std::int64_t key) {
  double sum = 0;
  for (std::int64_t c = 0; c < o.size; ++c) sum += value_of(o, o.query, query + c) * value_of(o, o.key.data, key + c);
  return sum * static_cast<double>(o.scale);
}

void attend_head(const OneQuery& o, std::int64_t b, std::int64_t h) {
  const std::int64_t heads = o.kv_heads * o.group, kv_head = h / o.group;
  const auto row_of = [&](const OneQuery::Cache& cache, std::int64_t position) {
    return b * cache.batch_stride + kv_head * cache.head_stride + position * cache.position_stride;
  };
  std::vector<std::int64_t> visible;
  std::vector<double> weights;
  double max = -std::numeric_limits<double>::infinity();
  for (std::int64_t p = 0; p < o.positions; ++p) {
    if (!o.visible(b, p)) continue;
    visible.push_back(p);
    weights.push_back(score(o, b * o.query_batch_stride + h * o.query_head_stride, row_of(o.key, p)));
    max = std::max(max, weights.back());
  }
  const double base = max == -std::numeric_limits<double>::infinity() ? 0 : max;
  double denominator = 0;
  for (double& weight : weights) denominator += weight = std::exp(weight - base);
  const Tensor y{o.y, o.dtype, {}, 2, {o.batch * heads, o.size}, {o.size, 1}};
  for (std::int64_t c = 0; c < o.size; ++c) {
    double sum = 0;
    for (std::size_t i = 0; i < visible.size(); ++i) {
      sum += weights[i] * value_of(o, o.value.data, row_of(o.value, visible[i]) + c);
    }
    store(y, b * heads + h, c, static_cast<float>(denominator == 0 ? sum : sum / denominator));
  }
}

}  // namespace

void attend_one_query(const OneQuery& o) {
  for (std::int64_t b = 0; b < o.batch; ++b) {
    for (std::int64_t h = 0; h < o.kv_heads * o.group; ++h) attend_head(o, b, h);
  }
}

}  // namespace octile::reference
