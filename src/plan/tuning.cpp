#include "plan/tuning.h"

#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "base/message.h"
#include "base/thread_pool.h"
#include "base/tuning_file.h"
#include "cpu/support/isa.h"
#include "cpu/support/processor.h"
#include "cuda/devices.h"
#include "octile/octile.h"
#include "plan/choose.h"

namespace octile {

namespace {

using base::in_quotes;

constexpr std::string_view kTitle = "octile tuning 1";
constexpr std::string_view kOff = "off";

// The file's contents must not depend on the program's locale, as message()'s do.
std::string text(std::integral auto value) { return std::to_string(value); }
std::string text(double value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof digits, value, std::chars_format::general, 6).ptr};
}
std::string text(std::string_view value) { return std::string(value); }
template <class... Parts>
std::string line(const Parts&... parts) {
  return (text(parts) + ...);
}

std::string library_version() {
  return line(OCTILE_VERSION_MAJOR, ".", OCTILE_VERSION_MINOR, ".", OCTILE_VERSION_PATCH);
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail(Status::invalid_argument, parts...);
}

std::string contents_of(const std::filesystem::path& path) {
  const auto refused = [](const std::string& why) { refuse(why); };
  if (const std::optional<std::string> text = base::tuning_text(path, refused)) return *text;
  refuse("cannot be read: ", std::generic_category().message(ENOENT));
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  TuningFile read() {
    if (next_line() != kTitle)
      refuse("is not a tuning file: its first line is ", in_quotes(line_), ", not \"", kTitle, '"');
    const std::string_view version = after("library ");
    if (version != library_version()) {
      refuse("is of version ", in_quotes(version), " of the library, this is ", library_version(),
             ": run octile tune again");
    }
    TuningFile file;
    file.device = after("device ");
    std::size_t count = 0;
    while (!next_line().starts_with("end ")) {
      add_choice(file);
      ++count;
    }
    if (number<std::size_t>(line_.substr(4)) != count)
      refuse_line("has ", in_quotes(line_), " after ", count, " products");
    if (!text_.empty()) refuse("goes on after its end");
    return file;
  }

 private:
  std::string_view next_line() {
    const std::size_t end = text_.find('\n');
    ++line_number_;
    if (end == std::string_view::npos) {
      refuse(line_number_ == 1 ? "is not a tuning file: it has no line" : "is cut off: it has no \"end\"");
    }
    line_ = text_.substr(0, end);
    text_.remove_prefix(end + 1);
    return line_;
  }
  std::string_view after(std::string_view begin) {
    if (!next_line().starts_with(begin)) refuse_line("is ", in_quotes(line_), ", expected \"", begin, "...\"");
    return line_.substr(begin.size());
  }
  template <class... Parts>
  [[noreturn]] void refuse_line(const Parts&... parts) {
    refuse("line ", line_number_, " ", parts...);
  }
  template <class Number>
  Number number(std::string_view text) {
    Number value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    bool good = error == std::errc{} && end == text.data() + text.size();
    if constexpr (std::is_floating_point_v<Number>) good = good && std::isfinite(value) && value > 0;
    if (!good) refuse_line("has ", in_quotes(text), " where a number belongs");
    return value;
  }
  // A row of the table, for the product that the line is about.
  std::string row(std::string_view text, std::string_view key) {
    const std::string_view task = key.substr(0, key.find(' '));
    for (const GemmKernel* kernel : gemm_kernels()) {
      if (kernel->name != text) continue;
      if (name(kernel->task) != task) refuse_line("has the kernel ", text, " for ", in_quotes(task));
      return std::string(text);
    }
    refuse_line("has ", in_quotes(text), ", which is not a kernel of this library");
  }
  void add_choice(TuningFile& file) {
    std::string_view rest = line_;
    const auto word = [&] {
      const std::size_t end = rest.find(' ');
      if (end == std::string_view::npos) refuse_line("is ", in_quotes(line_), ", which is not a product");
      const std::string_view text = rest.substr(0, end);
      rest.remove_prefix(end + 1);
      return text;
    };
    const std::int64_t m = number<std::int64_t>(word());
    if (m < 1) refuse_line("has m = ", m);
    const std::string_view kernel = word(), seconds = word(), model_kernel = word(), model_seconds = word();
    const TunedChoice choice = {m, row(kernel, rest), number<double>(seconds), row(model_kernel, rest),
                                number<double>(model_seconds)};
    if (!file.choices[std::string(rest)].emplace(m, choice).second) refuse_line("has a product for the second time");
  }

  std::string_view text_;
  std::string_view line_;
  int line_number_ = 0;
};

struct State {
  std::mutex mutex;
  std::optional<std::string> requested;  // by use_tuning
  std::map<std::pair<DeviceType, int>, std::shared_ptr<const Tuning>> loaded;
};
State& state() {
  static State& all = []() -> State& {
    auto& made = *new State;  // threads may outlive main's statics
    // A child must not wait for a thread of its parent.
    pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
    return made;
  }();
  return all;
}

std::string requested_by_environment() {
  const char* text = std::getenv("OCTILE_TUNING");
  return text ? text : "";
}

std::string type_of(std::string_view device) { return std::string(device.substr(0, device.find(' '))); }

Tuning load(Device device, const std::string& requested) {
  Tuning tuning;
  const auto not_used = [&](const auto&... parts) {
    tuning.reason = message(parts...);
    return tuning;
  };
  if (requested == kOff) return not_used(kOff);
  const std::string here = tuning_device(device);
  if (here.empty()) return not_used("there is no ", device);
  tuning.named = !requested.empty();
  tuning.path = tuning.named ? std::filesystem::path(requested) : default_tuning_path(here);
  if (tuning.path.empty()) return not_used("neither XDG_CACHE_HOME nor HOME says where it is");
  struct stat status = {};
  if (!tuning.named && stat(tuning.path.c_str(), &status) != 0 && errno == ENOENT) return not_used("does not exist");
  try {
    tuning.file = read_tuning(tuning.path);
  } catch (const Error& error) {
    tuning.refused = true;
    return not_used(error.what());
  }
  const std::string& there = tuning.file.device;
  if (there == here) return tuning;
  // One file is named for all plans, those for a CPU and those for a GPU.
  tuning.refused = type_of(there) != "cpu" && type_of(there) != "cuda" ? true : type_of(there) == type_of(here);
  return not_used("is for ", in_quotes(there), ", this is ", here);
}

}  // namespace

void use_tuning(std::string_view file) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.requested = file;
  s.loaded.clear();
}

std::string tuning_key(const GemmProblem& p) {
  std::string b = "row";
  if (p.b.granularity == Granularity::column) b = "column";
  if (p.grouped()) b = p.b.group == p.k ? "k" : text(p.b.group);
  std::string key = line(name(task_of(p)), " n=", p.n, " k=", p.k, " a=", bits(p.a), " b=", b, " y=", bits(p.y));
  if (p.a_major == Major::outer) key += " a_outer";
  if (p.b_major == Major::outer) key += " b_outer";
  if (p.y_major == Major::outer) key += " y_outer";
  if (p.a_block > 0) key += line(" block=", p.a_block);
  if (p.by_terms) key += " by_terms";
  if (p.b_packed) key += " packed";
  if (p.device.type == DeviceType::cpu) {
    key += line(" threads=", p.threads > 0 ? p.threads : cpu::hardware_threads(), " isa=", cpu::name(cpu::isa()));
  }
  return key;
}

std::string tuning_device(Device device) {
  std::string model;
  if (device.type == DeviceType::cpu) {
    const std::string signature = cpu::processor_signature();
    model = cpu::processor_name() + (signature.empty() ? "" : " ") + signature;
  } else {
    const CudaDevices cuda = cuda_devices();
    if (static_cast<std::size_t>(device.index) >= cuda.devices.size()) return {};
    model = cuda.devices[static_cast<std::size_t>(device.index)].name;
  }
  std::replace_if(
      model.begin(), model.end(), [](unsigned char c) { return c < 0x20; }, ' ');
  return message(name(device.type), " ", model);
}

std::vector<Device> all_devices() {
  std::vector<Device> devices = {Device{}};
  const std::size_t gpus = cuda_devices().devices.size();
  for (std::size_t i = 0; i < gpus; ++i) devices.push_back(Device::cuda(static_cast<int>(i)));
  return devices;
}

std::filesystem::path default_tuning_path(std::string_view device) {
  return base::tuning_path("", device, message("-", library_version(), ".tuning"));
}

std::string text_of(const TuningFile& file) {
  std::string whole = line(kTitle, "\nlibrary ", library_version(), "\ndevice ", file.device, "\n");
  std::size_t count = 0;
  for (const auto& [key, rows] : file.choices) {
    for (const auto& [m, choice] : rows) {
      whole += line(m, " ", choice.kernel, " ", choice.seconds, " ", choice.model_kernel, " ", choice.model_seconds,
                    " ", key, "\n");
      ++count;
    }
  }
  return whole + line("end ", count, "\n");
}

TuningFile parse_tuning(std::string_view text) { return Reader(text).read(); }

TuningFile read_tuning(const std::filesystem::path& path) { return parse_tuning(contents_of(path)); }

const TunedChoice* tuned_at(const TunedRows& rows, std::int64_t m) {
  const auto at = rows.lower_bound(m);
  return at != rows.end() && at->first / 2 < m ? &at->second : nullptr;
}

std::shared_ptr<const Tuning> tuning_of(Device device) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  std::shared_ptr<const Tuning>& known = s.loaded[{device.type, device.index}];
  if (!known) {
    known = std::make_shared<Tuning>(load(device, s.requested ? *s.requested : requested_by_environment()));
  }
  return known;
}

void check_tuning(std::string_view function, Device device) {
  const std::shared_ptr<const Tuning> tuning = tuning_of(device);
  if (!tuning->named || !tuning->refused) return;
  fail(Status::invalid_argument, function, ": the tuning file ", tuning->path.string(), " ", tuning->reason);
}

std::shared_ptr<const TunedRows> tuned_rows(const GemmProblem& problem) {
  const std::shared_ptr<const Tuning> tuning = tuning_of(problem.device);
  if (!tuning->reason.empty()) return nullptr;
  // The bits of a sum of floats depend on the kernel. On a CPU they do not depend on m; on a GPU they do, and only a
  // file that was named changes them.
  const bool may_change_bits = tuning->named && problem.device.type == DeviceType::cuda;
  if (!may_change_bits && !is_exact(task_of(problem))) return nullptr;
  const auto found = tuning->file.choices.find(tuning_key(problem));
  if (found == tuning->file.choices.end()) return nullptr;
  return {tuning, &found->second};
}

std::string in_words(const TunedChoice& c) {
  return message("tuning: ", c.kernel, " measured ", milliseconds(c.seconds), " at m = ", c.m,
                 c.model_kernel == c.kernel
                     ? std::string(", the cost model's choice too")
                     : message("; ", c.model_kernel, ", the cost model's choice, ", milliseconds(c.model_seconds)));
}

std::string in_words(const Tuning& tuning) {
  if (tuning.path.empty()) return tuning.reason;
  if (!tuning.reason.empty()) return message("none; ", tuning.path.string(), " ", tuning.reason);
  return tuning.path.string() + (tuning.named ? "" : ", for exact sums alone");
}

}  // namespace octile
