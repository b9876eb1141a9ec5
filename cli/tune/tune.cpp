// octile tune: times the kernels that a plan may choose among, and keeps the fastest in a file that plans follow.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "base/output.h"
#include "base/python_json.h"
#include "base/tuning_file.h"
#include "cli/bench/peaks.h"
#include "cli/cli.h"
#include "cli/support/formats.h"
#include "cli/support/shape.h"
#include "cli/tune/measure.h"
#include "octile/linear.h"
#include "octile/octile.h"
#include "plan/tuning.h"

namespace octile::cli {

namespace {

namespace fs = std::filesystem;

constexpr const char* kFooter =
    R"(A plan takes the kernel that a cost model expects to be the fastest. The model was fitted to
few machines; on others, or for unusual shapes, measuring may find a faster one. tune times the
kernels of each product alternately, empties the caches before each run, and writes the fastest
to a file, one for each model of device and version of the library:

  $XDG_CACHE_HOME/octile/DEVICE-VERSION.tuning   (without that variable: ~/.cache)

Plans use this file automatically. The kernels of a product with int8 activations (w8a8, w4a8)
all give the same bits, so tuning affects only the time. Those of w8a16 and w4a16 on a GPU sum
floats in different orders: plans follow such choices only from a file that OCTILE_TUNING
names. On a CPU the type of X decides, and there is nothing to choose.

A shape is M x K x N: the batch, IN, OUT. A choice also serves smaller batches, down to half
its own: that for 64 rows serves 33 to 64, unless the file has one for fewer rows that fits.
Without --shape and the like, the layers are those of a model with 8 billion parameters. A
product that no kernel can do, such as one with groups that do not divide K, is left out, and a
line says why. Other products that are in the file stay there, and an interrupted run keeps
what it has measured.

The environment variable OCTILE_TUNING: "off", or the path of a file to use instead.
docs/how-to/tune.md has the details.

Exit status: 0, or 1 if nothing could be timed or written, or 2 for a wrong command line.

Examples:
  octile tune                                 int8 products of common shapes, on the CPU
  octile tune --device cuda --model-config model/config.json --batch 1,8,64
  octile tune --shape 32x4096x11008 --format w4a8 --packed
  octile tune --list                          the choices that plans use now)";

// ---- What is asked for ----

struct Options {
  std::string device = "cpu";
  std::vector<std::string> formats = {"w8a8", "w4a8"};
  std::vector<std::string> shape_texts;
  std::string shape_file;
  std::string model_config;
  std::vector<std::int64_t> batches;
  std::string dtype;
  std::int64_t group = -1;
  int threads = 0;
  bool packed = false;
  bool warm = false;
  bool list = false;
  bool json = false;
  std::string out;
};

constexpr std::int64_t kDefaultGroup = 128;  // of 4-bit weights
constexpr std::int64_t kMaxCpuBatch = 512;
constexpr std::int64_t kMaxGpuBatch = 4096;

bool on_gpu(const Options& options) { return options.device == "cuda"; }

using Layer = std::pair<std::int64_t, std::int64_t>;  // K, N

template <class T>
std::vector<T> without_repeats(const std::vector<T>& all) {
  std::vector<T> result;
  for (const T& one : all) {
    if (std::find(result.begin(), result.end(), one) == result.end()) result.push_back(one);
  }
  return result;
}

std::vector<Layer> layers_of(const std::string& path) {
  using nlohmann::json;
  const json document = json::parse(base::without_python_numbers(read_file(path)), nullptr, false);
  if (!document.is_object()) throw std::runtime_error(path + " is not a JSON object");
  const auto nested = document.find("text_config");
  const json& config = nested != document.end() && nested->is_object() ? *nested : document;
  const auto size = [&](const char* name, std::int64_t otherwise) {
    constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
    const auto found = config.find(name);
    if (otherwise > 0 && (found == config.end() || found->is_null())) return otherwise;
    if (found == config.end()) throw std::runtime_error(path + " has no " + name + "; give --shape");
    if (!found->is_number_integer() || *found < 1 || *found > kMaxSize) {
      throw std::runtime_error(path + ": " + name + " is not a size of 1 to " + std::to_string(kMaxSize));
    }
    return found->get<std::int64_t>();
  };
  const std::int64_t hidden = size("hidden_size", 0), inner = size("intermediate_size", 0);
  const std::int64_t heads = size("num_attention_heads", 0), key_heads = size("num_key_value_heads", heads);
  const std::int64_t head = size("head_dim", std::max<std::int64_t>(hidden / heads, 1));
  const std::int64_t expert = size("moe_intermediate_size", inner);
  return without_repeats(std::vector<Layer>{{hidden, heads * head},
                                            {hidden, key_heads * head},
                                            {heads * head, hidden},
                                            {hidden, inner},
                                            {inner, hidden},
                                            {hidden, expert},
                                            {expert, hidden}});
}

std::vector<Shape> shapes_in(const std::string& path) {
  std::vector<Shape> shapes;
  std::istringstream lines(read_file(path));
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      const std::optional<Shape> shape = shape_of(word);
      if (!shape) throw std::runtime_error(path + ":" + std::to_string(number) + ": " + no_shape(word));
      shapes.push_back(*shape);
    }
  }
  if (shapes.empty()) throw std::runtime_error(path + " has no shape");
  return shapes;
}

// Each once.
std::vector<Shape> shapes_of(const Options& options) {
  std::vector<Shape> shapes;
  for (const std::string& text : options.shape_texts) shapes.push_back(parse_shape("--shape", text));
  if (!options.shape_file.empty()) {
    const std::vector<Shape> more = shapes_in(options.shape_file);
    shapes.insert(shapes.end(), more.begin(), more.end());
  }
  std::vector<Layer> layers;
  if (!options.model_config.empty()) {
    layers = layers_of(options.model_config);
  } else if (shapes.empty()) {
    layers = {{4096, 4096}, {4096, 14336}, {14336, 4096}};
  } else if (!options.batches.empty()) {
    throw CLI::ValidationError("--batch", "is for the layers of a model; each shape has an M of its own");
  }
  std::vector<std::int64_t> batches = options.batches;
  if (batches.empty()) {
    for (std::int64_t m = 1; m <= (on_gpu(options) ? kMaxGpuBatch : kMaxCpuBatch); m *= 2) batches.push_back(m);
  }
  for (const auto& [k, n] : layers) {
    for (const std::int64_t m : batches) shapes.push_back({m, k, n});
  }
  return without_repeats(shapes);
}

LinearDescription layer_of(const std::string& format, const Shape& shape, const Options& options, Device device) {
  const Format& named = kFormats.at(format);
  const bool grouped = named.weight.granularity == Granularity::group;
  const std::int64_t group = options.group >= 0 ? options.group : grouped ? kDefaultGroup : 0;
  LinearDescription d;
  d.m = shape.m;
  d.n = shape.n;
  d.k = shape.k;
  d.x = d.y = options.dtype == "f16" ? DType::f16 : options.dtype == "bf16" ? DType::bf16 : DType::f32;
  d.activation = named.activation;
  d.weight = grouped || group > 0 ? WeightFormat::in_groups(named.weight.type, group) : named.weight;
  d.packed_weight = options.packed;
  d.device = device;
  d.threads = options.threads;
  return d;
}

// ---- The file ----

// What the file holds now, which has to be for this device.
TuningFile read_before(const fs::path& path, const std::string& device) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(path, ignored))) return {device, {}};
  try {
    TuningFile file = read_tuning(path);
    if (file.device == device) return file;
    throw std::runtime_error("is for " + file.device + ", this is " + device);
  } catch (const std::exception& error) {
    throw std::runtime_error(path.string() + " " + error.what() + "; remove it, or name another file with --out");
  }
}

void save(const fs::path& path, const std::string& device, const Measured& one) {
  const base::FolderLock lock(path.has_parent_path() ? path.parent_path() : ".");
  TuningFile file = read_before(path, device);
  file.choices[one.key][one.choice.m] = one.choice;
  base::write_file(path, text_of(file));
}

// ---- Reports ----

std::string milliseconds_text(double seconds) { return fixed(seconds * 1e3, seconds < 1e-3 ? 4 : 3); }

double gain(const std::vector<Measured>& measured) {
  double sum = 0;
  for (const Measured& one : measured) sum += std::log(one.choice.model_seconds / one.choice.seconds);
  return std::exp(sum / static_cast<double>(measured.size()));
}

nlohmann::json choice_json(const std::string& key, const TunedChoice& c) {
  return {{"m", c.m},
          {"product", key},
          {"kernel", c.kernel},
          {"seconds", c.seconds},
          {"model_kernel", c.model_kernel},
          {"model_seconds", c.model_seconds}};
}

void print_json(const nlohmann::json& document) {
  std::cout << document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

std::vector<std::string> choice_row(const std::string& key, const TunedChoice& c) {
  return {std::to_string(c.m),
          key,
          c.kernel,
          milliseconds_text(c.seconds),
          c.model_kernel,
          milliseconds_text(c.model_seconds)};
}
const std::vector<std::string> kHeading = {"M", "product", "kernel", "ms", "cost model's choice", "ms"};

void list(const Options& options) {
  nlohmann::json documents = nlohmann::json::array();
  for (const Device device : all_devices()) {
    const std::shared_ptr<const Tuning> tuning = tuning_of(device);
    nlohmann::json choices = nlohmann::json::array();
    std::vector<std::vector<std::string>> rows;
    for (const auto& [key, by_m] : tuning->file.choices) {
      if (!tuning->reason.empty()) break;
      for (const auto& [m, choice] : by_m) {
        choices.push_back(choice_json(key, choice));
        rows.push_back(choice_row(key, choice));
      }
    }
    documents.push_back({{"device", tuning_device(device)},
                         {"file", tuning->path.string()},
                         {"used", tuning->reason.empty()},
                         {"reason", tuning->reason},
                         {"choices", choices}});
    if (options.json) continue;
    std::cout << tuning_device(device) << "\ntuning: " << in_words(*tuning) << "\n";
    if (!rows.empty()) std::cout << "\n" << format_table(kHeading, rows, 3);
  }
  if (options.json) print_json({{"version", octile_version()}, {"devices", documents}});
}

// ---- The verb ----

void tune(Options options) {
  if (options.list) return list(options);
  const bool floats = std::any_of(options.formats.begin(), options.formats.end(),
                                  [](const std::string& format) { return format.ends_with("a16"); });
  if (floats && !on_gpu(options)) {
    throw CLI::ValidationError("--format",
                               "a CPU has one kernel for w8a16 and one for w4a16: there is nothing to choose");
  }
  use_tuning("off");  // the plans that are timed are the cost model's
  if (options.dtype.empty()) options.dtype = on_gpu(options) ? "f16" : "f32";
  const std::vector<Shape> shapes = shapes_of(options);
  const std::vector<std::string> formats = without_repeats(options.formats);
  if (on_gpu(options)) require_gpu("tune");
  Stand stand(on_gpu(options), !options.warm, options.threads);
  const std::string device = tuning_device(stand.device());
  const fs::path path = options.out.empty() ? default_tuning_path(device) : fs::path(options.out);
  if (path.empty()) throw std::runtime_error("neither XDG_CACHE_HOME nor HOME says where to write; give --out FILE");
  if (options.out.empty()) {
    std::error_code error;
    fs::create_directories(path.parent_path(), error);
    if (error) base::fail_on("write into", path.parent_path(), error.value());
  }
  read_before(path, device);

  std::vector<Measured> measured;
  std::string left_out;
  const double start = seconds_now();
  {
    Progress progress("tune", static_cast<std::int64_t>(shapes.size() * formats.size()));
    for (const std::string& format : formats) {
      for (const Shape& shape : shapes) {
        const std::string name =
            format + " " + std::to_string(shape.m) + "x" + std::to_string(shape.k) + "x" + std::to_string(shape.n);
        try {
          measured.push_back(measure(layer_of(format, shape, options, stand.device()), stand));
          save(path, device, measured.back());
        } catch (const Error& error) {
          if (error.status() != Status::unsupported && error.status() != Status::invalid_argument) throw;
          const std::string what = error.what();
          left_out += name + " left out: " + what.substr(0, what.find('\n')) + "\n";
        }
        progress.advance(1, name);
      }
    }
  }
  std::cerr << left_out;
  if (measured.empty()) throw std::runtime_error("no kernel could do what was asked");
  const double seconds = seconds_now() - start;
  const auto changed = std::count_if(measured.begin(), measured.end(),
                                     [](const Measured& one) { return one.choice.kernel != one.choice.model_kernel; });
  if (options.json) {
    nlohmann::json choices = nlohmann::json::array();
    for (const Measured& one : measured) choices.push_back(choice_json(one.key, one.choice));
    return print_json({{"version", octile_version()},
                       {"device", device},
                       {"file", path.string()},
                       {"seconds", seconds},
                       {"gain", gain(measured)},
                       {"choices", choices}});
  }
  std::vector<std::vector<std::string>> rows;
  for (const Measured& one : measured) rows.push_back(choice_row(one.key, one.choice));
  std::cout << device << "\n\n"
            << format_table(kHeading, rows, 3) << "\n"
            << measured.size() << (measured.size() == 1 ? " choice in " : " choices in ") << fixed(seconds, 1) << " s, "
            << changed << " other than the cost model's, whose choices take " << fixed(gain(measured), 3)
            << " times as long (geometric mean)\n"
            << path.string() << "\n";
  if (floats)
    std::cout << "plans follow the choices for sums of floats (a16) with OCTILE_TUNING=" << path.string() << "\n";
}

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* command = app.add_subcommand("tune", "Measure which kernels are the fastest here, for plans to use");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  command->add_option("--device", options->device, "cpu, or cuda: the first GPU")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  std::vector<std::string> formats = names_of(kFormats);
  std::erase(formats, "w8a8-static");  // the products of w8a8
  command
      ->add_option("--format", options->formats, CLI::detail::join(formats) + "; may be repeated (default: w8a8, w4a8)")
      ->check(CLI::IsMember(formats))
      ->type_name("FORMAT")
      ->allow_extra_args(false);
  command->add_option("--shape", options->shape_texts, "A product; may be repeated")
      ->type_name("MxKxN")
      ->allow_extra_args(false);
  command->add_option("--shapes", options->shape_file, "Products, one per line")->type_name("FILE");
  command
      ->add_option("--model-config", options->model_config, "The layers of the model that this config.json describes")
      ->type_name("FILE");
  command->add_option("--batch", options->batches, "M of a model's layers (default: powers of 2 to 512; cuda: 4096)")
      ->type_name("M,M,...")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24).description(""));
  command->add_option("--dtype", options->dtype, "Type of X and Y: f32, f16 or bf16 (default: f32; cuda: f16)")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->type_name("TYPE");
  command->add_option("--group", options->group, "Inputs that share a scale, 0: all (default for 4 bits: 128)")
      ->check(CLI::IsMember({0, 32, 64, 128}))
      ->type_name("SIZE");
  command->add_flag("--packed", options->packed, "With packed weights, which are tuned separately");
  command->add_option("--threads", options->threads, "CPU threads (default: all that may be used)")
      ->type_name("COUNT")
      ->check(CLI::Range(1, 1024).description(""));
  command->add_flag("--warm", options->warm, "Do not empty the caches before each run");
  command->add_option("--out", options->out, "The file to write into, for OCTILE_TUNING")->type_name("FILE");
  command->add_flag("--list", options->list, "Show the choices that plans use now, and time nothing");
  command->add_flag("--json", options->json, "Write one JSON document instead of a table");
  add_quiet(*command);
  command->callback([options] { tune(*options); });
}

}  // namespace octile::cli
