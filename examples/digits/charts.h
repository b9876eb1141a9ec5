// The charts of the demo's page, as SVG.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "experiment.h"

namespace octile::digits {

std::string str(std::string_view text);

// The training loss of each way: a thin line for each seed, a thick one for their mean.
std::string loss_chart(const Result& result);

struct AccuracyRow {
  std::string_view id;
  std::string_view label;
  const PerSeed& accuracy;
};

// A dot for each seed, a stroke for their mean.
std::string accuracy_chart(const std::vector<AccuracyRow>& rows);

}  // namespace octile::digits
