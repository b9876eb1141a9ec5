// How many thread block clusters a GPU runs at once.
#pragma once

#include "octile/types.h"

namespace octile::cuda {

// Clusters of `size` blocks, at most 8, one block to an SM. Fewer than SMs / size, since a cluster lies within one GPC:
// of an H200's 132 SMs 66 of two, 39 of three, 30 of four, 15 of eight. The driver is asked once for each GPU and size,
// at select; run reads what it answered.
int max_active_clusters(Device device, int size);

}  // namespace octile::cuda
