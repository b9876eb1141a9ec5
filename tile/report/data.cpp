// The launch as JSON, for the page's script.
#include <array>
#include <cmath>
#include <map>

#include "report/page_parts.h"

namespace octile::tile::page {

namespace {

constexpr std::int64_t kMaxValues = 65'536;  // of a tensor

std::string list(const std::vector<double>& values) {
  std::string out = "[";
  for (const double value : values) {
    if (out.size() > 1) out += ',';
    out += std::isfinite(value) ? value_text(value) : "\"" + value_text(value) + "\"";
  }
  return out + "]";
}

template <class Range>
std::string integers(const Range& values) {
  std::string out = "[";
  for (const auto& value : values) out += (out.size() > 1 ? "," : "") + std::to_string(value);
  return out + "]";
}

std::string field(const char* name, std::int64_t value) {
  return ",\"" + std::string(name) + "\":" + std::to_string(value);
}

std::string tensor(const TensorUse& use, const TensorValues* values) {
  std::string out = "{\"name\":" + json_text(use.name) + ",\"dtype\":" + json_text(name(use.dtype)) +
                    ",\"shape\":" + integers(use.shape) + field("bytes", use.element_bytes) + field("size", use.size) +
                    field("read", use.elements_read) + field("written", use.elements_written) +
                    field("never", use.never_written) + ",\"unwritten\":[";
  for (std::size_t i = 0; i < use.unwritten.size(); ++i) out += (i > 0 ? "," : "") + integers(use.unwritten[i]);
  out += "]";
  if (values != nullptr && use.size < kMaxValues) {
    out += ",\"values\":" + list(values->values);
    if (!values->expected.empty()) {
      out += ",\"expected\":" + list(values->expected) + ",\"absolute\":" + value_text(values->tolerance.absolute) +
             ",\"relative\":" + value_text(values->tolerance.relative);
      if (values->bounds.size() == values->values.size()) out += ",\"bounds\":" + list(values->bounds);
    }
  }
  return out + "}";
}

std::string site(const Site& s, int file) {
  return "{\"access\":" + json_text(name(s.access)) + field("file", file) + field("line", s.line) +
         field("column", s.column) + field("tensor", s.tensor) + field("calls", s.calls) + field("lanes", s.lanes) +
         field("active", s.active) + field("bytes", s.bytes) + field("sectors", s.sectors) + "}";
}

}  // namespace

std::string data(const Report& report, const ReportPage& page, const Sources& sources, const Judgement& judgement) {
  std::string out = "{\"grid\":[" + std::to_string(report.grid.x) + "," + std::to_string(report.grid.y) + "," +
                    std::to_string(report.grid.z) + "],\"left_out\":" + std::to_string(report.records_left_out) +
                    ",\"tensors\":[";
  for (std::size_t i = 0; i < report.tensors.size(); ++i) {
    out += (i > 0 ? ",\n" : "\n") + tensor(report.tensors[i], values_of(page, report.tensors[i]));
  }
  out += "],\n\"sites\":[";
  for (std::size_t i = 0; i < report.sites.size(); ++i) {
    out += (i > 0 ? ",\n" : "\n") + site(report.sites[i], sources.file_of(report.sites[i]));
  }
  out += "],\n\"findings\":[";
  for (std::size_t i = 0; i < report.findings.size(); ++i) {
    const Finding& f = report.findings[i];
    const auto& p = f.first.program;
    out += (i > 0 ? ",\n" : "\n") + ("{\"problem\":" + json_text(name(f.problem))) + field("site", f.site) +
           field("count", f.count) + field("index", f.first.index) +
           field("program", (std::int64_t{p[2]} * report.grid.y + p[1]) * report.grid.x + p[0]) + "}";
  }
  out += "],\n\"wrong\":[";
  for (std::size_t i = 0; i < judgement.worst.size(); ++i) {
    const WrongElement& w = judgement.worst[i];
    out += (i > 0 ? ",\n" : "\n") + ("{\"tensor\":" + std::to_string(w.tensor)) + field("index", w.index) +
           field("program", w.program) + field("site", w.site) + field("operation", w.operation) + "}";
  }
  // Few records differ in more than program, operation and base.
  std::map<std::array<std::int64_t, 7>, std::size_t> kinds;
  std::vector<std::array<std::int64_t, 7>> order;
  std::string records;
  for (const Record& r : report.records) {
    const std::array<std::int64_t, 7> kind{r.site,         r.planes,     r.rows,         r.columns,
                                           r.plane_stride, r.row_stride, r.column_stride};
    const auto [found, is_new] = kinds.emplace(kind, order.size());
    if (is_new) order.push_back(kind);
    records += (records.empty() ? "" : ",") + std::to_string(found->second) + "," + std::to_string(r.program) + "," +
               std::to_string(r.operation) + "," + std::to_string(r.base);
  }
  out += "],\n\"kinds\":[";
  for (std::size_t i = 0; i < order.size(); ++i) out += (i > 0 ? "," : "") + integers(order[i]);
  return out + "],\n\"records\":[" + records + "]}";
}

}  // namespace octile::tile::page
