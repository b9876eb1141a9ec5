// Deprecated: the former name of linear.h, which solutions of puzzles 13 to 18 may include. To be removed in 0.2.
#pragma once

#include "puzzles/linear.h"
