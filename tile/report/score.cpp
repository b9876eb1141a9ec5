// What the launch moved, against the minimum, in total and line by line.
#include <algorithm>
#include <cmath>
#include <set>

#include "report/page_parts.h"

namespace octile::tile::page {

namespace {

constexpr double kH200Bandwidth = 4.8e12;  // bytes a second, from its data sheet
constexpr int kWarp = 32, kVectorBytes = 16;

std::string tile(const std::string& value, const std::string& what, const std::string& note) {
  return "<div class=\"fact\"><dt>" + what + "</dt><dd><b>" + value + "</b><span>" + note + "</span></dd></div>\n";
}

std::string time(double seconds) {
  if (seconds >= 1e-3) return number(seconds * 1e3, 2) + " ms";
  if (seconds >= 1e-6) return number(seconds * 1e6, 2) + " µs";
  return number(seconds * 1e9, 2) + " ns";
}

// The records of the site's widest access: one, or several for an irregular mask.
std::vector<const Record*> widest_access(const Report& report, std::size_t site) {
  std::vector<const Record*> widest, now;
  std::int64_t max_lanes = 0, lanes = 0;
  for (const Record& record : report.records) {
    if (record.site != static_cast<int>(site)) continue;
    if (!now.empty() && (now.back()->program != record.program || now.back()->operation != record.operation)) {
      now.clear();
      lanes = 0;
    }
    now.push_back(&record);
    lanes += std::int64_t{record.planes} * record.rows * record.columns;
    if (lanes <= max_lanes) continue;
    max_lanes = lanes;
    widest = now;
  }
  return widest;
}

// The elements that the first warp accesses at once.
std::set<std::int64_t> first_request(const Report& report, const Site& site, const std::vector<const Record*>& access) {
  std::set<std::int64_t> elements;
  if (access.empty()) return elements;
  if (access.size() > 1) {  // parts: a thread takes one lane
    for (const Record* const record : access) {
      for (int c = 0; c < record->columns && elements.size() < kWarp; ++c) {
        elements.insert(record->base + c * record->column_stride);
      }
    }
    return elements;
  }
  const Record& box = *access.front();
  const int element_bytes = report.tensors[at(site.tensor)].element_bytes;
  WarpLayout layout = report.layout;
  if (layout.rows == 0) layout = box.rows == 1 ? WarpLayout{1, 128, 4} : WarpLayout{4, 32, 4};
  const int vector = std::max(1, std::min({layout.vector, box.columns, kVectorBytes / element_bytes}));
  const bool whole = box.column_stride == 1 && box.columns % vector == 0 && box.base % vector == 0 &&
                     (box.rows == 1 || box.row_stride % vector == 0);
  for (int thread = 0; thread < kWarp; ++thread) {
    const int row = thread / layout.columns, column = thread % layout.columns * vector;
    if (row >= box.rows) break;
    for (int i = 0; i < (whole ? vector : 1) && column + i < box.columns; ++i) {
      elements.insert(box.base + row * box.row_stride + (column + i) * box.column_stride);
    }
  }
  return elements;
}

// In how many calls threads can move several elements at once.
std::string vectors(const Site& site, const std::vector<const Record*>& access) {
  if (site.scalar_calls > 0) {
    return number(site.calls - site.scalar_calls) + " of " + number(site.calls) +
           (site.misaligned_calls > 0 ? "; " + number(site.misaligned_calls) + " misaligned" : "; the mask cuts in");
  }
  bool one_column = true, contiguous = true;
  for (const Record* const record : access) {
    one_column = one_column && record->columns == 1;
    contiguous = contiguous && (record->columns == 1 || record->column_stride == 1);
  }
  return !contiguous || (one_column && access.size() > 1) ? "none: not neighbours" : one_column ? "–" : "all";
}

// 32-byte sectors in address order, with the requested bytes filled.
std::string request_picture(const std::set<std::int64_t>& elements, const Site& site, int element_bytes) {
  if (elements.empty()) return "–";
  const auto sector_of = [&](std::int64_t element) { return element * element_bytes >> 5; };
  std::vector<std::int64_t> sectors;
  for (const std::int64_t element : elements) {
    if (sectors.empty() || sectors.back() != sector_of(element)) sectors.push_back(sector_of(element));
  }
  const int cells = std::min(8, kSector / element_bytes), per_cell = kSector / cells;
  std::string marks;
  for (std::size_t s = 0; s < sectors.size(); ++s) {
    const std::string x = std::to_string(s * 10), width = "width=\"8\"";
    marks += "<rect class=\"sector\" x=\"" + x + "\" y=\"0\" " + width + " height=\"10\"/>";
    const auto used = [&](int c) {
      const std::int64_t byte = sectors[s] * kSector + c * per_cell;
      const auto next = elements.lower_bound((byte + element_bytes - 1) / element_bytes);
      return next != elements.end() && *next * element_bytes < byte + per_cell;
    };
    for (int c = 0, end = 0; c < cells; c = end + 1) {  // neighbours are one rectangle
      end = c;
      while (end < cells && used(end)) ++end;
      if (end == c) continue;
      const double step = 8.0 / cells;
      marks += "<rect class=\"used\" x=\"" + number(static_cast<double>(s) * 10 + c * step, 2) + "\" y=\"0\" width=\"" +
               number((end - c) * step, 2) + "\" height=\"10\"/>";
    }
  }
  const std::string width = std::to_string(std::max<std::size_t>(sectors.size() * 10, 10));
  return "<svg class=\"request " + std::string(name(site.access)) + "\" role=\"img\" viewBox=\"0 0 " + width +
         " 10\" preserveAspectRatio=\"none\" style=\"width:" + std::to_string(sectors.size() * 16) +
         "px\" aria-label=\"" + plural(static_cast<std::int64_t>(elements.size()), "element") + " in " +
         plural(static_cast<std::int64_t>(sectors.size()), "sector") + "\">" + marks + "</svg>";
}

}  // namespace

std::string score(const Report& report) {
  std::int64_t moved = 0, lanes = 0, active = 0, request_sectors = 0, request_bytes = 0, minimum = 0;
  bool atomics = false;
  for (const Site& site : report.sites) {
    moved += site.access == Access::atomic ? 2 * site.bytes : site.bytes;  // it loads and stores
    atomics = atomics || site.access == Access::atomic;
    lanes += site.lanes;
    active += site.active;
    request_sectors += site.request_sectors;
    request_bytes += site.request_bytes;
  }
  for (const TensorUse& tensor : report.tensors) {
    minimum += (tensor.elements_read + tensor.elements_written) * tensor.element_bytes;
  }
  std::string out = "<section id=\"score\"><h2>Score</h2>\n<dl class=\"facts\">\n";
  out += tile(bytes(static_cast<double>(moved)), "moved",
              "the minimum is " + bytes(static_cast<double>(minimum)) + ": each element once" +
                  (atomics ? "; an atomic counts as a load and a store" : ""));
  out += tile(minimum > 0 ? number(static_cast<double>(moved) / static_cast<double>(minimum), 2) + " ×" : "–",
              "times the minimum", "how often each element goes over the memory bus");
  out += tile(percent(static_cast<double>(request_bytes), static_cast<double>(kSector * request_sectors)), "sector use",
              bytes(static_cast<double>(request_bytes)) + " of the " + number(request_sectors) +
                  " sectors of 32 bytes that warps ask for");
  out += tile(percent(static_cast<double>(lanes - active), static_cast<double>(lanes)), "masked off",
              number(lanes - active) + " of " + plural(lanes, "lane"));
  if (report.flops > 0) {
    out += tile(number(moved > 0 ? static_cast<double>(report.flops) / static_cast<double>(moved) : 0, 1),
                "flops a byte", number(report.flops) + " flops in dot products");
  }
  out += tile(time(static_cast<double>(moved) / kH200Bandwidth), "at least, on an H200",
              "these bytes at 4.8 TB/s: a model, not a measurement");
  return out + "</dl>\n</section>\n";
}

std::string traffic_table(const Report& report) {
  std::string out =
      "<section id=\"traffic\"><h2>Line by line</h2>\n<p class=\"soft\">What each line asks of memory. A warp's "
      "request "
      "is served in sectors of 32 bytes; the picture shows the sectors of one request, and what is used of "
      "them.</p>\n" +
      table_head("traffic", "Line by line",
                 {"line", "access", "calls", "lanes", "masked off", "bytes", "sectors a request", "sector use",
                  "whole vectors", "a request"});
  for (std::size_t s = 0; s < report.sites.size(); ++s) {
    const Site& site = report.sites[s];
    const TensorUse& tensor = report.tensors[at(site.tensor)];
    const std::vector<const Record*> access = widest_access(report, s);
    out += "<tr data-site=\"" + std::to_string(s) + "\"><th scope=\"row\">" + std::to_string(site.line) + ":" +
           std::to_string(site.column) + "</th>" +
           cell("access", "<span><i class=\"" + std::string(name(site.access)) + "\">" + name(site.access) +
                              "</i> <code>" + escaped(tensor.name) + "</code></span>") +
           cell("calls", number(site.calls)) + cell("lanes", number(site.active)) +
           cell("masked off", percent(static_cast<double>(site.lanes - site.active), static_cast<double>(site.lanes))) +
           cell("bytes", number(site.bytes)) +
           cell("sectors a request",
                site.requests > 0
                    ? number(static_cast<double>(site.request_sectors) / static_cast<double>(site.requests), 1)
                    : "–") +
           cell("sector use",
                percent(static_cast<double>(site.request_bytes), static_cast<double>(kSector * site.request_sectors))) +
           cell("whole vectors", vectors(site, access)) +
           cell("a request", request_picture(first_request(report, site, access), site, tensor.element_bytes)) +
           "</tr>\n";
  }
  return out + kTableEnd + "</section>\n";
}

}  // namespace octile::tile::page
