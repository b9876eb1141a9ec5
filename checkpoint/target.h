// Where a quantized checkpoint goes: what may be there already, and what is copied to it.
#pragma once

#include <filesystem>
#include <functional>
#include <set>
#include <string>

#include "base/output.h"
#include "octile/checkpoint/quantize.h"

namespace octile::checkpoint {

// The place to write: `to` with links followed, without a slash at its end. What would fail at the end fails here: a
// FileError where `to` is what is read, is inside of it or holds any of it, is there and may not be replaced, or is of
// another kind. What is read is told by device and inode: all that the checkpoint's folder leads to, and the
// calibration.
std::filesystem::path check_target(const Checkpoint& from, const std::filesystem::path& to,
                                   const QuantizeOptions& options);

// A folder is replaced as a whole, so each entry must come from the checkpoint's folder, save what is written anyway:
// a folder there for a folder, a file there for a file or a link. The check throws FileError, naming what would be
// lost.
base::CheckReplaced check_replaced(const Checkpoint& from, const std::filesystem::path& target);

// All files of the folder, save those named at its top, byte for byte; each is told to `tell` first.
void copy_others(const std::filesystem::path& from, base::Temporary& to, const std::set<std::string>& except,
                 const std::function<void(const std::string&)>& tell);

}  // namespace octile::checkpoint
