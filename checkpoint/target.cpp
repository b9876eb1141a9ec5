#include "target.h"

#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "files.h"
#include "reject.h"

namespace octile::checkpoint {

namespace {

namespace fs = std::filesystem;

using Identity = std::pair<dev_t, ino_t>;

Identity identity(const fs::path& path, bool follow = true) {
  struct stat status = {};
  if ((follow ? stat : lstat)(path.c_str(), &status) != 0) files::fail_on("read", path, errno);
  return {status.st_dev, status.st_ino};
}

// Follows links to files, which model caches use; not links to folders, which may form cycles.
void add_folder(const fs::path& folder, std::set<Identity>& read) {
  read.insert(identity(folder));
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory()) {
      if (entry.is_symlink()) reject(entry.path().string(), ": a link to a folder is not followed");
      add_folder(entry.path(), read);
    } else if (entry.is_regular_file()) {
      read.insert(identity(entry.path()));
    } else {
      reject(entry.path().string(), ": neither a file nor a folder");
    }
  }
}

std::set<Identity> what_is_read(const Checkpoint& from, const QuantizeOptions& options) {
  std::set<Identity> read;
  if (from.is_folder()) {
    add_folder(from.path(), read);
  } else {
    read.insert(identity(from.path()));
  }
  if (options.calibration) read.insert(identity(*options.calibration));
  return read;
}

void copy_folder(const fs::path& from, base::Temporary& to, const fs::path& within, const std::set<std::string>& except,
                 const std::function<void(const std::string&)>& tell) {
  for (const fs::directory_entry& entry : fs::directory_iterator(from / within)) {
    const fs::path name = within / entry.path().filename();
    if (except.count(name.string()) != 0) continue;
    tell(entry.path().filename().string());
    if (entry.is_directory() && !entry.is_symlink()) {
      to.add_folder(name, base::mode_of(entry.path(), 0));
      copy_folder(from, to, name, except, tell);
    } else {
      files::copy(entry.path(), to, name);
    }
  }
}

}  // namespace

fs::path check_target(const Checkpoint& from, const fs::path& to, const QuantizeOptions& options) {
  const auto refuse = [&](const std::string& why) -> FileError {
    return FileError("cannot write " + to.string() + ": " + why);
  };
  if (to.empty()) throw refuse("it has no name");
  if (fs::is_other(fs::status(to))) throw refuse("it is neither a file nor a folder");
  fs::path target = fs::weakly_canonical(fs::absolute(to));
  if (!target.has_filename()) target = target.parent_path();  // "folder/" is "folder"
  if (from.is_folder() && target.extension() == ".safetensors") {
    throw refuse("that is a file's name, and the input is a folder");
  }
  if (!from.is_folder() && !to.has_filename()) throw refuse("that is a folder's name, and the input is a file");
  if (!fs::is_directory(target.parent_path())) throw refuse("there is no folder " + target.parent_path().string());
  const std::set<Identity> read = what_is_read(from, options);
  const auto is_read = [&](const fs::path& path) { return read.count(identity(path, false)) != 0; };
  for (fs::path folder = target.parent_path();; folder = folder.parent_path()) {
    if (is_read(folder)) throw refuse("it is inside the input");
    if (folder == folder.parent_path()) break;
  }
  if (!fs::exists(fs::symlink_status(target))) return target;
  if (!fs::exists(target)) throw refuse("it is a link to nothing");
  if (is_read(target)) throw refuse("it is an input");
  const bool is_folder = fs::is_directory(target);
  if (!options.overwrite) throw refuse("it already exists (see --force)");
  if (is_folder != from.is_folder()) {
    throw refuse(is_folder ? "it is a folder, the input is a file" : "it is a file, the input is a folder");
  }
  if (!is_folder) return target;
  const base::CheckReplaced check = check_replaced(from, target);
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(target)) {
    const fs::path name = entry.path().lexically_relative(target);
    if (is_read(entry.path())) throw refuse(name.string() + " in it is an input");
    check(name, entry);
  }
  return target;
}

base::CheckReplaced check_replaced(const Checkpoint& from, const fs::path& target) {
  return [&from, target](const fs::path& name, const fs::directory_entry& entry) {
    const bool is_folder = entry.is_directory() && !entry.is_symlink();
    const bool is_file = entry.is_symlink() || entry.is_regular_file();
    const fs::path source = from.path() / name;
    if (is_folder && fs::is_directory(source)) return;
    if (is_file && (name == kConfigFile || fs::is_regular_file(source))) return;
    reject("cannot replace ", target.string(), ": ", name.string(), " in it does not come from ", from.path().string());
  };
}

void copy_others(const fs::path& from, base::Temporary& to, const std::set<std::string>& except,
                 const std::function<void(const std::string&)>& tell) {
  copy_folder(from, to, {}, except, tell);
}

}  // namespace octile::checkpoint
