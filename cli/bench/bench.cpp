// octile bench: the speed of each row of the kernel table here, as a share of the machine's peak and beside a baseline.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "check/refusal.h"
#include "cli/bench/cases.h"
#include "cli/bench/gpu.h"
#include "cli/bench/peaks.h"
#include "cli/bench/timing.h"
#include "cli/cli.h"
#include "cli/support/console.h"
#include "octile/octile.h"
#include "plan/choose.h"

namespace octile::cli {

namespace {

constexpr const char* kFooter =
    R"(A benchmark is called <format>_<operation>_<shape>, as in w8a8_forward_16x4096x4096. A
shape is M x K x N: the batch, IN, OUT, as far as the operation has them. All benchmarks
time a plan's run() on f32 tensors (forward_bf16: X in bf16; on a GPU: f16) of random
normal values, quantized to the full range; in forward_s8, X is already quantized. --dtype
times benchmarks that only move data in other float types. 4-bit weights have groups of 128,
or of a whole row where 128 does not divide IN. Without options, every kernel is timed except
the reference loops.

Columns:
  time      the median; the last column is the number of runs
  speed     2 M N K / time for products, where the time includes quantizing X or dY; for the
            rest the bytes read and written, each operand once
  of peak   the share of this machine's peak, measured in the same run: in int8, f32 or
            bf16 arithmetic, or in memory bandwidth (mem), whichever is the tighter limit
  baseline  the time of another program that alternates with ours: openblas_sgemm does the
            product in f32, memcpy reads and writes as many bytes
  ratio     the baseline's time over ours: above 1 ours is faster
  host      on a GPU, instead of the last two: how long the call of run() takes, which
            only enqueues

Before each run the caches are emptied, unless --warm is given. On a GPU, times are measured
by its own clock, and the int8 peak is the specification's, at the highest clock rate.

Exit status: 0, or 1 if nothing could be timed, or 2 for a wrong command line.

Examples:
  octile bench --filter w8a8                   everything int8
  octile bench --kernel w8a8_gemm_reference --shape 8x512x512
  octile bench --filter forward --shape 32x4096x11008 --shape 1x4096x11008 --threads 1
  octile bench --filter quantize --dtype bf16  everything that quantizes, from and to bf16
  octile bench --device cuda --chosen          the first GPU, what the plans choose there
  octile bench --json > bench.json)";

struct Options {
  std::string device = "cpu";
  std::string dtype = "f32";
  bool chosen = false;
  std::string filter;
  std::string kernel;
  std::vector<std::string> shape_texts;
  std::vector<Shape> shapes;
  int threads = 0;
  int runs = 0;
  bool warm = false;
  bool list = false;
  bool json = false;
};

struct Result {
  Benchmark benchmark;
  std::string sku;
  std::string baseline;
  Timing timing;
  double host = 0;  // seconds; on a GPU
  Arithmetic arithmetic = Arithmetic::none;
  double operations = 0;
  double bytes = 0;
  double share = 0;  // of the roof
  std::string roof;  // "int8", "f32", "mem"
};

bool is_reference(const std::string& kernel) { return kernel.ends_with("_reference"); }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The row of that name, or else those of that arch: quantize_reference is not fake_quantize_reference.
bool named(const std::string& row, const std::string& requested) {
  const std::vector<KernelInfo> table = kernels();
  const bool is_name =
      std::any_of(table.begin(), table.end(), [&](const KernelInfo& k) { return k.name == requested; });
  return is_name ? row == requested : matches(row, requested);
}

bool on_gpu(const Options& options) { return options.device == "cuda"; }

DType float_type(const std::string& text) {
  return text == "f16" ? DType::f16 : text == "bf16" ? DType::bf16 : DType::f32;
}

// The rows that run here, or that --kernel names. Reference rows are slow, so they run only on request. Plans do not
// choose them, and where an operation has no other row, what they choose instead is another benchmark's.
bool row_wanted(const KernelInfo& row, const Options& options) {
  if (name(row.device) != options.device) return false;
  if (!options.kernel.empty()) return named(row.name, options.kernel);
  const bool asked_for = !options.chosen && !options.filter.empty() && contains(row.name, options.filter);
  if (is_reference(row.name) && !asked_for) return false;
  return row.reason.empty();
}

// With --chosen the rows of a name become one.
void add(std::vector<Benchmark>& benchmarks, Benchmark b, const Options& options) {
  if (!contains(b.name, options.filter) && !contains(b.kernel, options.filter)) return;
  if (options.chosen) {
    b.kernel.clear();
    if (std::any_of(benchmarks.begin(), benchmarks.end(), [&](auto& other) { return other.name == b.name; })) return;
  }
  benchmarks.push_back(std::move(b));
}

std::vector<Benchmark> selected(const Options& options) {
  bool known = false;
  std::vector<Benchmark> benchmarks;
  for (const KernelInfo& row : kernels()) {
    if (!row_wanted(row, options)) continue;
    known = true;
    if (!row.reason.empty()) throw std::runtime_error(row.name + " cannot run here: " + row.reason);
    for (Benchmark& b : benchmarks_of(row, options.shapes, float_type(options.dtype)))
      add(benchmarks, std::move(b), options);
  }
  if (!known && !options.kernel.empty()) {
    throw CLI::ValidationError("--kernel", "no kernel for " + options.device + " is named " + options.kernel +
                                               ", nor has that arch; octile info shows them");
  }
  if (benchmarks.empty() && !options.filter.empty()) {
    const std::string among = options.dtype == "f32" ? "" : " with --dtype " + options.dtype;
    throw CLI::ValidationError("--filter", options.filter + " is part of no benchmark's name" + among +
                                               "; octile bench --list" + (among.empty() ? "" : " with it") +
                                               " shows them");
  }
  if (benchmarks.empty() && on_gpu(options)) throw std::runtime_error("no kernel of the table can run on this GPU");
  if (benchmarks.empty())
    throw std::runtime_error("this build has reference kernels alone; --kernel reference times them");
  return benchmarks;
}

void rate(Result& result, const Peaks& peaks, bool gpu) {
  const double memory_rate = result.operations > 0 ? peaks.read.rate : peaks.copy.rate;
  double shortest = result.bytes / memory_rate;
  result.roof = "mem";
  const Peak& arithmetic = result.arithmetic == Arithmetic::s8     ? peaks.int8
                           : result.arithmetic == Arithmetic::bf16 ? peaks.bf16
                                                                   : peaks.f32;
  if (arithmetic.rate > 0 && result.operations / arithmetic.rate > shortest) {
    shortest = result.operations / arithmetic.rate;
    result.roof = result.arithmetic == Arithmetic::s8     ? "int8"
                  : result.arithmetic == Arithmetic::bf16 ? "bf16"
                  : gpu                                   ? "f16"
                                                          : "f32";
  }
  result.share = shortest / result.timing.ours;
}

Schedule schedule_for(const Options& options, const Machine& machine) {
  constexpr std::int64_t kMinBytes = std::int64_t{32} << 20;
  Schedule schedule;
  schedule.threads = options.threads;
  schedule.runs = options.runs;
  schedule.cold = !options.warm;
  // Twice the last cache, which may keep older lines.
  if (schedule.cold)
    schedule.evictor.assign(static_cast<std::size_t>(std::max(kMinBytes, 2 * machine.last_cache_bytes())), 1);
  return schedule;
}

// Where it runs, and how its time is taken.
struct Stand {
  Place place;
  Peaks peaks;
  Schedule schedule;  // on a CPU
};

Result timed(const Benchmark& b, const Stand& stand, const Options& options) {
  const Prepared p = b.prepare(b, stand.place);
  if (!contains(p.sku, b.kernel)) throw Error(Status::unsupported, "the plan chose " + p.sku);
  Result result{b, p.sku, p.baseline, {}, 0, p.arithmetic, p.operations, p.bytes, 0, {}};
  if (stand.place.gpu) {
    const GpuTiming timing = time_on(*stand.place.gpu, p.run, options.runs, !options.warm);
    result.timing = {timing.seconds, 0, timing.runs};
    result.host = timing.host;
  } else {
    result.timing = time_in_turns(p.run, p.run_baseline, stand.schedule);
  }
  rate(result, stand.peaks, on_gpu(options));
  return result;
}

std::vector<Result> run_all(const std::vector<Benchmark>& benchmarks, const Stand& stand, const Options& options) {
  std::vector<Result> results;
  std::string refused;
  {
    Progress progress("bench", static_cast<std::int64_t>(benchmarks.size()));
    for (const Benchmark& b : benchmarks) {
      try {
        results.push_back(timed(b, stand, options));
      } catch (const Error& error) {
        if (error.status() != Status::unsupported && !stand.place.gpu) throw;
        const std::string reason = check::refusal_of(b.kernel, error.what());
        refused.append(b.name).append(b.kernel.empty() ? "" : " with " + b.kernel).append(" left out: ");
        refused.append(reason.empty() ? check::one_line(error.what(), options.device) : reason).append("\n");
      }
      progress.advance(1, b.name);
    }
  }
  std::cerr << refused;
  if (results.empty()) throw std::runtime_error("no kernel could do what was asked");
  return results;
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return fixed(seconds * 1e6, 1) + " us";
  if (seconds < 1) return fixed(seconds * 1e3, 2) + " ms";
  return fixed(seconds, 2) + " s";
}

std::string speed(const Result& r) {
  const double rate = (r.operations > 0 ? r.operations : r.bytes) / r.timing.ours;
  const bool tera = r.host > 0;  // a GPU's
  return fixed(rate / (tera ? 1e12 : 1e9), tera ? 2 : 1) + (tera ? " T" : " G") + (r.operations > 0 ? "OPS" : "B/s");
}

std::string first_line(const std::string& where, const Options& options) {
  return where + ", caches " + (options.warm ? "warm" : "emptied") + "\n";
}

void print_text(const std::vector<Result>& results, const std::string& where, const Peaks& peaks,
                const Options& options) {
  std::cout << first_line(where, options) << "peaks: int8 " << fixed(peaks.int8.rate / 1e9, 0) << " GOPS ("
            << peaks.int8.how << "), " << (on_gpu(options) ? "f16 " : "f32 ") << fixed(peaks.f32.rate / 1e9, 0)
            << " GOPS (" << peaks.f32.how << "), "
            << (peaks.bf16.rate > 0 ? "bf16 " + fixed(peaks.bf16.rate / 1e9, 0) + " GOPS (" + peaks.bf16.how + "), "
                                    : "")
            << "memory " << fixed(peaks.read.rate / 1e9, 1) << " GB/s read, " << fixed(peaks.copy.rate / 1e9, 1)
            << " GB/s copied\n\n";
  std::vector<std::string> heading = {"benchmark", "kernel", "time", "speed", "of peak", "baseline", "ratio", "runs"};
  if (on_gpu(options)) heading = {"benchmark", "kernel", "time", "speed", "of peak", "host", "runs"};
  std::vector<std::vector<std::string>> rows;
  for (const Result& r : results) {
    std::vector<std::string>& row = rows.emplace_back();
    row = {r.benchmark.name, r.sku, duration(r.timing.ours), speed(r), fixed(100 * r.share, 0) + "% " + r.roof};
    if (on_gpu(options)) {
      row.push_back(duration(r.host));
    } else {
      row.push_back(r.baseline + " " + duration(r.timing.baseline));
      row.push_back(fixed(r.timing.baseline / r.timing.ours, 2));
    }
    row.push_back(std::to_string(r.timing.runs));
  }
  std::cout << format_table(heading, rows, 2);
}

nlohmann::json shape_json(const Shape& shape) {
  nlohmann::json sizes = nlohmann::json::object();
  if (shape.m > 0) sizes["m"] = shape.m;
  if (shape.k > 0) sizes["k"] = shape.k;
  if (shape.n > 0) sizes["n"] = shape.n;
  return sizes;
}

void print_json(const std::vector<Result>& results, const std::string& where, const Peaks& peaks,
                const Options& options) {
  using nlohmann::json;
  const auto peak = [](const Peak& p, const char* unit) {
    return json{{"rate", p.rate}, {"unit", unit}, {"how", p.how}};
  };
  json lines = json::array();
  for (const Result& r : results) {
    const bool product = r.operations > 0;
    json& line = lines.emplace_back(json{{"name", r.benchmark.name},
                                         {"row", r.benchmark.kernel},
                                         {"kernel", r.sku},
                                         {"shape", shape_json(r.benchmark.shape)},
                                         {"seconds", r.timing.ours},
                                         {"operations", r.operations},
                                         {"bytes", r.bytes},
                                         {"rate", (product ? r.operations : r.bytes) / r.timing.ours},
                                         {"unit", product ? "operations/s" : "bytes/s"},
                                         {"share_of_peak", r.share},
                                         {"peak", r.roof},
                                         {"runs", r.timing.runs}});
    if (on_gpu(options)) {
      line["host_seconds"] = r.host;
    } else {
      line["baseline"] = {{"name", r.baseline}, {"seconds", r.timing.baseline}};
      line["ratio"] = r.timing.baseline / r.timing.ours;
    }
  }
  json document = {{"version", octile_version()},
                   {"caches", options.warm ? "warm" : "emptied"},
                   {"peaks",
                    {{"int8", peak(peaks.int8, "operations/s")},
                     {on_gpu(options) ? "f16" : "f32", peak(peaks.f32, "operations/s")},
                     {"read", peak(peaks.read, "bytes/s")},
                     {"copy", peak(peaks.copy, "bytes/s")}}},
                   {"benchmarks", lines}};
  if (peaks.bf16.rate > 0) document["peaks"]["bf16"] = peak(peaks.bf16, "operations/s");
  document[on_gpu(options) ? "gpu" : "cpu"] = where;
  if (!on_gpu(options)) document["threads"] = options.threads;
  if (!on_gpu(options)) document["dtype"] = options.dtype;
  std::cout << document.dump(2, ' ', false, json::error_handler_t::replace) << "\n";
}

void print_list(const std::vector<Benchmark>& benchmarks, bool as_json) {
  if (as_json) {
    nlohmann::json lines = nlohmann::json::array();
    for (const Benchmark& b : benchmarks) {
      lines.push_back({{"name", b.name}, {"row", b.kernel}, {"shape", shape_json(b.shape)}});
    }
    std::cout << nlohmann::json{{"benchmarks", lines}}.dump(2) << "\n";
    return;
  }
  std::vector<std::vector<std::string>> rows;
  for (const Benchmark& b : benchmarks) rows.push_back({b.name, b.kernel});
  std::cout << format_table({"benchmark", "kernel"}, rows, 2);
}

void print(const std::vector<Result>& results, const std::string& where, const Peaks& peaks, const Options& options) {
  options.json ? print_json(results, where, peaks, options) : print_text(results, where, peaks, options);
}

void time_on_cpu(const std::vector<Benchmark>& benchmarks, Options options) {
  // OpenBLAS reads it while it is loaded: the logarithm of the cycles for which idle threads spin, on the cores that
  // ours need.
  setenv("OPENBLAS_THREAD_TIMEOUT", "4", 0);
  const Machine machine = this_machine();
  if (options.threads == 0) options.threads = machine.threads;
  const Stand stand = {
      {options.threads, nullptr}, measure_peaks(machine, options.threads), schedule_for(options, machine)};
  const std::vector<Result> results = run_all(benchmarks, stand, options);
  const std::string threads = std::to_string(options.threads) + (options.threads == 1 ? " thread" : " threads");
  print(results, options.json ? machine.cpu : machine.cpu + ", " + threads + ", " + options.dtype, stand.peaks,
        options);
}

void time_on_gpu(const std::vector<Benchmark>& benchmarks, const Options& options) {
  const Gpu gpu(0);
  const Stand stand = {{1, &gpu}, peaks_of(gpu), {}};
  print(run_all(benchmarks, stand, options), gpu.facts().name, stand.peaks, options);
}

void time_kernels(Options options) {
  for (const std::string& text : options.shape_texts) options.shapes.push_back(parse_shape("--shape", text));
  if (on_gpu(options)) require_gpu("bench");
  const std::vector<Benchmark> benchmarks = selected(options);
  if (options.list) return print_list(benchmarks, options.json);
  on_gpu(options) ? time_on_gpu(benchmarks, options) : time_on_cpu(benchmarks, options);
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Time the kernels, against this machine's peaks and a baseline");
  command->footer(kFooter);
  const auto options = std::make_shared<Options>();
  command->add_option("--device", options->device, "Rows of this device: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--filter", options->filter, "Only benchmarks whose name, or whose kernel's, contains this")
      ->type_name("SUBSTRING");
  command->add_option("--kernel", options->kernel, "Only this kernel, or those of an arch such as reference")
      ->type_name("NAME");
  command->add_option("--dtype", options->dtype, "CPU: type of floats that are only moved; f16, bf16: no products")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
  command->add_flag("--chosen", options->chosen, "Time only the kernels that plans choose")->excludes("--kernel");
  command->add_option("--shape", options->shape_texts, "Instead of the usual shapes; may be repeated")
      ->type_name("MxKxN")
      ->allow_extra_args(false);
  command->add_option("--threads", options->threads, "CPU threads (default: all that may be used)")
      ->type_name("COUNT")
      ->check(CLI::Range(1, 1024).description(""));
  command->add_option("--runs", options->runs, "Runs of each (default: 20, fewer if that takes over 3 s; cuda: 40)")
      ->type_name("COUNT")
      ->check(CLI::Range(1, 1000000).description(""));
  command->add_flag("--warm", options->warm, "Do not empty the caches before each run");
  command->add_flag("--list", options->list, "Show the names and time nothing");
  command->add_flag("--json", options->json, "Write one JSON document instead of a table");
  add_quiet(*command);
  command->callback([options] { time_kernels(*options); });
}

}  // namespace octile::cli
