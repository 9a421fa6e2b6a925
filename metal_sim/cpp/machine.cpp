// Runs a dispatch: threadgroups one after the other. In each, one thread runs until it must wait for others; then the next
// one in a chosen order does. What real hardware leaves undefined is an error, with the threads and where they wait.
#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <utility>

namespace tqsim {

Machine* machine = nullptr;

void fail(const char* format, ...) {
  char* out = machine->dispatch->error;
  size_t used = 0;
  auto write = [&](auto... parts) {
    if (used < ERROR_BYTES) used += static_cast<size_t>(snprintf(out + used, ERROR_BYTES - used, parts...));
  };
  const Thread& me = self();
  const Position g = machine->group_in_grid;
  char message[512];
  va_list parts;
  va_start(parts, format);
  vsnprintf(message, sizeof message, format, parts);
  va_end(parts);
  write("%s (thread %u: simdgroup %u, lane %u, of threadgroup %u,%u,%u)", message, me.index, me.simdgroup, me.lane, g.x,
        g.y, g.z);
  std::vector<bool> told(machine->count);
  for (uint32_t i = 0; i < machine->count; i++) {
    const Thread& first = machine->threads[i];
    if (told[i] || !first.waits_for) continue;
    uint32_t number = 0;
    for (uint32_t j = i; j < machine->count; j++) {
      const Thread& other = machine->threads[j];
      if (!other.waits_for || !(other.site == first.site)) continue;
      told[j] = true;
      number++;
    }
    write("\n  %u threads wait at %s, line %d; the first is thread %u", number, first.site.what, first.site.line, i);
  }
  write("\n  %u of %u threads have returned", machine->count - machine->alive, machine->count);
  switch_fiber(self().fiber, machine->host, machine->host_stack, true);
  __builtin_unreachable();
}

static void run_next() {
  Machine& m = *machine;
  Thread& me = self();
  if (m.alive == 0) {
    switch_fiber(me.fiber, m.host, m.host_stack, true);
    __builtin_unreachable();
  }
  uint32_t place = m.place[m.current];
  for (uint32_t step = 0; step < m.count; step++) {
    place = place + 1 == m.count ? 0 : place + 1;
    Thread& next = m.threads[m.order[place]];
    if (next.returned || (next.waits_for && next.waits_for->round == next.waits_in_round)) continue;
    next.waits_for = nullptr;
    m.current = next.index;
    if (&next != &me) switch_fiber(me.fiber, next.fiber, m.host_stack, me.returned);
    return;
  }
  fail("deadlock: every thread waits for one that waits elsewhere");
}

static void wait(Meeting& meeting, uint64_t round, const Site& site) {
  Thread& me = self();
  me.waits_for = &meeting;
  me.waits_in_round = round;
  me.site = site;
  run_next();
}

// Take part in a meeting of `expected` threads that must all come from the same site; true for the one that completes it.
static bool arrive(Meeting& meeting, uint32_t expected, const Site& site) {
  if (meeting.arrived == 0) meeting.site = site;
  const Site& first = meeting.site;
  if (!(first == site))
    fail("divergent %s at line %d (operand %u): others of its group are at %s, line %d (operand %u)", site.what, site.line,
         site.operand, first.what, first.line, first.operand);
  return ++meeting.arrived == expected;
}

Brought meet_simdgroup(uint64_t value, const Site& site, bool orders_memory) {
  Thread& me = self();
  Simdgroup& s = machine->simdgroups[me.simdgroup];
  const uint64_t round = s.meeting.round;
  const int side = round & 1;
  s.slots[side][me.lane] = value;
  count(COLLECTIVE);
  if (s.live != s.lanes) fail("%s at line %d after other lanes of its simdgroup have returned", site.what, site.line);
  if (arrive(s.meeting, static_cast<uint32_t>(__builtin_popcount(s.lanes)), site)) {
    s.meeting.arrived = 0;
    s.meeting.round++;
    s.memory_round += orders_memory;
  } else {
    wait(s.meeting, round, site);
  }
  return {s.slots[side], s.lanes};
}

void meet_threadgroup(const Site& site, bool orders_memory) {
  Machine& m = *machine;
  const uint64_t round = m.barrier.round;
  count(BARRIER);
  if (m.alive != m.count) fail("%s at line %d after other threads have returned", site.what, site.line);
  if (arrive(m.barrier, m.count, site)) {
    m.barrier.arrived = 0;
    m.barrier.round++;
    m.memory_round += orders_memory;
  } else {
    wait(m.barrier, round, site);
  }
}

static void return_from_kernel() {
  Thread& me = self();
  Simdgroup& s = machine->simdgroups[me.simdgroup];
  if (machine->barrier.arrived) fail("returns while others wait at %s, line %d", machine->barrier.site.what, machine->barrier.site.line);
  if (s.meeting.arrived) fail("returns while its simdgroup waits at %s, line %d", s.meeting.site.what, s.meeting.site.line);
  me.returned = true;
  machine->alive--;
  s.live &= ~(1u << me.lane);
  run_next();
}

static void enter_fiber() {
  fiber_started(machine->host_stack);
  machine->kernel(*machine->dispatch);
  return_from_kernel();
}

// Order 0: by index; 1: the reverse; others: shuffled, another way in each threadgroup.
static void choose_order(Machine& m, uint64_t order) {
  m.order.resize(m.count);
  m.place.resize(m.count);
  for (uint32_t i = 0; i < m.count; i++) m.order[i] = order == 1 ? m.count - 1 - i : i;
  const Position g = m.group_in_grid;
  uint64_t state = order * 0x9E3779B97F4A7C15ull + g.x + 31 * g.y + 997 * g.z;
  for (uint32_t i = m.count; order > 1 && i > 1; i--) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::swap(m.order[i - 1], m.order[state % i]);
  }
  for (uint32_t i = 0; i < m.count; i++) m.place[m.order[i]] = i;
}

static void run_threadgroup(Machine& m, const Stacks& stacks, Position size) {
  const Position g = m.group_in_grid, n = m.threads_in_group;
  m.count = m.alive = n.x * n.y * n.z;
  m.group = ++groups_run;
  m.barrier = Meeting();
  m.simdgroups.assign((m.count + LANES - 1) / LANES, Simdgroup());
  for (uint32_t i = 0; i < m.count; i++) {
    Thread& t = m.threads[i];
    t = Thread();
    t.returned = false;
    t.index = i;
    t.lane = i % LANES;
    t.simdgroup = i / LANES;
    t.in_threadgroup = {i % n.x, i / n.x % n.y, i / (n.x * n.y)};
    t.in_grid = {g.x * size.x + t.in_threadgroup.x, g.y * size.y + t.in_threadgroup.y, g.z * size.z + t.in_threadgroup.z};
    t.fiber.prepare(stacks.at(i), enter_fiber);
    Simdgroup& s = m.simdgroups[t.simdgroup];
    s.live = s.lanes |= 1u << t.lane;
  }
  choose_order(m, m.dispatch->order);
  m.current = m.order[0];
  switch_fiber(m.host, self().fiber, m.host_stack);
}

void run(Dispatch& dispatch, void (*kernel)(Dispatch&)) {
  Machine m;
  machine = &m;
  m.dispatch = &dispatch;
  m.kernel = kernel;
  const uint32_t *grid = dispatch.grid, *group = dispatch.threadgroup;
  auto least = [](uint32_t a, uint32_t b) { return a < b ? a : b; };
  const Position size = {least(group[0], grid[0]), least(group[1], grid[1]), least(group[2], grid[2])};
  m.threads_in_grid = {grid[0], grid[1], grid[2]};
  m.groups = {(grid[0] + size.x - 1) / size.x, (grid[1] + size.y - 1) / size.y, (grid[2] + size.z - 1) / size.z};
  m.threads.resize(size_t(size.x) * size.y * size.z);
  const Stacks stacks(m.threads.size());
  if (!stacks.valid()) {
    snprintf(dispatch.error, ERROR_BYTES, "no memory for the stacks of %zu threads", m.threads.size());
    return;
  }
  for (uint32_t z = 0; z < m.groups.z; z++)
    for (uint32_t y = 0; y < m.groups.y; y++)
      for (uint32_t x = dispatch.first; x < m.groups.x && !dispatch.error[0]; x++) {
        m.group_in_grid = {x, y, z};
        m.threads_in_group = {least(size.x, grid[0] - x * size.x), least(size.y, grid[1] - y * size.y),
                              least(size.z, grid[2] - z * size.z)};
        run_threadgroup(m, stacks, size);
      }
  machine = nullptr;
}

}  // namespace tqsim
