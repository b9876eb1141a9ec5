// octile quantize: quantizes the linear layers of a checkpoint.
#include "octile/checkpoint/quantize.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "base/output.h"
#include "cli/cli.h"
#include "cli/support/console.h"
#include "cli/support/formats.h"
#include "model_text.h"

namespace octile::cli {

namespace {

using checkpoint::LayerReport;
using checkpoint::printable;
using checkpoint::QuantizeReport;

constexpr int kInterrupted = 130;  // a shell's status of a program that SIGINT ended

constexpr const char* kFooter =
    R"(IN and OUT are both a .safetensors file, or both a folder as Transformers writes it. OUT is
a compressed-tensors checkpoint, which vLLM and Transformers load too. All other files of a
folder are copied verbatim. OUT is written completely or not at all. Links in IN to files are
followed, wherever they lead; written files have the permissions of their sources, less the
umask.

Formats:
  w8a8         int8 weights; activations quantized per token
  w8a8-static  the same, with one scale for all inputs of a layer, from the calibration
  w8a16        int8 weights; activations stay float
  w4a16        4-bit weights; activations stay float
  w4a8         4-bit weights; activations quantized per token
A weight has one scale per output channel, or with --group one per 32, 64 or 128 consecutive
inputs. w4a16 and w4a8 have groups of 128 by default; --group 0 means a whole row.

Methods, each better and slower than the one before:
  nearest   each weight to the nearest level
  clip      the scale with the smallest squared error; with second moments, of the output
  feedback  column by column (GPTQ): later columns compensate for the error of earlier ones;
            the calibration must hold second moments

A linear layer is a float matrix NAME.weight whose name is not that of an embedding, norm,
head or router. Experts in one tensor (gate_up_proj, down_proj) become layers of their own.
PATTERN matches layer names: * is any text. --only selects exactly the layers it matches,
whatever their names. Both options take one value at a time: a pattern, or several separated
by commas:
  --ignore '*.down_proj' --ignore '*.o_proj'   is   --ignore '*.down_proj,*.o_proj'

--calibration is a file of input statistics, saved by octile.calibrate in Python. --smooth
(SmoothQuant) moves outliers from the inputs to the weights if the layer before can take
the factors without changing what the model computes; other layers are listed with the
reason. With --smooth search, layers that no alpha would improve on unseen inputs stay as
they are.

--force replaces OUT, which must be a file or a folder; if it is a link, its target. A folder
is replaced as a whole, so everything in it must be in IN too, and no input may be in it.

The report's SQNR compares the quantized weights with the values in IN. Warnings name patterns
that match no layer, rows or groups of weights that became all zeros, being too small for the
smallest scale (1e-8), and smoothing that rests on few calibration rows.

Exit status: 1 if a file cannot be read or written, 130 after Ctrl-C, which ends the command
at the next layer. A second Ctrl-C ends it at once, as other signals do. No files are left.

Examples:
  octile quantize FOLDER OUT --format w8a8
  octile quantize FOLDER OUT --format w8a8 --group 64
  octile quantize FOLDER OUT --format w4a16 --group 32 --method clip
  octile quantize FOLDER OUT --format w8a8-static --calibration FILE --smooth 0.5)";

const std::map<std::string, WeightMethod> kMethods = {{"nearest", WeightMethod::nearest},
                                                      {"clip", WeightMethod::clip_search},
                                                      {"feedback", WeightMethod::error_feedback}};

struct Options {
  std::string from;
  std::string to;
  checkpoint::QuantizeOptions quantize;
  std::string format;
  std::optional<std::int64_t> group;
  bool zero_points = false;
  std::string method = "nearest";
  std::string smooth;
  std::string calibration;
  bool json = false;
};

volatile std::sig_atomic_t interrupted = 0;

extern "C" void note_interrupt(int) {
  constexpr std::string_view kText = "\noctile: stops at the next layer; Ctrl-C again ends at once\n";
  const int error = errno;
  interrupted = 1;
  std::signal(SIGINT, octile_end_by_signal);  // a large layer takes minutes
  (void)!write(STDERR_FILENO, kText.data(), kText.size());
  errno = error;
}

struct Interrupted {};

std::optional<checkpoint::Smoothing> smoothing_of(const std::string& text) {
  checkpoint::Smoothing smoothing = {.search = text == "search"};
  if (smoothing.search) return smoothing;
  if (CLI::detail::lexical_cast(text, smoothing.alpha)) return smoothing;
  return std::nullopt;
}

std::string check_smooth(const std::string& text) {
  return smoothing_of(text) ? "" : text + " is neither a number nor \"search\"";
}

// By SQNR.
std::vector<const LayerReport*> worst_first(const QuantizeReport& report) {
  std::vector<const LayerReport*> layers;
  for (const LayerReport& layer : report.layers) layers.push_back(&layer);
  std::stable_sort(layers.begin(), layers.end(),
                   [](const LayerReport* a, const LayerReport* b) { return a->sqnr < b->sqnr; });
  return layers;
}

void print_json(const Options& options, const QuantizeReport& report) {
  using nlohmann::json;
  json layers = json::array();
  for (const LayerReport& layer : report.layers) {
    layers.push_back({{"name", layer.name},
                      {"out", layer.n},
                      {"in", layer.k},
                      {"bytes_before", layer.bytes_before},
                      {"bytes_after", layer.bytes},
                      {"sqnr_db", number(layer.sqnr)},
                      {"max_error", layer.max_error},
                      {"vanished", layer.vanished}});
  }
  json left_out = json::array();
  for (const auto& left : report.left_out) left_out.push_back({{"name", left.name}, {"reason", left.reason}});
  json smoothed = json::array();
  for (const auto& group : report.smoothed) {
    smoothed.push_back({{"before", group.before}, {"layers", group.layers}, {"alpha", group.alpha}});
  }
  json not_smoothed = json::array();
  for (const auto& layer : report.not_smoothed) {
    not_smoothed.push_back({{"name", layer.layer}, {"reason", layer.reason}});
  }
  const auto worst = worst_first(report);
  const json document = {{"path", options.to},
                         {"bytes_before", report.size_before},
                         {"bytes_after", report.size_after},
                         {"sqnr_db_min", number(worst.front()->sqnr)},
                         {"sqnr_db_median", number(worst[worst.size() / 2]->sqnr)},
                         {"layers", layers},
                         {"left_out", left_out},
                         {"smoothed", smoothed},
                         {"not_smoothed", not_smoothed},
                         {"warnings", report.warnings}};
  std::cout << json_text(document) << "\n";
}

std::string change(std::uint64_t before, std::uint64_t after) {
  return size_text(before) + " -> " + size_text(after) + " (" +
         fixed(100 * static_cast<double>(after) / static_cast<double>(before), 1) + " %)";
}

void print_text(const Options& options, const QuantizeReport& report) {
  if (!report.left_out.empty()) {
    std::cout << "left as they are:\n" << reasons_text(report.left_out) << "\n";
  }
  if (options.quantize.smoothing) {
    std::cout << "smoothed: " << counted(report.smoothed.size(), "group") << " of layers";
    std::map<double, int> alphas;
    for (const auto& group : report.smoothed) ++alphas[group.alpha];
    const char* separator = ", alpha ";
    for (const auto& [alpha, count] : alphas) {
      std::cout << separator << fixed(alpha, 2) << " (" << count << ")";
      separator = ", ";
    }
    std::cout << "\n";
    if (!report.not_smoothed.empty()) {
      std::vector<checkpoint::LeftOut> left;
      for (const auto& layer : report.not_smoothed) left.push_back({layer.layer, layer.reason, true});
      std::cout << "not smoothed:\n" << reasons_text(left);
    }
    std::cout << "\n";
  }
  const auto worst = worst_first(report);
  std::uint64_t layers_before = 0, layers_after = 0;
  for (const LayerReport& layer : report.layers) {
    layers_before += layer.bytes_before;
    layers_after += layer.bytes;
  }
  std::cout << printable(options.to) << ": " << counted(report.layers.size(), "layer") << ", "
            << change(layers_before, layers_after) << "; the whole model "
            << change(report.size_before, report.size_after) << "\nSQNR of the weights: min "
            << in_decibels(worst.front()->sqnr) << ", median " << in_decibels(worst[worst.size() / 2]->sqnr) << "\n\n";
  constexpr std::size_t kShown = 5;
  std::vector<std::vector<std::string>> rows;
  for (std::size_t i = 0; i < worst.size() && i < kShown; ++i) {
    rows.push_back({printable(worst[i]->name), checkpoint::shape_text({worst[i]->n, worst[i]->k}),
                    decibels(worst[i]->sqnr), error_text(worst[i]->max_error)});
  }
  std::cout << format_table({"worst layers", "(OUT, IN)", "SQNR, dB", "max error"}, rows)
            << warnings_text(report.warnings);
}

QuantizeReport run(const Options& options) {
  struct sigaction action = {};
  sigaction(SIGINT, nullptr, &action);
  if (action.sa_handler != SIG_IGN) std::signal(SIGINT, note_interrupt);
  std::optional<Progress> progress;
  std::int64_t shown = 0;
  return checkpoint::quantize_checkpoint(options.from, options.to, options.quantize,
                                         [&](std::int64_t done, std::int64_t all, const std::string& tensor) {
                                           if (interrupted) throw Interrupted();
                                           if (!progress) progress.emplace("quantize", all);
                                           progress->advance(done - shown, printable(tensor));
                                           shown = done;
                                         });
}

void quantize(Options& options) {
  checkpoint::QuantizeOptions& quantize = options.quantize;
  quantize.weight = kFormats.at(options.format).weight;
  quantize.activation = kFormats.at(options.format).activation;
  if (options.group) quantize.weight.granularity = Granularity::group, quantize.weight.group = *options.group;
  quantize.weight.zero_point = options.zero_points;
  quantize.method = kMethods.at(options.method);
  if (!options.calibration.empty()) quantize.calibration = options.calibration;
  if (!options.smooth.empty()) quantize.smoothing = smoothing_of(options.smooth);
  QuantizeReport report;
  try {
    report = run(options);
  } catch (const Interrupted&) {
    std::cerr << "octile: interrupted; nothing is left of " << printable(options.to) << std::endl;
    throw CLI::RuntimeError(kInterrupted);
  } catch (const checkpoint::OptionError& error) {
    throw CLI::ValidationError(error.what());
  }
  options.json ? print_json(options, report) : print_text(options, report);
}

// The usual cause is a second pattern after --ignore; the last word is then not the wrong one.
void refuse_extras(const CLI::App& command, const Options& options) {
  const std::vector<std::string> extras = command.remaining();
  if (extras.empty()) return;
  if (extras.front().starts_with('-')) throw CLI::ExtrasError(command.get_name(), extras);
  throw CLI::ValidationError(options.from + " " + options.to + " " + CLI::detail::join(extras, " "),
                             "expected two paths, IN and OUT; --ignore and --only take one value each time: several "
                             "patterns have commas between them, or the option before each");
}

}  // namespace

void add_quantize(CLI::App& app) {
  CLI::App* command = app.add_subcommand("quantize", "Quantize the linear layers of a checkpoint");
  command->footer(kFooter);
  auto options = std::make_shared<Options>();
  checkpoint::QuantizeOptions& quantize_options = options->quantize;
  command->add_option("in", options->from, "A safetensors file, or a model's folder")->required();
  command->add_option("out", options->to, "The output: a file or a folder, as IN")->required();
  command->add_option("--format", options->format, "Format of the quantized layers")
      ->check(CLI::IsMember(names_of(kFormats)))
      ->required();
  command->add_option("--group", options->group, "Inputs that share a scale; 0: a whole row")
      ->check(CLI::IsMember({0, 32, 64, 128}))
      ->type_name("SIZE");
  command->add_flag("--zero-points", options->zero_points, "A zero point for each scale, with 4-bit weights");
  command->add_option("--method", options->method, "How weights are rounded")
      ->check(CLI::IsMember(names_of(kMethods)))
      ->capture_default_str();
  command->add_option("--calibration", options->calibration, "Statistics of the layers' inputs")->type_name("FILE");
  command->add_option("--smooth", options->smooth, "SmoothQuant's alpha, 0 to 1, or \"search\"")
      ->check(CLI::Validator(check_smooth, ""))
      ->type_name("ALPHA");
  auto* ignore =
      command->add_option("--ignore", quantize_options.selection.ignore, "Layers to leave in float; repeatable");
  auto* only =
      command->add_option("--only", quantize_options.selection.only, "The only layers to quantize; repeatable");
  for (CLI::Option* const patterns : {ignore, only}) {
    patterns->type_name("PATTERN[,PATTERN...]")->delimiter(',')->expected(1)->allow_extra_args(false);
    patterns->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  }
  command->add_flag("--force", quantize_options.overwrite, "Replace OUT if it exists");
  command->add_option("--threads", quantize_options.threads, "CPU threads (0: all). Results do not depend on it")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Write one JSON document instead of text");
  add_quiet(*command);
  command->allow_extras();  // for a message of our own
  command->callback([=] {
    refuse_extras(*command, *options);
    quantize(*options);
  });
}

}  // namespace octile::cli
