// Handwritten digits learned in f32, with an int8 forward, and in int8 throughout: Octile through its public C++
// interface.
#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "data.h"
#include "experiment.h"
#include "octile/octile.h"
#include "page.h"
#include "text.h"

namespace octile::digits {

namespace {

constexpr const char* kDescription = "Train on handwritten digits in f32 and in int8, and compare";

constexpr const char* kFooter =
    R"(A network of three Linear layers (64 - hidden - hidden - 10, ReLU between them) learns
handwritten digits three ways, from the same weights, on the same minibatches, in the
same order:
  f32                        every product in f32, by the BLAS
  int8 forward               the forward in int8; the backward dequantizes the int8 tensors
  int8 forward and backward  all three products in int8
The parameters and the optimizer are f32 in all three. Then the networks that were trained
in f32 are quantized to W8A8 (int8 weights and activations) and W4 (4-bit weights).

Each seed deals the images into five parts; each part is tested on by a network that
learned from the other four, after its last step. Accuracy is the share of all images.
The same command gives the same accuracies and losses again on the same machine.

FILE holds one image a line: 64 pixels, each an integer from 0 to 16, and the digit, with
commas between. Without it: the test part of the UCI data set "Optical Recognition of
Handwritten Digits" (Alpaydin and Kaynak, 1998, CC BY 4.0), which is built in.

The page is one file, needs no network, and is written at the end, whole or not at all.
It replaces another page, but no other file.

Examples:
  octile-digits
  octile-digits --seeds 1 --epochs 5 --no-html
  octile-digits --json --no-html | jq '.ways[] | {id, accuracy: .accuracy.mean}')";

struct Options {
  Settings settings;
  std::optional<std::string> data;  // a file
  std::string html = "octile-demo.html";
  bool no_html = false;
  bool json = false;
  bool quiet = false;
};

std::string range(const PerSeed& accuracy) { return fixed(accuracy.low(), 2) + " to " + fixed(accuracy.high(), 2); }

std::string ways_table(const Result& result) {
  std::vector<std::vector<std::string>> rows;
  for (const WayResult& way : result.ways) {
    rows.push_back({std::string(way.label), fixed(way.accuracy.mean(), 2), range(way.accuracy),
                    difference(way.accuracy.mean(), result.ways.front().accuracy.mean()), fixed(way.loss.mean(), 5),
                    fixed(way.seconds.mean(), 2), grouped(way.kept_bytes)});
  }
  return format_table({"trained in", "test acc. %", "seeds", "vs f32", "train loss", "time s", "kept bytes"}, rows);
}

std::string formats_table(const Result& result) {
  std::vector<std::vector<std::string>> rows;
  for (const FormatResult& format : result.formats) {
    rows.push_back({std::string(format.label), fixed(format.accuracy.mean(), 2), range(format.accuracy),
                    difference(format.accuracy.mean(), result.formats.front().accuracy.mean()),
                    grouped(format.weight_bytes)});
  }
  return format_table({"quantized after training", "test acc. %", "seeds", "vs f32", "weight bytes"}, rows);
}

void print_tables(const Result& result) {
  const Settings& s = result.settings;
  std::cout << "\n"
            << grouped(result.images) << " digits (" << result.source << "), 64 - " << s.hidden << " - " << s.hidden
            << " - 10, " << s.epochs << (s.epochs == 1 ? " epoch" : " epochs") << ", minibatches of " << s.batch
            << ", mean of " << s.seeds << (s.seeds == 1 ? " seed" : " seeds") << "\n\n"
            << ways_table(result) << "\n"
            << formats_table(result) << std::endl;
}

nlohmann::json per_seed(const PerSeed& p) {
  return {{"mean", p.mean()}, {"lowest", p.low()}, {"highest", p.high()}, {"seeds", p.values}};
}

nlohmann::json to_json(const Result& result) {
  using nlohmann::json;
  const Settings& s = result.settings;
  json ways = json::array();
  for (const WayResult& way : result.ways) {
    ways.push_back({{"id", way.id},
                    {"label", way.label},
                    {"accuracy", per_seed(way.accuracy)},
                    {"loss", per_seed(way.loss)},
                    {"seconds", per_seed(way.seconds)},
                    {"kept_bytes", way.kept_bytes},
                    {"kernels", way.kernels},
                    {"curves", way.curves}});
  }
  json formats = json::array();
  for (const FormatResult& format : result.formats) {
    formats.push_back({{"id", format.id},
                       {"label", format.label},
                       {"accuracy", per_seed(format.accuracy)},
                       {"weight_bytes", format.weight_bytes},
                       {"kernels", format.kernels}});
  }
  return {{"version", octile_version()},
          {"data", {{"source", result.source}, {"images", result.images}}},
          {"settings",
           {{"epochs", s.epochs},
            {"seeds", s.seeds},
            {"batch", s.batch},
            {"hidden", s.hidden},
            {"threads", s.threads},
            {"learning_rate", learning_rate(s)}}},
          {"ways", ways},
          {"formats", formats}};
}

void run(const Options& options) {
  const bool html = !options.no_html;
  if (html) require_writable(options.html);
  const bool built_in = !options.data;
  const Digits digits = built_in ? built_in_digits() : parse_digits(read_file(*options.data), *options.data);
  Result result;
  {
    Progress progress(experiment_length(options.settings), options.quiet);
    result = run_experiment(options.settings, digits, [&](const std::string& what) { progress.advance(what); });
  }
  result.source = built_in ? "UCI optical recognition of handwritten digits, test part" : *options.data;
  if (html) write_file(options.html, demo_page(result, digits));
  if (options.json) {
    nlohmann::json document = to_json(result);
    if (html) document["html"] = options.html;
    std::cout << document.dump(2) << std::endl;
    return;
  }
  print_tables(result);
  if (html) std::cout << "wrote " << options.html << ": curves and tables, for a browser" << std::endl;
}

void add_options(CLI::App& app, Options& options) {
  Settings& s = options.settings;
  app.add_option("--epochs", s.epochs, "Passes over the training images")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--seeds", s.seeds, "Repeat with seeds 1 to N")->check(CLI::Range(1, 100))->capture_default_str();
  app.add_option("--batch", s.batch, "Maximum number of images in a minibatch")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--hidden", s.hidden, "Width of the hidden layers, a multiple of 32")
      ->check(CLI::Range(32, 8192))
      ->check(CLI::Validator(
          [](const std::string& text) {
            return std::stoll(text) % kW4Group == 0 ? std::string() : text + " is not a multiple of 32";
          },
          "", "multiple"))
      ->capture_default_str();
  app.add_option("--threads", s.threads, "Maximum number of CPU threads (0: all)")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--data", options.data, "Learn from this file instead of the digits that are built in")
      ->type_name("FILE");
  auto* html =
      app.add_option("--html", options.html, "Where to write the page")->type_name("FILE")->capture_default_str();
  app.add_flag("--no-html", options.no_html, "Write no page")->excludes(html);
  app.add_flag("--json", options.json, "Print one JSON document, with every seed and curve, instead of tables");
  app.add_flag("-q,--quiet", options.quiet, "Show no progress (the default unless stderr is a terminal)");
}

}  // namespace

}  // namespace octile::digits

int main(int argc, char** argv) {
  using namespace octile::digits;
  CLI::App app(kDescription, "octile-digits");
  app.footer(kFooter);
  app.set_help_flag("-h,--help", "Show this page and exit");
  Options options;
  add_options(app, options);
  try {
    app.parse(argc, argv);
    run(options);
    if (!std::cout.flush()) throw std::runtime_error("cannot write to the standard output");
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::cerr << "octile-digits: " << error.what() << " (see octile-digits --help)" << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "octile-digits: " << error.what() << std::endl;
    return 1;
  }
}
