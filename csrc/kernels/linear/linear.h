// Parameters of the kernel in linear.cu.
#pragma once

namespace rewright {

enum MatrixKind : int { kPlainE4m3, kPlainE2m1, kPlainBf16, kPlainF32, kPackedE4m3, kPackedE2m1, kPackedBf16 };

struct MatrixProductParams {
  const void* x;                 // rows of K, `x_pitch` bytes apart
  const unsigned char* x_scale;  // e8m0 per 128 where x_kind is 2
  const void* weight;            // [n,k], or one per expert
  const void* scale;
  void* out;
  const int* experts;            // i32[rows,choices], null where there is one matrix
  long long x_pitch, x_scale_pitch, out_pitch, experts_pitch, expert_bytes, expert_scale_bytes;
  int x_kind;                    // Element, or 2: e4m3 with scales
  int kind, n, k;                // MatrixKind
  int scale_f32, scale_packed, scale_columns, out_f32;
  int groups, out_flat;          // grouped: a row of x for each group, a row of out or one for all
  int choices, expert_count, x_by_choice;
};

}  // namespace rewright
