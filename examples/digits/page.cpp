#include "page.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>
#include <thread>

#include "charts.h"
#include "octile/octile.h"
#include "text.h"

namespace octile::digits {

namespace {

// The colours are those of Okabe and Ito, which remain distinct in the common forms of colour blindness; the lines
// differ in width and dashes too, because good results lie on top of each other.
constexpr const char* kStyle = R"(
:root { color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1c1f24; --soft: #5b636e; --rule: #dcdfe3; --grid: #eceef0;
  --f32: #8a929c; --int8_forward: #0072b2; --int8: #d55e00; --w8a8: #007a5a; --w4: #a5417f; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --card: #1b1f24; --ink: #e8eaed; --soft: #a3abb5; --rule: #343a42; --grid: #272c33;
  --f32: #9aa3ae; --int8_forward: #56b4e9; --int8: #f08a3c; --w8a8: #2fc197; --w4: #dc8fbd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Noto Sans", "Liberation Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; letter-spacing: -.015em; text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 0 0 .2rem; }
p { margin: .4rem 0; max-width: 44rem; }
.soft, figcaption, .note { color: var(--soft); }
.note { font-size: .9rem; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .75rem; padding: 1.25rem 1.4rem;
  margin-top: 1.25rem; }
.facts { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1.25rem; }
.facts > section { margin-top: 0; }
.facts { margin-top: 1.5rem; }
.fact { font-size: 1.75rem; font-weight: 650; line-height: 1.2; font-variant-numeric: tabular-nums; }
.digits { display: grid; grid-template-columns: repeat(10, minmax(0, 2.5rem)); gap: .45rem; margin: 1.1rem 0 0; }
.digits svg { width: 100%; aspect-ratio: 1; border: 1px solid var(--rule); border-radius: .3rem;
  background: var(--card); padding: .2rem; fill: var(--ink); }
figure { margin: 0; }
figcaption { font-size: .9rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; list-style: none; margin: .7rem 0 .3rem; padding: 0;
  font-size: .92rem; }
.legend svg { width: 2.4rem; height: .8rem; margin-right: .5rem; vertical-align: baseline; }
svg.chart { display: block; width: 100%; height: auto; overflow: hidden; }
svg text { fill: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
svg .name { fill: var(--ink); }
.grid { stroke: var(--grid); stroke-width: 1; }
.axis { stroke: var(--rule); stroke-width: 1.5; }
path { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.f32 { stroke: var(--f32); stroke-width: 7; }
.int8_forward { stroke: var(--int8_forward); stroke-width: 2.5; stroke-dasharray: 9 6; stroke-linecap: butt; }
.int8 { stroke: var(--int8); stroke-width: 2; }
path.seed { stroke-width: 1; stroke-dasharray: none; opacity: .3; }
.dot { stroke: none; opacity: .45; }
.mean { stroke-width: 3; stroke-dasharray: none; }
path.mean.f32 { stroke-width: 7; opacity: .55; }
path.mean.int8_forward { stroke-width: 2.5; stroke-dasharray: 9 6; }
path.mean.int8 { stroke-width: 2; }
.dot.f32 { fill: var(--f32); } .dot.int8_forward { fill: var(--int8_forward); } .dot.int8 { fill: var(--int8); }
.dot.w8a8 { fill: var(--w8a8); } .dot.w4 { fill: var(--w4); }
line.w8a8 { stroke: var(--w8a8); } line.w4 { stroke: var(--w4); }
table { width: 100%; border-collapse: collapse; margin: .8rem 0 .3rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .5rem 0 .5rem 1rem; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; }
thead th { color: var(--soft); font-size: .85rem; font-weight: 500; line-height: 1.3; vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0; }
tbody tr:last-child > * { border-bottom: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1.4rem; margin: .8rem 0 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: .88em/1.5 ui-monospace, "DejaVu Sans Mono", "Liberation Mono", monospace; overflow-wrap: anywhere; }
@media (max-width: 700px) {
  main { padding: 1.5rem .8rem 3rem; } section { padding: 1rem; }
  h1 { font-size: 1.5rem; }
  .facts { grid-template-columns: 1fr; gap: .7rem; }
  svg.chart text { font-size: 22px; }
  thead { display: none; }
  table, tbody, tr, th, td { display: block; }
  tbody th { padding: .8rem 0 .2rem; border: 0; }
  td { display: flex; justify-content: space-between; gap: 1rem; padding: .15rem 0; border: 0; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; }
  tbody tr { border-bottom: 1px solid var(--rule); padding-bottom: .7rem; }
  tbody tr:last-child { border: 0; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .6rem; }
}
)";

std::string legend(const Result& result) {
  std::string out = "<ul class=\"legend\">\n";
  for (const WayResult& way : result.ways) {
    out += "<li><svg viewBox=\"0 0 40 12\" aria-hidden=\"true\"><path class=\"mean " + str(way.id) +
           "\" d=\"M4,6H36\"/></svg>" + escaped(way.label) + "</li>\n";
  }
  return out + "</ul>\n";
}

struct Cell {
  std::string key;    // for a program
  std::string label;  // the column's
  std::string value;
};

struct Row {
  std::string_view id;
  std::string_view label;
  std::vector<Cell> cells;
};

std::string table(const std::string& id, const std::string& first, const std::vector<Row>& rows) {
  std::string out = "<table id=\"" + id + "\">\n<thead><tr><th scope=\"col\">" + first + "</th>";
  for (const Cell& cell : rows.front().cells) out += "<th scope=\"col\">" + cell.label + "</th>";
  out += "</tr></thead>\n<tbody>\n";
  for (const Row& row : rows) {
    out += "<tr data-id=\"" + str(row.id) + "\"><th scope=\"row\">" + escaped(row.label) + "</th>";
    for (const Cell& cell : row.cells) {
      out += "<td data-key=\"" + cell.key + "\" data-label=\"" + cell.label + "\">" + cell.value + "</td>";
    }
    out += "</tr>\n";
  }
  return out + "</tbody>\n</table>\n";
}

std::vector<Cell> accuracy_cells(const PerSeed& accuracy, const PerSeed& f32) {
  return {{"accuracy", "test accuracy,&nbsp;%", fixed(accuracy.mean(), 2)},
          {"range", "lowest to highest seed", fixed(accuracy.low(), 2) + " to " + fixed(accuracy.high(), 2)},
          {"difference", "against f32, points", difference(accuracy.mean(), f32.mean())}};
}

std::string ways_table(const Result& result) {
  std::vector<Row> rows;
  for (const WayResult& way : result.ways) {
    Row row{way.id, way.label, accuracy_cells(way.accuracy, result.ways.front().accuracy)};
    row.cells.push_back({"loss", "training loss", fixed(way.loss.mean(), 5)});
    row.cells.push_back({"seconds", "training time, s", fixed(way.seconds.mean(), 2)});
    row.cells.push_back({"kept_bytes", "kept for backward, bytes", grouped(way.kept_bytes)});
    rows.push_back(std::move(row));
  }
  return table("ways", "trained in", rows);
}

std::string formats_table(const Result& result) {
  std::vector<Row> rows;
  for (const FormatResult& format : result.formats) {
    Row row{format.id, format.label, accuracy_cells(format.accuracy, result.formats.front().accuracy)};
    row.cells.push_back({"weight_bytes", "weights, bytes", grouped(format.weight_bytes)});
    const double share =
        static_cast<double>(result.formats.front().weight_bytes) / static_cast<double>(format.weight_bytes);
    row.cells.push_back({"smaller", "smaller by", fixed(share, 2) + "&times;"});
    rows.push_back(std::move(row));
  }
  return table("formats", "run in", rows);
}

std::string fact(const std::string& value, const std::string& what) {
  return "<section><div class=\"fact\">" + value + "</div><div class=\"soft\">" + what + "</div></section>\n";
}

std::string facts(const Result& result) {
  const WayResult& f32 = result.ways.front();
  const WayResult& int8 = result.ways.back();
  const double kept = static_cast<double>(f32.kept_bytes) / static_cast<double>(int8.kept_bytes);
  const FormatResult& w8a8 = result.formats[1];
  return "<div class=\"facts\">\n" +
         fact(difference(int8.accuracy.mean(), f32.accuracy.mean()) + " points",
              "test accuracy of int8 forward and backward against f32") +
         fact(fixed(kept, 2) + "&times; less", "kept by the forward for the backward, in int8") +
         fact(difference(w8a8.accuracy.mean(), f32.accuracy.mean()) + " points",
              "test accuracy of the f32 network quantized to W8A8 after training") +
         "</div>\n";
}

std::string sample_digits(const Digits& digits) {
  std::string out = "<div class=\"digits\">\n";
  for (int label = 0; label < kClasses; ++label) {
    const auto found = std::find(digits.labels.begin(), digits.labels.end(), label) - digits.labels.begin();
    out += "<svg viewBox=\"0 0 8 8\" role=\"img\" aria-label=\"a handwritten " + std::to_string(label) + "\">";
    for (std::int64_t pixel = 0; pixel < kPixels; ++pixel) {
      const float ink = digits.pixels[found * kPixels + pixel];
      if (ink == 0) continue;
      out += "<rect x=\"" + std::to_string(pixel % 8) + "\" y=\"" + std::to_string(pixel / 8) +
             "\" width=\"1\" height=\"1\" opacity=\"" + fixed(ink, 2) + "\"/>";
    }
    out += "</svg>\n";
  }
  return out + "</div>\n";
}

std::string item(const std::string& term, const std::string& description) {
  return "<dt>" + term + "</dt><dd>" + description + "</dd>\n";
}

// As Linux names it.
std::string processor() {
  std::istringstream lines(std::filesystem::exists("/proc/cpuinfo") ? read_file("/proc/cpuinfo") : std::string());
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(": ") + 2);
  }
  return "an unnamed processor";
}

int all_threads() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

std::string what_was_run(const Result& result) {
  const Settings& s = result.settings;
  const std::string hidden = std::to_string(s.hidden);
  std::string out = "<dl>\n";
  out += item("data", escaped(result.source) + ", " + grouped(result.images) + " images of 8 x 8 pixels");
  out += item("test", "for each seed the images are dealt into " + std::to_string(kFolds) +
                          " parts; each part is tested on by a network that learned from the others, after its last "
                          "step, so every image is tested on once per seed");
  out += item("network", "Linear 64 to " + hidden + ", ReLU, Linear " + hidden + " to " + hidden + ", ReLU, Linear " +
                             hidden + " to 10; softmax and cross-entropy");
  out += item("training", std::to_string(s.epochs) + " epochs, minibatches of at most " + std::to_string(s.batch) +
                              ", " + grouped(result.steps) + " steps of SGD with momentum 0.9, learning rate " +
                              fixed(learning_rate(s), 3) +
                              " falling linearly to 0; parameters and optimizer in f32 in all three ways");
  out += item("seeds", s.seeds == 1 ? "1"
                                    : "1 to " + std::to_string(s.seeds) +
                                          "; each sets the parts, the first weights and the order of minibatches, "
                                          "the same for all three ways");
  out += item("machine",
              escaped(processor()) + ", " + std::to_string(s.threads > 0 ? s.threads : all_threads()) + " threads");
  out += item("octile", octile_version());
  for (const WayResult& way : result.ways) out += item(escaped(way.label), "<code>" + escaped(way.kernels) + "</code>");
  for (std::size_t f = 1; f < result.formats.size(); ++f) {
    out += item(escaped(result.formats[f].label), "<code>" + escaped(result.formats[f].kernels) + "</code>");
  }
  return out + "</dl>\n";
}

}  // namespace

std::string difference(double accuracy, double f32_accuracy) {
  const double points = accuracy - f32_accuracy;
  const std::string text = fixed(std::abs(points), 2);
  return (text == "0.00" ? "" : points < 0 ? "-" : "+") + text;
}

std::string demo_page(const Result& result, const Digits& digits) {
  std::vector<AccuracyRow> rows;
  for (const WayResult& way : result.ways) rows.push_back({way.id, way.label, way.accuracy});
  for (std::size_t f = 1; f < result.formats.size(); ++f) {
    const FormatResult& format = result.formats[f];
    rows.push_back({format.id, format.label, format.accuracy});
  }
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<link rel=\"icon\" href=\"data:,\">\n"
      "<title>Octile demo: handwritten digits in f32 and int8</title>\n<style>";
  out += kStyle;
  out += "</style>\n</head>\n<body>\n<main>\n<header>\n<h1>Handwritten digits, learned in f32 and in int8</h1>\n";
  out += "<p>One network of three Linear layers, " + std::to_string(result.settings.hidden) +
         " wide, trained three ways from the same weights on the same minibatches in the same order. Only the "
         "arithmetic of its matrix products differs.</p>\n";
  out += sample_digits(digits) + "</header>\n" + facts(result);
  out +=
      "<section><figure>\n<h2>Training loss</h2>\n<figcaption>Mean cross-entropy of each epoch, logarithmic. Strong "
      "lines: the mean over seeds; faint ones: each seed.</figcaption>\n";
  out += legend(result) + loss_chart(result) + "</figure></section>\n";
  out += "<section><h2>Trained three ways</h2>\n" + ways_table(result);
  out +=
      "<p class=\"note\"><b>int8 forward</b> multiplies int8 by int8 in the forward and dequantizes the int8 tensors "
      "on "
      "the fly in the backward. <b>int8 forward and backward</b> computes all three products on integers. Means over "
      "seeds; time of one seed, all " +
      std::to_string(kFolds) + " networks. Kept for backward: what the forward of a full minibatch of " +
      std::to_string(result.settings.batch) +
      " leaves for the backward; not the weights, which all ways keep in f32, and int8 also as int8.</p></section>\n";
  out += "<section><h2>Quantized after training</h2>\n" + formats_table(result);
  out +=
      "<p class=\"note\">The f32 networks from above. <b>W8A8</b>: int8 weights with a scale per output channel, "
      "activations quantized per token as they come. <b>W4</b>: 4-bit weights with a scale for each " +
      std::to_string(kW4Group) +
      " inputs, activations in f32. Bytes count weights and scales, not biases.</p></section>\n";
  out +=
      "<section><figure>\n<h2>Test accuracy, seed by seed</h2>\n<figcaption>A dot is a seed, the stroke is their mean. "
      "One image more or less is " +
      fixed(100.0 / static_cast<double>(result.images), 3) + " points of one seed.</figcaption>\n";
  out += accuracy_chart(rows) + "</figure></section>\n";
  out += "<section><h2>What was run</h2>\n" + what_was_run(result);
  out +=
      "<p class=\"note\">The int8 products give the same bits on every machine. The sums in f32 around them do not, "
      "nor does the BLAS of the f32 network, so elsewhere the last digits may differ.</p></section>\n";
  return out + "</main>\n</body>\n</html>\n";
}

}  // namespace octile::digits
