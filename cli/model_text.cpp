#include "model_text.h"

#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/support/console.h"

namespace octile::cli {

std::string size_text(std::uint64_t bytes) {
  constexpr double kThousand = 1000;
  const char* const units[] = {"bytes", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= kThousand && unit < 4; ++unit) value /= kThousand;
  return fixed(value, unit == 0 ? 0 : 1) + " " + units[unit];
}

std::string decibels(double value) {
  if (std::isnan(value)) return "NaN";
  return std::isinf(value) ? value > 0 ? "exact" : "-inf" : fixed(value, 2);
}

std::string in_decibels(double value) { return decibels(value) + (std::isfinite(value) ? " dB" : ""); }

std::string counted(std::size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string shape_text(const checkpoint::Layer& layer) { return checkpoint::shape_text({layer.n, layer.k}); }

nlohmann::json number(double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(nullptr); }

std::string json_text(const nlohmann::json& document) {
  return document.dump(2, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::string error_text(double value) {
  constexpr double kSmallest = 1e-4;  // of which six places show three digits
  if (!(value != 0 && std::fabs(value) < kSmallest)) return fixed(value, 6);
  char text[32];
  std::snprintf(text, sizeof text, "%.2e", value);
  return text;
}

std::string warnings_text(const std::vector<std::string>& warnings) {
  std::string text = warnings.empty() ? "" : "\n";
  for (const std::string& warning : warnings) text += "warning: " + warning + "\n";
  return text;
}

std::string reasons_text(const std::vector<checkpoint::LeftOut>& left_out) {
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const checkpoint::LeftOut& left : left_out) by_reason[left.reason].push_back(checkpoint::printable(left.name));
  std::string text;
  for (const auto& [reason, names] : by_reason) {
    constexpr std::size_t kShown = 3;
    text += "  " + checkpoint::printable(reason) + ": ";
    for (std::size_t i = 0; i < names.size() && i < kShown; ++i) text += (i > 0 ? ", " : "") + names[i];
    if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
    text += "\n";
  }
  return text;
}

}  // namespace octile::cli
