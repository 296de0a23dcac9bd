// Parameters of the kernels in route.cu.
#pragma once

namespace rewright {

constexpr int kMostExperts = 384;
constexpr int kMostChosen = 8;  // experts of a token

struct RouteParams {
  const float* logits;  // [B, tokens, experts]
  const void* bias;     // [experts]; null: experts are named by the table
  const void* table;    // ids [vocabulary, k]
  const int* ids;       // [B, tokens]
  const int* n_valid;
  int* chosen;     // [B, tokens, k]
  float* weights;  // like chosen
  long long logits_pitch, table_pitch, ids_pitch, chosen_pitch, weights_pitch;
  int rows, tokens, experts, k, bias_element, vocabulary, wide_ids;  // wide_ids: the table is i64, otherwise i32
  float scale;
};

}  // namespace rewright
