// The tuning file: for a product, the row that was measured to be the fastest. `octile tune` writes it, `ask` reads it.
//
//   octile tuning 1
//   library 0.1.0
//   device cuda NVIDIA H200
//   64 w8a8_gemm_skinny_sm90 1.21e-05 w8a8_gemm_sm90 1.38e-05 w8a8_gemm n=4096 k=4096 a=8 b=row y=16
//   end 1
//
// A line for each product: m, the fastest row and its seconds, the cost model's choice and its seconds, all but m of
// the problem. "end" has their number, so that a truncated file is noticed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "octile/tuning.h"
#include "plan/kernel.h"

namespace octile {

struct TunedChoice {
  std::int64_t m = 0;  // 0: none
  std::string kernel;
  double seconds = 0;
  std::string model_kernel;  // the cost model's choice, timed in turns with `kernel`
  double model_seconds = 0;
};
using TunedRows = std::map<std::int64_t, TunedChoice>;  // by m

struct TuningFile {
  std::string device;                                     // tuning_device()
  std::map<std::string, TunedRows, std::less<>> choices;  // by tuning_key()
};

// What a product's choice depends on, without m. Neither bias, zero points nor accumulation are in it: they
// hardly change which row is the fastest, and a row that cannot do the problem is not chosen.
std::string tuning_key(const GemmProblem& problem);

// "cuda NVIDIA H200", "cpu AMD EPYC b00f21"; "" if there is no such device.
std::string tuning_device(Device device);

// The CPU and every GPU.
std::vector<Device> all_devices();

// The default file of `octile tune`. Empty: neither XDG_CACHE_HOME nor HOME is set.
std::filesystem::path default_tuning_path(std::string_view device);

std::string text_of(const TuningFile& file);

// Throws Error with what is wrong: no regular file, too large, not such a text, of another version of the library, or
// with a kernel that this library does not have.
TuningFile read_tuning(const std::filesystem::path& path);
TuningFile parse_tuning(std::string_view text);

// The choice at the smallest tuned m from `m` to below 2 * m; null: none.
const TunedChoice* tuned_at(const TunedRows& rows, std::int64_t m);

// What plans for one device follow.
struct Tuning {
  std::filesystem::path path;
  bool named = false;    // by OCTILE_TUNING or use_tuning
  bool refused = false;  // there is something at `path` that cannot be used, or it was named and there is nothing
  std::string reason;    // why it is not used; empty: it is
  TuningFile file;
};
std::shared_ptr<const Tuning> tuning_of(Device device);

// Throws where a file that was named cannot be used.
void check_tuning(std::string_view function, Device device);

// The file's choices for this product; null: none.
std::shared_ptr<const TunedRows> tuned_rows(const GemmProblem& problem);

// Lines of explain(): a choice, and what plans for a device follow.
std::string in_words(const TunedChoice& choice);
std::string in_words(const Tuning& tuning);

}  // namespace octile
