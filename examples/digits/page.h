// The demo's page: one HTML file that needs nothing else, no network and no scripts.
#pragma once

#include <string>

#include "experiment.h"

namespace octile::digits {

std::string demo_page(const Result& result, const Digits& digits);

// How a way or a format differs from its f32 twin, in points: "+0.06", "-0.11".
std::string difference(double accuracy, double f32_accuracy);

}  // namespace octile::digits
