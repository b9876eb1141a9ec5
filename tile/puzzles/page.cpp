#include "puzzles/page.h"

#include "puzzles/sources.h"

namespace octile::tile::puzzles {

namespace {

const Report& report_of(const Outcome& outcome) {
  for (const Report& report : outcome.reports) {
    if (!report.clean()) return report;
  }
  for (const Mismatch& mismatch : outcome.mismatches) {
    if (mismatch.launch >= 0) return outcome.reports[static_cast<std::size_t>(mismatch.launch)];
  }
  return outcome.reports.back();
}

// "8 sizes, 7 of them hidden: all right"
std::string tried(const Verdict& verdict) {
  std::string result = std::to_string(verdict.cases) + (verdict.cases == 1 ? " size" : " sizes");
  if (verdict.hidden > 0) result += ", " + std::to_string(verdict.hidden) + " of them hidden";
  if (verdict.wrong) return result + ": this is the first that goes wrong";
  return result + ": " + (verdict.disagreement.empty() ? "all right" : verdict.disagreement);
}

}  // namespace

void write_page(const std::string& path, const Facts& facts, const Verdict& verdict, const std::string& command) {
  const Outcome& outcome = verdict.wrong ? *verdict.wrong : *verdict.stated;
  ReportPage page;
  page.title = "Puzzle " + std::to_string(facts.number) + ", " + facts.name;
  page.statement = facts.task;
  page.facts = {{"sizes", text(facts, outcome.the_case) + (outcome.the_case.stated ? "" : " (a hidden size)")},
                {"tried", tried(verdict)},
                {"tensors", facts.tensors},
                {"launch", facts.launch},
                {"tolerance", facts.tolerance}};
  if (verdict.proof) page.facts.push_back({"proof", verdict.proof->text});
  page.command = command;
  for (const KernelSource& source : kernel_sources()) page.sources.push_back({source.file, source.text});
  page.tensors = outcome.tensors;
  write_report(path, report_of(outcome), page);
}

}  // namespace octile::tile::puzzles
