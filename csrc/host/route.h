// Choice of experts for a token, and the activation between their products.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "../runtime/kernel.h"

namespace rewright {

constexpr int64_t kMostChoices = 64;  // experts of one token

// Experts and weights of tokens: by the scores of their logits f32[B,T,E] and a bias [E], or by a table of
// ids [V,k] that the token's id i32[B,T] indexes.
class ExpertChoice {
 public:
  // Either `bias` or `table` and `tokens` is present. `k` counts for a choice by score; the table has its own.
  ExpertChoice(const CallSite& site, const Tensor& logits, const Tensor& bias, const Tensor& table, const Tensor& tokens,
               int64_t k, float scale);

  int64_t experts() const { return logits_.cols(); }
  int k() const { return k_; }

  // Ids and weights [k] of token `row` = b * T + t, which is valid; best first, equal scores by ascending id.
  // scratch holds 2 * experts() floats.
  void choose(int64_t row, int32_t* ids, float* weights, float* scratch) const;

 private:
  const Step* step_;
  Tensor logits_, table_, tokens_;
  std::vector<float> bias_;
  int k_;
  float scale_;
};

// out[i] = silu(min(gate[i], limit)) * clamp(up[i], -limit, limit) (* *weight), not yet rounded; out may be gate
// or up. Elements from `in_vectors` on are those that the reference computes with the C library (math.h).
void swiglu_row(const float* gate, const float* up, int64_t count, const float* weight, float limit, float* out,
                int64_t in_vectors = std::numeric_limits<int64_t>::max());

}  // namespace rewright
