// The target of a quantized checkpoint: what it may replace, and what is copied to it.
#pragma once

#include <filesystem>
#include <functional>
#include <set>
#include <string>

#include "base/output.h"
#include "octile/checkpoint/quantize.h"

namespace octile::checkpoint {

// The path to write: `to` with links followed, without a trailing slash. Fails early: throws FileError where `to` is an
// input, is inside of one or holds any, exists and may not be replaced, or is of another kind. Inputs are compared by
// device and inode: everything in the checkpoint's folder, links followed, and the calibration.
std::filesystem::path check_target(const Checkpoint& from, const std::filesystem::path& to,
                                   const QuantizeOptions& options);

// A folder is replaced as a whole, so each of its entries must correspond to one of the checkpoint's folder, a folder
// to a folder, a file or a link to a file; files that are written anyway are excepted. The check throws FileError,
// naming what would be lost.
base::CheckReplaced check_replaced(const Checkpoint& from, const std::filesystem::path& target);

// Copies all files of the folder verbatim, except the top-level ones in `except`. Calls `tell` before each.
void copy_others(const std::filesystem::path& from, base::Temporary& to, const std::set<std::string>& except,
                 const std::function<void(const std::string&)>& tell);

}  // namespace octile::checkpoint
