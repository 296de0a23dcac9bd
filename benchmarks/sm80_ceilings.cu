// What a card can do at best, measured with kernels that do nothing else: a read-only stream by bytes of a
// launch, a copy, an empty launch, a launch that depends on the one before, a barrier of the whole grid.
// Prints one JSON object. Launches run as nodes of a CUDA graph, so a time is that of a node in a chain;
// streams go through a pool of 4 GiB, so that nothing is left in the L2 cache of what a node reads.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#define CHECK(call)                                                                                   \
  do {                                                                                                \
    cudaError_t error_ = (call);                                                                      \
    if (error_ != cudaSuccess) {                                                                      \
      fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, cudaGetErrorString(error_));              \
      exit(1);                                                                                        \
    }                                                                                                 \
  } while (0)

namespace {

using u32 = uint32_t;

__device__ __forceinline__ uint4 load_stream(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ u32 sum(const uint4& v) { return v.x + v.y + v.z + v.w; }

// Fills with words that differ, so that sums can be compared.
__global__ void fill(uint4* p, size_t count) {
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
    u32 x = (u32)i * 2654435761u ^ (u32)(i >> 30);
    x ^= x >> 16;
    p[i] = make_uint4(x, x * 3, x * 5, x * 7);
  }
}

__global__ void plain_sum(const uint4* p, size_t count, u32* out) {
  u32 s = 0;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) s += sum(p[i]);
  atomicAdd(out, s);
}

// Reads units of 512 bytes, a warp one at a time, Loads of them in flight. Warps of the grid take turns, or
// (contiguous) those of a block within the block's own part. Each thread leaves its sum.
template <int Loads>
__global__ void __launch_bounds__(512) read_stream(const uint4* p, size_t bytes, u32* out, bool contiguous) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, units = (u32)(bytes / 512);
  const u32 first = contiguous ? (u32)((size_t)units * blockIdx.x / gridDim.x) + warp : blockIdx.x * warps + warp;
  const u32 end = contiguous ? (u32)((size_t)units * (blockIdx.x + 1) / gridDim.x) : units;
  const u32 stride = contiguous ? warps : gridDim.x * warps;
  const int n = first < end ? (int)((end - 1 - first) / stride) + 1 : 0;
  const uint4* q = p + (size_t)first * 32 + lane;
  const size_t step = (size_t)stride * 32;
  u32 s = 0;
  int i = 0;
  for (; i + Loads <= n; i += Loads, q += Loads * step) {
    uint4 v[Loads];
#pragma unroll
    for (int u = 0; u < Loads; ++u) v[u] = load_stream(q + u * step);
#pragma unroll
    for (int u = 0; u < Loads; ++u) s += sum(v[u]);
  }
  for (; i < n; ++i, q += step) s += sum(load_stream(q));
  out[(size_t)blockIdx.x * blockDim.x + threadIdx.x] = s;
}

__global__ void __launch_bounds__(512) copy_stream(const uint4* p, uint4* to, size_t count) {
  const size_t stride = (size_t)gridDim.x * blockDim.x;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = load_stream(p + i + u * stride);
#pragma unroll
    for (int u = 0; u < 4; ++u) to[i + u * stride] = v[u];
  }
  for (; i < count; i += stride) to[i] = load_stream(p + i);
}

__global__ void empty(int* p) {
  if (p == (int*)1) *p = 1;
}

__global__ void chain(const int* in, int* out) {  // every block reads what the launch before wrote
  if (threadIdx.x == 0) {
    const int v = *(volatile const int*)in;
    if (blockIdx.x == 0 || v < 0) *out = v + 1;
  }
}

// n barriers; before each a block leaves its count, behind it it reads its neighbour's. All blocks must run
// at once; a block that waits too long counts an error and gives up.
__global__ void barriers(u32* arrived, int n, int* slots, int* errors) {
  __shared__ int dead;
  if (threadIdx.x == 0) dead = 0;
  __syncthreads();
  for (int i = 0; i < n; ++i) {
    if (threadIdx.x == 0) __stcg(slots + (i & 1) * gridDim.x + blockIdx.x, i);
    __syncthreads();
    if (threadIdx.x == 0 && !dead) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
      const u32 want = (u32)(i + 1) * gridDim.x;
      u32 v;
      int spins = 0;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(arrived) : "memory");
      } while (v < want && ++spins < (1 << 21));
      if (v < want) {
        dead = 1;
        atomicAdd(errors, 1);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && __ldcg(slots + (i & 1) * gridDim.x + (blockIdx.x + 1) % gridDim.x) != i) atomicAdd(errors, 1 << 16);
    if (dead) return;
  }
}

constexpr size_t kPool = (size_t)4 << 30;
constexpr int kNodes = 500;  // of a chain of launches that take no time of their own

cudaStream_t stream;
int failures = 0;

void verify(const char* what, bool good) {
  if (good) return;
  ++failures;
  fprintf(stderr, "wrong: %s\n", what);
}

// Microseconds of a node in a chain of `nodes`, median over replays.
template <typename Launch>
double node_us(int nodes, Launch launch, int replays = 7) {
  cudaGraph_t graph;
  cudaGraphExec_t made;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < nodes; ++i) {
    launch(i);
    CHECK(cudaGetLastError());
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&made, graph, 0));
  for (int i = 0; i < 2; ++i) CHECK(cudaGraphLaunch(made, stream));
  CHECK(cudaStreamSynchronize(stream));
  std::vector<double> found;
  for (int i = 0; i < replays; ++i) {
    float ms;
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(made, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    found.push_back(ms * 1e3 / nodes);
  }
  std::sort(found.begin(), found.end());
  CHECK(cudaGraphExecDestroy(made));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  return found[found.size() / 2];
}

struct Reader {
  void (*kernel)(const uint4*, size_t, u32*, bool);
  int loads, threads, blocks;  // blocks of a multiprocessor
  bool contiguous;
};

std::string name_of(const Reader& r) {
  return std::to_string(r.loads) + " loads, " + std::to_string(r.blocks) + " x " + std::to_string(r.threads) + " threads, " +
         (r.contiguous ? "contiguous" : "interleaved");
}

}  // namespace

int main() {
  cudaDeviceProp card;
  CHECK(cudaGetDeviceProperties(&card, 0));
  CHECK(cudaStreamCreate(&stream));
  const int processors = card.multiProcessorCount;
  uint4 *pool, *target;
  u32* scratch;
  CHECK(cudaMalloc(&pool, kPool));
  CHECK(cudaMalloc(&target, (size_t)1 << 30));
  CHECK(cudaMalloc(&scratch, (size_t)64 << 20));
  fill<<<processors * 8, 256, 0, stream>>>(pool, kPool / 16);
  CHECK(cudaGetLastError());

  std::vector<Reader> readers;
  for (int threads : {256, 512}) {
    for (int blocks : {1, 2, 4}) {
      if (threads * blocks > 1024) continue;
      for (bool contiguous : {false, true}) {
        readers.push_back({read_stream<4>, 4, threads, blocks, contiguous});
        readers.push_back({read_stream<8>, 8, threads, blocks, contiguous});
        readers.push_back({read_stream<16>, 16, threads, blocks, contiguous});
      }
    }
  }

  // Every variant must sum up what lies there.
  const size_t some = (size_t)48 << 20;
  u32 want;
  CHECK(cudaMemsetAsync(scratch, 0, 4, stream));
  plain_sum<<<processors, 256, 0, stream>>>(pool, some / 16, scratch);
  CHECK(cudaMemcpyAsync(&want, scratch, 4, cudaMemcpyDeviceToHost, stream));
  CHECK(cudaStreamSynchronize(stream));
  for (const Reader& r : readers) {
    const size_t threads = (size_t)processors * r.blocks * r.threads;
    r.kernel<<<processors * r.blocks, r.threads, 0, stream>>>(pool, some, scratch, r.contiguous);
    std::vector<u32> sums(threads);
    CHECK(cudaMemcpyAsync(sums.data(), scratch, threads * 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    u32 got = 0;
    for (u32 s : sums) got += s;
    verify(name_of(r).c_str(), got == want);
  }

  printf("{\"card\": \"%s\", \"multiprocessors\": %d, \"l2_bytes\": %d, \"compute_capability\": \"%d.%d\",\n", card.name,
         processors, card.l2CacheSize, card.major, card.minor);
  printf(" \"read\": [");
  bool first = true;
  for (int mib : {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024}) {
    const size_t bytes = (size_t)mib << 20;
    // A prime step through the pool; more than the L2 cache is read before a node comes back to its part.
    const size_t parts = kPool / bytes;
    const int nodes = (int)std::max<size_t>(4, std::min<size_t>(200, ((size_t)3 << 30) / bytes));
    double best = 0;
    std::string which;
    for (const Reader& r : readers) {
      const double us = node_us(
          nodes,
          [&](int i) {
            r.kernel<<<processors * r.blocks, r.threads, 0, stream>>>(pool + (size_t)i % parts * (bytes / 16), bytes, scratch,
                                                                      r.contiguous);
          },
          mib >= 256 ? 3 : 7);
      if (best == 0 || us < best) {
        best = us;
        which = name_of(r);
      }
    }
    printf("%s\n  {\"bytes\": %zu, \"us\": %.4f, \"bytes_per_second\": %.6g, \"variant\": \"%s\"}", first ? "" : ",", bytes, best,
           bytes / best * 1e6, which.c_str());
    first = false;
  }
  printf("],\n");

  const size_t gib = (size_t)1 << 30;
  double copy = 0;
  for (int blocks : {1, 2, 4}) {
    const double us = node_us(
        4, [&](int i) { copy_stream<<<processors * blocks, 512, 0, stream>>>(pool + (size_t)i % 4 * (gib / 16), target, gib / 16); }, 3);
    if (copy == 0 || us < copy) copy = us;
  }
  CHECK(cudaStreamSynchronize(stream));
  u32 copied;
  u32 original;
  for (int i = 0; i < 2; ++i) {
    CHECK(cudaMemsetAsync(scratch, 0, 4, stream));
    plain_sum<<<processors, 256, 0, stream>>>(i ? pool + 3 * (gib / 16) : target, gib / 16, scratch);
    CHECK(cudaMemcpyAsync(i ? &original : &copied, scratch, 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
  }
  verify("copy", copied == original);
  printf(" \"copy_bytes_per_second\": %.6g,\n", 2.0 * gib / copy * 1e6);

  const double nothing = node_us(kNodes, [&](int) { empty<<<processors, 256, 0, stream>>>(nullptr); });
  int* values = reinterpret_cast<int*>(scratch);
  CHECK(cudaMemset(values, 0, (kNodes + 1) * 4));
  const double dependent = node_us(kNodes, [&](int i) { chain<<<processors, 256, 0, stream>>>(values + i, values + i + 1); });
  int last;
  CHECK(cudaMemcpy(&last, values + kNodes, 4, cudaMemcpyDeviceToHost));
  verify("dependent launches", last == kNodes);

  const int rounds = 1000;
  int *slots = values + 1024, *errors = values + 512;
  double barrier[2];
  for (int pass = 0; pass < 2; ++pass) {  // the second without barriers: what the launch itself takes
    const int n = pass ? 0 : rounds;
    std::vector<double> found;
    for (int i = 0; i < 5; ++i) {
      cudaEvent_t begin, end;
      float ms;
      CHECK(cudaEventCreate(&begin));
      CHECK(cudaEventCreate(&end));
      CHECK(cudaMemsetAsync(scratch, 0, 4096 + processors * 8, stream));
      CHECK(cudaEventRecord(begin, stream));
      barriers<<<processors, 256, 0, stream>>>(scratch, n, slots, errors);
      CHECK(cudaEventRecord(end, stream));
      CHECK(cudaStreamSynchronize(stream));
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      int wrong;
      CHECK(cudaMemcpy(&wrong, errors, 4, cudaMemcpyDeviceToHost));
      verify("grid barrier", wrong == 0);
      found.push_back(ms * 1e3);
    }
    std::sort(found.begin(), found.end());
    barrier[pass] = found[found.size() / 2];
  }
  printf(" \"empty_node_us\": %.4f, \"dependent_node_us\": %.4f, \"grid_barrier_us\": %.4f, \"wrong\": %d}\n", nothing, dependent,
         (barrier[0] - barrier[1]) / rounds, failures);
  return failures ? 1 : 0;
}
