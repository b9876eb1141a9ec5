// Where quantize_checkpoint writes, what it replaces, and which targets it refuses.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "base/output.h"
#include "checkpoint_levels.h"
#include "checkpoint_model.h"

// Replaces the C library's function: a file system that does not know the flags of a rename, or refuses it.
namespace {
constexpr unsigned kNoReplace = 1, kExchange = 2;
int refused_with = 0, refused = 0;
unsigned refused_flags = 0;
}  // namespace

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if ((flags & refused_flags) != 0) {
    ++refused;
    errno = refused_with;
    return -1;
  }
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

namespace octile::checkpoint {
namespace {

class RenamesRefused {
 public:
  RenamesRefused(int error, unsigned flags) { refused_with = error, refused = 0, refused_flags = flags; }
  ~RenamesRefused() { refused_flags = 0; }
  RenamesRefused(const RenamesRefused&) = delete;
  RenamesRefused& operator=(const RenamesRefused&) = delete;
  int count() const { return refused; }
};

TEST(Quantize, RefusesPlaces) {
  const Model model;
  const auto refuses = [&](const std::filesystem::path& to, const char* says, bool overwrite = true) {
    QuantizeOptions options;
    options.overwrite = overwrite;
    EXPECT_ERROR(quantize_checkpoint(model.in, to, options), says);
  };
  refuses(model.in, "it is an input");
  refuses(model.in / ".." / "in", "it is an input");
  refuses(model.in / "out", "it is inside the input");
  refuses(model.folder.path / "none" / "out", "there is no folder");
  refuses(model.folder.path / "out.safetensors", "that is a file's name, and the input is a folder");
  EXPECT_ERROR(quantize_checkpoint(model.calibration, model.folder.path / "new" / "", {}),
               "that is a folder's name, and the input is a file");
  EXPECT_FALSE(std::filesystem::exists(model.folder.path / "new"));
  refuses(model.calibration, "it is a file, the input is a folder");
  std::filesystem::create_directory(model.out);
  refuses(model.out, "it already exists", false);
  write_text(model.out / "thesis.txt", "years of work");
  refuses(model.out, "thesis.txt in it does not come from");
  EXPECT_EQ(read_all(model.out / "thesis.txt"), "years of work");
  std::filesystem::rename(model.out / "thesis.txt", model.out / "lora.safetensors");
  refuses(model.out, "lora.safetensors in it does not come from");
  std::filesystem::rename(model.out / "lora.safetensors", model.out / "model.safetensors.index.json");
  refuses(model.out, "model.safetensors.index.json in it does not come from");
  std::filesystem::remove_all(model.out);
  refuses("", "it has no name");
  std::filesystem::create_symlink(model.folder.path / "none", model.out);
  refuses(model.out, "it is a link to nothing");
}

TEST(Quantize, WritesWhereLinksAndSlashesLead) {
  const Model model;
  QuantizeOptions options;
  quantize_checkpoint(model.in, model.out / ".", options);
  std::filesystem::remove_all(model.out);
  quantize_checkpoint(model.in / "", model.out / "", options);
  EXPECT_EQ(Checkpoint::open(model.out).config().format, "int-quantized");
  std::filesystem::create_directory_symlink("out", model.folder.path / "link");
  options.overwrite = true;
  options.weight = {DType::s4, Granularity::group, 32};
  options.activation = Activation::none;
  quantize_checkpoint(model.in, model.folder.path / "link", options);
  EXPECT_TRUE(std::filesystem::is_symlink(model.folder.path / "link"));
  EXPECT_EQ(Checkpoint::open(model.out).config().format, "pack-quantized");
  EXPECT_EQ(files_in(model.folder.path), 4u);
}

// A file added to the folder while its replacement is written is not lost.
TEST(Quantize, LooksAgainAtWhatItReplaces) {
  const Model model;
  model.quantize();
  const std::string before = read_all(model.out / "model.safetensors");
  QuantizeOptions options;
  options.overwrite = true;
  const auto late = [&](std::int64_t, std::int64_t, const std::string&) {
    write_text(model.out / "late.txt", "just in time");
  };
  EXPECT_ERROR(quantize_checkpoint(model.in, model.out, options, late), "late.txt in it does not come from");
  EXPECT_EQ(read_all(model.out / "late.txt"), "just in time");
  EXPECT_EQ(read_all(model.out / "model.safetensors"), before);
  EXPECT_EQ(files_in(model.folder.path), 3u);
}

// By device and inode: nothing that is read may lie in what is replaced, whatever the paths are.
TEST(Quantize, RefusesAnOutThatHoldsWhatIsRead) {
  const Model model;
  QuantizeOptions options;
  options.overwrite = true;
  const auto refuses = [&](const std::filesystem::path& from, const char* says) {
    EXPECT_ERROR(quantize_checkpoint(from, model.out, options), says);
  };
  const auto links = model.folder.path / "links";
  std::filesystem::rename(model.in, model.out);
  const std::string before = read_all(model.out / "model.safetensors");
  std::filesystem::create_directory(links);
  for (const char* const name : {"model.safetensors", "config.json"}) {
    std::filesystem::create_symlink(model.out / name, links / name);
  }
  std::filesystem::remove_all(model.out / "1_Pooling");
  std::filesystem::remove(model.out / "tokenizer.json");
  refuses(links, " in it is an input");
  // A link to a link, and a hard link.
  std::filesystem::create_symlink(links / "config.json", model.folder.path / "again");
  std::filesystem::remove(links / "model.safetensors");
  std::filesystem::create_hard_link(model.out / "model.safetensors", links / "model.safetensors");
  refuses(links, " in it is an input");
  std::filesystem::remove(links / "config.json");
  write_text(links / "config.json", "{}");
  refuses(links, "model.safetensors in it is an input");
  // The folder itself, by a link and from within.
  std::filesystem::create_directory_symlink(model.out, model.folder.path / "link");
  refuses(model.folder.path / "link", "it is an input");
  std::filesystem::create_directory(model.out / "in");
  std::filesystem::copy(links, model.out / "in");
  refuses(model.out / "in", "in in it is an input");
  EXPECT_EQ(read_all(model.out / "model.safetensors"), before);
}

TEST(Quantize, RefusesToReplaceTheCalibration) {
  const Model model;
  model.quantize();
  QuantizeOptions options;
  options.overwrite = true;
  options.activation = Activation::static_per_tensor;
  options.calibration = model.calibration;
  const std::string before = read_all(model.calibration);
  EXPECT_ERROR(quantize_checkpoint(model.in / "model.safetensors", model.calibration, options), "it is an input");
  // Under a name that could be one of IN's.
  std::filesystem::rename(model.calibration, model.out / "tokenizer.json");
  options.calibration = model.out / "tokenizer.json";
  EXPECT_ERROR(quantize_checkpoint(model.in, model.out, options), "tokenizer.json in it is an input");
  EXPECT_EQ(read_all(model.out / "tokenizer.json"), before);
}

// A snapshot in a model cache is a folder of links to files elsewhere. The cache must not change.
TEST(Quantize, ReadsFoldersOfLinks) {
  const Model model;
  const auto cache = model.folder.path / "cache", snapshot = cache / "snapshots" / "main";
  std::filesystem::create_directories(snapshot / "1_Pooling");
  std::filesystem::rename(model.in, cache / "blobs");
  for (const char* const name : {"model.safetensors", "config.json", "tokenizer.json"}) {
    std::filesystem::create_symlink(std::filesystem::path("../../blobs") / name, snapshot / name);
  }
  std::filesystem::create_symlink("../../../blobs/1_Pooling/config.json", snapshot / "1_Pooling" / "config.json");
  QuantizeOptions options;
  for (int i = 0; i < 2; ++i) {
    quantize_checkpoint(snapshot, model.out, options);
    options.overwrite = true;
  }
  EXPECT_TRUE(std::filesystem::is_regular_file(std::filesystem::symlink_status(model.out / "tokenizer.json")));
  EXPECT_EQ(read_all(model.out / "tokenizer.json"), read_all(cache / "blobs" / "tokenizer.json"));
  EXPECT_EQ(read_all(model.out / "1_Pooling" / "config.json"), "{}");
  EXPECT_ERROR(quantize_checkpoint(snapshot, cache, options), "in it does not come from");
  // A link to OUT's file is replaced, and its target stays.
  std::filesystem::remove(model.out / "tokenizer.json");
  std::filesystem::create_symlink(model.calibration, model.out / "tokenizer.json");
  quantize_checkpoint(snapshot, model.out, options);
  EXPECT_EQ(read_all(model.out / "tokenizer.json"), read_all(cache / "blobs" / "tokenizer.json"));
  EXPECT_TRUE(std::filesystem::exists(model.calibration));
}

TEST(Quantize, AFolderIsReplacedByAFolderAndAFileByAFile) {
  const Model model;
  QuantizeOptions options;
  options.overwrite = true;
  const auto refuses = [&](const char* says) { EXPECT_ERROR(model.quantize(options), says); };
  std::filesystem::create_directory(model.in / "notes");
  model.quantize();
  std::filesystem::remove(model.out / "notes");
  write_text(model.out / "notes", "years of work");
  refuses("notes in it does not come from");
  EXPECT_EQ(read_all(model.out / "notes"), "years of work");
  std::filesystem::remove(model.out / "notes");
  std::filesystem::remove(model.out / "tokenizer.json");
  std::filesystem::create_directory(model.out / "tokenizer.json");
  refuses("tokenizer.json in it does not come from");
  std::filesystem::remove(model.out / "tokenizer.json");
  ASSERT_EQ(mkfifo((model.out / "tokenizer.json").c_str(), 0600), 0);
  refuses("tokenizer.json in it does not come from");
  std::filesystem::remove(model.out / "tokenizer.json");
  std::filesystem::remove(model.out / "config.json");
  std::filesystem::create_directory(model.out / "config.json");
  refuses("config.json in it does not come from");
}

// A single file onto a pipe, or onto a device where the test may make one.
TEST(Quantize, ReplacesRegularFilesOnly) {
  const Model model;
  const auto target = model.folder.path / "target";
  QuantizeOptions options;
  for (const mode_t kind : {S_IFIFO, S_IFCHR}) {
    if (mknod(target.c_str(), kind | 0600, makedev(1, 3)) != 0) continue;
    for (const bool overwrite : {false, true}) {
      options.overwrite = overwrite;
      for (const auto& from : {model.in / "model.safetensors", model.in}) {
        EXPECT_ERROR(quantize_checkpoint(from, target, options), "it is neither a file nor a folder");
      }
    }
    EXPECT_TRUE(std::filesystem::is_other(target));
    std::filesystem::remove(target);
  }
}

TEST(Quantize, KeepsPermissions) {
  const Model model;
  const auto mode = [](const std::filesystem::path& path) { return static_cast<unsigned>(base::mode_of(path, 0)); };
  const auto set = [](const std::filesystem::path& path, mode_t mode) { chmod(path.c_str(), mode); };
  const mode_t umask_before = umask(022);
  set(model.in, 0700);
  set(model.in / "model.safetensors", 0600);
  set(model.in / "config.json", 0440);
  set(model.in / "tokenizer.json", 0666);
  set(model.in / "1_Pooling", 0555);
  set(model.in / "1_Pooling" / "config.json", 0400);
  model.quantize();
  EXPECT_EQ(mode(model.out), 0700u);
  EXPECT_EQ(mode(model.out / "model.safetensors"), 0600u);
  EXPECT_EQ(mode(model.out / "config.json"), 0440u);
  EXPECT_EQ(mode(model.out / "tokenizer.json"), 0644u);
  EXPECT_EQ(mode(model.out / "1_Pooling"), 0755u);  // so that it can be filled, and removed again
  EXPECT_EQ(mode(model.out / "1_Pooling" / "config.json"), 0400u);
  set(model.in / "1_Pooling", 0755);
  // A single file, and one that was private before.
  QuantizeOptions options;
  options.overwrite = true;
  const auto file = model.folder.path / "q";
  for (const auto& [source, old, expected] : {std::array{0600u, 0644u, 0600u}, {0644u, 0600u, 0600u}}) {
    write_text(file, "old");
    set(file, old);
    set(model.in / "model.safetensors", source);
    quantize_checkpoint(model.in / "model.safetensors", file, options);
    EXPECT_EQ(mode(file), expected);
  }
  set(model.in, 0755);
  model.quantize(options);
  EXPECT_EQ(mode(model.out), 0700u);
  umask(umask_before);
}

TEST(Quantize, ReplacesWhereFileSystemsCannotExchange) {
  const Model model;
  model.quantize();
  QuantizeOptions options;
  options.overwrite = true;
  options.weight = {DType::s4, Granularity::group, 32};
  options.activation = Activation::none;
  for (const int error : {EINVAL, ENOSYS}) {
    const RenamesRefused refused(error, kNoReplace | kExchange);
    model.quantize(options);
    EXPECT_EQ(refused.count(), 2);  // the file into its folder, then the folder into its place
    EXPECT_EQ(Checkpoint::open(model.out).config().format, "pack-quantized");
    EXPECT_EQ(files_in(model.folder.path), 3u);
  }
  std::filesystem::remove_all(model.out);
  {
    const RenamesRefused refused(EINVAL, kNoReplace);
    model.quantize();
    EXPECT_EQ(refused.count(), 2);
  }
  EXPECT_EQ(Checkpoint::open(model.out).config().format, "int-quantized");
  const RenamesRefused refused(EACCES, kExchange);
  EXPECT_ERROR(model.quantize(options), "cannot replace");
  EXPECT_EQ(Checkpoint::open(model.out).config().format, "int-quantized");
  EXPECT_EQ(files_in(model.folder.path), 3u);
}

// A temporary name that is taken is left alone.
TEST(Quantize, TakesNothingThatIsThere) {
  const Model model;
  const std::string process = std::to_string(getpid());
  const auto folder = model.folder.path / ("out." + process + ".tmp");
  const auto victim = model.folder.path / "victim", file = model.folder.path / "q";
  std::filesystem::create_directory(folder);
  write_text(folder / "mine", "kept");
  write_text(victim, "kept");
  std::filesystem::create_symlink(victim, model.folder.path / ("q." + process + ".tmp"));
  model.quantize();
  quantize_checkpoint(model.in / "model.safetensors", file, {});
  EXPECT_EQ(read_all(folder / "mine"), "kept");
  EXPECT_EQ(read_all(victim), "kept");
  EXPECT_FALSE(std::filesystem::is_symlink(file));
  EXPECT_EQ(Checkpoint::open(file).config().format, "int-quantized");
  EXPECT_EQ(files_in(model.folder.path), 7u);
}

}  // namespace
}  // namespace octile::checkpoint
