// Stacks that take turns on one thread of the operating system.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace rewright::emulation {

class Fiber;
void switch_fiber(Fiber& from, Fiber& to);

class Fiber {
 public:
  // Prepares to run `entry` on a stack of its own; entry never returns.
  void start(void (*entry)(), size_t stack_bytes);

 private:
  friend void switch_fiber(Fiber& from, Fiber& to);
  std::unique_ptr<char[]> stack_;
#ifdef __x86_64__
  void* pointer_ = nullptr;  // saved stack pointer; the registers lie on the stack
#else
  ucontext_t context_;
#endif
};

}  // namespace rewright::emulation
