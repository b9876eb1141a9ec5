// Where quantize_checkpoint writes, what it replaces, and what it does not take.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "checkpoint_levels.h"
#include "checkpoint_model.h"

// A file system that does not know the flags of a rename, or refuses it. In the place of the C library's function.
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
  refuses(model.in, "it is what is read");
  refuses(model.in / ".." / "in", "it is what is read");
  refuses(model.in / "out", "inside of what is read");
  refuses(model.folder.path / "none" / "out", "there is no folder");
  refuses(model.folder.path / "out.safetensors", "that is a file's name, and what is read is a folder");
  refuses(model.calibration, "it is a file, what is read is not");
  std::filesystem::create_directory(model.out);
  refuses(model.out, "it is there already", false);
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
  options.format = Format::w4a16;
  options.group = 32;
  quantize_checkpoint(model.in, model.folder.path / "link", options);
  EXPECT_TRUE(std::filesystem::is_symlink(model.folder.path / "link"));
  EXPECT_EQ(Checkpoint::open(model.out).config().format, "pack-quantized");
  EXPECT_EQ(files_in(model.folder.path), 4u);
}

// What comes into the folder while its successor is written is not lost.
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

TEST(Quantize, ReplacesWhereFileSystemsCannotExchange) {
  const Model model;
  model.quantize();
  QuantizeOptions options;
  options.overwrite = true;
  options.format = Format::w4a16;
  options.group = 32;
  for (const int error : {EINVAL, ENOSYS}) {
    const RenamesRefused refused(error, kNoReplace | kExchange);
    model.quantize(options);
    EXPECT_EQ(refused.count(), 2);  // the file into its folder, the folder into its place
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

// A temporary name that somebody has taken is theirs.
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
