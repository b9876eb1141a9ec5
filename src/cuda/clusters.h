// How many thread block clusters a GPU runs at once.
#pragma once

#include "octile/types.h"

namespace octile::cuda {

// Clusters of `size` blocks, at most 8, one block to an SM. Fewer than SMs / size, since a cluster lies within one GPC:
// of an H200's 132 SMs 66 of two, 39 of three, 30 of four, 15 of eight. The first call for a GPU asks the driver, for
// all sizes.
int max_active_clusters(Device device, int size);

// Whether the GPU runs clusters of 16 blocks, two to an SM: more than a GPU with clusters has to. The first call for a
// GPU asks the driver.
bool runs_clusters_of_16(Device device);

// At select, by rows that would otherwise ask in run.
void prepare_clusters(Device device);

}  // namespace octile::cuda
