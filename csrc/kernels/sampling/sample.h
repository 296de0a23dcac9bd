// Parameters of the kernel in sample.cu, and what it keeps of each row between steps.
#pragma once

namespace rewright {

constexpr int kMostStops = 8;

// How the tokens of one row are drawn, and how far the row is. Lies in the card's memory.
struct SampleRow {
  double temperature, top_p;       // temperature 0: the largest logit
  unsigned long long seed, draw;   // of the random numbers; `draw` counts the draws of the request
  unsigned step;                   // tokens drawn since the row began: where in the ring the next one goes
  int left;                        // tokens that may still be drawn
  int stops, stop[kMostStops];     // tokens that end the row
  int unused;
};

// What stands in the ring in the place of a token.
constexpr int kNothingYet = -1, kNoneFinite = -2, kNaNFirst = -3;  // kNaNFirst - i: the logit of token i is NaN

struct SampleParams {
  const float* logits;          // [rows, vocabulary], rows `pitch` bytes apart
  SampleRow* rows;              // [rows]
  unsigned long long* weights;  // [rows, vocabulary], working memory
  int *ids, *pos, *n_valid;     // [rows]: inputs of the step that made the logits, and of the next one
  int* ring;                    // [ring_length, ring_rows] in memory that the host reads
  long long pitch;
  int vocabulary, ring_length, ring_rows;
};

}  // namespace rewright
