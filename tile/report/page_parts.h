// The parts that a report's page is made of.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "report/escaped.h"
#include "report/write_report.h"

namespace octile::tile::page {

extern const std::string_view kStyle, kScript;  // page.css and the scripts beside it

inline constexpr int kSector = 32;  // bytes: the minimum transfer of GPU memory

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// ---- Text ----

std::string json_text(std::string_view text);    // quoted, and without '<', so that it may be part of a script
std::string number(std::int64_t value);          // 1,234,567
std::string number(double value, int digits);    // with this many digits after the point
std::string percent(double part, double whole);  // "100 %"; "-" of nothing
std::string bytes(double count);                 // "6.4 KB"
std::string value_text(double value);            // the shortest text that is this value, as a float if it is one
std::string plural(std::int64_t count, const char* what);  // "1 lane", "24 lanes"
std::string program_name(const Grid& grid, const std::array<int, 3>& program);
std::string element_name(const TensorUse& tensor, std::int64_t index);
std::string file_name(std::string_view path);
bool is_word(char c);  // a letter, a digit or an underscore

// ---- Tables ----

// Up to the first row. A narrow screen shows the labels of the cells instead of the columns.
std::string table_head(const std::string& name, const std::string& label, const std::vector<std::string>& columns);
std::string cell(const std::string& label, const std::string& text);
inline constexpr const char* kTableEnd = "</tbody></table></div>\n";

// ---- Sources ----

// Lines of the files that the sites are in.
class Sources {
 public:
  Sources(const Report& report, const ReportPage& page);

  struct File {
    std::string path;
    std::vector<std::string> lines;  // empty: not found
    int first = 0, last = -1;        // lines to show, from 1
  };
  const std::vector<File>& files() const { return files_; }
  int file_of(const Site& site) const;
  const std::string* line(const Site& site) const;

 private:
  std::vector<File> files_;
};

// ---- Sections ----

std::string problems(const Report& report, const Sources& sources);
std::string wrong_elements(const Report& report, const ReportPage& page, const Judgement& judgement);
std::string score(const Report& report);
std::string listing(const Report& report, const Sources& sources);
std::string traffic_table(const Report& report);
std::string data(const Report& report, const ReportPage& page, const Sources& sources, const Judgement& judgement);

const TensorValues* values_of(const ReportPage& page, const TensorUse& tensor);

}  // namespace octile::tile::page
