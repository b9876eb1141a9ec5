// The only way in which Octile's command and libraries write files: a file or folder appears completely or not at all,
// under an unpredictable name until then, and nothing else is left behind, whatever ends the process.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string_view>

#include "base/descriptor.h"

namespace octile::base {

// what(): "cannot write PATH: REASON", or the like.
class OutputError : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

// `error`: an errno.
[[noreturn]] void fail_on(const char* action, const std::filesystem::path& path, int error);

// `path` names the file in errors.
void write_all(const Descriptor& file, std::string_view contents, const std::filesystem::path& path);

// Permission bits: of what `path` leads to, or `otherwise` if there is nothing.
mode_t mode_of(const std::filesystem::path& path, mode_t otherwise);

// Called for each entry of a folder that is about to be replaced, with its path within the folder. Throws to keep it.
using CheckReplaced = std::function<void(const std::filesystem::path& name, const std::filesystem::directory_entry&)>;

// A new empty file or folder beside `target`. It is removed with the object, or by a signal that ends the process,
// unless it has replaced `target`. All functions throw OutputError.
class Temporary {
 public:
  enum class Kind { file, folder };
  // `mode`: the permission bits, less those of the umask. The owner may always write into a folder.
  Temporary(std::filesystem::path target, Kind kind, mode_t mode);
  ~Temporary();
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const Descriptor& file() const { return file_; }  // to write; of a folder: none

  // In a folder, which must be there. `name`: within it.
  Descriptor add_file(const std::filesystem::path& name, mode_t mode);
  void add_folder(const std::filesystem::path& name, mode_t mode);

  // Renames, once, and makes it durable. Fails if anything has the name.
  void move_into_place();
  // The same, in place of a regular file, or of a folder all of whose entries pass `check`. A folder is moved aside
  // before it is checked; if the check fails it is moved back, and only the entries that were checked are removed. At
  // every moment one of the two exists, except on file systems that cannot exchange two folders in one step.
  void replace(const CheckReplaced& check = {});

 private:
  void sync() const;
  void replace_folder(const CheckReplaced& check);

  std::filesystem::path target_;
  std::filesystem::path path_;  // empty: it has come into its place
  Descriptor file_;
};

// page: replaces a page of HTML or an empty file, nothing else.
enum class Existing { replace, refuse, page };

// A regular file is replaced and keeps its permission bits; a symbolic link stays one, and the file behind it is
// replaced. Pipes and character devices, and the file that is the standard output or error, are written into. Throws
// OutputError, among others for a link to nothing and a block device.
void write_file(const std::filesystem::path& path, std::string_view contents, Existing existing = Existing::replace);

// From here on, signals that end the process first remove the files and folders that are not yet in their places.
// Signals that are ignored stay ignored. A file beyond the limit of its size is an error, not the end of the process.
void clean_up_on_signals();

}  // namespace octile::base

// A signal's handler: removes those files and folders, and ends the process by that signal.
extern "C" void octile_end_by_signal(int signal);
