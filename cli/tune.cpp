// octile tune: times the kernels that a plan may choose among, and keeps the fastest in a file that plans follow.
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <sstream>

#include "base/output.h"
#include "check/gpu.h"
#include "cli/bench/gpu.h"
#include "cli/bench/peaks.h"
#include "cli/cli.h"
#include "cli/support/shape.h"
#include "octile/linear.h"
#include "octile/octile.h"
#include "plan/choose.h"
#include "plan/plan.h"
#include "plan/tuning.h"

namespace octile::cli {

namespace {

namespace fs = std::filesystem;

constexpr const char* kFooter =
    R"(A plan takes the kernel that a cost model expects to be the fastest. The model was fitted to
few machines; on others, or for unusual shapes, measuring finds a faster one. tune times the
kernels of each product in turns, caches emptied before each run, and writes the fastest to a
file, one for each model of device and version of the library:

  $XDG_CACHE_HOME/octile/DEVICE-VERSION.tuning   (without that variable: ~/.cache)

Plans follow it by themselves. The kernels of a product with int8 activations (w8a8, w4a8) all
give the same bits, so tuning changes nothing but the time. Those of w8a16 and w4a16 on a GPU
add floats in orders of their own: plans follow such choices only from a file that OCTILE_TUNING
names. A CPU has one kernel for each of the two, and nothing to choose.

A shape is M x K x N: the batch, IN, OUT. A choice holds for batches above half its own too:
that for 64 rows serves 33 to 64, unless one for fewer of them is there. Without --shape and the
like, the layers are those of a model of 8 billion parameters. What the file has of other products
stays in it, and an interrupted run keeps what it had measured.

The environment variable OCTILE_TUNING: "off", or the path of a file to follow instead.
docs/tuning.md has the whole story.

Exit status: 0, or 1 if nothing could be timed or written, or 2 for a wrong command line.

Examples:
  octile tune                                 int8 products of common shapes, on the CPU
  octile tune --device cuda --model-config model/config.json --batch 1,8,64
  octile tune --shape 32x4096x11008 --format w4a8 --packed
  octile tune --list                          the choices that plans follow now)";

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

constexpr std::int64_t kMaxCpuBatch = 512;
constexpr std::int64_t kMaxGpuBatch = 4096;

bool on_gpu(const Options& options) { return options.device == "cuda"; }

using Layer = std::pair<std::int64_t, std::int64_t>;  // K, N

std::vector<Layer> layers_of(const std::string& path) {
  using nlohmann::json;
  const json document = json::parse(read_file(path), nullptr, false);
  if (!document.is_object()) throw std::runtime_error(path + " is no JSON object");
  const auto nested = document.find("text_config");
  const json& config = nested != document.end() && nested->is_object() ? *nested : document;
  const auto size = [&](const char* name, std::int64_t otherwise) {
    constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;
    const auto found = config.find(name);
    if (otherwise > 0 && (found == config.end() || found->is_null())) return otherwise;
    if (found == config.end()) throw std::runtime_error(path + " has no " + name + "; give --shape");
    if (!found->is_number_integer() || *found < 1 || *found > kMaxSize) {
      throw std::runtime_error(path + ": " + name + " is no size of 1 to " + std::to_string(kMaxSize));
    }
    return found->get<std::int64_t>();
  };
  const std::int64_t hidden = size("hidden_size", 0), inner = size("intermediate_size", 0);
  const std::int64_t heads = size("num_attention_heads", 0), key_heads = size("num_key_value_heads", heads);
  const std::int64_t head = size("head_dim", std::max<std::int64_t>(hidden / heads, 1));
  const std::int64_t expert = size("moe_intermediate_size", inner);
  std::vector<Layer> layers;
  for (const Layer& layer :
       {Layer{hidden, heads * head}, Layer{hidden, key_heads * head}, Layer{heads * head, hidden}, Layer{hidden, inner},
        Layer{inner, hidden}, Layer{hidden, expert}, Layer{expert, hidden}}) {
    if (std::find(layers.begin(), layers.end(), layer) == layers.end()) layers.push_back(layer);
  }
  return layers;
}

std::vector<Shape> shapes_of(const Options& options) {
  std::vector<Shape> shapes;
  for (const std::string& text : options.shape_texts) shapes.push_back(parse_shape("--shape", text));
  if (!options.shape_file.empty()) {
    std::istringstream words(read_file(options.shape_file));
    for (std::string word; words >> word;) shapes.push_back(parse_shape("--shapes", word));
  }
  std::vector<Layer> layers;
  if (!options.model_config.empty()) {
    layers = layers_of(options.model_config);
  } else if (shapes.empty()) {
    layers = {{4096, 4096}, {4096, 14336}, {14336, 4096}};
  }
  std::vector<std::int64_t> batches = options.batches;
  if (batches.empty()) {
    for (std::int64_t m = 1; m <= (on_gpu(options) ? kMaxGpuBatch : kMaxCpuBatch); m *= 2) batches.push_back(m);
  }
  for (const auto& [k, n] : layers) {
    for (const std::int64_t m : batches) shapes.push_back({m, k, n});
  }
  return shapes;
}

// ---- Where it runs ----

// Memory of the device, for as long as a product is timed.
class Memory {
 public:
  explicit Memory(const check::Gpu* gpu) : gpu_(gpu) {}

  std::byte* allocate(std::size_t bytes) {
    if (gpu_) return gpu_memory_.emplace_back(gpu_->allocate(bytes)).get();
    return on_host(bytes);
  }
  std::byte* on_host(std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    void* const data = std::aligned_alloc(kLine, std::max(bytes, std::size_t{1}) / kLine * kLine + kLine);
    if (!data) throw std::bad_alloc();
    return host_memory_.emplace_back(static_cast<std::byte*>(data)).get();
  }
  // `values` over and over: copied once, then the copy is doubled.
  template <class T>
  std::byte* filled(const std::vector<T>& values, std::size_t bytes) {
    std::byte* const data = allocate(bytes);
    std::size_t done = std::min(bytes, values.size() * sizeof(T));
    copy(data, values.data(), done);
    for (; done < bytes; done += std::min(done, bytes - done)) copy(data + done, data, std::min(done, bytes - done));
    if (gpu_) gpu_->wait();
    return data;
  }
  void copy(void* to, const void* from, std::size_t bytes) const {
    gpu_ ? gpu_->copy(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  const check::Gpu* gpu_;
  std::vector<check::GpuBytes> gpu_memory_;
  std::vector<std::unique_ptr<std::byte, Free>> host_memory_;
};

// The device, and how a run on it is timed.
class Stand {
 public:
  explicit Stand(const Options& options) : cold_(!options.warm), threads_(options.threads) {
    if (on_gpu(options)) {
      gpu_.emplace(0);
    } else if (cold_) {
      constexpr std::int64_t kMinBytes = std::int64_t{32} << 20;
      evictor_.assign(static_cast<std::size_t>(std::max(kMinBytes, 2 * this_machine().last_cache_bytes())), 1);
    }
  }
  Device device() const { return gpu_ ? gpu_->device() : Device{}; }
  const check::Gpu* gpu() const { return gpu_ ? &*gpu_ : nullptr; }
  Stream stream() const { return gpu_ ? gpu_->stream() : Stream{}; }

  // Appends times of `work`: on a GPU of a few runs in a row.
  void time(const std::function<void()>& work, std::vector<double>& seconds) {
    if (gpu_) {
      constexpr int kRuns = 8;
      constexpr std::size_t kFlush = std::size_t{256} << 20;
      if (!flush_) flush_ = gpu_->allocate(kFlush);
      const auto flush = [&] {
        if (cold_) gpu_->fill(flush_.get(), std::byte{1}, kFlush);
      };
      const std::vector<double> more = gpu_->time(kRuns, flush, work);
      seconds.insert(seconds.end(), more.begin(), more.end());
      return;
    }
    if (cold_) parallel_read(threads_, evictor_.data(), evictor_.size());
    const double start = seconds_now();
    work();
    seconds.push_back(seconds_now() - start);
  }

 private:
  std::optional<check::Gpu> gpu_;
  check::GpuBytes flush_{nullptr, [](std::byte*) {}};
  bool cold_;
  int threads_;
  std::vector<char> evictor_;
};

// ---- One product ----

// As quantizers make them of a bell curve: kernels have slower ways for levels that are large or evenly spread. `max`
// stands for 4.2 times the standard deviation.
std::int8_t level(std::mt19937& random, float max) {
  std::normal_distribution<float> curve(0, max / 4.2f);
  return static_cast<std::int8_t>(std::clamp(std::rint(curve(random)), -max, max));
}

std::vector<std::int8_t> random_levels(DType type) {
  constexpr std::size_t kCount = 1'048'573;  // prime, so that no row repeats another
  std::vector<std::int8_t> drawn(kCount);
  std::mt19937 random(1);
  for (std::int8_t& byte : drawn) {
    byte = type == DType::s8 ? level(random, 127)
                             : static_cast<std::int8_t>((level(random, 7) & 15) | (level(random, 7) << 4));
  }
  return drawn;
}

// Numbers of either sign from 1 to below 2, as bits of the type.
template <class Bits>
std::vector<Bits> random_floats(Bits one, Bits fraction, Bits sign) {
  std::vector<Bits> values;
  std::mt19937 random(2);
  for (std::size_t i = 0; i < 65'521; ++i) {
    const std::uint32_t drawn = random();
    values.push_back(static_cast<Bits>(one | (drawn & fraction) | (drawn >> 31 ? sign : 0)));
  }
  return values;
}

std::byte* filled(Memory& memory, DType type, std::int64_t elements) {
  const auto bytes = static_cast<std::size_t>((elements * bits(type) + 7) / 8);
  switch (type) {
    case DType::f16:
      return memory.filled(random_floats<std::uint16_t>(0x3c00, 0x3ff, 0x8000), bytes);
    case DType::bf16:
      return memory.filled(random_floats<std::uint16_t>(0x3f80, 0x7f, 0x8000), bytes);
    case DType::f32:
      return memory.filled(random_floats<std::uint32_t>(0x3f800000, 0x7fffff, 0x80000000), bytes);
    default: {
      static const std::vector<std::int8_t> s8 = random_levels(DType::s8), s4 = random_levels(DType::s4);
      return memory.filled(type == DType::s8 ? s8 : s4, bytes);
    }
  }
}

Tensor tensor(std::byte* data, DType type, Device device, std::int64_t rows, std::int64_t cols) {
  return {data, type, device, 2, {rows, cols}, {type == DType::s4 ? (cols + 1) / 2 * 2 : cols, 1}};
}
Tensor tensor(std::byte* data, DType type, Device device, std::int64_t size) {
  return {data, type, device, 1, {size, 0}, {1, 0}};
}

// The operands of a layer, of every plan for it.
LinearArgs operands_of(const LinearDescription& d, Memory& memory, const Stand& stand) {
  const Device device = stand.device();
  const std::int64_t row = d.weight.type == DType::s4 ? (d.k + 1) / 2 * 2 : d.k;
  const bool grouped = d.weight.granularity == Granularity::group;
  const std::int64_t groups = grouped && d.weight.group > 0 ? d.k / d.weight.group : 1;
  LinearArgs args;
  args.x = tensor(filled(memory, d.x, d.m * d.k), d.x, device, d.m, d.k);
  if (d.x == DType::s8) args.x_scale = tensor(filled(memory, DType::f32, d.m), DType::f32, device, d.m);
  args.y = tensor(memory.allocate(static_cast<std::size_t>(d.m * d.n * bits(d.y) / 8)), d.y, device, d.m, d.n);
  if (!d.packed_weight) {
    args.weight = tensor(filled(memory, d.weight.type, d.n * row), d.weight.type, device, d.n, d.k);
    std::byte* const scale = filled(memory, DType::f32, d.n * groups);
    args.weight_scale =
        grouped ? tensor(scale, DType::f32, device, d.n, groups) : tensor(scale, DType::f32, device, d.n);
    return args;
  }
  Memory host(nullptr);
  const LinearPlan plan = LinearPlan::select(d);
  const auto size = static_cast<std::int64_t>(plan.packed_weight_size());
  std::byte* const packed = host.allocate(plan.packed_weight_size());
  std::byte* const scale = filled(host, DType::f32, d.n * groups);
  plan.pack({tensor(filled(host, d.weight.type, d.n * row), d.weight.type, {}, d.n, d.k),
             grouped ? tensor(scale, DType::f32, {}, d.n, groups) : tensor(scale, DType::f32, {}, d.n),
             {},
             tensor(packed, DType::u8, {}, size)});
  std::byte* const there = memory.allocate(plan.packed_weight_size());
  memory.copy(there, packed, plan.packed_weight_size());
  if (stand.gpu()) stand.gpu()->wait();
  args.weight = tensor(there, DType::u8, device, size);
  return args;
}

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds = {};

  // The lower quartile: what else the machine does only adds to a time.
  double time() const {
    std::vector<double> sorted = seconds;
    const auto at = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 4);
    std::nth_element(sorted.begin(), at, sorted.end());
    return *at;
  }
};

Candidate candidate(std::string name, const LinearDescription& d, const LinearArgs& args, Memory& memory,
                    Stream stream) {
  const LinearPlan plan = LinearPlan::select(d);
  const Workspace workspace = {memory.allocate(plan.workspace_size()), plan.workspace_size()};
  return {std::move(name), [plan, args, workspace, stream] { plan.run(args, workspace, stream); }};
}

// In turns, so that all see the same machine: at least so many rounds, and more while there is time.
void time_in_turns(const std::vector<Candidate*>& candidates, Stand& stand) {
  constexpr int kMinRounds = 3;
  constexpr int kMaxRounds = 9;
  constexpr double kSeconds = 0.5;
  const double end = seconds_now() + kSeconds;
  for (int round = 0; round < kMaxRounds && (round < kMinRounds || seconds_now() < end); ++round) {
    for (Candidate* c : candidates) stand.time(c->run, c->seconds);
  }
}

// The fastest, and beside it the cost model's choice.
TunedChoice fastest(std::vector<Candidate>& candidates, const std::string& model, Stand& stand) {
  constexpr double kHopeless = 1.5;  // after two rounds
  // What is hardly faster, or not in most turns, does not replace the model's choice.
  constexpr double kGain = 0.95;
  constexpr double kTurns = 0.75;
  const auto is_faster = [](const Candidate* a, const Candidate* b) { return a->time() < b->time(); };
  std::vector<Candidate*> left;
  Candidate* of_model = nullptr;
  for (Candidate& c : candidates) {
    c.run();  // touches its memory, loads its code
    left.push_back(&c);
    if (c.name == model) of_model = &c;
  }
  for (int round = 0; round < 2 && left.size() > 1; ++round) {
    for (Candidate* c : left) stand.time(c->run, c->seconds);
  }
  if (left.size() > 1) {
    const double limit = kHopeless * (*std::min_element(left.begin(), left.end(), is_faster))->time();
    std::erase_if(left, [&](const Candidate* c) { return c != of_model && c->time() > limit; });
  }
  time_in_turns(left, stand);
  Candidate* best = *std::min_element(left.begin(), left.end(), is_faster);
  if (best != of_model) {
    // Once more and by themselves: the fastest of several has been lucky.
    best->seconds.clear();
    of_model->seconds.clear();
    time_in_turns({best, of_model}, stand);
    const auto turns = static_cast<double>(best->seconds.size());
    double won = 0;
    for (std::size_t i = 0; i < best->seconds.size(); ++i) won += best->seconds[i] < of_model->seconds[i];
    if (best->time() > kGain * of_model->time() || won < kTurns * turns) best = of_model;
  }
  return {0, best->name, best->time(), model, of_model->time()};
}

struct Product {
  std::string format;
  Shape shape;
  LinearDescription description;  // of the product alone: an int8 X is given quantized
  LinearDescription layer;        // X is float
};

struct Measured {
  std::string format;
  Shape shape;
  std::string key;
  TunedChoice choice;
};

// The rows that can do it, without those of which the model is sure that they are far slower, and its choice.
std::vector<const GemmKernel*> rows_for(const GemmProblem& p, std::string& model) {
  constexpr double kFarSlower = 8;
  std::vector<const GemmKernel*> rows;
  const auto seconds = [&](const GemmKernel* row) { return row->cost(p).seconds; };
  for (const GemmKernel* row : gemm_kernels()) {
    if (row->task == task_of(p) && row->device == p.device.type && refusal(*row, p).empty()) rows.push_back(row);
  }
  if (rows.empty()) return rows;
  const auto cheapest = std::min_element(
      rows.begin(), rows.end(), [&](const GemmKernel* a, const GemmKernel* b) { return seconds(a) < seconds(b); });
  model = (*cheapest)->name;
  std::erase_if(rows, [&, limit = kFarSlower * seconds(*cheapest)](const auto* row) { return seconds(row) > limit; });
  return rows;
}

std::vector<Measured> measure(const Product& product, Stand& stand) {
  std::vector<Measured> measured;
  const auto keep = [&](const GemmProblem& p, TunedChoice choice) {
    choice.m = product.shape.m;
    measured.push_back({product.format, product.shape, tuning_key(p), std::move(choice)});
  };
  LinearDescription d = product.description;
  const GemmProblem p = gemm_problem(d);
  Memory memory(stand.gpu());
  std::string model;
  const std::vector<const GemmKernel*> rows = rows_for(p, model);
  if (rows.empty()) LinearPlan::select(d);  // throws, and says why
  const LinearArgs args = operands_of(d, memory, stand);
  std::vector<Candidate> candidates;
  for (const GemmKernel* row : rows) {
    d.kernel = row->name;
    candidates.push_back(candidate(d.kernel, d, args, memory, stand.stream()));
  }
  keep(p, fastest(candidates, model, stand));

  // The same from a float X: a row that quantizes it too, against the quantizer and the row just found.
  LinearDescription layer = product.layer;
  const bool per_token = layer.weight.type == DType::s8 && layer.weight.granularity != Granularity::group &&
                         layer.activation == Activation::dynamic_per_token;
  if (!per_token) return measured;
  const GemmProblem whole = linear_problem(layer);
  const std::vector<const GemmKernel*> whole_rows = rows_for(whole, model);
  if (whole_rows.empty()) return measured;
  const std::string sku = LinearPlan::select(layer).sku();
  if (sku.find("_linear_") == std::string::npos) model = kTwoSteps;
  LinearArgs float_args = args;
  float_args.x = tensor(filled(memory, layer.x, layer.m * layer.k), layer.x, stand.device(), layer.m, layer.k);
  float_args.x_scale = {};
  layer.kernel = measured.front().choice.kernel;
  candidates.clear();
  candidates.push_back(candidate(std::string(kTwoSteps), layer, float_args, memory, stand.stream()));
  for (const GemmKernel* row : whole_rows) {
    layer.kernel = row->name;
    candidates.push_back(candidate(layer.kernel, layer, float_args, memory, stand.stream()));
  }
  keep(whole, fastest(candidates, model, stand));
  return measured;
}

Product product_of(const std::string& format, const Shape& shape, const Options& options, Device device) {
  const bool s4 = format.starts_with("w4");
  const std::int64_t group = options.group >= 0 ? options.group : s4 && shape.k % 128 == 0 ? 128 : 0;
  LinearDescription d;
  d.m = shape.m;
  d.n = shape.n;
  d.k = shape.k;
  d.x = d.y = options.dtype == "f16" ? DType::f16 : options.dtype == "bf16" ? DType::bf16 : DType::f32;
  d.activation = format.ends_with("a16") ? Activation::none : Activation::dynamic_per_token;
  if (s4 || group > 0) {
    d.weight = s4 ? WeightFormat::s4_group : WeightFormat::s8_group;
    d.weight.group = group;
  }
  d.packed_weight = options.packed;
  d.device = device;
  d.threads = options.threads;
  Product product = {format, shape, d, d};
  if (d.activation != Activation::none) product.description.x = DType::s8;
  return product;
}

// ---- The file ----

// While it lives, no other octile tune writes into this folder.
class FolderLock {
 public:
  explicit FolderLock(const fs::path& folder) : folder_(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    if (folder_.number() < 0) base::fail_on("write into", folder, errno);
    while (flock(folder_.number(), LOCK_EX) != 0) {
      if (errno != EINTR) return;  // a file system without locks: the last one to write wins
    }
  }

 private:
  base::Descriptor folder_;
};

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

void save(const fs::path& path, const std::string& device, const std::vector<Measured>& measured) {
  const FolderLock lock(path.has_parent_path() ? path.parent_path() : ".");
  TuningFile file = read_before(path, device);
  for (const Measured& one : measured) file.choices[one.key][one.choice.m] = one.choice;
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
  if (on_gpu(options)) {
    const CudaDevices cuda = cuda_devices();
    if (cuda.devices.empty()) throw std::runtime_error("tune --device cuda: " + cuda.reason);
  }
  Stand stand(options);
  const std::string device = tuning_device(stand.device());
  const fs::path path = options.out.empty() ? default_tuning_path(device) : fs::path(options.out);
  if (path.empty()) throw std::runtime_error("neither XDG_CACHE_HOME nor HOME says where to write; give --out FILE");
  if (options.out.empty()) fs::create_directories(path.parent_path());
  read_before(path, device);

  std::vector<Measured> measured;
  std::string left_out;
  const double start = seconds_now();
  {
    Progress progress("tune", static_cast<std::int64_t>(shapes.size() * options.formats.size()));
    for (const std::string& format : options.formats) {
      for (const Shape& shape : shapes) {
        const std::string name =
            format + " " + std::to_string(shape.m) + "x" + std::to_string(shape.k) + "x" + std::to_string(shape.n);
        try {
          const std::vector<Measured> more = measure(product_of(format, shape, options, stand.device()), stand);
          save(path, device, more);
          measured.insert(measured.end(), more.begin(), more.end());
        } catch (const Error& error) {
          if (error.status() != Status::unsupported) throw;
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
            << measured.size() << " choices in " << fixed(seconds, 1) << " s, " << changed
            << " other than the cost model's; its times are " << fixed(gain(measured), 3)
            << " of these (geometric mean)\n"
            << path.string() << "\n";
  if (floats)
    std::cout << "plans follow the choices for sums of floats (a16) with OCTILE_TUNING=" << path.string() << "\n";
}

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* command = app.add_subcommand("tune", "Measure which kernels are the fastest here, for plans to follow");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  command->add_option("--device", options->device, "cpu, or cuda: the first GPU")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--format", options->formats, "w8a8, w8a16, w4a8 or w4a16; may be repeated (default: w8a8, w4a8)")
      ->check(CLI::IsMember({"w8a8", "w8a16", "w4a8", "w4a16"}))
      ->type_name("FORMAT")
      ->allow_extra_args(false);
  command->add_option("--shape", options->shape_texts, "A product; may be repeated")
      ->type_name("MxKxN")
      ->allow_extra_args(false);
  command->add_option("--shapes", options->shape_file, "Products, one a line")->type_name("FILE");
  command
      ->add_option("--model-config", options->model_config, "The layers of the model that this config.json describes")
      ->type_name("FILE");
  command->add_option("--batch", options->batches, "M of a model's layers (default: powers of 2 to 512; cuda: 4096)")
      ->type_name("M,M,...")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24).description(""));
  command->add_option("--dtype", options->dtype, "f32, f16 or bf16, of X and Y (default: f32; cuda: f16)")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->type_name("TYPE");
  command->add_option("--group", options->group, "Inputs that share a scale, 0: all (default: 128 of 4-bit weights)")
      ->check(CLI::IsMember({0, 32, 64, 128}))
      ->type_name("SIZE");
  command->add_flag("--packed", options->packed, "With packed weights, which are products of their own");
  command->add_option("--threads", options->threads, "CPU threads (default: all that may be used)")
      ->type_name("COUNT")
      ->check(CLI::Range(1, 1024).description(""));
  command->add_flag("--warm", options->warm, "Leave in the caches what the run before left there");
  command->add_option("--out", options->out, "The file to write into, for OCTILE_TUNING")->type_name("FILE");
  command->add_flag("--list", options->list, "Show the choices that plans follow now, and time nothing");
  command->add_flag("--json", options->json, "Write one JSON document instead of a table");
  add_quiet(*command);
  command->callback([options] { tune(*options); });
}

}  // namespace octile::cli
