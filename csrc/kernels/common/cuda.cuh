// What every kernel is written with: short types, and the instructions that C++ has no word for.
//
// Kernels use these wrappers and CUDA's own intrinsics, never inline assembly of their own: compiled as
// plain C++ for a CPU (REWRIGHT_EMULATE), the same sources run under csrc/emulation, which gives each
// wrapper the meaning it has on the card. Everything here exists on SM80.
#pragma once

#ifdef REWRIGHT_EMULATE
#include "../../emulation/cuda.h"
#else
#define DEVICE __device__ __forceinline__
// Defines the kernel `name` of blocks of at most `threads`, `blocks` of which fit a multiprocessor; its
// parameters are one struct `p`.
#define KERNEL(name, Params, threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p)
// The dynamic shared memory of a block as 16-byte words.
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]
#endif
#define UNROLL _Pragma("unroll")

namespace rewright {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kAllLanes = 0xffffffffu;

#ifndef REWRIGHT_EMULATE

// Weights: read once, kept out of L1.
DEVICE uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// 16 bytes from global to shared memory, asynchronously.
DEVICE void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global)
               : "memory");
}
// The same of 4 bytes.
DEVICE void copy_async_word(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are under way.
template <int N>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// D[16,8] = A[16,16] B[16,8] + C, f32 sums. Lane l (g = l/4, t = l%4) holds of A the halves
// a0 = (row g, k 2t..2t+1), a1 = (row g+8, same k), a2 = (row g, k 2t+8..), a3 = (row g+8, k 2t+8..),
// of B b0 = (k 2t..2t+1, column g), b1 = (k 2t+8.., column g), of C and D (row g, columns 2t, 2t+1),
// (row g+8, same columns).
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same from zero.
DEVICE void mma_f16_first(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
DEVICE void mma_bf16_first(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// Four 8x8 matrices of 16-bit elements from shared memory; lane l gives the address of row l%8 of
// matrix l/8, r[i] receives of matrix i (row l/4, columns 2(l%4), +1); `trans`: (rows 2(l%4), +1, column l/4).
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}
DEVICE void load_matrices_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(row)) : "memory");
}

// Largest of all lanes' values.
DEVICE u32 warp_max_u32(u32 v) { return __reduce_max_sync(kAllLanes, v); }

// Two floats rounded to bf16, ties to even: `low` in the low half.
DEVICE u32 round_bf16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Two floats rounded to fp16, ties to even: `low` in the low half.
DEVICE u32 round_f16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// bf16 pairs: a * b, exact where the result is one.
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}

// A store that is made at once, of a word that the host reads meanwhile.
DEVICE void store_volatile(int* p, int v) { *(volatile int*)p = v; }
// __syncthreads for `warps` whole warps of the block, which name the same barrier, 1 to 15.
DEVICE void sync_warps(int barrier, int warps) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps * 32) : "memory"); }

// Counts among the blocks of a card: who has waited for a count sees what was written before it was raised.
// Seconds of waiting mean that it never will be; the launch then fails in place of hanging.
DEVICE void await_count(const int* p, int least) {
  constexpr int kMostRounds = 1 << 23;
  for (int round = 0;; ++round) {
    int v;
    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    if (v >= least) return;
    if (round == kMostRounds) __trap();
  }
}
DEVICE void add_release(int* p, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

#endif

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }

template <typename T>
DEVICE T warp_sum(T v) {
  UNROLL for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(kAllLanes, v, d);
  return v;
}
DEVICE float warp_max(float v) {
  UNROLL for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}

// Sum over the block, the same in every thread and on every run; `scratch` is shared memory of 33 floats.
DEVICE float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  __syncthreads();
  if (lane_id() == 0) scratch[warp_id()] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.f;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) total += scratch[w];
    scratch[32] = total;
  }
  __syncthreads();
  return scratch[32];
}

}  // namespace rewright
