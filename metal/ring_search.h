// The search for the ring of codes with the least squared error, bit for bit as `mlx_tq.codec.formats.trellis.search_ring`; one
// simdgroup per vector.
//
// States that differ only in their last BITS have the same predecessors and form a group. Threadgroup memory has the
// least cost of each group and, for each value, the number of its best predecessor. A lane finds both for LANE_GROUPS
// groups, or GROUP_LANES lanes find them for one group, each among some predecessors. The number of a predecessor
// replaces the lowest bits of its cost, so that one comparison finds both; costs are positive, so they are ordered as
// their bits are.
#include "encoding.h"
#include "trellis.h"

#define TQ_MARGIN 16
#define TQ_MAX_GROUPS 128  // with 1 bit
#define TQ_UNREACHABLE 1e9f

template <int D, int BITS>
struct tq_trellis : tq_unit<D, BITS> {
  using UNIT = tq_unit<D, BITS>;
  enum {
    BRANCHES = 1 << BITS,
    GROUPS = TQ_STATES >> BITS,
    LANE_GROUPS = GROUPS < 32 ? 1 : GROUPS / 32,
    GROUP_LANES = LANE_GROUPS * 32 / GROUPS,
    OWNERS = GROUPS / LANE_GROUPS,                          // lanes, or sets of lanes, with separate groups
    CANDIDATES = BRANCHES / GROUP_LANES,                      // predecessors of a group that a lane compares
    MARGIN = TQ_MARGIN < D / 2 ? TQ_MARGIN : D / 2  // values on either side of the cut that determine its state
  };

  // The position of a dim in the ring, and the dim of a position.
  static TQ_FN int ring_index(int dim) { return dim % int(UNIT::COUNT) * int(UNIT::VALUES) + dim / int(UNIT::COUNT); }
  static TQ_FN int dim(int t) { return t % int(UNIT::VALUES) * int(UNIT::COUNT) + t / int(UNIT::VALUES); }
};

// Memory of a search: `values` [D] and `costs` [2 GROUPS], floats, and `choices` [32 D], bytes, are threadgroup memory.
template <class Levels, class Values, class Costs, class Choices>
struct tq_ring_search {
  Levels levels;  // levels of all states
  Values values;
  Costs costs;
  Choices choices;

  // Searches `count` values of the ring from `first` on; `level` has the levels of the lane's candidates.
  template <int D, int BITS>
  TQ_FN void search(int first, int count, TQ_THREAD const float* level, int lane) const {
    using TRELLIS = tq_trellis<D, BITS>;
    constexpr int GROUPS = TRELLIS::GROUPS, LANE_GROUPS = TRELLIS::LANE_GROUPS, CANDIDATES = TRELLIS::CANDIDATES, OWNERS = TRELLIS::OWNERS;
    constexpr uint CHOICE_MASK = (1u << BITS) - 1u;
    int place = lane % OWNERS, share = int(TRELLIS::GROUP_LANES) == 1 ? 0 : lane / OWNERS;
    int first_group = (place * LANE_GROUPS >> BITS) + (share * CANDIDATES * GROUPS >> BITS);
    for (int t = 0; t < count; t++) {
      float value = values[first + t < D ? first + t : first + t - D];
      uint best[LANE_GROUPS], packed = 0;
      int source = (t & 1) * GROUPS + first_group;
      TQ_UNROLL for (int i = 0; i < CANDIDATES; i++) {
        float previous = 0.0f;
        TQ_UNROLL for (int o = 0; o < LANE_GROUPS; o++) {
          if (o % (1 << BITS) == 0) previous = costs[source + (i * GROUPS >> BITS) + (o >> BITS)];
          float difference = tq_sub(value, level[o * CANDIDATES + i]), cost = tq_add(tq_mul(difference, difference), previous);
          uint candidate = (as_type<uint>(cost) & ~CHOICE_MASK) | uint(share * CANDIDATES + i);
          best[o] = i == 0 || candidate < best[o] ? candidate : best[o];
        }
      }
      TQ_UNROLL for (int stride = OWNERS; stride < 32; stride *= 2) {
        uint other = simd_shuffle_xor(best[0], ushort(stride));
        best[0] = other < best[0] ? other : best[0];
      }
      TQ_UNROLL for (int o = 0; o < LANE_GROUPS; o++) packed |= (best[o] & CHOICE_MASK) << (BITS * o);
      if (share == 0) {
        TQ_UNROLL for (int o = 0; o < LANE_GROUPS; o++) costs[(~t & 1) * GROUPS + place * LANE_GROUPS + o] = as_type<float>(best[o]);
        choices[t * OWNERS + place] = uchar(packed);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  // The best state at value t of a search if the next state is in `group`.
  template <int D, int BITS>
  TQ_FN uint state(uint group, int t) const {
    constexpr uint LANE_GROUPS = tq_trellis<D, BITS>::LANE_GROUPS, GROUPS = tq_trellis<D, BITS>::GROUPS;
    uint choice = uint(choices[t * int(tq_trellis<D, BITS>::OWNERS) + int(group / LANE_GROUPS)]) >> (uint(BITS) * (group % LANE_GROUPS));
    return group + (choice & uint((1 << BITS) - 1)) * GROUPS;
  }

  // The group with the least cost after an even number of values, the first of equal ones.
  template <int D, int BITS>
  TQ_FN uint cheapest_group(int lane) const {
    constexpr int LANE_GROUPS = tq_trellis<D, BITS>::LANE_GROUPS, OWNERS = tq_trellis<D, BITS>::OWNERS;
    uint least = uint(lane % OWNERS * LANE_GROUPS);
    float cost = costs[int(least)];
    TQ_UNROLL for (int o = 1; o < LANE_GROUPS; o++) {
      float group_cost = costs[lane % OWNERS * LANE_GROUPS + o];
      least = group_cost < cost ? uint(lane % OWNERS * LANE_GROUPS + o) : least;
      cost = group_cost < cost ? group_cost : cost;
    }
    TQ_UNROLL for (int stride = 1; stride < OWNERS; stride *= 2) {
      float other = simd_shuffle_xor(cost, ushort(stride));
      uint other_group = simd_shuffle_xor(least, ushort(stride));
      bool better = other < cost || (other == cost && other_group < least);
      cost = better ? other : cost;
      least = better ? other_group : least;
    }
    return least;
  }

  // Writes the codes of `values` to `codes`, and replaces the values by their levels.
  template <int D, int BITS, class Codes>
  TQ_FN void find_ring(Codes codes, int lane) const {
    using TRELLIS = tq_trellis<D, BITS>;
    constexpr int GROUPS = TRELLIS::GROUPS, LANE_GROUPS = TRELLIS::LANE_GROUPS, CANDIDATES = TRELLIS::CANDIDATES;
    constexpr int OWNERS = TRELLIS::OWNERS, MARGIN = TRELLIS::MARGIN;
    int place = lane % OWNERS, share = lane / OWNERS;
    float level[LANE_GROUPS * CANDIDATES];
    TQ_UNROLL for (int i = 0; i < LANE_GROUPS * CANDIDATES; i++)
      level[i] = static_cast<float>(levels[place * LANE_GROUPS + i / CANDIDATES + (share * CANDIDATES + i % CANDIDATES) * GROUPS]);
    for (int i = lane; i < GROUPS; i += 32) costs[i] = 0.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    search<D, BITS>(D - MARGIN, 2 * MARGIN, level, lane);
    uint group = cheapest_group<D, BITS>(lane), best_state = 0;
    for (int t = 2 * MARGIN - 1; t >= MARGIN - 1; t--) {
      best_state = state<D, BITS>(group, t);
      group = best_state >> uint(BITS);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    group = best_state & uint(GROUPS - 1);  // where the ring begins and ends
    for (int i = lane; i < GROUPS; i += 32) costs[i] = uint(i) == group ? 0.0f : TQ_UNREACHABLE;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    search<D, BITS>(0, D, level, lane);
    for (int t = D - 1; t >= 0; t--) {
      best_state = state<D, BITS>(group, t);
      group = best_state >> uint(BITS);
      if (lane == t % 32) {
        codes[TRELLIS::dim(t)] = uchar(best_state & ((1u << BITS) - 1u));
        values[t] = static_cast<float>(levels[int(best_state)]);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Finds a vector's codes and returns its scale.
  template <int D, int M, int BITS, int RULE, class Codes>
  TQ_FN float encode(TQ_THREAD const float* y, float norm, Codes codes, uint simd_lane) const {
    using TRELLIS = tq_trellis<D, BITS>;
    constexpr int N = (D + 31) / 32;
    int lane = int(simd_lane);
    float factor = norm > 0.0f ? tq_div(1.0f, norm) : 0.0f, ring_level[N];
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + lane;
      if (dim < D) values[TRELLIS::ring_index(dim)] = tq_mul(y[j], factor);
    }
    find_ring<D, BITS>(codes, lane);
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + lane;
      ring_level[j] = 0.0f;
      if (dim < D) ring_level[j] = values[TRELLIS::ring_index(dim)];
    }
    return tq_scale<D, M, RULE>(y, norm, ring_level);
  }

  template <int D, int M, class Flips>
  TQ_FN void transform(TQ_THREAD float* x, TQ_THREAD float* square, Flips flips, uint lane) const {
    tq_transform<D, M>(x, square, flips, lane);
  }
  // Word number `word` of a vector's codes.
  template <int D, int BITS, class Codes>
  static TQ_FN ushort pack(Codes codes, int word) {
    using UNIT = tq_unit<D, BITS>;
    int n = word / int(UNIT::COUNT), unit = word % int(UNIT::COUNT);
    uint packed = 0;
    TQ_UNROLL for (int i = 0; i < int(UNIT::VALUES); i++) {
      int shift = 16 * (n + 1) - BITS * (i + 1);  // a code may continue in the next word
      uint code = codes[i * int(UNIT::COUNT) + unit];
      if (shift > -BITS && shift < 16) packed |= shift >= 0 ? code << uint(shift) : code >> uint(-shift);
    }
    return ushort(packed);
  }
};

// Finds the codes of a vector: as a ring if TRELLIS, else each by itself.
template <bool TRELLIS>
struct tq_code_search {
  template <class Levels, class Values, class Costs, class Choices>
  static TQ_FN tq_nearest_levels make(Levels, Values, Costs, Choices) {
    return {};
  }
};
template <>
struct tq_code_search<true> {
  template <class Levels, class Values, class Costs, class Choices>
  static TQ_FN tq_ring_search<Levels, Values, Costs, Choices> make(Levels levels, Values values, Costs costs, Choices choices) {
    return {levels, values, costs, choices};
  }
};
