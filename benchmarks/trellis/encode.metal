// A sketch of encoding: Viterbi's search through a bitshift trellis, for vectors that are rotated and of unit variance.
//
//   unit_vectors [N, D], trellis_levels [STATES]: float
//   paths [N, D]: 16-bit states
//
// LANES lanes take a vector. What a lane holds of each step is the least cost of OWN groups of states; a group's states
// differ in their last BITS, so that they come from the same predecessors. Of a choice BITS bits are kept: a byte a lane and
// value, 4 KB a vector of 128. The first search reads AROUND values on either side of the cut and finds the state there;
// the second begins and ends in it. A candidate's number stands in the lowest bits of its cost, so that one comparison
// finds both.
//
// Grid (32 SIMDGROUPS, ceil(N / (SIMDGROUPS 32 / LANES)), 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "tq_compat.h"

#define TCQ_FAR 1e9f

// One search over `count` values from number `first` of a ring of D; choices are left in `choices`, costs in `costs`.
template <int D, int BITS, int WINDOW, int LANES, class Vector, class Costs, class Choices>
TQ_FN void tcq_search(Vector vector, int first, int count, TQ_THREAD const float* level, Costs costs, Choices choices, int lane) {
  constexpr int BRANCHES = 1 << BITS, GROUPS = 1 << (WINDOW - BITS), OWN = GROUPS / LANES;
  constexpr uint NUMBER = BRANCHES - 1, COST = 0xFFFFFFFFu - NUMBER;  // bits of a candidate
  for (int t = 0; t < count; t++) {
    int at = first + t < D ? first + t : first + t - D;
    float value = vector[at];
    uint best[OWN], packed = 0;
    TQ_UNROLL for (int j = 0; j < BRANCHES; j++) {
      float before = costs[(t & 1) * GROUPS + ((lane * OWN + j * GROUPS) >> BITS)];  // of all OWN groups
      TQ_UNROLL for (int o = 0; o < OWN; o++) {
        float off = tq_sub(value, level[o * BRANCHES + j]), cost = tq_fma(off, off, before);
        uint candidate = (as_type<uint>(cost) & COST) | uint(j);
        best[o] = j == 0 || as_type<float>(candidate) < as_type<float>(best[o]) ? candidate : best[o];
      }
    }
    TQ_UNROLL for (int o = 0; o < OWN; o++) {
      costs[(~t & 1) * GROUPS + lane * OWN + o] = as_type<float>(best[o]);
      packed |= (best[o] & NUMBER) << (BITS * o);
    }
    choices[t * LANES + lane] = uchar(packed);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// The state before `state` at value number t, by the choices made there.
template <int BITS, int WINDOW, int LANES, class Choices>
TQ_FN uint tcq_before(uint state, int t, Choices choices) {
  constexpr int GROUPS = 1 << (WINDOW - BITS), OWN = GROUPS / LANES;
  uint group = state >> BITS;
  uint choice = uint(choices[t * LANES + int(group / uint(OWN))]) >> (uint(BITS) * (group % uint(OWN)));
  return group + (choice & uint((1 << BITS) - 1)) * uint(GROUPS);
}

//// body

constexpr int BRANCHES = 1 << BITS, STATES = 1 << WINDOW, GROUPS = STATES >> BITS;
constexpr int LANES = GROUPS < 32 ? GROUPS : 32, OWN = GROUPS / LANES, TOGETHER = SIMDGROUPS * 32 / LANES;
threadgroup float all_costs[TOGETHER * 2 * GROUPS];
threadgroup uchar all_choices[TOGETHER * D * LANES];

static_assert(OWN <= BRANCHES, "the groups of a lane have the same predecessors");

int lane = int(thread_index_in_simdgroup) % LANES;
int place = (int(simdgroup_index_in_threadgroup) * 32 + int(thread_index_in_simdgroup)) / LANES;
int number = int(threadgroup_position_in_grid.y) * TOGETHER + place, count = unit_vectors_shape[0];
auto costs = all_costs + place * 2 * GROUPS;
auto choices = all_choices + place * D * LANES;
auto vector = unit_vectors + int64_t(number < count ? number : count - 1) * D;
float level[OWN * BRANCHES];
TQ_UNROLL for (int i = 0; i < OWN * BRANCHES; i++) level[i] = trellis_levels[lane * OWN + i / BRANCHES + (i % BRANCHES) * GROUPS];

TQ_UNROLL for (int o = 0; o < OWN; o++) costs[lane * OWN + o] = 0.0f;
simdgroup_barrier(mem_flags::mem_threadgroup);
tcq_search<D, BITS, WINDOW, LANES>(vector, D - AROUND, 2 * AROUND, level, costs, choices, lane);
// 2 AROUND is even: the costs of the last step are the first half. Its best group, as a state's upper bits.
uint least = 0;
TQ_UNROLL for (int o = 0; o < OWN; o++) {
  float mine = costs[lane * OWN + o];
  least = o == 0 || mine < costs[lane * OWN + int(least % uint(OWN))] ? uint(lane * OWN + o) : least;
}
float cost = costs[int(least)];
TQ_UNROLL for (int stride = 1; stride < LANES; stride *= 2) {
  float other = simd_shuffle_xor(cost, ushort(stride));
  uint whose = simd_shuffle_xor(least, ushort(stride));
  bool better = other < cost || (other == cost && whose < least);
  cost = better ? other : cost;
  least = better ? whose : least;
}
// The group's choice is the state of the last value itself.
uint state = tcq_before<BITS, WINDOW, LANES>(least << BITS, 2 * AROUND - 1, choices);
for (int t = 2 * AROUND - 2; t >= AROUND - 1; t--) state = tcq_before<BITS, WINDOW, LANES>(state, t, choices);
simdgroup_barrier(mem_flags::mem_threadgroup);

uint end = state;
TQ_UNROLL for (int o = 0; o < OWN; o++) costs[lane * OWN + o] = (end & uint(GROUPS - 1)) == uint(lane * OWN + o) ? 0.0f : TCQ_FAR;
simdgroup_barrier(mem_flags::mem_threadgroup);
tcq_search<D, BITS, WINDOW, LANES>(vector, 0, D, level, costs, choices, lane);
for (int t = D - 1; t >= 0; t--) {
  if (t < D - 1) state = tcq_before<BITS, WINDOW, LANES>(state, t, choices);
  if (lane == t % LANES && number < count) paths[int64_t(number) * D + t] = ushort(state);
}
