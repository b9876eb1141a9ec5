// Octile: measured choices of kernels.
//
// A plan takes the kernel that a cost model expects to be the fastest. `octile tune` times the kernels on this machine
// and writes the fastest to a file, and plans then follow it: docs/how-to/tune.md.
#pragma once

#include <string_view>

#include "octile/export.h"

namespace octile {

// Which file the plans selected from now on follow, in this process: the same as the environment variable
// OCTILE_TUNING, whose value this replaces.
//   ""     `octile tune`'s own file of the plan's device in the user's cache folder, where there is one. It decides for
//          exact sums alone, so it changes no bit of any result
//   "off"  none
//   a path that file, on a GPU for sums of floats too. Where it cannot be used, select() throws: it is damaged, or of
//          another device or version of the library. For the other type of device (CPU, GPU) it decides nothing
// The file is read when the first plan needs it. Plans selected before keep their kernels. Thread-safe.
OCTILE_API void use_tuning(std::string_view file);

}  // namespace octile
