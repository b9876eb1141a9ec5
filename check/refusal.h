// Why a plan has not chosen a row, according to its texts.
#pragma once

#include <string>

namespace octile::check {

// What the row answered: the rest of its line in an explanation, or in the error of a plan that found no row. Empty
// where it has no line.
std::string refusal_of(const std::string& row, const std::string& text);

// An error without the rows of other devices than this one, on one line.
std::string one_line(const std::string& error, const std::string& device);

}  // namespace octile::check
