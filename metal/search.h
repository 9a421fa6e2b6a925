// The search for the ring of codes of least squared error: `mlx_tq.codec.formats.trellis.search_ring`, bit for bit, one vector a simdgroup.
//
// States that differ in their last BITS come from the same predecessors. Of each such group threadgroup memory has the least
// cost, and for each value the number of the best predecessor. A lane finds both for OWN groups, or SHARES lanes for one, each
// of some predecessors. A predecessor's number stands in the lowest bits of its cost, so that one comparison finds both; costs
// are positive, and so in the order of their bits.
#include "coding.h"
#include "trellis.h"

#define TQ_AROUND 16
#define TQ_MOST_GROUPS 64  // of 2 bits
#define TQ_FAR 1e9f

template <int D, int BITS>
struct tq_trellis : tq_unit<D, BITS> {
  using UNIT = tq_unit<D, BITS>;
  enum {
    BRANCHES = 1 << BITS,
    GROUPS = TQ_STATES >> BITS,
    OWN = GROUPS < 32 ? 1 : GROUPS / 32,
    SHARES = OWN * 32 / GROUPS,
    PLACES = GROUPS / OWN,                          // lanes that have groups of their own
    TRIED = BRANCHES / SHARES,                      // predecessors of a group, of a lane
    AROUND = TQ_AROUND < D / 2 ? TQ_AROUND : D / 2  // values on either side of the cut that say which state is there
  };

  // Which value of the ring a dim is, and the other way.
  static TQ_FN int along(int dim) { return dim % int(UNIT::COUNT) * int(UNIT::VALUES) + dim / int(UNIT::COUNT); }
  static TQ_FN int dim(int t) { return t % int(UNIT::VALUES) * int(UNIT::COUNT) + t / int(UNIT::VALUES); }
};

// What a search needs beside a byte for each code, in threadgroup memory but for `levels`: floats [D] and [2 GROUPS], bytes
// [32 D].
template <class Levels, class Values, class Costs, class Choices>
struct tq_searching {
  Levels levels;  // of all states
  Values values;
  Costs costs;
  Choices choices;

  // Over `count` values from number `first` of the ring on; `level` has the lane's own.
  template <int D, int BITS>
  TQ_FN void search(int first, int count, TQ_THREAD const float* level, int lane) const {
    using TRELLIS = tq_trellis<D, BITS>;
    constexpr int GROUPS = TRELLIS::GROUPS, OWN = TRELLIS::OWN, TRIED = TRELLIS::TRIED, PLACES = TRELLIS::PLACES;
    constexpr int APART = GROUPS >> BITS;  // of predecessors of one group, in groups
    constexpr uint NUMBER = (1u << BITS) - 1u;
    int place = lane % PLACES, share = int(TRELLIS::SHARES) == 1 ? 0 : lane / PLACES;
    int mine = (place * OWN >> BITS) + share * TRIED * APART;
    for (int t = 0; t < count; t++) {
      float value = values[first + t < D ? first + t : first + t - D];
      uint best[OWN], packed = 0;
      int from = (t & 1) * GROUPS + mine;
      TQ_UNROLL for (int i = 0; i < TRIED; i++) {
        float before = costs[from + i * APART];  // of all OWN groups
        TQ_UNROLL for (int o = 0; o < OWN; o++) {
          float off = tq_sub(value, level[o * TRIED + i]), cost = tq_add(tq_mul(off, off), before);
          uint candidate = (as_type<uint>(cost) & ~NUMBER) | uint(share * TRIED + i);
          best[o] = i == 0 || candidate < best[o] ? candidate : best[o];
        }
      }
      TQ_UNROLL for (int stride = PLACES; stride < 32; stride *= 2) {
        uint other = simd_shuffle_xor(best[0], ushort(stride));
        best[0] = other < best[0] ? other : best[0];
      }
      TQ_UNROLL for (int o = 0; o < OWN; o++) packed |= (best[o] & NUMBER) << (BITS * o);
      if (share == 0) {
        TQ_UNROLL for (int o = 0; o < OWN; o++) costs[(~t & 1) * GROUPS + place * OWN + o] = as_type<float>(best[o]);
        choices[t * PLACES + place] = uchar(packed);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  // The best state number t of a search whose next state begins with the bits of `group`.
  template <int D, int BITS>
  TQ_FN uint state(uint group, int t) const {
    constexpr uint OWN = tq_trellis<D, BITS>::OWN, GROUPS = tq_trellis<D, BITS>::GROUPS;
    uint choice = uint(choices[t * int(tq_trellis<D, BITS>::PLACES) + int(group / OWN)]) >> (uint(BITS) * (group % OWN));
    return group + (choice & uint((1 << BITS) - 1)) * GROUPS;
  }

  // The group of least cost after an even number of values; of equals the first.
  template <int D, int BITS>
  TQ_FN uint cheapest(int lane) const {
    constexpr int OWN = tq_trellis<D, BITS>::OWN, PLACES = tq_trellis<D, BITS>::PLACES;
    uint least = uint(lane % PLACES * OWN);
    float cost = costs[int(least)];
    TQ_UNROLL for (int o = 1; o < OWN; o++) {
      float mine = costs[lane % PLACES * OWN + o];
      least = mine < cost ? uint(lane % PLACES * OWN + o) : least;
      cost = mine < cost ? mine : cost;
    }
    TQ_UNROLL for (int stride = 1; stride < PLACES; stride *= 2) {
      float other = simd_shuffle_xor(cost, ushort(stride));
      uint whose = simd_shuffle_xor(least, ushort(stride));
      bool better = other < cost || (other == cost && whose < least);
      cost = better ? other : cost;
      least = better ? whose : least;
    }
    return least;
  }

  // Leaves a vector's codes in `codes` and its levels in `values`, of values there along the ring, and returns its scale.
  template <int D, int M, int BITS, int RULE, class Codes>
  TQ_FN float encode(TQ_THREAD const float* y, float norm, Codes codes, uint simd_lane) const {
    using TRELLIS = tq_trellis<D, BITS>;
    constexpr int N = (D + 31) / 32, GROUPS = TRELLIS::GROUPS, OWN = TRELLIS::OWN, TRIED = TRELLIS::TRIED;
    constexpr int PLACES = TRELLIS::PLACES, AROUND = TRELLIS::AROUND;
    int lane = int(simd_lane), place = lane % PLACES, share = lane / PLACES;
    float factor = norm > 0.0f ? tq_div(1.0f, norm) : 0.0f, level[OWN * TRIED];
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + lane;
      if (dim < D) values[TRELLIS::along(dim)] = tq_mul(y[j], factor);
    }
    TQ_UNROLL for (int i = 0; i < OWN * TRIED; i++)
      level[i] = static_cast<float>(levels[place * OWN + i / TRIED + (share * TRIED + i % TRIED) * GROUPS]);
    for (int i = lane; i < GROUPS; i += 32) costs[i] = 0.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    search<D, BITS>(D - AROUND, 2 * AROUND, level, lane);
    uint group = cheapest<D, BITS>(lane), found = 0;
    for (int t = 2 * AROUND - 1; t >= AROUND - 1; t--) {
      found = state<D, BITS>(group, t);
      group = found >> uint(BITS);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    group = found & uint(GROUPS - 1);  // in which the ring begins and ends
    for (int i = lane; i < GROUPS; i += 32) costs[i] = uint(i) == group ? 0.0f : TQ_FAR;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    search<D, BITS>(0, D, level, lane);
    for (int t = D - 1; t >= 0; t--) {
      found = state<D, BITS>(group, t);
      group = found >> uint(BITS);
      if (lane == t % 32) {
        codes[TRELLIS::dim(t)] = uchar(found & ((1u << BITS) - 1u));
        values[t] = static_cast<float>(levels[int(found)]);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float own[N];
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + lane;
      own[j] = 0.0f;
      if (dim < D) own[j] = values[TRELLIS::along(dim)];
    }
    return tq_scale<D, M, RULE>(y, norm, own);
  }

  // Word number `word` of a vector's codes.
  template <int D, int BITS, class Codes>
  static TQ_FN ushort pack(Codes codes, int word) {
    using UNIT = tq_unit<D, BITS>;
    int n = word / int(UNIT::COUNT), unit = word % int(UNIT::COUNT);
    uint packed = 0;
    TQ_UNROLL for (int i = 0; i < int(UNIT::VALUES); i++) {
      int shift = 16 * (n + 1) - BITS * (i + 1);  // a code may reach over the end of its word
      uint code = codes[i * int(UNIT::COUNT) + unit];
      if (shift > -BITS && shift < 16) packed |= shift >= 0 ? code << uint(shift) : code >> uint(-shift);
    }
    return ushort(packed);
  }
};

// How the codes of vectors are found: as a ring where TRELLIS, else each by itself.
template <bool TRELLIS>
struct tq_coding {
  template <class Levels, class Values, class Costs, class Choices>
  static TQ_FN tq_nearest with(Levels, Values, Costs, Choices) {
    return {};
  }
};
template <>
struct tq_coding<true> {
  template <class Levels, class Values, class Costs, class Choices>
  static TQ_FN tq_searching<Levels, Values, Costs, Choices> with(Levels levels, Values values, Costs costs, Choices choices) {
    return {levels, values, costs, choices};
  }
};
