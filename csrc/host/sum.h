// Sums in a stated order, whatever the vector width of the machine: the order in which the reference
// (torch's reductions on a CPU with 8 lanes) sums, so that both agree to the last bit.
#pragma once

#include <cstdint>

namespace rewright {

// Sum of x[count]: eight lanes, four running sums each, cascaded every 16 (or more) terms.
float sum_in_order(const float* x, int64_t count);

// The same for values that are bf16: pairs eight apart are added first.
float sum_in_order_bf16(const float* x, int64_t count);

// Sum of squares of x[count] over count, in that order; x * x is rounded before it is added.
float mean_square(const float* x, int64_t count);

// The same for values that are bf16, x * x rounded to bf16: summed as sum_in_order_bf16 does.
float mean_square_bf16(const float* x, int64_t count);

}  // namespace rewright
