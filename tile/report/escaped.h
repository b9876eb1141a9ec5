// Text for HTML, in its own file because the command's own page needs nothing else of the reports.
#pragma once

#include <string>
#include <string_view>

namespace octile::tile::page {

inline std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace octile::tile::page
