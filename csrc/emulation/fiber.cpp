#include "fiber.h"

namespace rewright::emulation {

#ifdef __x86_64__

// ucontext would make two system calls a switch. The System V ABI asks for these six registers only.
asm(R"(
.text
.globl rewright_switch_stack
.hidden rewright_switch_stack
rewright_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void rewright_switch_stack(void** save, void* load);

void Fiber::start(void (*entry)(), size_t stack_bytes) {
  if (!stack_) stack_.reset(new char[stack_bytes]);
  uintptr_t top = (reinterpret_cast<uintptr_t>(stack_.get()) + stack_bytes) & ~uintptr_t{15};
  void** at = reinterpret_cast<void**>(top) - 2;  // entry finds the alignment that a call leaves
  *at = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--at = nullptr;
  pointer_ = at;
}

void switch_fiber(Fiber& from, Fiber& to) { rewright_switch_stack(&from.pointer_, to.pointer_); }

#else

void Fiber::start(void (*entry)(), size_t stack_bytes) {
  if (!stack_) stack_.reset(new char[stack_bytes]);
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = stack_bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context_, &to.context_); }

#endif

}  // namespace rewright::emulation
