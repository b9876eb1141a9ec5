// Checks of numbers on the command line, which CLI11's own let a NaN pass.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

namespace octile::cli {

// name: what the pages call the option's value; empty: its type.
inline CLI::Validator finite_number(const std::string& name, bool positive) {
  const auto check = [positive](const std::string& text) {
    double value = 0;
    const bool given = CLI::detail::lexical_cast(text, value) && std::isfinite(value) && (value > 0 || !positive);
    return given ? "" : text + (positive ? " is not a positive number" : " is not a finite number");
  };
  return CLI::Validator(check, name);
}

}  // namespace octile::cli
