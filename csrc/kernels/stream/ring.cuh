// A warp's stream of weights: blocks of 2 KB on their way through a ring in shared memory.
//
// A block is 16 rows of 128 columns (e4m3), 256 (e2m1) or 64 (bf16) in fragment order, contiguous, with its
// scales. The stream runs ahead of the products across tiles and matrices, so that neither the end of a tile
// nor the preparation of inputs drains it.
#pragma once

#include "stream.h"

#include "../common/cuda.cuh"

namespace rewright {

DEVICE int block_columns(int format) {
  return format >= kBf16Bf16 ? 64 : format == kE2m1Quantised || format == kE2m1Bf16 ? 256 : 128;
}
DEVICE int blocks_of(const Segment& s) {
  const int width = block_columns(s.format);
  return (s.columns + width - 1) / width;
}
DEVICE bool is_e2m1(int format) { return format == kE2m1Quantised || format == kE2m1Bf16; }

// A place in the stream: blocks [at, end) of one tile.
struct Cursor {
  const char* codes;           // of block `at`
  const unsigned char* scale;  // of block `at`: e4m3 a byte, e2m1 128 bytes
  int at, end, format, half;   // half: the last block of the tile has 128 columns only (e2m1)
  i64 below;                   // kRowsBf16: bytes from this lane's row to the one eight below
};

DEVICE Cursor open_tile(const Segment& s, int expert, int tile, int begin, int end) {
  Cursor c;
  c.format = s.format;
  c.at = begin;
  c.end = end;
  c.half = is_e2m1(s.format) && (s.columns & 255) ? blocks_of(s) - 1 : -1;
  c.below = 0;
  if (s.format == kRowsBf16) {  // rows behind the last one are read as it, and not stored
    const int row = tile * 16 + (lane_id() >> 2), upper = min(row, s.rows - 1), lower = min(row + 8, s.rows - 1);
    c.codes = (const char*)s.weight + ((i64)upper * s.columns + begin * 64 + (lane_id() & 3) * 8) * 2;
    c.below = (i64)(lower - upper) * s.columns * 2;
    c.scale = nullptr;
    return c;
  }
  const i64 row_bytes = is_e2m1(s.format) ? s.columns / 2 : s.format == kBf16Bf16 ? 2 * s.columns : s.columns;
  c.codes = (const char*)s.weight + (i64)expert * s.expert_bytes + (i64)tile * 16 * row_bytes + (i64)begin * 2048;
  c.scale = nullptr;
  if (is_e2m1(s.format)) {
    c.scale = s.scale + (i64)expert * s.expert_scale_bytes + (i64)tile * (s.columns / 128) * 64 + begin * 128;
  } else if (s.format != kBf16Bf16) {
    c.scale = s.scale + (i64)expert * s.expert_scale_bytes + (i64)(tile >> 3) * (s.columns / 128) + begin;
  }
  return c;
}

// Starts the copy of the cursor's block to a slot and moves the cursor on.
DEVICE void fetch(Cursor& c, char* slot, int lane) {
  if (c.format == kRowsBf16) {
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
  if (c.at != c.half) {
    copy_async(to + 1024, from + 1024);
    copy_async(to + 1536, from + 1536);
  }
  if (is_e2m1(c.format)) {
    if (lane < (c.at == c.half ? 4 : 8)) copy_async(slot + 2048 + lane * 16, c.scale + lane * 16);
    c.scale += 128;
  } else if (c.scale != nullptr) {  // the word that holds the byte
    if (lane == 0) copy_async_word(slot + 2048, (const void*)((u64)c.scale & ~(u64)3));
    c.scale += 1;
  }
  c.codes += 2048;
  ++c.at;
}

// The reader's side of `fetch`: its place moves on.
DEVICE void pass(Cursor& c) {
  ++c.at;
  if (c.scale != nullptr && !is_e2m1(c.format)) ++c.scale;
}

}  // namespace rewright
