// Runs the blocks of a grid on this CPU, the threads of a block as fibers.
#include "emulation.h"

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda.h"
#include "fiber.h"

namespace rewright::emulation {

Thread* current = nullptr;
dim3 block_index, block_size, grid_size;

namespace {

constexpr size_t kStackBytes = 128 << 10;

// The state of a thread besides what kernels see of it.
struct Running {
  Thread thread;
  Fiber fiber;
  bool done = false;
  const unsigned* awaited = nullptr;  // it waits until *awaited differs from `seen`
  unsigned seen = 0;
};

struct Block {
  std::vector<Running> threads;
  std::vector<Warp> warps;
  unsigned arrived = 0, generation = 0, alive = 0;
  struct { unsigned arrived = 0, generation = 0; } groups[16];
  std::vector<uint64_t> shared;
};

Block block;
Running* running = nullptr;
Fiber scheduler;
KernelFunction kernel;
const void* parameters;
std::string failure;

void wait_for_change(const unsigned& word, unsigned seen) {
  running->awaited = &word;
  running->seen = seen;
  switch_fiber(running->fiber, scheduler);
}

void thread_main() {
  kernel(parameters);
  running->done = true;
  --block.alive;
  switch_fiber(running->fiber, scheduler);
}

void run_block() {
  unsigned left = block.alive = static_cast<unsigned>(block.threads.size());
  block.arrived = 0;
  for (auto& group : block.groups) group.arrived = 0;
  for (size_t i = 0; i < block.threads.size(); ++i) {
    Running& r = block.threads[i];
    r.done = false;
    r.awaited = nullptr;
    r.fiber.start(thread_main, kStackBytes);
  }
  while (left) {
    bool progress = false;
    for (Running& r : block.threads) {
      if (r.done || (r.awaited && *r.awaited == r.seen)) continue;
      r.awaited = nullptr;
      running = &r;
      current = &r.thread;
      switch_fiber(scheduler, r.fiber);
      progress = true;
      if (r.done) --left;
    }
    if (!progress) throw std::runtime_error("emulated kernel: threads of a block wait at different barriers");
  }
}

}  // namespace

void* dynamic_shared() { return block.shared.data(); }

void fail(const char* what) { failure = std::string("emulated kernel: ") + what; }

void block_barrier() {
  if (++block.arrived == block.threads.size()) {
    block.arrived = 0;
    ++block.generation;
    return;
  }
  wait_for_change(block.generation, block.generation);
}

void group_barrier(int barrier, unsigned threads) {
  auto& group = block.groups[barrier];
  if (++group.arrived == threads) {
    group.arrived = 0;
    ++group.generation;
    return;
  }
  wait_for_change(group.generation, group.generation);
}

void warp_barrier(unsigned mask) {
  Warp& warp = *current->warp;
  if (++warp.arrived == static_cast<unsigned>(__builtin_popcount(mask))) {
    warp.arrived = 0;
    ++warp.generation;
    return;
  }
  wait_for_change(warp.generation, warp.generation);
}

unsigned ballot(unsigned mask, bool predicate) {
  Warp& warp = *current->warp;
  const unsigned parity = warp.generation & 1;
  warp.slots[parity][current->lane] = predicate;
  warp_barrier(mask);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1 && warp.slots[parity][lane]) bits |= 1u << lane;
  }
  return bits;
}

unsigned reduce_max(unsigned mask, unsigned value) {
  Warp& warp = *current->warp;
  const unsigned parity = warp.generation & 1;
  warp.slots[parity][current->lane] = value;
  warp_barrier(mask);
  unsigned most = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) most = std::max(most, static_cast<unsigned>(warp.slots[parity][lane]));
  }
  return most;
}

namespace {

float half_value(uint16_t h) {
  const int e = (h >> 10) & 31, m = h & 1023;
  const float v = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(static_cast<float>(1024 + m), e - 25) : std::ldexp(static_cast<float>(m), -24);
  return h & 0x8000 ? -v : v;
}

const float* half_table() {
  static const std::vector<float> table = [] {
    std::vector<float> t(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) t[i] = half_value(static_cast<uint16_t>(i));
    return t;
  }();
  return table.data();
}

}  // namespace

void matrix_multiply(float (&c)[4], const float (&from)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bf16) {
  Warp& warp = *current->warp;
  const unsigned parity = warp.generation & 1;
  const int lane = current->lane, g = lane >> 2, t = lane & 3;
  for (int i = 0; i < 4; ++i) warp.a[parity][lane][i] = a[i];
  warp.b[parity][lane][0] = b0;
  warp.b[parity][lane][1] = b1;
  warp_barrier(0xffffffffu);
  const float* halves = half_table();
  const auto value = [&](uint32_t pair, int high) {
    const uint16_t bits = static_cast<uint16_t>(high ? pair >> 16 : pair);
    return bf16 ? __uint_as_float(static_cast<unsigned>(bits) << 16) : halves[bits];
  };
  for (int i = 0; i < 4; ++i) {
    const int row = i >> 1, column = 2 * t + (i & 1);
    double sum = from[i];
    for (int k = 0; k < 16; ++k) {  // k = 8 * part + 2 * owner + high
      const int part = k >> 3, owner = (k & 7) >> 1, high = k & 1;
      sum += static_cast<double>(value(warp.a[parity][g * 4 + owner][row + 2 * part], high)) *
             value(warp.b[parity][column * 4 + owner][part], high);
    }
    c[i] = static_cast<float>(sum);
  }
}

void load_matrices(uint32_t (&r)[4], const void* row, bool transposed) {
  Warp& warp = *current->warp;
  const unsigned parity = warp.generation & 1;
  const int lane = current->lane, g = lane >> 2, t = lane & 3;
  warp.rows[parity][lane] = row;
  warp_barrier(0xffffffffu);
  for (int i = 0; i < 4; ++i) {
    const auto element = [&](int at, int column) {
      return static_cast<uint32_t>(static_cast<const uint16_t*>(warp.rows[parity][i * 8 + at])[column]);
    };
    r[i] = transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16 : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
  }
}

namespace {

std::map<std::string, Emulated>& kernels() {
  static std::map<std::string, Emulated> all;  // made when the first kernel registers
  return all;
}

}  // namespace

Registered::Registered(const char* name, KernelFunction function, unsigned params_bytes) {
  kernels()[name] = {function, params_bytes};
}

Emulated find_kernel(const char* name) {
  const auto found = kernels().find(name);
  return found == kernels().end() ? Emulated{} : found->second;
}

void run_grid(KernelFunction function, const void* params, const unsigned (&grid)[3], unsigned threads, unsigned shared_bytes) {
  kernel = function;
  parameters = params;
  failure.clear();
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {threads, 1, 1};
  block.threads.resize(threads);
  block.warps.assign((threads + 31) / 32, Warp{});
  for (unsigned i = 0; i < threads; ++i) {
    block.threads[i].thread.index = {i, 0, 0};
    block.threads[i].thread.lane = static_cast<int>(i & 31);
    block.threads[i].thread.warp = &block.warps[i >> 5];
  }
  block.shared.resize(shared_bytes / 8 + 2);
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        std::fill(block.shared.begin(), block.shared.end(), ~uint64_t{0});
        for (Warp& warp : block.warps) warp.arrived = 0;
        block_index = {x, y, z};
        run_block();
      }
  if (!failure.empty()) throw std::runtime_error(failure);
}

}  // namespace rewright::emulation
