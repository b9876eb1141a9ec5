// Where a quantized checkpoint goes: what may be there already, and what is copied to it.
#pragma once

#include <filesystem>
#include <functional>
#include <set>
#include <string>

#include "octile/checkpoint/checkpoint.h"

namespace octile::checkpoint {

// The place to write: `to` with links followed, without a slash at its end. What would fail at the end fails here: a
// FileError where `to` is what is read or inside of it, is there and may not be replaced, or is of another kind.
std::filesystem::path check_target(const Checkpoint& from, const std::filesystem::path& to, bool overwrite);

// A folder is replaced as a whole, so nothing may be in it that the checkpoint's folder does not have, save what is
// written anyway. Throws FileError, naming what would be lost.
void check_replaced(const Checkpoint& from, const std::filesystem::path& target);

// All files of the folder, save those named at its top, byte for byte; each is told to `tell` first.
void copy_others(const std::filesystem::path& from, const std::filesystem::path& to,
                 const std::set<std::string>& except, const std::function<void(const std::string&)>& tell);

}  // namespace octile::checkpoint
