// Octile: quantized linear layers, forward and backward. Everything of the C++ interface.
#pragma once

#include "octile/error.h"
#include "octile/grouped_linear.h"
#include "octile/linear.h"
#include "octile/plan.h"
#include "octile/quantize.h"
#include "octile/smooth_quant.h"
#include "octile/tensor.h"
#include "octile/tuning.h"
#include "octile/types.h"
#include "octile/weight_quantizer.h"
