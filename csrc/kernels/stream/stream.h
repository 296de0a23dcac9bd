// Parameters of the streaming kernels (stream.cu): matrix products of a step of at most eight tokens, with
// what prepares their inputs and what takes up their results.
#pragma once

#include "../common/order.h"

namespace rewright {

constexpr int kMostWarps = 12;  // of a block
constexpr int kMostFixed = 128;  // calibrated scales of an input
constexpr int kMostSegments = 8, kMostInputs = 3, kMostTokens = 8, kMostChoices = 8;
constexpr int kMostPairs = kMostTokens * kMostChoices;
constexpr int kSlotBytes = 2048 + 128;  // one block: 2 KB of codes, and its scales
constexpr int kPartialBlocks = 132, kPartialColumns = 32, kEpsColumn = 30;  // ir/carried.py

constexpr int kExpertWarps = 12, kExpertWarpsPerTile = 6, kExpertStages = 3;  // of the experts' sum

// A set of formats or kinds.
template <int... kMembers>
constexpr unsigned kMask = (... | (1u << kMembers));
constexpr unsigned kAllFormats = 0x3f, kAllKinds = 0x1f;

// What a matrix holds, and what it is multiplied with.
enum WeightFormat : int {
  kE4m3Quantised,  // mma8 with a scale per 128 x 128; the input is quantised: fp16 values, a scale per 128
  kE4m3Bf16,       // the same; the input is bf16
  kE2m1Quantised,  // mma4 with mma4_scale; the input is quantised
  kE2m1Bf16,
  kBf16Bf16,       // mma16
  kRowsBf16,       // bf16 row by row: matrices whose rows fill no tiles
};

// One matrix [rows, columns] in tiles of 16 rows, or one per expert.
struct Segment {
  const void* weight;
  const unsigned char* scale;
  void* out;                // row r of the step at out + r * out_pitch
  long long out_pitch;
  long long expert_bytes, expert_scale_bytes;  // from one expert to the next
  int format, rows, tiles, columns, input;
  int tiles_per_group;      // of grouped matrices: group g reads input columns g * columns..; 0: one group
  int out_f32, experts;     // experts: one matrix per expert, a row of `out` per token and choice
  short begins[kMostWarps + 4];  // of slice s of a tile's blocks; the slice ends where the next begins
};

// Where the rows of an input go: any may be null. `values` are fp16 codes times 2^-8 with `exponents`.
struct Prepared {
  unsigned short *bf16, *values;
  unsigned char *exponents, *codes;
  long long bf16_pitch, values_pitch, exponents_pitch, codes_pitch;  // bytes
};

enum InputKind : int {
  kGiven,   // x as it is, bf16
  kCodes,   // e4m3 codes and scales
  kRow,     // x, normed where `gamma` is given
  kStreams, // streams collapsed with coefficients from mixing logits, normed where `gamma` is given
  kGated,   // silu(min(x, limit)) * clamp(up) * route weight
};

// One input of a launch: how it is made, and where it lies for the products.
struct Input {
  int kind, columns, rows;
  const void *x, *up;
  const unsigned char* scale;
  const float* route;         // of kGated: a weight per row, or null
  long long x_pitch, up_pitch, scale_pitch;
  const void* gamma;
  int gamma_f32;
  float eps, limit;
  // kStreams
  const float* mix;           // logits f32[rows,M] or, with `partials`, their parts
  int partials, streams, logits;  // n, M
  long long mix_pitch;
  const void *mix_scale, *mix_base;
  int scale_f32, base_f32;
  float hc_eps;
  int head, iterations;
  float *pre, *post, *comb;   // results of hc_split, or null
  long long pre_pitch, post_pitch, comb_pitch;  // bytes from token to token; comb: from row to row
  // Where it goes
  Prepared results;           // values that leave the launch
  Prepared staged;            // of launches of several tokens: the products' operands
  int shared_offset, shared_exponents;  // of launches of one token: theirs in shared memory, bytes
  int bf16, quantised;        // which of them the products read
  // Calibrated scales, e8m0 per 128, the same for all rows; else scales are found by a row's largest values.
  // They lie here and not in the artifact's memory, from where they would come a microsecond later.
  int calibrated;
  unsigned char fixed[kMostFixed];
};

// Experts of every token.
struct Routing {
  int kind;                   // 0 none, 1 by score, 2 by table, 3 given in `experts`
  int count, choices;         // E, k
  const float* logits;        // f32[M,E]
  long long logits_pitch;
  const void* bias;
  int bias_f32;
  const void* table;          // [V,k]
  int table_i64, vocabulary;
  const int* tokens;
  float scale;
  int* experts;               // i32[M,k]
  float* weights;             // f32[M,k]
  long long experts_pitch, weights_pitch;
};

// The residual streams behind a product: X' = post y + comb X, and the parts of the next mixing logits.
struct Combine {
  int on, streams, logits, dim;
  const unsigned short* before;  // bf16[M,n,D]
  unsigned short* after;
  const float *post, *comb;
  long long before_pitch, after_pitch, post_pitch, comb_pitch;  // bytes from row (last axis) to row
  const float* fn;            // f32[logits, n * D], null where no logits are formed
  float* partials;            // f32[132][M][32]
  float eps;                  // of the norm in the mixing logits
  const unsigned short* shared;  // bf16[M,D] that is added to the sum over experts, or null
  long long shared_pitch;
  int slots, fetches_fn;      // most tiles of a block; whether shared memory has room for their part of fn
};

// Shared memory of a block for the tiles behind which streams are combined (combine.cuh: Kept).
constexpr int kKeptWeights = 20, kStreamRow = 4 * 16;  // post and comb of a token; the streams in a tile's columns
constexpr int kept_bytes(const Combine& c, int tokens, bool with_fn) {
  const int floats = c.slots * tokens * (16 + kStreamRow + kStreamRow / 2) + (tokens * kKeptWeights + 3) / 4 * 4;
  return 4 * (floats + (with_fn ? c.slots * c.logits * c.streams * 16 : 0));
}

struct alignas(16) StreamParams {
  Segment segments[kMostSegments];
  Input inputs[kMostInputs];
  Routing routing;
  Combine combine;
  const int* n_valid;         // of each sequence
  int tokens_per_sequence;
  int count, inputs_count;
  int rows;                   // tokens of the step
  int jobs, expert_tiles;     // tiles of all plain segments; of one expert's matrices
  int warps_per_tile;
  int side_by_side;           // a block's tiles are neighbours
  int streamers;              // blocks that stream; those behind them prepare what leaves the launch
  int shared_sums, shared_kept, shared_scratch;  // offsets in shared memory, bytes; the rings come first
};

// The parameters lie in the card's memory, from where a block reads them at once: one by one out of the
// constant bank, each first touch would take as long.
struct StreamLaunch {
  const StreamParams* params;
  Order order;
};

}  // namespace rewright
