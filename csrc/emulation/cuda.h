// CUDA's words for kernels that run on a CPU, one fiber for each thread of a block.
//
// Included by kernels/common/cuda.cuh in place of the compiler's own when REWRIGHT_EMULATE is defined.
// Blocks run one after another; the threads of a block take turns and wait for each other at the same
// places as on a card, so that a missing barrier shows up as a wrong result, and one that not all
// threads reach as an error. Shared memory is filled with NaN before every block. What it cannot show:
// races between warps that a card might win, and anything about speed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulation.h"

#define DEVICE inline
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) alignas(n)
#define __shared__ static
#define KERNEL(name, Params, threads, blocks)                                                   \
  static void name(const Params& p);                                                            \
  static const rewright::emulation::Registered registered_##name(                               \
      #name, [](const void* params) { name(*static_cast<const Params*>(params)); }, sizeof(Params)); \
  static void name([[maybe_unused]] const Params& p)
#define __constant__ static const
#define DYNAMIC_SHARED(name) uint4* name = reinterpret_cast<uint4*>(rewright::emulation::dynamic_shared())

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace rewright::emulation {

struct Warp {
  unsigned arrived = 0, generation = 0;
  alignas(16) uint64_t slots[2][32];  // what each lane shows the others, by parity of the exchange
  uint32_t a[2][32][4], b[2][32][2];  // operands of matrix instructions
  const void* rows[2][32];
};

struct Thread {
  dim3 index;
  int lane = 0;
  Warp* warp = nullptr;
};

extern Thread* current;  // the thread that runs
extern dim3 block_index, block_size, grid_size;

void* dynamic_shared();
void fail(const char* what);  // the grid's run ends with this error once its blocks have ended
void block_barrier();       // __syncthreads
void group_barrier(int barrier, unsigned threads);  // bar.sync, of the block's 16
void warp_barrier(unsigned mask);

template <typename T>
T exchange(unsigned mask, T value, int from) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = *current->warp;
  const unsigned parity = warp.generation & 1;
  std::memcpy(&warp.slots[parity][current->lane], &value, sizeof(T));
  warp_barrier(mask);
  T got;
  std::memcpy(&got, &warp.slots[parity][from & 31], sizeof(T));
  return got;
}

unsigned ballot(unsigned mask, bool predicate);
unsigned reduce_max(unsigned mask, unsigned value);
void matrix_multiply(float (&c)[4], const float (&from)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bf16);
void load_matrices(uint32_t (&r)[4], const void* row, bool transposed);

}  // namespace rewright::emulation

#define threadIdx (rewright::emulation::current->index)
#define blockIdx (rewright::emulation::block_index)
#define blockDim (rewright::emulation::block_size)
#define gridDim (rewright::emulation::grid_size)

inline void __syncthreads() { rewright::emulation::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { rewright::emulation::warp_barrier(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
template <typename T>
T __shfl_sync(unsigned mask, T v, int lane) { return rewright::emulation::exchange(mask, v, lane); }
template <typename T>
T __shfl_xor_sync(unsigned mask, T v, int bits) { return rewright::emulation::exchange(mask, v, rewright::emulation::current->lane ^ bits); }
template <typename T>
T __shfl_down_sync(unsigned mask, T v, int by) {
  const int from = rewright::emulation::current->lane + by;
  return rewright::emulation::exchange(mask, v, from > 31 ? rewright::emulation::current->lane : from);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T v, int by) {
  const int from = rewright::emulation::current->lane - by;
  return rewright::emulation::exchange(mask, v, from < 0 ? rewright::emulation::current->lane : from);
}
inline unsigned __ballot_sync(unsigned mask, bool p) { return rewright::emulation::ballot(mask, p); }
inline bool __any_sync(unsigned mask, bool p) { return rewright::emulation::ballot(mask, p) != 0; }
inline bool __all_sync(unsigned mask, bool p) { return rewright::emulation::ballot(mask, p) == mask; }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return rewright::emulation::reduce_max(mask, v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }

template <typename T>
T __ldg(const T* p) { return *p; }
template <typename T>
T __ldcg(const T* p) { return *p; }
template <typename T>
void __stcg(T* p, T v) { *p = v; }

template <typename T>
T rewright_bits(const void* p) { T v; std::memcpy(&v, p, sizeof(T)); return v; }
inline float __uint_as_float(unsigned v) { return rewright_bits<float>(&v); }
inline float __int_as_float(int v) { return rewright_bits<float>(&v); }
inline unsigned __float_as_uint(float v) { return rewright_bits<unsigned>(&v); }
inline int __float_as_int(float v) { return rewright_bits<int>(&v); }
inline float __fadd_rn(float a, float b) { volatile float s = a + b; return s; }
inline float __fmul_rn(float a, float b) { volatile float p = a * b; return p; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::fabs;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

// Blocks run one after another and threads take turns, so a plain update is atomic.
template <typename T, typename V>
T atomicAdd(T* p, V v) { const T old = *p; *p = old + static_cast<T>(v); return old; }
template <typename T, typename V>
T atomicMax(T* p, V v) { const T old = *p; *p = std::max(old, static_cast<T>(v)); return old; }
template <typename T, typename V>
T atomicOr(T* p, V v) { const T old = *p; *p = old | static_cast<T>(v); return old; }
template <typename T, typename V>
T atomicExch(T* p, V v) { const T old = *p; *p = static_cast<T>(v); return old; }

namespace rewright {

inline uint4 load_stream(const void* p) { return *static_cast<const uint4*>(p); }
inline void copy_async(void* shared, const void* global) { std::memcpy(shared, global, 16); }
inline void copy_async_word(void* shared, const void* global) { std::memcpy(shared, global, 4); }
inline void copy_commit() {}
template <int N>
void copy_wait() {}
inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::matrix_multiply(c, c, a, b0, b1, false);
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::matrix_multiply(c, c, a, b0, b1, true);
}
inline void mma_f16_first(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const float zero[4] = {};
  emulation::matrix_multiply(c, zero, a, b0, b1, false);
}
inline void mma_bf16_first(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const float zero[4] = {};
  emulation::matrix_multiply(c, zero, a, b0, b1, true);
}
inline void load_matrices(uint32_t (&r)[4], const void* row) { emulation::load_matrices(r, row, false); }
inline void load_matrices_trans(uint32_t (&r)[4], const void* row) { emulation::load_matrices(r, row, true); }
inline uint32_t warp_max_u32(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }
inline uint32_t round_bf16x2(float low, float high) {
  const auto round = [](float f) {
    const unsigned u = __float_as_uint(f);
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  };
  return round(low) | round(high) << 16;
}
inline uint32_t round_f16x2(float low, float high) {
  const auto round = [](float f) -> uint32_t {  // finite, no larger than an fp16 can be
    const float magnitude = std::fabs(f);
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    exponent = magnitude == 0.f ? -14 : std::max(exponent - 1, -14);
    const uint32_t units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // of the last place
    return (units + (static_cast<uint32_t>(exponent + 14) << 10)) | (std::signbit(f) ? 0x8000u : 0u);
  };
  return round(low) | round(high) << 16;
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  const auto round = [](float f) {
    const unsigned u = __float_as_uint(f);
    return (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  };
  const unsigned low = round(__uint_as_float(a << 16) * __uint_as_float(b << 16));
  const unsigned high = round(__uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u));
  return low | high << 16;
}
inline void store_volatile(int* p, int v) { *const_cast<volatile int*>(p) = v; }
inline void sync_warps(int barrier, int warps) { emulation::group_barrier(barrier, static_cast<unsigned>(warps) * 32); }
inline void await_count(const int* p, int least) {
  if (*p < least) emulation::fail("waits for a launch that has not run");
}
inline void add_release(int* p, int v) { *p += v; }

}  // namespace rewright
