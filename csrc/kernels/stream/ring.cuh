// A warp's stream of weights: blocks of 2 KB on their way through a ring in shared memory.
//
// A block is 16 rows of 128 columns (e4m3), 256 (e2m1) or 64 (bf16) in fragment order, contiguous, with its
// scales. The stream runs ahead of the products across tiles and matrices, so that neither the end of a tile
// nor the preparation of inputs drains it.
#pragma once

#include "stream.h"

#include "../common/cuda.cuh"

namespace rewright {

// Whether a matrix is stored in one of the formats kSome, of the formats kFormats that a launch has.
template <unsigned kSome, unsigned kFormats>
DEVICE bool is_one_of(int format) {
  if ((kFormats & kSome) == 0) return false;
  return (kFormats & ~kSome) == 0 || (kSome >> format & 1u) != 0;
}
constexpr unsigned kE4m3Formats = kMask<kE4m3Quantised, kE4m3Bf16>, kE2m1Formats = kMask<kE2m1Quantised, kE2m1Bf16>;
constexpr unsigned kBf16Formats = kMask<kBf16Bf16, kRowsBf16>;

template <unsigned kFormats>
DEVICE int blocks_of(const Segment& s) {
  const int shift = is_one_of<kBf16Formats, kFormats>(s.format) ? 6 : is_one_of<kE2m1Formats, kFormats>(s.format) ? 8 : 7;
  return (s.columns + (1 << shift) - 1) >> shift;
}

// A place in the stream: blocks [at, end) of one tile.
struct Cursor {
  const char* codes;           // of block `at`
  const unsigned char* scale;  // of block `at`: e4m3 a byte, e2m1 128 bytes
  int at, end, format, half;   // half: the last block of the tile has 128 columns only (e2m1)
  i64 below;                   // kRowsBf16: bytes from this lane's row to the one eight below
};

template <unsigned kFormats>
DEVICE Cursor open_tile(const Segment& s, int expert, int tile, int begin, int end) {
  Cursor c;
  c.format = s.format;
  c.at = begin;
  c.end = end;
  c.half = -1;
  c.below = 0;
  c.scale = nullptr;
  if (is_one_of<kMask<kRowsBf16>, kFormats>(s.format)) {  // rows behind the last one are read as it, and not stored
    const int row = tile * 16 + (lane_id() >> 2), upper = min(row, s.rows - 1), lower = min(row + 8, s.rows - 1);
    c.codes = (const char*)s.weight + ((i64)upper * s.columns + begin * 64 + (lane_id() & 3) * 8) * 2;
    c.below = (i64)(lower - upper) * s.columns * 2;
    return c;
  }
  const bool e2m1 = is_one_of<kE2m1Formats, kFormats>(s.format), bf16 = is_one_of<kBf16Formats, kFormats>(s.format);
  const i64 row_bytes = e2m1 ? s.columns / 2 : bf16 ? 2 * s.columns : s.columns;
  c.codes = (const char*)s.weight + (i64)expert * s.expert_bytes + (i64)tile * 16 * row_bytes + (i64)begin * 2048;
  if (e2m1) {
    if (s.columns & 255) c.half = blocks_of<kFormats>(s) - 1;
    c.scale = s.scale + (i64)expert * s.expert_scale_bytes + (i64)tile * (s.columns / 128) * 64 + begin * 128;
  } else if (!bf16) {
    c.scale = s.scale + (i64)expert * s.expert_scale_bytes + (i64)(tile >> 3) * (s.columns / 128) + begin;
  }
  return c;
}

// Starts the copy of the cursor's block to a slot and moves the cursor on.
template <unsigned kFormats>
DEVICE void fetch(Cursor& c, char* slot, int lane) {
  if (is_one_of<kMask<kRowsBf16>, kFormats>(c.format)) {
    UNROLL for (int j = 0; j < 2; ++j) {
      copy_async(slot + j * 1024 + lane * 16, c.codes + j * 64);
      copy_async(slot + j * 1024 + 512 + lane * 16, c.codes + j * 64 + c.below);
    }
    c.codes += 128;
    ++c.at;
    return;
  }
  const char* from = c.codes + lane * 16;
  char* to = slot + lane * 16;
  copy_async(to, from);
  copy_async(to + 512, from + 512);
  if ((kFormats & kE2m1Formats) == 0 || c.at != c.half) {
    copy_async(to + 1024, from + 1024);
    copy_async(to + 1536, from + 1536);
  }
  if (is_one_of<kE2m1Formats, kFormats>(c.format)) {
    if (lane < (c.at == c.half ? 4 : 8)) copy_async(slot + 2048 + lane * 16, c.scale + lane * 16);
    c.scale += 128;
  } else if (is_one_of<kE4m3Formats, kFormats>(c.format)) {  // the word that holds the byte
    if (lane == 0) copy_async_word(slot + 2048, (const void*)((u64)c.scale & ~(u64)3));
    c.scale += 1;
  }
  c.codes += 2048;
  ++c.at;
}

// The reader's side of `fetch`: its place moves on. `scale` counts the bytes of e4m3 blocks.
template <unsigned kFormats>
DEVICE void pass(Cursor& c) {
  ++c.at;
  if (is_one_of<kE4m3Formats, kFormats>(c.format)) ++c.scale;
}

}  // namespace rewright
