// Are the values right, and who wrote those that are not?
#include <algorithm>
#include <cmath>
#include <limits>

#include "report/page_parts.h"

namespace octile::tile {

namespace {

constexpr std::size_t kMaxWorst = 12;
constexpr int kMaxUnwritten = 3;  // of a tensor: they are all alike

// In units of the tolerance; a NaN where none is expected is infinitely far off.
double distance(double value, double expected, double allowed) {
  if (value == expected || (std::isnan(value) && std::isnan(expected))) return 0;
  const double far = std::fabs(value - expected);
  if (!(far <= std::numeric_limits<double>::max())) return std::numeric_limits<double>::infinity();
  return far <= allowed ? 0 : allowed > 0 ? far / allowed : std::numeric_limits<double>::infinity();
}

bool holds(const Record& record, std::int64_t index) {
  for (int p = 0; p < record.planes; ++p) {
    for (int r = 0; r < record.rows; ++r) {
      const std::int64_t far = index - record.base - p * record.plane_stride - r * record.row_stride;
      if (far == 0) return true;
      if (record.column_stride == 0 || far % record.column_stride != 0) continue;
      const std::int64_t column = far / record.column_stride;
      if (column >= 0 && column < record.columns) return true;
    }
  }
  return false;
}

}  // namespace

// Programs run one after the other, so the last record that holds the element left the value.
int last_store(const Report& report, int tensor, std::int64_t index) {
  for (std::size_t i = report.records.size(); i-- > 0;) {
    const Record& record = report.records[i];
    const Site& site = report.sites[page::at(record.site)];
    if (site.tensor == tensor && site.access != Access::load && holds(record, index)) return static_cast<int>(i);
  }
  return -1;
}

namespace page {

const TensorValues* values_of(const ReportPage& page, const TensorUse& tensor) {
  for (const TensorValues& values : page.tensors) {
    if (values.name == tensor.name && static_cast<std::int64_t>(values.values.size()) == tensor.size) return &values;
  }
  return nullptr;
}

}  // namespace page

Judgement judge(const Report& report, const ReportPage& page) {
  Judgement result;
  result.wrong_of.assign(report.tensors.size(), 0);
  struct Candidate {
    double distance;
    WrongElement element;
  };
  std::vector<Candidate> worst;
  const auto keep_farthest = [&] {
    std::stable_sort(worst.begin(), worst.end(),
                     [](const Candidate& a, const Candidate& b) { return a.distance > b.distance; });
    if (worst.size() > kMaxWorst) worst.resize(kMaxWorst);
  };
  bool any_expected = false;
  for (std::size_t t = 0; t < report.tensors.size(); ++t) {
    const TensorValues* const values = page::values_of(page, report.tensors[t]);
    if (values == nullptr || values->expected.empty()) continue;
    any_expected = true;
    const std::size_t n = std::min(values->values.size(), values->expected.size());
    bool first = true;
    int unwritten = 0;
    for (std::size_t i = 0; i < n; ++i) {
      ++result.compared;
      double far = distance(values->values[i], values->expected[i], values->allowed(i));
      const bool written = i >= values->written.size() || values->written[i] != 0;
      if (!written) far = std::numeric_limits<double>::infinity();
      if (far == 0) continue;
      ++result.wrong;
      ++result.wrong_of[t];
      if (first) far = std::numeric_limits<double>::infinity();  // the first one is always among them
      if (!written && ++unwritten > kMaxUnwritten) continue;
      if (first || worst.size() < 4 * kMaxWorst || far > worst.back().distance) {
        worst.push_back({far,
                         {static_cast<int>(t), static_cast<std::int64_t>(i), values->values[i], values->expected[i],
                          written, -1, -1, -1}});
        if (worst.size() >= 8 * kMaxWorst) keep_farthest();
      }
      first = false;
    }
  }
  keep_farthest();
  for (const Candidate& candidate : worst) {
    WrongElement& element = result.worst.emplace_back(candidate.element);
    const int last = last_store(report, element.tensor, element.index);
    if (last < 0) continue;
    const Record& record = report.records[page::at(last)];
    element.program = record.program;
    element.site = record.site;
    element.operation = record.operation;
  }
  result.verdict = !report.findings.empty() ? Verdict::unsafe
                   : result.wrong > 0       ? Verdict::wrong
                   : any_expected           ? Verdict::correct
                                            : Verdict::unchecked;
  return result;
}

}  // namespace octile::tile
