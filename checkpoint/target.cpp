#include "target.h"

#include <algorithm>

#include "files.h"

namespace octile::checkpoint {

namespace fs = std::filesystem;

fs::path check_target(const Checkpoint& from, const fs::path& to, bool overwrite) {
  const auto refuse = [&](const std::string& why) -> FileError {
    return FileError("cannot write " + to.string() + ": " + why);
  };
  if (to.empty()) throw refuse("it has no name");
  const fs::path source = fs::canonical(from.path());
  fs::path target = fs::weakly_canonical(fs::absolute(to));
  if (!target.has_filename()) target = target.parent_path();  // "folder/" is "folder"
  if (source == target) throw refuse("it is what is read");
  const auto [end, ignored] = std::mismatch(source.begin(), source.end(), target.begin(), target.end());
  if (from.is_folder() && end == source.end()) throw refuse("it is inside of what is read");
  if (from.is_folder() && target.extension() == ".safetensors") {
    throw refuse("that is a file's name, and what is read is a folder");
  }
  if (!fs::is_directory(target.parent_path())) throw refuse("there is no folder " + target.parent_path().string());
  if (!fs::exists(fs::symlink_status(target))) return target;
  if (!fs::exists(target)) throw refuse("it is a link to nothing");
  if (!overwrite) throw refuse("it is there already (see --force)");
  if (fs::is_directory(target) != from.is_folder()) {
    throw refuse(std::string("it is a ") + (fs::is_directory(target) ? "folder" : "file") + ", what is read is not");
  }
  if (from.is_folder()) check_replaced(from, target);
  return target;
}

void check_replaced(const Checkpoint& from, const fs::path& target) {
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(target)) {
    const fs::path name = entry.path().lexically_relative(target);
    if (name == kConfigFile || fs::exists(from.path() / name)) continue;
    throw FileError("cannot replace " + target.string() + ": " + name.string() + " in it does not come from " +
                    from.path().string());
  }
}

// Links to files are followed, as model caches use them; links to folders are not, since they may lead back.
void copy_others(const fs::path& from, const fs::path& to, const std::set<std::string>& except,
                 const std::function<void(const std::string&)>& tell) {
  for (const fs::directory_entry& entry : fs::directory_iterator(from)) {
    const fs::path name = entry.path().filename();
    if (except.count(name.string()) != 0) continue;
    tell(name.string());
    if (entry.is_directory()) {
      if (entry.is_symlink()) throw FileError(entry.path().string() + ": a link to a folder is not followed");
      fs::create_directory(to / name);
      copy_others(entry.path(), to / name, {}, tell);
    } else if (entry.is_regular_file()) {
      files::copy(entry.path(), to / name);
    } else {
      throw FileError(entry.path().string() + ": neither a file nor a folder");
    }
  }
}

}  // namespace octile::checkpoint
