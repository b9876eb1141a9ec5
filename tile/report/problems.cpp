// What went wrong: a card for each problem and line, and the elements with wrong values.
#include <cmath>

#include "report/page_parts.h"

namespace octile::tile::page {

namespace {

constexpr std::size_t kMaxCards = 20;

std::string verb(Access access) {
  return access == Access::load ? "reads" : access == Access::store ? "stores to" : "updates";
}

std::string lane_name(const std::array<int, 3>& lane) {
  if (lane[0] > 0) {
    return "lane [" + std::to_string(lane[0]) + ", " + std::to_string(lane[1]) + ", " + std::to_string(lane[2]) + "]";
  }
  if (lane[1] > 0) return "lane [" + std::to_string(lane[1]) + ", " + std::to_string(lane[2]) + "]";
  return "lane " + std::to_string(lane[2]);
}

std::string explanation(Problem problem) {
  switch (problem) {
    case Problem::out_of_bounds:
      return "An index outside of the tensor: other memory on a GPU, or a fault.";
    case Problem::undefined_value:
      return "A lane without a value is stored: a masked load without <code>other</code> leaves it undefined.";
    case Problem::undefined_index:
      return "An index or a mask comes from a lane that a masked load left undefined.";
    case Problem::uninitialized:
      return "Memory is read that nobody has written.";
    case Problem::race:
      return "Programs run at the same time and in any order: several use one element, and one of them writes it.";
    case Problem::same_address:
      return "Two lanes of one store write one element: which of them stays is not said.";
    case Problem::unordered:
      return "A program uses an element twice, in different lanes or to read what it stored, and nothing says which "
             "comes first.";
    case Problem::overflow:
      return "An index left 32 bits and wrapped around.";
    case Problem::endless:
      return "The program was stopped after so many accesses: a loop of it seems to have no end.";
  }
  return {};
}

std::string hint(const Report& report, const Finding& finding) {
  const Site& site = report.sites[at(finding.site)];
  const TensorUse& tensor = report.tensors[at(site.tensor)];
  const std::string name = "<code>" + escaped(tensor.name) + "</code>";
  switch (finding.problem) {
    case Problem::out_of_bounds: {
      if (finding.first.index < 0) return "The index falls below 0: mask those lanes off with <code>i &gt;= 0</code>.";
      return (site.masked ? "The mask is too wide: " : "This access has no mask. Give it one: ") +
             (tensor.shape.size() < 2
                  ? "the index must stay below " + number(tensor.size) + ", the size of " + name + "."
                  : "each index must stay below its own side of " + name + ".");
    }
    case Problem::undefined_value:
      return "Give the load an <code>other</code> that does no harm (0 to a sum, <code>-kInfinity</code> to a "
             "maximum), "
             "or mask this store as the load is masked.";
    case Problem::undefined_index:
      return "Give that load an <code>other</code> that is a valid index, or mask this access as well.";
    case Problem::uninitialized:
      return "Fill " + name + " before the launch, or read it in a later launch than the one that writes it.";
    case Problem::race:
      return "Let each program write elements of its own, use <code>t.atomic_add</code> or <code>t.atomic_max</code>, "
             "or make two launches of it.";
    case Problem::same_address:
      return "Reduce those lanes to one before the store (<code>sum</code>, <code>max</code>), or use an atomic.";
    case Problem::unordered:
      return "Put <code>t.barrier()</code> in between, or keep the value in a variable. A pipeline loads ahead of its "
             "bodies: what those store belongs after it.";
    case Problem::overflow:
      return "Make one factor 64 bits: <code>cast&lt;s64&gt;(i) * n</code>.";
    case Problem::endless:
      return "Look at what the loop around this line counts.";
  }
  return {};
}

std::string place(const Site& site) { return file_name(site.file) + ":" + std::to_string(site.line); }

std::string first_instance(const Report& report, const Finding& finding) {
  const Site& site = report.sites[at(finding.site)];
  const TensorUse& tensor = report.tensors[at(site.tensor)];
  const Instance& first = finding.first;
  std::string out = "Program " + program_name(report.grid, first.program);
  if (first.lane[0] >= 0) out += ", " + lane_name(first.lane) + ",";
  if (finding.problem == Problem::overflow) return escaped(out + " computes an index that does not fit.");
  if (finding.problem == Problem::endless) return escaped(out + " does not end.");
  out += " " + verb(site.access) + " <b>" + escaped(element_name(tensor, first.index)) + "</b>";
  if (finding.problem == Problem::out_of_bounds) {
    out += "; " + escaped(tensor.name) + " has " + plural(tensor.size, "element");
    if (tensor.size > 0) out += ", 0 to " + number(tensor.size - 1);
  }
  if (first.cause != Cause::none) {
    out += first.cause == Cause::division ? ", from a division by 0" : ", from a shift by too many bits";
  } else if (first.other_site >= 0 && Report::has_origin(finding)) {
    const Site& load = report.sites[at(first.other_site)];
    out += "; the lane was left undefined at <code>" + escaped(place(load)) + "</code>, which loads <code>" +
           escaped(report.tensors[at(load.tensor)].name) + "</code>";
  } else if (first.other_site >= 0) {
    const Site& other = report.sites[at(first.other_site)];
    const bool same = first.other_program == first.program;
    out += (same ? "; it also " : "; program " + program_name(report.grid, first.other_program) + " ") +
           verb(other.access) + " the same element at <code>" + escaped(place(other)) + "</code>";
  }
  return out + ".";
}

std::string card(const Report& report, const Sources& sources, std::size_t index) {
  const Finding& finding = report.findings[index];
  const Site& site = report.sites[at(finding.site)];
  const TensorUse& tensor = report.tensors[at(site.tensor)];
  std::string title = name(finding.problem);
  title[0] = static_cast<char>(title[0] - 'a' + 'A');
  std::string out = "<article class=\"problem\" id=\"problem-" + std::to_string(index + 1) + "\" data-finding=\"" +
                    std::to_string(index) + "\">\n<h3>" + title + "</h3>\n<p class=\"where\"><code>" +
                    escaped(place(site)) + "</code> · " + name(site.access) + " <code>" + escaped(tensor.name) +
                    "</code> · <b>" + plural(finding.count, unit(finding.problem)) + "</b></p>\n";
  if (const std::string* const line = sources.line(site)) {
    const std::size_t indent = std::min(line->find_first_not_of(" \t"), line->size());
    // Compilers name the parenthesis of the call, or its beginning: underline the function's name.
    std::size_t begin = std::min<std::size_t>(std::max(site.column, 1u) - 1, line->size()), end = begin;
    if (begin < line->size() && (*line)[begin] == '(') {
      while (begin > indent && is_word((*line)[begin - 1])) --begin;
    } else {
      while (end < line->size() && (is_word((*line)[end]) || (*line)[end] == '.')) ++end;
    }
    begin = std::max(begin, indent);
    end = std::max(end, begin + 1);
    out += "<pre class=\"scroll\" tabindex=\"0\" aria-label=\"Source line\">" + escaped(line->substr(indent)) +
           "\n<b>" + std::string(begin - indent, ' ') + std::string(end - begin, '^') + "</b></pre>\n";
  }
  out += "<p>" + first_instance(report, finding) + "</p>\n<p class=\"soft\">" + explanation(finding.problem) +
         "</p>\n<p class=\"hint\">" + hint(report, finding) + "</p>\n</article>\n";
  return out;
}

}  // namespace

std::string problems(const Report& report, const Sources& sources) {
  if (report.findings.empty()) return {};
  std::string out = "<section id=\"problems\"><h2>Problems</h2>\n<div class=\"problems\">\n";
  const std::size_t shown = std::min(report.findings.size(), kMaxCards);
  for (std::size_t i = 0; i < shown; ++i) out += card(report, sources, i);
  out += "</div>\n";
  if (shown < report.findings.size()) {
    out +=
        "<p class=\"soft\">And " + number(static_cast<std::int64_t>(report.findings.size() - shown)) + " more.</p>\n";
  }
  return out + "</section>\n";
}

std::string wrong_elements(const Report& report, const ReportPage& page, const Judgement& judgement) {
  if (judgement.wrong == 0) return {};
  std::string out = "<section id=\"mismatches\"><h2>Who wrote the wrong values</h2>\n<p class=\"soft\">" +
                    number(judgement.wrong) + " of " + plural(judgement.compared, "compared element") +
                    " differ by more than";
  for (const TensorUse& tensor : report.tensors) {
    const TensorValues* const values = values_of(page, tensor);
    if (values == nullptr || values->expected.empty()) continue;
    out += !values->bounds.empty() ? " is allowed for them"
                                   : " " + value_text(values->tolerance.absolute) + " + " +
                                         value_text(values->tolerance.relative) + " · |expected|";
    break;
  }
  out += "; the first of them, then those farthest off.</p>\n" +
         table_head("wrong", "Wrong values", {"element", "value", "expected", "written by"});
  for (std::size_t i = 0; i < judgement.worst.size(); ++i) {
    const WrongElement& element = judgement.worst[i];
    std::string writer = "nobody: never written";
    if (element.program >= 0) {
      const Site& site = report.sites[at(element.site)];
      writer = "program " + program_name(report.grid, report.program(element.program)) + ", " + place(site);
    } else if (element.written) {
      writer = report.records_left_out > 0 ? "unknown: its record was left out" : "nobody in this launch";
    }
    out += "<tr data-wrong=\"" + std::to_string(i) + "\"><th scope=\"row\"><code>" +
           escaped(element_name(report.tensors[at(element.tensor)], element.index)) + "</code></th>" +
           cell("value", element.written ? value_text(element.value) : "–") +
           cell("expected", value_text(element.expected)) + cell("written by", escaped(writer)) + "</tr>\n";
  }
  return out + kTableEnd + "<div id=\"explorer\" class=\"scripted\" aria-live=\"polite\"></div>\n</section>\n";
}

}  // namespace octile::tile::page
