// octile compare: the difference between the weights of two checkpoints.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "cli/cli.h"
#include "cli/support/console.h"
#include "cli/support/numbers.h"
#include "model_text.h"
#include "octile/checkpoint/measure.h"

namespace octile::cli {

namespace {

using checkpoint::Checkpoint;
using checkpoint::Difference;
using checkpoint::Layer;
using checkpoint::printable;
using checkpoint::TensorInfo;

constexpr const char* kFooter =
    R"(A and B are .safetensors files or models' folders, each with float weights or quantized
(int-quantized, pack-quantized, AWQ, GPTQ). For each linear layer of both:
  SQNR       10 log10(sum a^2 / sum (a - b)^2), in dB, of the dequantized weights
  max error  the largest |a - b|
Weights are compared as stored, F64 unrounded. A warning names layers with rows or
groups that are all zero in B but not in A.
All other tensors are compared byte by byte. A smoothed checkpoint has different weights by
design: they were multiplied by the factors that its norms were divided by.

Exit status: 1 if a layer is below --min-sqnr, has a NaN or an infinity, is in only one of the
two, or differs in shape, or if a file cannot be read.

Examples:
  octile compare FOLDER QUANTIZED
  octile compare FOLDER QUANTIZED --min-sqnr 30 --json | jq '.layers[0]')";

struct Options {
  std::string a;
  std::string b;
  double min_sqnr = -std::numeric_limits<double>::infinity();
  std::size_t worst = 10;
  bool json = false;
};

struct LayerRow {
  std::string name;
  std::string problem;  // empty: it was compared
  std::string kind_a;
  std::string kind_b;
  Difference difference;
  std::int64_t vanished = 0;  // rows, or groups of B, that are all zero in B but not in A
};

struct OtherTensors {
  std::size_t equal = 0;
  std::vector<std::string> different;
  std::vector<std::string> only_in_a;
  std::vector<std::string> only_in_b;
};

// A model with its layers by name.
class Side {
 public:
  explicit Side(const std::string& path) : model_(Checkpoint::open(path)) {
    for (Layer& layer : checkpoint::find_layers(model_).layers) {
      names_.push_back(layer.name);
      layers_.emplace(names_.back(), std::move(layer));
    }
  }

  const Checkpoint& model() const { return model_; }
  const std::vector<std::string>& names() const { return names_; }  // of the layers, in file order

  // May be a matrix that does not look linear by its name: the other side has quantized it.
  std::optional<Layer> layer(const std::string& name) const {
    if (const auto found = layers_.find(name); found != layers_.end()) return found->second;
    const TensorInfo* const weight = model_.find(name + ".weight");
    if (!weight || weight->shape.size() != 2 || !is_float(weight->type)) return std::nullopt;
    return Layer{.name = name, .n = weight->shape[0], .k = weight->shape[1], .tensors = {weight->name}};
  }

  bool is_f64(const Layer& layer) const {
    return layer.kind == checkpoint::LayerKind::plain &&
           model_.get(layer.weight_tensor()).type == checkpoint::ElementType::f64;
  }

  void take(const Layer& layer) { in_layers_.insert(layer.tensors.begin(), layer.tensors.end()); }
  bool has_taken(const std::string& tensor) const { return in_layers_.count(tensor) != 0; }

  void release(const Layer& layer) const {
    for (const std::string& tensor : layer.tensors) model_.release(tensor);
  }

 private:
  Checkpoint model_;
  std::vector<std::string> names_;
  std::map<std::string, Layer> layers_;
  std::set<std::string> in_layers_;  // tensors
};

class Comparison {
 public:
  explicit Comparison(const Options& options) : a_(options.a), b_(options.b) {
    std::vector<std::string> names;
    std::set<std::string> known;
    for (const Side* const side : {&a_, &b_}) {
      for (const std::string& name : side->names()) {
        if (known.insert(name).second) names.push_back(name);
      }
    }
    Progress progress("compare", static_cast<std::int64_t>(names.size()));
    for (const std::string& name : names) {
      progress.advance(0, printable(name));
      rows.push_back(compare_layer(name));
      progress.advance();
    }
    std::stable_sort(rows.begin(), rows.end(), [](const LayerRow& x, const LayerRow& y) { return rank(x) < rank(y); });
    compare_others();
  }

  std::vector<LayerRow> rows;  // worst first
  OtherTensors others;

 private:
  // A NaN ranks first.
  static double rank(const LayerRow& row) {
    const double sqnr = row.difference.sqnr();
    return !row.problem.empty() || std::isnan(sqnr) ? -std::numeric_limits<double>::infinity() : sqnr;
  }

  LayerRow compare_layer(const std::string& name) {
    const auto a = a_.layer(name);
    const auto b = b_.layer(name);
    LayerRow row;
    row.name = name;
    if (!a || !b) {
      row.problem = std::string("not in ") + (a ? "B" : "A");
      return row;
    }
    row.kind_a = checkpoint::name(a->kind);
    row.kind_b = checkpoint::name(b->kind);
    a_.take(*a);
    b_.take(*b);
    if (a->n != b->n || a->k != b->k) {
      row.problem = shape_text(*a) + " in A, " + shape_text(*b) + " in B";
      return row;
    }
    if (a_.is_f64(*a) || b_.is_f64(*b)) {
      measure(read_weight_f64(a_.model(), *a), read_weight_f64(b_.model(), *b), *b, row);
    } else {
      measure(read_weight(a_.model(), *a), read_weight(b_.model(), *b), *b, row);
    }
    a_.release(*a);
    b_.release(*b);
    return row;
  }

  // Row by row in f64, to save memory.
  template <class Real>
  static void measure(const std::vector<Real>& a, const std::vector<Real>& b, const Layer& layer, LayerRow& row) {
    for (std::ptrdiff_t first = 0; first < static_cast<std::ptrdiff_t>(a.size()); first += layer.k) {
      const std::vector<double> row_a(a.begin() + first, a.begin() + first + layer.k);
      const std::vector<double> row_b(b.begin() + first, b.begin() + first + layer.k);
      row.difference.add(row_a, row_b);
      row.vanished += checkpoint::count_vanished(row_a, row_b, layer.k / checkpoint::groups_of(layer.weight, layer.k));
    }
  }

  void compare_others() {
    const Checkpoint& a = a_.model();
    const Checkpoint& b = b_.model();
    for (const std::string& name : a.names()) {
      if (a_.has_taken(name)) continue;
      const TensorInfo* const other = b.find(name);
      if (!other) {
        others.only_in_a.push_back(name);
        continue;
      }
      const TensorInfo& own = a.get(name);
      const auto bytes_a = a.bytes(name);
      const auto bytes_b = b.bytes(name);
      const bool equal = own.type == other->type && own.shape == other->shape &&
                         std::equal(bytes_a.begin(), bytes_a.end(), bytes_b.begin(), bytes_b.end());
      if (equal) {
        ++others.equal;
      } else {
        others.different.push_back(name);
      }
    }
    for (const std::string& name : b.names()) {
      if (!b_.has_taken(name) && !a.find(name)) others.only_in_b.push_back(name);
    }
  }

  Side a_;
  Side b_;
};

// The rows of layers that were compared, worst first.
std::vector<double> compared(const std::vector<LayerRow>& rows) {
  std::vector<double> values;
  for (const LayerRow& row : rows) {
    if (row.problem.empty()) values.push_back(row.difference.sqnr());
  }
  return values;
}

// Why the comparison fails: "14 linear layers: 2 below 43.00 dB, 1 not finite, 1 not compared". Empty: it does not.
std::string failure(const Options& options, const std::vector<LayerRow>& rows) {
  std::size_t low = 0, not_finite = 0, not_compared = 0;
  for (const LayerRow& row : rows) {
    if (!row.problem.empty()) {
      ++not_compared;
    } else if (const double sqnr = row.difference.sqnr(); !(sqnr >= options.min_sqnr)) {
      ++(std::isnan(sqnr) ? not_finite : low);
    }
  }
  std::string text;
  const auto add = [&](std::size_t count, const std::string& what) {
    if (count > 0) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + what;
  };
  add(low, "below " + fixed(options.min_sqnr, 2) + " dB");
  add(not_finite, "not finite");
  add(not_compared, "not compared");
  return text.empty() ? text : counted(rows.size(), "linear layer") + ": " + text;
}

void print_json(const Options& options, const Comparison& comparison) {
  using nlohmann::json;
  json layers = json::array();
  for (const LayerRow& row : comparison.rows) {
    json layer = {{"name", row.name}, {"a", row.kind_a}, {"b", row.kind_b}};
    if (row.problem.empty()) {
      layer["sqnr_db"] = number(row.difference.sqnr());
      layer["max_error"] = number(row.difference.max_error);
      layer["exact"] = row.difference.is_exact();
      layer["vanished"] = row.vanished;
    } else {
      layer["problem"] = row.problem;
    }
    layers.push_back(std::move(layer));
  }
  const auto values = compared(comparison.rows);
  const json document = {{"a", options.a},
                         {"b", options.b},
                         {"good", failure(options, comparison.rows).empty()},
                         {"sqnr_db_min", values.empty() ? json(nullptr) : number(values.front())},
                         {"sqnr_db_median", values.empty() ? json(nullptr) : number(values[values.size() / 2])},
                         {"layers", layers},
                         {"other_tensors",
                          {{"equal", comparison.others.equal},
                           {"different", comparison.others.different},
                           {"only_in_a", comparison.others.only_in_a},
                           {"only_in_b", comparison.others.only_in_b}}}};
  std::cout << json_text(document) << "\n";
}

void print_names(const char* label, const std::vector<std::string>& names) {
  if (names.empty()) return;
  constexpr std::size_t kShown = 5;
  std::cout << "  " << label << ": ";
  for (std::size_t i = 0; i < names.size() && i < kShown; ++i) std::cout << (i > 0 ? ", " : "") << printable(names[i]);
  if (names.size() > kShown) std::cout << " and " << names.size() - kShown << " more";
  std::cout << "\n";
}

void print_text(const Options& options, const Comparison& comparison) {
  const auto values = compared(comparison.rows);
  std::cout << counted(comparison.rows.size(), "linear layer");
  if (!values.empty()) {
    std::cout << ", SQNR min " << in_decibels(values.front()) << ", median " << in_decibels(values[values.size() / 2]);
  }
  std::cout << "\nother tensors: " << comparison.others.equal << " equal\n";
  print_names("different", comparison.others.different);
  print_names("only in A", comparison.others.only_in_a);
  print_names("only in B", comparison.others.only_in_b);
  std::vector<std::vector<std::string>> rows;
  for (const LayerRow& row : comparison.rows) {
    if (rows.size() == options.worst) break;
    const bool good = row.problem.empty();
    rows.push_back({printable(row.name), row.kind_a, row.kind_b, good ? decibels(row.difference.sqnr()) : row.problem,
                    good ? error_text(row.difference.max_error) : ""});
  }
  if (!rows.empty()) std::cout << "\n" << format_table({"worst layers", "A", "B", "SQNR, dB", "max error"}, rows, 3);
  std::vector<std::string> warnings;
  for (const LayerRow& row : comparison.rows) {
    if (row.vanished == 0) continue;
    warnings.push_back("\"" + printable(row.name) + "\": " + std::to_string(row.vanished) +
                       " rows or groups are all zero in B and not in A");
  }
  std::cout << warnings_text(warnings);
}

void compare(const Options& options) {
  const Comparison comparison(options);
  options.json ? print_json(options, comparison) : print_text(options, comparison);
  const std::string why = failure(options, comparison.rows);
  if (why.empty()) return;
  std::cerr << "octile: " << why << std::endl;
  throw CLI::RuntimeError(1);
}

}  // namespace

void add_compare(CLI::App& app) {
  CLI::App* command = app.add_subcommand("compare", "Compare the weights of two checkpoints, layer by layer");
  command->footer(kFooter);
  auto options = std::make_shared<Options>();
  command->add_option("a", options->a, "A safetensors file, or a model's folder")->required();
  command->add_option("b", options->b, "The same, to compare with A")->required();
  command->add_option("--min-sqnr,--least-sqnr", options->min_sqnr, "Fail if a layer's SQNR is below this, in dB")
      ->check(finite_number("", false))
      ->type_name("DB");
  command->add_option("--worst", options->worst, "Number of layers to show, worst first")
      ->check(CLI::Range(0, 1 << 30).description(""))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Write one JSON document instead of text");
  add_quiet(*command);
  command->callback([options] { compare(*options); });
}

}  // namespace octile::cli
