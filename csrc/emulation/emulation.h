// A grid of an emulated kernel.
#pragma once

namespace rewright::emulation {

using KernelFunction = void (*)(const void* params);

// Runs every block of the grid to its end. std::runtime_error where threads wait for each other for ever.
void run_grid(KernelFunction function, const void* params, const unsigned (&grid)[3], unsigned threads, unsigned shared_bytes);

struct Emulated {
  KernelFunction function = nullptr;
  unsigned params_bytes = 0;
};

// The kernel called `name`; its function is null where there is none.
Emulated find_kernel(const char* name);

// Makes a kernel known by its name.
struct Registered {
  Registered(const char* name, KernelFunction function, unsigned params_bytes);
};

}  // namespace rewright::emulation
