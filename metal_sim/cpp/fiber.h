// Fibers: many stacks in one OS thread, switched by hand. Each Metal thread is one fiber.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

// Saves what the ABI wants preserved across a call on the current stack, stores the stack pointer in *save, and goes on
// from the stack pointer `load`.
extern "C" void tqsim_switch(void** save, void* load) asm("tqsim_switch");  // the same name for every linker

namespace tqsim {

// Room for a kernel's arrays; the frames of a sanitizer build are several times as large.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t STACK_BYTES = 512 * 1024;
#else
constexpr size_t STACK_BYTES = 128 * 1024;
#endif

// The stacks of a threadgroup. Untouched pages cost nothing.
class Stacks {
 public:
  explicit Stacks(size_t count) : bytes_(count * STACK_BYTES) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  ~Stacks() { munmap(base_, bytes_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  bool valid() const { return base_ != MAP_FAILED; }
  char* at(size_t index) const { return static_cast<char*>(base_) + index * STACK_BYTES; }

 private:
  void* base_;
  size_t bytes_;
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;         // lowest address; null: the OS thread's own stack
  void* fake_stack = nullptr;    // the sanitizer's

  // Make the first switch to this fiber call `entry`, which never returns.
  void prepare(char* memory, void (*entry)()) {
    stack = memory;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(memory, STACK_BYTES);  // an earlier fiber may have ended in the middle of its frames
#endif
    void** top = reinterpret_cast<void**>(memory + STACK_BYTES);
#if defined(__x86_64__)
    *--top = nullptr;  // where a call would have put its return address: keeps the stack aligned as the ABI wants
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
#else
    top -= 20;
    for (int i = 0; i < 20; i++) top[i] = nullptr;
    top[11] = reinterpret_cast<void*>(entry);  // x30, the return address
#endif
    stack_pointer = top;
  }
};

// The bounds of the OS thread's stack, which the sanitizer tells at the first switch away from it.
struct HostStack {
  const void* bottom = nullptr;
  size_t bytes = 0;
};

inline void switch_fiber(Fiber& from, Fiber& to, HostStack& host, bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack ? to.stack : host.bottom,
                                 to.stack ? STACK_BYTES : host.bytes);
#else
  (void)host;
  (void)last;
#endif
  tqsim_switch(&from.stack_pointer, to.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// To be called first in a fiber's entry.
inline void fiber_started(HostStack& host) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (host.bottom == nullptr) host = {bottom, bytes};  // only the first fiber is entered from the host's stack
#else
  (void)host;
#endif
}

}  // namespace tqsim
