#include "check/bounds.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <string>

#include "base/message.h"

namespace octile::check {

namespace {

// The rows in a plan's "row + row (unaligned: row)".
std::vector<std::string> rows_in(std::string_view sku) {
  std::vector<std::string> rows(1);
  for (const char c : sku) {
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_') {
      rows.back() += c;
    } else if (!rows.back().empty()) {
      rows.emplace_back();
    }
  }
  std::erase_if(rows, [](const std::string& row) { return row.empty() || row == "unaligned"; });
  return rows;
}

}  // namespace

Work work_of(std::string_view row) {
  for (const QuantizeKernel* kernel : quantize_kernels()) {
    if (kernel->name == row) return {kernel->task, kernel->bound};
  }
  for (const GemmKernel* kernel : gemm_kernels()) {
    if (kernel->name == row) return {kernel->task, kernel->bound};
  }
  throw std::logic_error(message("no row is named ", row));
}

bool sums_columns(Task task) {
  return task.operation == Operation::gradient_quantize || task.operation == Operation::blocked_gradient_quantize ||
         task.operation == Operation::grouped_gradient_quantize;
}

Bounds bounds_of(std::string_view sku) {
  Bounds bounds;
  for (const std::string& row : rows_in(sku)) {
    Work work = work_of(row);
    if (sums_columns(work.task)) work = {{Operation::column_sum}, Bound::sum};
    if (has_format(work.task.operation)) work.task.operation = Operation::gemm;
    bounds[work.task].push_back(work.bound);
  }
  return bounds;
}

}  // namespace octile::check
