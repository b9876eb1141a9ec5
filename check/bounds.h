// How far the rows of the kernel table may be off.
#pragma once

#include <map>
#include <string_view>
#include <vector>

#include "plan/bound.h"
#include "plan/kernel.h"

namespace octile::check {

// What a row of the table computes, and how far it may be off.
struct Work {
  Task task;
  Bound bound;
};

Work work_of(std::string_view row);

// The steps that quantize dY add dB up as column_sum does.
bool sums_columns(Task task);

// The bounds of the rows that a plan has for a task.
using Bounds = std::map<Task, std::vector<Bound>>;
Bounds bounds_of(std::string_view sku);

}  // namespace octile::check
