// Copies rows of a that are gathered into their order in y, for kernels whose TMA loads whole tiles of them.
#pragma once

#include <cstddef>

#include "plan/kernel.h"

namespace octile::cuda {

// Bytes that the copy takes; none where rows are not gathered.
std::size_t gathered_size(const GemmProblem& problem);
void prepare_gather_rows();
// Enqueues the copy of the experts' rows, without rows of no expert, and makes it the operands' a.
void gather_rows(const GemmProblem& problem, GemmOperands& operands, const Launch& launch);

// Seconds that it takes on an H200.
double gather_seconds(const GemmProblem& problem);

}  // namespace octile::cuda
