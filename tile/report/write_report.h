// The report of one checked launch as an HTML page: one file, no server, no network.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "octile/tile/report.h"

namespace octile::tile {

struct Tolerance {
  double absolute = 1e-3, relative = 1e-3;  // |value - expected| <= absolute + relative * |expected|
};

// What the page shows of a tensor beside the launch's own report, after the launch. Matched by name.
struct TensorValues {
  std::string name;
  std::vector<double> values;
  std::vector<double> expected;       // empty: not known
  std::vector<std::uint8_t> written;  // empty: all are; an unwritten element is wrong, whatever it holds
  Tolerance tolerance;
  std::vector<double> bounds;  // of each element's error, instead of the tolerance; empty: the tolerance

  double allowed(std::size_t i) const {
    if (i < bounds.size()) return bounds[i];
    const double size = expected[i] < 0 ? -expected[i] : expected[i];
    return tolerance.absolute + tolerance.relative * size;
  }
};

template <class T>
TensorValues tensor_values(const Array<T>& array) {
  TensorValues result;
  result.name = array.name();
  result.values.reserve(static_cast<std::size_t>(array.size()));
  for (std::int64_t i = 0; i < array.size(); ++i) {
    result.values.push_back(static_cast<double>(widen(array[i])));
    result.written.push_back(array.written(i) ? 1 : 0);
  }
  return result;
}

template <class T, class U>
TensorValues tensor_values(const Array<T>& array, const std::vector<U>& expected, Tolerance tolerance = {}) {
  TensorValues result = tensor_values(array);
  result.tolerance = tolerance;
  result.expected.reserve(expected.size());
  for (const U& value : expected) {
    if constexpr (std::is_arithmetic_v<U>) {
      result.expected.push_back(static_cast<double>(value));
    } else {
      result.expected.push_back(static_cast<double>(widen(value)));
    }
  }
  return result;
}

struct SourceText {
  std::string file;  // as the compiler saw it, or the end of that path
  std::string text;
};

struct ReportPage {
  std::string title;                                       // empty: the kernel's name
  std::string statement;                                   // what the kernel computes, in a sentence
  std::vector<std::pair<std::string, std::string>> facts;  // sizes, blocks, seed ..., in the order shown
  std::string command;                                     // that makes this page again
  std::string version;
  std::vector<SourceText> sources;  // a file that is not among them is read from disk
  std::vector<TensorValues> tensors;
};

enum class Verdict : std::uint8_t {
  correct,    // no finding, and all expected values are met
  unchecked,  // no finding; no expected values to compare with
  wrong,      // no finding, but wrong values
  unsafe      // findings, whatever the values
};

struct WrongElement {
  int tensor = 0;
  std::int64_t index = 0;
  double value = 0, expected = 0;
  bool written = true;
  std::int64_t program = -1;  // who stored it last; -1: nobody, or its record was left out
  int site = -1;
  std::int32_t operation = -1;
};

struct Judgement {
  Verdict verdict = Verdict::unchecked;
  std::int64_t compared = 0, wrong = 0;  // elements
  std::vector<std::int64_t> wrong_of;    // per tensor of the report
  std::vector<WrongElement> worst;       // at most 12: the first, and those farthest off
};

Judgement judge(const Report& report, const ReportPage& page);

// The record that stored to an element of a tensor last, or -1.
int last_store(const Report& report, int tensor, std::int64_t index);

std::string report_html(const Report& report, const ReportPage& page);
// Replaces another page, but no other file. Throws std::runtime_error if the file cannot be written.
void write_report(const std::string& path, const Report& report, const ReportPage& page);

}  // namespace octile::tile
