#include "report/write_report.h"

#include <algorithm>

#include "base/output.h"
#include "report/page_parts.h"

namespace octile::tile {

namespace {

using namespace page;

std::string counted_problems(const Report& report) {
  std::array<std::int64_t, kProblems> counts{};
  std::array<std::size_t, kProblems> first{};
  for (std::size_t i = report.findings.size(); i-- > 0;) {
    const auto problem = static_cast<std::size_t>(report.findings[i].problem);
    counts[problem] += report.findings[i].count;
    first[problem] = i + 1;
  }
  std::string out;
  for (std::size_t p = 0; p < counts.size(); ++p) {
    if (counts[p] == 0) continue;
    out += "<li><a href=\"#problem-" + std::to_string(first[p]) + "\">" + name(static_cast<Problem>(p)) + "</a> <b>" +
           plural(counts[p], unit(static_cast<Problem>(p))) + "</b></li>\n";
  }
  return out;
}

std::string verdict_bar(const Report& report, const ReportPage& page, const Judgement& judgement) {
  const std::string compared = plural(judgement.compared, "value");
  std::string word, sentence, style;
  switch (judgement.verdict) {
    case Verdict::correct:
      style = "correct", word = "Correct";
      sentence = "All " + compared + " are as expected, and no access is unsafe.";
      break;
    case Verdict::unchecked:
      style = "unchecked", word = "No problem found";
      sentence = "No access is unsafe. The values were not compared with anything.";
      break;
    case Verdict::wrong:
      style = "wrong", word = "Wrong values";
      sentence = "No access is unsafe, but " + number(judgement.wrong) + " of " + compared + " are wrong.";
      break;
    case Verdict::unsafe:
      style = "unsafe", word = judgement.wrong > 0 ? "Unsafe, and wrong" : "Unsafe";
      sentence = judgement.wrong > 0      ? number(judgement.wrong) + " of " + compared + " are wrong."
                 : judgement.compared > 0 ? "The values came out right this time; on a GPU they need not."
                                          : "The values were not compared with anything.";
  }
  for (std::size_t t = 0; t < report.tensors.size(); ++t) {
    const TensorUse& tensor = report.tensors[t];
    const bool output = std::any_of(report.sites.begin(), report.sites.end(), [&](const Site& site) {
      return site.tensor == static_cast<int>(t) && site.access != Access::load;
    });
    if (!output || tensor.never_written == 0) continue;
    sentence += " Never written: " + number(tensor.never_written) + " of " + plural(tensor.size, "element") +
                " of <code>" + escaped(tensor.name) + "</code>.";
  }
  const char* const sign = judgement.verdict == Verdict::correct     ? "✓"
                           : judgement.verdict == Verdict::unchecked ? "○"
                                                                     : "✕";
  std::string out = "<div class=\"verdict " + style + "\" id=\"verdict\" data-verdict=\"" + style +
                    "\"><span class=\"sign\" aria-hidden=\"true\">" + sign + "</span><div><p class=\"word\">" + word +
                    "</p>\n<p>" + sentence + "</p>\n";
  std::string counts = counted_problems(report);
  if (judgement.wrong > 0) {
    counts += "<li><a href=\"#mismatches\">wrong</a> <b>" + plural(judgement.wrong, "value") + "</b></li>\n";
  }
  if (!counts.empty()) out += "<ul class=\"counts\">\n" + counts + "</ul>\n";
  out += "</div></div>\n<dl class=\"setting\">\n";
  const auto fact = [&](const std::string& what, const std::string& value) {
    out += "<div><dt>" + escaped(what) + "</dt><dd>" + escaped(value) + "</dd></div>\n";
  };
  fact("kernel", report.kernel);
  fact("grid",
       std::to_string(report.grid.x) + " × " + std::to_string(report.grid.y) + " × " + std::to_string(report.grid.z));
  for (const auto& [what, value] : page.facts) fact(what, value);
  fact("run on", "checked CPU");
  return out + "</dl>\n";
}

std::string tensor_table(const Report& report, const Judgement& judgement) {
  std::string out = table_head(
      "tensors", "Tensors", {"tensor", "type", "shape", "elements read", "elements written", "never written", "wrong"});
  for (std::size_t t = 0; t < report.tensors.size(); ++t) {
    const TensorUse& tensor = report.tensors[t];
    std::string shape;
    for (const std::int64_t side : tensor.shape) shape += (shape.empty() ? "" : " × ") + number(side);
    out += "<tr><th scope=\"row\"><code>" + escaped(tensor.name) + "</code></th>" + cell("type", name(tensor.dtype)) +
           cell("shape", shape) + cell("elements read", number(tensor.elements_read)) +
           cell("elements written", number(tensor.elements_written)) +
           cell("never written", number(tensor.never_written)) + cell("wrong", number(judgement.wrong_of[t])) +
           "</tr>\n";
  }
  return out + kTableEnd;
}

std::string explorer(const Report& report, const Sources& sources, const Judgement& judgement) {
  std::string out =
      "<section id=\"kernel\"><h2>Kernel</h2>\n" + listing(report, sources) +
      "</section>\n<section id=\"explore\"><h2>Programs and tensors</h2>\n"
      "<noscript><p class=\"soft\">The pictures need scripts. The verdict, the problems and all tables do "
      "not.</p></noscript>\n"
      "<div class=\"explore scripted\"><div class=\"left\">\n<div id=\"programs\"></div>\n<div "
      "id=\"operations\"></div>\n"
      "</div><div class=\"right\">\n<div id=\"modes\"></div>\n<div id=\"pictures\"></div>\n</div></div>\n";
  out += tensor_table(report, judgement);
  if (report.records_left_out > 0) {
    out += "<p class=\"note\" id=\"sampled\">There are too many accesses to keep all of them: the pictures show " +
           plural(static_cast<std::int64_t>(report.records.size()), "record") + " of a sample of the programs, and " +
           plural(report.records_left_out, "record") + " are left out. The counts are of all.</p>\n";
  }
  return out + "</section>\n";
}

}  // namespace

std::string report_html(const Report& report, const ReportPage& page) {
  const Judgement judgement = judge(report, page);
  const Sources sources(report, page);
  const std::string title = page.title.empty() ? report.kernel : page.title;
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
      "script-src 'unsafe-inline'; img-src data:\">\n"
      "<title>" +
      escaped(title) + "</title>\n<style>" + std::string(kStyle) +
      "</style></head>\n<body><main>\n"
      "<header><h1>" +
      escaped(title) + "</h1>\n";
  if (!page.statement.empty()) out += "<p class=\"statement\">" + escaped(page.statement) + "</p>\n";
  out += verdict_bar(report, page, judgement) + "</header>\n";
  out += problems(report, sources) + wrong_elements(report, page, judgement) + score(report);
  out += explorer(report, sources, judgement) + traffic_table(report);
  out += "<section id=\"recount\" class=\"scripted\"></section>\n";
  out += "<section id=\"reproduce\"><h2>Reproduce</h2>\n";
  if (!page.command.empty()) {
    out += "<pre class=\"scroll\" tabindex=\"0\" aria-label=\"Command\">" + escaped(page.command) + "</pre>\n";
  }
  out +=
      "<p class=\"soft\">" + (page.version.empty() ? std::string() : escaped(page.version) + ". ") +
      "Programs ran one after the other on the checked CPU executor; races are judged by which elements the programs "
      "use, not by the order of this run.</p>\n</section>\n</main>\n";
  out += "<script type=\"application/json\" id=\"data\">" + data(report, page, sources, judgement) + "</script>\n";
  return out + "<script>" + std::string(kScript) + "</script>\n</body></html>\n";
}

void write_report(const std::string& path, const Report& report, const ReportPage& page) {
  base::write_file(path, report_html(report, page), base::Existing::page);
}

}  // namespace octile::tile
