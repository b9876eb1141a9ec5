// The tile language, with the executor that checks and the one that is fast. A kernel needs only octile/tile/context.h.
#pragma once

#include "octile/tile/checked.h"
#include "octile/tile/fast.h"
