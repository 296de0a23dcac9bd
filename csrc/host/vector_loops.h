// The loops of vector.h over a type V of 16 floats. Included by one source file for each instruction
// set, inside a namespace of its own; nothing here may be shared between them.
//
// V has: load(const float*), store(float*), set(float), widen_bf16/half/e4m3/e8m0 from 16 elements,
// widen_e2m1(16 bytes, even, odd), and mul, add, fma.

template <int R>
inline void chain_rows(const float* panel, int64_t ldp, const float* x, int64_t ldx, int64_t count, float* sums) {
  V sum[R];
  for (int r = 0; r < R; ++r) sum[r] = V::load(sums + r * kTile);
  for (int64_t k = 0; k < count; ++k) {
    const V w = V::load(panel + k * ldp);
    for (int r = 0; r < R; ++r) sum[r] = V::fma(V::set(x[r * ldx + k]), w, sum[r]);
  }
  for (int r = 0; r < R; ++r) sum[r].store(sums + r * kTile);
}

void chain(const float* panel, int64_t ldp, const float* x, int64_t ldx, int64_t rows, int64_t count, float* sums) {
  for (; rows >= kMostRows; rows -= kMostRows, x += kMostRows * ldx, sums += kMostRows * kTile) {
    chain_rows<kMostRows>(panel, ldp, x, ldx, count, sums);
  }
  for (; rows >= 3; rows -= 3, x += 3 * ldx, sums += 3 * kTile) chain_rows<3>(panel, ldp, x, ldx, count, sums);
  if (rows == 2) chain_rows<2>(panel, ldp, x, ldx, count, sums);
  if (rows == 1) chain_rows<1>(panel, ldp, x, ldx, count, sums);
}

void lanes(const float* panel, const float* x, int64_t count, float* sums) {
  V sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = V::load(sums + i * kTile);
  for (int64_t k = 0; k < count; k += 4) {
    for (int i = 0; i < 4; ++i) {
      sum[i] = V::add(sum[i], V::mul(V::set(x[k + i]), V::load(panel + (k + i) * kTile)));
    }
  }
  for (int i = 0; i < 4; ++i) sum[i].store(sums + i * kTile);
}

void lanes64(const float* panel, const float* x, int64_t count, float* sums) {
  for (int64_t lane = 0; lane < 64; ++lane) {
    V sum = V::load(sums + lane * kTile);
    for (int64_t k = lane; k < count; k += 64) sum = V::fma(V::set(x[k]), V::load(panel + k * kTile), sum);
    sum.store(sums + lane * kTile);
  }
}

void widen_bf16(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kTile) V::widen_bf16(from + i).store(to + i);
}

void widen_half(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kTile) V::widen_half(from + i).store(to + i);
}

void widen_e4m3(const uint8_t* from, int64_t count, float scale, float* to) {
  const V factor = V::set(scale);
  for (int64_t i = 0; i < count; i += kTile) V::mul(V::widen_e4m3(from + i), factor).store(to + i);
}

void widen_e2m1(const uint8_t* from, int64_t pairs, const float* scales, float* to) {
  const V factor = V::load(scales);
  for (int64_t p = 0; p < pairs; ++p) {
    V even, odd;
    V::widen_e2m1(from + p * kTile, even, odd);
    V::mul(even, factor).store(to + 2 * p * kTile);
    V::mul(odd, factor).store(to + (2 * p + 1) * kTile);
  }
}

void widen_e8m0(const uint8_t* from, float* to) { V::widen_e8m0(from).store(to); }

void exp(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = exp_rounded(x[i]);
}

void exps_ulp1(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = exp_ulp1(x[i]);
}

void softpluses(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = softplus(x[i]);
}
