// Text shared by inspect, quantize and compare.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "octile/checkpoint/layers.h"

namespace octile::cli {

std::string size_text(std::uint64_t bytes);                       // "86.7 MB"
std::string decibels(double value);                               // "42.13", or "exact" for an infinite one
std::string in_decibels(double value);                            // "42.13 dB", or "exact"
std::string counted(std::size_t count, const std::string& what);  // "1 layer", "14 layers"
std::string shape_text(const checkpoint::Layer& layer);

// A number, or null where JSON has none: the SQNR of equal values.
nlohmann::json number(double value);

// For --json. Escapes everything but ASCII: names come from files, and a terminal must not obey them.
std::string json_text(const nlohmann::json& document);
std::string error_text(double value);  // an error of weights: "0.001234", "1.2e-09"
// The last lines of a report.
std::string warnings_text(const std::vector<std::string>& warnings);

// One line per reason, with the first few names.
std::string reasons_text(const std::vector<checkpoint::LeftOut>& left_out);

}  // namespace octile::cli
