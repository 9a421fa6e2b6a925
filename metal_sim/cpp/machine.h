// The execution model: threadgroups of threads in simdgroups of 32 lanes, which meet at collectives and barriers.
//
// What a kernel sees of it; machine.cpp runs it.
#pragma once
#include <vector>

#include "dispatch.h"
#include "fiber.h"

namespace tqsim {

constexpr uint32_t LANES = 32;

struct Position {
  uint32_t x = 0, y = 0, z = 0;
};

// A place in the text where threads meet. `operand` is what all lanes must agree on, such as a shuffle's mask.
struct Site {
  const char* what = "";
  int line = 0;
  uint32_t operand = 0;
  bool operator==(const Site& o) const { return what == o.what && line == o.line && operand == o.operand; }
};

// A counter on which threads wait until it moves.
struct Meeting {
  uint32_t arrived = 0;
  uint64_t round = 0;
  Site site;
};

struct Simdgroup {
  Meeting meeting;
  uint32_t lanes = 0;         // that exist, as bits: fewer than 32 at the edge of a threadgroup
  uint32_t live = 0;          // that have not returned
  uint64_t slots[2][LANES];   // what each brought to this meeting and the one before
  uint64_t memory_round = 0;  // barriers that ordered threadgroup memory
};

struct Thread {
  Fiber fiber;
  bool returned = true;
  const Meeting* waits_for = nullptr;
  uint64_t waits_in_round = 0;
  Site site;
  Position in_grid, in_threadgroup;
  uint32_t index = 0, lane = 0, simdgroup = 0;
};

struct Machine {
  Dispatch* dispatch = nullptr;
  void (*kernel)(Dispatch&) = nullptr;
  std::vector<Thread> threads;
  std::vector<Simdgroup> simdgroups;
  std::vector<uint32_t> order, place;  // who runs after whom, and the inverse
  Meeting barrier;
  uint64_t memory_round = 0;
  uint64_t group = 0;  // number of the threadgroup, never the same again, in later dispatches neither
  uint32_t count = 0, current = 0, alive = 0;
  Fiber host;
  HostStack host_stack;
  Position group_in_grid, groups, threads_in_grid, threads_in_group;
  std::vector<uint64_t> fetched_by[MAX_BUFFERS];  // the threadgroup that loaded each byte last
};

extern Machine* machine;
// By all libraries of the process: threadgroup memory of kernels of one name is one variable to the linker.
inline uint64_t groups_run = 0;
inline Thread& self() { return machine->threads[machine->current]; }
inline void count(Operation operation, uint64_t times = 1) { machine->dispatch->operations[operation] += times; }

// Ends the whole dispatch with a report; the other fibers are abandoned.
[[noreturn]] void fail(const char* format, ...);

// What each lane of the simdgroup brought, and which lanes there are.
struct Brought {
  const uint64_t* slots;
  uint32_t lanes;
};

// All lanes must come: Metal would do with those that do, CUDA's full mask would not.
Brought meet_simdgroup(uint64_t value, const Site& site, bool orders_memory = false);
void meet_threadgroup(const Site& site, bool orders_memory);

// Metal's dispatchThreads: the grid is in threads, and threadgroups at its edge are smaller.
void run(Dispatch& dispatch, void (*kernel)(Dispatch&));

}  // namespace tqsim
