// The verdict on a trial, as text for a terminal.
#include <cmath>
#include <cstdio>

#include "puzzles/puzzle.h"
#include "puzzles/sources.h"

namespace octile::tile::puzzles {

namespace {

constexpr int kMaxFindings = 5;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

std::string number(double value, const char* format = "%.9g") {
  if (std::isnan(value)) return "NaN";
  char text[48];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string place(const Site& site) {
  return site.file.substr(site.file.rfind('/') + 1) + ":" + std::to_string(site.line);
}

std::string plural(std::int64_t n, const char* what) { return std::to_string(n) + " " + what + (n == 1 ? "" : "s"); }

}  // namespace

std::string text(const Facts& facts, const Case& a_case) {
  std::string result;
  for (std::size_t i = 0; i < a_case.sizes.size(); ++i) {
    result += (i == 0 ? "" : ", ") + facts.size_names[i] + " = " + std::to_string(a_case.sizes[i]);
  }
  if (a_case.values != Values::mixed) result += std::string(", ") + name(a_case.values);
  return result;
}

std::string excerpt(const Site& site) {
  const std::vector<std::string> lines = source_lines(site.file);
  if (site.line == 0 || site.line > lines.size()) return {};
  const std::string& line = lines[site.line - 1];
  const std::string number = std::to_string(site.line);
  std::string result = "    " + number + " | " + line + "\n";
  if (site.column > 0 && site.column <= line.size()) {
    result += "    " + std::string(number.size(), ' ') + " | " + std::string(site.column - 1, ' ') + "^\n";
  }
  return result;
}

Site site_of(const Progress& progress) {
  Site site;
  site.access = progress.access;
  site.file = progress.file;
  site.line = progress.line;
  site.column = progress.column;
  return site;
}

const Site* blamed(const Outcome& outcome, const Mismatch& mismatch) {
  if (mismatch.record < 0) return nullptr;
  const Report& report = outcome.reports[at(mismatch.launch)];
  return &report.sites[at(report.records[at(mismatch.record)].site)];
}

std::string text(const Facts& facts, const Outcome& wrong) {
  std::string result = "at " + text(facts, wrong.the_case) + (wrong.the_case.stated ? "" : " (a hidden size)") + "\n";
  int shown = 0, left_out = 0;
  for (const Report& report : wrong.reports) {
    for (const Finding& finding : report.findings) {
      if (shown++ >= kMaxFindings) {
        ++left_out;
        continue;
      }
      result += "  " + text(report, finding) + "\n" + excerpt(report.sites[at(finding.site)]);
      if (Report::has_origin(finding) && finding.first.other_site >= 0) {
        result += excerpt(report.sites[at(finding.first.other_site)]);
      }
    }
  }
  if (left_out > 0) result += "  and " + plural(left_out, "more problem") + "\n";
  for (const Mismatch& m : wrong.mismatches) {
    const std::string element = m.tensor + "[" + std::to_string(m.index) + "] of " + std::to_string(m.size);
    const Site* const site = blamed(wrong, m);
    if (m.input) {
      result += "  " + place(*site) + ": store to " + m.tensor + ", which is an input; first: " + element + "\n" +
                excerpt(*site);
      continue;
    }
    const std::string how_many = std::to_string(m.count) + " of " + std::to_string(m.size) + " are wrong";
    if (!m.written) {
      result += "  " + m.tensor + ": " + how_many + "; first: " + element + " was never written\n";
      continue;
    }
    result += "  " + (site != nullptr ? place(*site) + ": " : std::string()) + m.tensor + ": " + how_many +
              "; first: " + element + " is " + number(m.got) + ", not " + number(m.expected.value);
    if (m.expected.bound >= kMinFloat) result += " +- " + number(m.expected.bound, "%.2g");
    if (site != nullptr) {
      const Report& report = wrong.reports[at(m.launch)];
      const auto program = report.program(report.records[at(m.record)].program);
      result += ", by program (" + std::to_string(program[0]) + "," + std::to_string(program[1]) + "," +
                std::to_string(program[2]) + ")";
    }
    result += "\n";
    if (site != nullptr) result += excerpt(*site);
  }
  return result;
}

std::string text(const Score& score) {
  std::string again;
  for (const Score::Reuse& reuse : score.reuse) {
    if (reuse.loaded == reuse.different) continue;
    again += (again.empty() ? "\n  reads " : ", ") + reuse.tensor + " " + number(reuse.times(), "%.2f") + " times";
  }
  return "moves " + std::to_string(score.moved_bytes) + " bytes, " + number(score.times_minimum(), "%.2f") +
         " times the minimum of " + std::to_string(score.min_bytes) + "; " + number(100 * score.sector_use(), "%.0f") +
         " % of fetched bytes are used; " + number(100 * score.masked_off(), "%.0f") + " % of lanes are masked off" +
         again;
}

std::string text(const Facts& facts, const Verdict& verdict) {
  const std::string proof = verdict.proof ? verdict.proof->text : "";
  std::string result = std::to_string(facts.number) + " " + facts.name + ": ";
  if (verdict.wrong) {
    const bool unsafe = !verdict.wrong->clean(), wrong = !verdict.wrong->right();
    result += unsafe && wrong ? "wrong and unsafe" : unsafe ? "unsafe" : "wrong";
    return result + ", " + text(facts, *verdict.wrong) + proof;
  }
  if (!verdict.disagreement.empty()) return result + "wrong: " + verdict.disagreement + "\n" + proof;
  result += "right at " + plural(verdict.cases, "size");
  if (verdict.hidden > 0) result += ", " + std::to_string(verdict.hidden) + " of them hidden";
  if (verdict.worst > 0)
    result += "; the largest error is " + number(100 * verdict.worst, "%.3g") + " % of the tolerance";
  result += "\n";
  if (verdict.stated) result += "  " + text(score(*verdict.stated)) + "\n";
  return result + proof;
}

}  // namespace octile::tile::puzzles
