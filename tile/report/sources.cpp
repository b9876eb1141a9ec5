// The lines of source that a page shows: read, cut to the kernel, and printed with margins.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <set>
#include <sstream>

#include "report/page_parts.h"

namespace octile::tile::page {

namespace {

constexpr int kContext = 4;     // lines around what is no struct of its own
constexpr int kMaxLines = 400;  // of one file

bool ends_with_path(std::string_view path, std::string_view end) {
  if (!path.ends_with(end)) return false;
  return path.size() == end.size() || path[path.size() - end.size() - 1] == '/';
}

std::string text_of(const std::string& path, const ReportPage& page) {
  for (const SourceText& source : page.sources) {
    if (ends_with_path(path, source.file) || ends_with_path(source.file, path)) return source.text;
  }
  std::ifstream file(path);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.ends_with('\r')) line.pop_back();
    lines.push_back(line);
  }
  return lines;
}

// From the struct around the first site to the brace that ends the last one's.
void choose_lines(Sources::File& file, int first_site, int last_site) {
  const int count = static_cast<int>(file.lines.size());
  const auto line = [&](int number) -> const std::string& { return file.lines[at(number - 1)]; };
  const auto opens = [](const std::string& text) {
    return !text.empty() && std::isspace(static_cast<unsigned char>(text[0])) == 0 &&
           (text.find("struct ") != std::string::npos || text.find("class ") != std::string::npos);
  };
  file.first = std::max(1, first_site - kContext);
  file.last = std::min(count, last_site + kContext);
  for (int i = std::min(first_site, count); i >= 1 && !line(i).starts_with('}'); --i) {
    if (!opens(line(i))) continue;
    file.first = i;
    while (file.first > 1 && line(file.first - 1).starts_with("//")) --file.first;
    for (int j = last_site; j <= count; ++j) {
      if (!line(j).starts_with('}')) continue;
      file.last = j;
      break;
    }
    break;
  }
  if (file.last - file.first >= kMaxLines) file.last = std::max(last_site + kContext, file.first + kMaxLines - 1);
  file.last = std::min({file.last, count, file.first + kMaxLines - 1});
}

// Comments, strings, keywords and calls of the context, each in a span.
std::string coloured(const std::string& text) {
  static const std::set<std::string_view> keywords = {
      "auto",   "bool",  "break",    "case",     "const",    "constexpr", "continue", "do",       "double",
      "else",   "false", "float",    "for",      "if",       "int",       "long",     "operator", "return",
      "struct", "true",  "template", "typename", "unsigned", "using",     "void",     "while",    "TILE_KERNEL"};
  std::string out;
  const auto span = [&](const char* name, std::string_view what) {
    out += std::string("<i class=\"") + name + "\">" + escaped(what) + "</i>";
  };
  for (std::size_t i = 0; i < text.size();) {
    if (text.compare(i, 2, "//") == 0) {
      span("comment", std::string_view(text).substr(i));
      break;
    }
    std::size_t end = i + 1;
    if (text[i] == '"') {
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
      span("string", std::string_view(text).substr(i, end - i));
    } else if (is_word(text[i])) {
      while (end < text.size() && is_word(text[end])) ++end;
      const std::string_view word = std::string_view(text).substr(i, end - i);
      const bool of_context = i >= 2 && text[i - 1] == '.' && text[i - 2] == 't' && (i < 3 || !is_word(text[i - 3]));
      if (of_context && (word == "load" || word == "fetch")) {
        span("load", word);
      } else if (of_context && (word == "store" || word.starts_with("atomic"))) {
        span("store", word);
      } else if (keywords.count(word) != 0) {
        span("keyword", word);
      } else {
        out += word;
      }
    } else {
      out += escaped(text.substr(i, 1));
    }
    i = end;
  }
  return out;
}

}  // namespace

Sources::Sources(const Report& report, const ReportPage& page) {
  for (const Site& site : report.sites) {
    if (file_of(site) >= 0) continue;
    File& file = files_.emplace_back();
    file.path = site.file;
    file.lines = lines_of(text_of(site.file, page));
    int first = static_cast<int>(site.line), last = first;
    for (const Site& other : report.sites) {
      if (other.file != site.file) continue;
      first = std::min(first, static_cast<int>(other.line));
      last = std::max(last, static_cast<int>(other.line));
    }
    if (last > static_cast<int>(file.lines.size())) file.lines.clear();  // another version of the file
    if (!file.lines.empty()) choose_lines(file, first, last);
  }
}

int Sources::file_of(const Site& site) const {
  for (std::size_t i = 0; i < files_.size(); ++i) {
    if (files_[i].path == site.file) return static_cast<int>(i);
  }
  return -1;
}

const std::string* Sources::line(const Site& site) const {
  const int file = file_of(site);
  if (file < 0 || site.line < 1 || site.line > files_[at(file)].lines.size()) return nullptr;
  return &files_[at(file)].lines[site.line - 1];
}

std::string listing(const Report& report, const Sources& sources) {
  std::string out;
  for (std::size_t f = 0; f < sources.files().size(); ++f) {
    const Sources::File& file = sources.files()[f];
    out += "<h3 class=\"file\"><code>" + escaped(file_name(file.path)) + "</code></h3>\n";
    if (file.lines.empty()) {
      out += "<p class=\"soft\">The source is not at hand: <code>" + escaped(file.path) + "</code></p>\n";
      continue;
    }
    out +=
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Source\"><table class=\"source\">\n"
        "<thead><tr><th scope=\"col\"><span class=\"unseen\">Problems</span></th><th scope=\"col\">moved</th>"
        "<th scope=\"col\">use</th><th scope=\"col\">line</th><th scope=\"col\"></th></tr></thead>\n<tbody>\n";
    for (int line = file.first; line <= file.last; ++line) {
      std::int64_t moved = 0, used = 0, fetched = 0, problems = 0;
      bool accessed = false;
      for (std::size_t s = 0; s < report.sites.size(); ++s) {
        const Site& site = report.sites[s];
        if (static_cast<int>(site.line) != line || sources.file_of(site) != static_cast<int>(f)) continue;
        accessed = true;
        moved += site.bytes;
        used += site.request_bytes;
        fetched += kSector * site.request_sectors;
        for (const Finding& finding : report.findings) problems += finding.site == static_cast<int>(s) ? 1 : 0;
      }
      out += "<tr data-file=\"" + std::to_string(f) + "\" data-line=\"" + std::to_string(line) + "\"" +
             (problems > 0 ? " class=\"accessed faulty\""
              : accessed   ? " class=\"accessed\""
                           : "") +
             "><td class=\"mark\">" +
             (problems > 0
                  ? "<span title=\"" + plural(problems, "problem") + "\">✕<span class=\"unseen\">problem</span></span>"
                  : "") +
             "</td><td>" + (accessed ? bytes(static_cast<double>(moved)) : "") + "</td><td>" +
             (accessed ? percent(static_cast<double>(used), static_cast<double>(fetched)) : "") +
             "</td><td class=\"number\">" + std::to_string(line) + "</td><td class=\"code\">" +
             coloured(file.lines[at(line - 1)]) + "</td></tr>\n";
    }
    out += "</tbody></table></div>\n";
  }
  return out;
}

}  // namespace octile::tile::page
