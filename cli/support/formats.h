// What --format names.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "octile/types.h"

namespace octile::cli {

struct Format {
  WeightFormat weight;
  Activation activation;
};
inline const std::map<std::string, Format> kFormats = {
    {"w8a8", {WeightFormat::s8_per_channel, Activation::dynamic_per_token}},
    {"w8a8-static", {WeightFormat::s8_per_channel, Activation::static_per_tensor}},
    {"w8a16", {WeightFormat::s8_per_channel, Activation::none}},
    {"w4a16", {WeightFormat::s4_group, Activation::none}},
    {"w4a8", {WeightFormat::s4_group, Activation::dynamic_per_token}}};

template <class Value>
std::vector<std::string> names_of(const std::map<std::string, Value>& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

}  // namespace octile::cli
