// Octile: measured choices of kernels.
//
// A plan takes the kernel that a cost model expects to be the fastest. `octile tune` times the kernels on this machine
// and writes the fastest to a file, and plans then follow it: docs/how-to/tune.md.
#pragma once

#include <string_view>

#include "octile/export.h"

namespace octile {

// Sets the file that plans selected from now on follow, in this process. It overrides the environment variable
// OCTILE_TUNING, which has the same values:
//   ""     `octile tune`'s own file for the plan's device in the user's cache folder, if there is one. It is used only
//          for exact sums, so it changes no bit of any result
//   "off"  none
//   a path that file, on a GPU for sums of floats too. If it cannot be used (it is damaged, or for another device or
//          version of the library), select() throws. It does not affect plans for the other type of device (CPU, GPU)
// The file is read when the first plan needs it. Plans selected before keep their kernels. Thread-safe.
OCTILE_API void use_tuning(std::string_view file);

}  // namespace octile
