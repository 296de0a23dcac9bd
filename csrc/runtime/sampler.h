// Choice of the next token from logits.
#pragma once

#include <array>
#include <cstdint>

namespace rewright {

// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): random bits as a
// function of a key and a counter, so the n-th draw of a request never depends on what else runs.
std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter);

// A token id from logits[count]. temperature 0 takes the largest logit, of equal ones the lower id;
// otherwise logits are divided by it and a token is drawn from the smallest set of most likely tokens
// whose probability reaches top_p. `draw` counts the draws of the request. Throws PlanError where no
// logit is a number, or one is NaN.
int32_t sample(const float* logits, int64_t count, double temperature, double top_p, uint64_t seed, uint64_t draw);

}  // namespace rewright
