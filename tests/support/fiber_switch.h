// From one fiber's stack to another's, on x86-64.
#pragma once

#if defined(__x86_64__)

// Saves the callee-saved registers on the stack, the stack pointer in *from, and goes on at `to`.
extern "C" void unjam_fiber_switch(void** from, void* to);
asm(R"(
.text
.local unjam_fiber_switch
.type unjam_fiber_switch, @function
unjam_fiber_switch:
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
.size unjam_fiber_switch, .-unjam_fiber_switch
)");

#endif
