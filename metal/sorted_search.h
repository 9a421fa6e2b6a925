// Encodes keys of sorted dims, bit for bit as `mlx_tq.codec.formats.sorted_pairs`: a search for each group's ring.
#include "ring_search.h"
#include "sorted_keys.h"

// The scale of a vector y that is stored as `level`, by RULE as in `tq_scale`; register j of a lane counts with weight[j].
// Overwrites level.
template <int D, int M, int RULE>
TQ_FN float tq_weighted_scale(TQ_THREAD const float* y, float norm, TQ_THREAD const float* weight, TQ_THREAD float* level) {
  constexpr int N = D / TQ_GROUP;
  if (RULE == 0) return norm;
  float square[N], product[N];
  TQ_UNROLL for (int j = 0; j < N; j++) {
    square[j] = tq_mul(weight[j], tq_mul(y[j], y[j]));
    product[j] = tq_mul(weight[j], tq_mul(y[j], level[j]));
    level[j] = tq_mul(weight[j], tq_mul(level[j], level[j]));
  }
  float whole = tq_pairwise_sum<D, M>(square), energy = tq_pairwise_sum<D, M>(level);
  if (!(whole > 0.0f)) return 0.0f;
  if (RULE == 1) return tq_sqrt(tq_div(whole, energy));
  float agreement = tq_pairwise_sum<D, M>(product);
  agreement = agreement < 0.0f ? 0.0f : agreement;
  float least = tq_div(agreement, energy);
  if (RULE == 2) return least;
  float unbiased = tq_div(whole, agreement), largest = tq_mul(1.3f, least);
  return unbiased < largest ? unbiased : largest;
}

// Memory of a search, as in `tq_ring_search`, with the levels of all widths, and the groups of the key's head.
template <class Search, class Groups>
struct tq_group_search {
  Search search;
  Groups groups;

  // Divides dims by the sizes of their groups, puts them in order, and transforms the groups.
  template <int D, int M, class Flips>
  TQ_FN void transform(TQ_THREAD float* x, TQ_THREAD float* square, Flips flips, uint lane) const {
    constexpr int N = D / TQ_GROUP;
    TQ_UNROLL for (int j = 0; j < N; j++) search.values[TQ_GROUP * j + int(lane)] = x[j];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    TQ_UNROLL for (int j = 0; j < N; j++) {
      float value = search.values[int(groups[TQ_GROUP * j + int(lane)])];
      x[j] = tq_mul(value, tq_div(1.0f, tq_size<D>(groups, j)));
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    TQ_UNROLL for (int j = 0; j < N; j++) search.values[int(groups[TQ_GROUP * j + int(lane)])] = tq_mul(x[j], x[j]);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    TQ_UNROLL for (int j = 0; j < N; j++) square[j] = search.values[TQ_GROUP * j + int(lane)];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    tq_transform_groups<D, false>(x, flips, lane);
    float factor = tq_sqrt(static_cast<float>(N));
    TQ_UNROLL for (int j = 0; j < N; j++) x[j] = tq_mul(x[j], factor);
  }

  // Finds a vector's codes and returns its scale.
  template <int D, int M, int BITS, int RULE, class Codes>
  TQ_FN float encode(TQ_THREAD const float* y, float norm, Codes codes, uint lane) const {
    constexpr int N = D / TQ_GROUP;
    float factor = norm > 0.0f ? tq_div(1.0f, norm) : 0.0f, level[N], weight[N];
    TQ_UNROLL for (int j = 0; j < N; j++) {
      uint width = tq_place<D>(groups, j) & 7u;
      float size = tq_size<D>(groups, j), square = tq_mul(size, size), value = tq_mul(y[j], factor);
      auto group_codes = codes + TQ_GROUP * j;
      weight[j] = width > 0u ? tq_mul(square, square) : 0.0f;
      switch (width) {
        case 1: level[j] = find_level<1>(value, group_codes, int(lane)); break;
        case 2: level[j] = find_level<2>(value, group_codes, int(lane)); break;
        case 3: level[j] = find_level<3>(value, group_codes, int(lane)); break;
        case 4: level[j] = find_level<4>(value, group_codes, int(lane)); break;
        case 5: level[j] = find_level<5>(value, group_codes, int(lane)); break;
        case 6: level[j] = find_level<6>(value, group_codes, int(lane)); break;
        case 7: level[j] = find_level<7>(value, group_codes, int(lane)); break;
        default: level[j] = 0.0f;
      }
    }
    return tq_weighted_scale<D, M, RULE>(y, norm, weight, level);
  }

  // Word number `word` of a vector's codes.
  template <int D, int BITS, class Codes>
  TQ_FN ushort pack(Codes codes, int word) const {
    int group = 0;
    while (group + 1 < D / TQ_GROUP && word >= int(tq_place<D>(groups, group + 1) >> 3)) group++;
    uint place = tq_place<D>(groups, group);
    int rest = word - int(place >> 3);
    auto group_codes = codes + TQ_GROUP * group;
    switch (place & 7u) {
      case 1: return Search::template pack<TQ_GROUP, 1>(group_codes, rest);
      case 2: return Search::template pack<TQ_GROUP, 2>(group_codes, rest);
      case 3: return Search::template pack<TQ_GROUP, 3>(group_codes, rest);
      case 4: return Search::template pack<TQ_GROUP, 4>(group_codes, rest);
      case 5: return Search::template pack<TQ_GROUP, 5>(group_codes, rest);
      case 6: return Search::template pack<TQ_GROUP, 6>(group_codes, rest);
      default: return Search::template pack<TQ_GROUP, 7>(group_codes, rest);
    }
  }

  // Finds the codes of a group of WIDTH bits, and returns the level of the lane's value.
  template <int WIDTH, class Codes>
  TQ_FN float find_level(float value, Codes codes, int lane) const {
    using TRELLIS = tq_trellis<TQ_GROUP, WIDTH>;
    Search of_width = search;
    of_width.levels = search.levels + tq_table<true, WIDTH>();
    of_width.values[TRELLIS::ring_index(lane)] = value;
    of_width.template find_ring<TQ_GROUP, WIDTH>(codes, lane);
    float level = of_width.values[TRELLIS::ring_index(lane)];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    return level;
  }
};
template <class Levels, class Values, class Costs, class Choices, class Groups>
TQ_FN tq_group_search<tq_ring_search<Levels, Values, Costs, Choices>, Groups> tq_search_groups(Levels levels, Values values, Costs costs, Choices choices, Groups groups) {
  return {{levels, values, costs, choices}, groups};
}
