#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "report/page_parts.h"

namespace octile::tile::page {

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == '<') {  // no "</script>" and no "<!--"
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string number(std::int64_t value) {
  std::string digits = std::to_string(value);
  const std::size_t start = value < 0 ? 1 : 0;
  for (std::size_t i = digits.size(); i > start + 3;) digits.insert(i -= 3, ",");
  return digits;
}

std::string number(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string percent(double part, double whole) {
  if (!(whole > 0)) return "–";
  const double share = 100 * part / whole;
  // Not "100 %" unless it is.
  return (share > 99.5 && share < 100 ? "> 99" : share > 0 && share < 0.5 ? "< 1" : number(share, 0)) + " %";
}

std::string bytes(double count) {
  const char* const units[] = {"B", "KB", "MB", "GB", "TB"};
  int unit = 0;
  while (count >= 1000 && unit < 4) {
    count /= 1000;
    ++unit;
  }
  return number(count, unit == 0 || count >= 100 ? 0 : count >= 10 ? 1 : 2) + " " + units[unit];
}

std::string value_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char text[40];
  const auto as_float = static_cast<float>(value);
  const auto end = static_cast<double>(as_float) == value ? std::to_chars(text, text + sizeof(text), as_float).ptr
                                                          : std::to_chars(text, text + sizeof(text), value).ptr;
  return {text, end};
}

std::string plural(std::int64_t count, const char* what) {
  return number(count) + " " + what + (count == 1 ? "" : "s");
}

std::string program_name(const Grid& grid, const std::array<int, 3>& program) {
  const int axes = grid.z > 1 ? 3 : grid.y > 1 ? 2 : 1;
  std::string result = std::to_string(program[0]);
  for (int axis = 1; axis < axes; ++axis) result += ", " + std::to_string(program[at(axis)]);
  return axes == 1 ? result : "(" + result + ")";
}

std::string element_name(const TensorUse& tensor, std::int64_t index) {
  if (index < 0 || index >= tensor.size || tensor.shape.size() < 2) return tensor.name + "[" + number(index) + "]";
  std::string result;
  for (std::size_t axis = tensor.shape.size(); axis-- > 0;) {
    const std::int64_t side = tensor.shape[axis];
    result = number(index % side) + (result.empty() ? "" : ", ") + result;
    index /= side;
  }
  return tensor.name + "[" + result + "]";
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

std::string file_name(std::string_view path) { return std::string(path.substr(path.rfind('/') + 1)); }

std::string table_head(const std::string& name, const std::string& label, const std::vector<std::string>& columns) {
  std::string out = "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"" + label +
                    "\"><table class=\"" + name + " rows\"><thead><tr>";
  for (const std::string& column : columns) out += "<th scope=\"col\">" + column + "</th>";
  return out + "</tr></thead><tbody>\n";
}

std::string cell(const std::string& label, const std::string& text) {
  return "<td data-label=\"" + label + "\">" + text + "</td>";
}

}  // namespace octile::tile::page
