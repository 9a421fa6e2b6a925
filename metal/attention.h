// Attention of QUERIES query rows over one block of tokens by a team of simdgroups, for attend.metal and
// attend_short.metal.
//
// A team of TEAM simdgroups takes 32 TEAM tokens at a time. For scores a lane is a token: each code is decoded once for
// all queries, without a shuffle. For values a lane is a unit of the vector (see units.h); if a vector has fewer units
// than 32, several groups of lanes take tokens in turn. A team of more than one divides the vector, so that the outputs
// of many query rows fit in registers; its vectors have at least 32 TEAM units.
#include "byte_levels.h"
#include "means.h"
#include "rotation.h"
#if TQ_TRELLIS
#include "trellis.h"
#endif
#if TQ_SORTED
#include "sorted_keys.h"
#endif

// Tokens [start, stop) of one kind, packed or full-precision. Their position in the sequence is their number, plus
// `gap` from `gap_start` on.
struct tq_block {
  int start, stop, gap_start, gap;
};

// Sets `tokens` to block number `block` of `blocks` of [0, stop). Block sizes are multiples of 32, but for the last
// block.
TQ_FN void tq_block_range(int stop, int block, int blocks, TQ_THREAD tq_block& tokens) {
  int size = ((stop + blocks - 1) / blocks + 31) / 32 * 32;
  tokens.start = block * size;
  tokens.stop = tokens.start + size < stop ? tokens.start + size : stop;
}

// Partial attention of each query row: maximum of the simdgroup, sum and output of a lane.
template <int QUERIES, int VALUES>
struct tq_partial {
  float maximum[QUERIES], sum[QUERIES], output[QUERIES * VALUES];
};

// Division of values between lanes: SPAN lanes per token, SLOTS tokens at once, UNITS units per lane.
template <class V, int TEAM>
struct tq_split {
  enum {
    LANES = 32 * TEAM,
    SPAN = int(V::COUNT) < LANES ? int(V::COUNT) : LANES,
    SLOTS = LANES / SPAN,
    UNITS = (int(V::COUNT) + LANES - 1) / LANES,
    VALUES = UNITS * int(V::VALUES)
  };
};

template <int TEAM>
TQ_FN void tq_team_barrier() {
  if (TEAM == 1) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

struct tq_maximum {
  TQ_FN float operator()(float a, float b) { return tq_larger(a, b); }
};
struct tq_sum {
  TQ_FN float operator()(float a, float b) { return tq_add(a, b); }
};

// Combines the values of each query row, one of each simdgroup of a team.
template <int QUERIES, int TEAM, class Shared, class Combine>
TQ_FN void tq_share(int lane, int member, Shared shared, TQ_THREAD float* values, Combine combine) {
  if (lane == 0)
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) shared[member * QUERIES + q] = values[q];
  tq_team_barrier<TEAM>();
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
    values[q] = shared[q];
    TQ_UNROLL for (int other = 1; other < TEAM; other++) values[q] = combine(values[q], shared[other * QUERIES + q]);
  }
}

// Adds a unit's part of a key to the scores, of queries of D dims.
template <int QUERIES, class K, int D = int(K::DIM), class Query>
TQ_FN void tq_score(Query query, int unit, TQ_THREAD const float* decoded, TQ_THREAD float* score) {
  TQ_UNROLL for (int i = 0; i < int(K::VALUES); i++) {
    float query_values[QUERIES];
    tq_rows<QUERIES, D>::load(query, K::dim(unit, i), query_values);
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = tq_fma(query_values[q], decoded[i], score[q]);
  }
}

// Adds a key to the scores. If K::PAIRED, its words are read two at a time from `pairs`: each lane reads another row, so
// this halves the loads, which lanes cannot share.
template <int QUERIES, class K, class Query, class Key, class Pairs>
TQ_FN void tq_score_key(Query query, TQ_THREAD const Key& key, Pairs pairs, TQ_THREAD float* score) {
  float decoded[K::VALUES];
  if (K::PAIRED) {
    TQ_UNROLL_BY(K::VALUES == 1 && QUERIES <= 4 ? 8 : 4) for (int unit = 0; unit < int(K::COUNT); unit += 2) {
      uint words[K::WORDS];
      TQ_UNROLL for (int n = 0; n < int(K::WORDS); n++) words[n] = pairs[K::place(unit, n) / 2];
      K::decode(key, words, decoded);
      tq_score<QUERIES, K>(query, unit, decoded, score);
      TQ_UNROLL for (int n = 0; n < int(K::WORDS); n++) words[n] >>= 16;
      K::decode(key, words, decoded);
      tq_score<QUERIES, K>(query, unit + 1, decoded, score);
    }
  } else {
    TQ_UNROLL_BY(2) for (int unit = 0; unit < int(K::COUNT); unit++) {
      K::load(key, unit, decoded);
      tq_score<QUERIES, K>(query, unit, decoded, score);
    }
  }
}
#if TQ_SORTED

// Adds a group of WIDTH bits to the scores of queries of D dims, without its size.
template <int QUERIES, int D, int WIDTH, class Query, class Words, class Levels>
TQ_FN void tq_score_group(Query query, Words words, Levels levels, TQ_THREAD float* score) {
  using RING = tq_ring<WIDTH>;
  auto ring = RING::make(words, levels);
  uint previous = RING::VECTOR::last_word(ring, int(RING::VECTOR::COUNT) - 1);
  TQ_UNROLL_BY(QUERIES > 4 ? 2 : 1) for (int unit = 0; unit < int(RING::VECTOR::COUNT); unit++) {
    float decoded[RING::VECTOR::VALUES];
    RING::VECTOR::load_next(ring, unit, previous, decoded);
    tq_score<QUERIES, typename RING::VECTOR, D>(query, unit, decoded, score);
  }
}

// Adds a key of sorted dims to the scores.
template <int QUERIES, class K, class Query, class Words, class Levels, class Groups, class Pairs>
TQ_FN void tq_score_key(Query query, TQ_THREAD const tq_sorted_key<Words, Levels, Groups>& key, Pairs, TQ_THREAD float* score) {
  constexpr int D = K::DIM;
  TQ_UNROLL_BY(1) for (int group = 0; group < D / TQ_GROUP; group++) {
    uint place = tq_place<D>(key.groups, group);
    float size = tq_size<D>(key.groups, group), part[QUERIES];
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) part[q] = 0.0f;
    auto words = key.words + int(place >> 3);
    auto group_query = query + TQ_GROUP * group;
    switch (place & 7u) {
      case 1: tq_score_group<QUERIES, D, 1>(group_query, words, key.levels, part); break;
      case 2: tq_score_group<QUERIES, D, 2>(group_query, words, key.levels, part); break;
      case 3: tq_score_group<QUERIES, D, 3>(group_query, words, key.levels, part); break;
      case 4: tq_score_group<QUERIES, D, 4>(group_query, words, key.levels, part); break;
      case 5: tq_score_group<QUERIES, D, 5>(group_query, words, key.levels, part); break;
      case 6: tq_score_group<QUERIES, D, 6>(group_query, words, key.levels, part); break;
      case 7: tq_score_group<QUERIES, D, 7>(group_query, words, key.levels, part); break;
    }
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = tq_fma(part[q], size, score[q]);
  }
}
#endif

// Attends to a block, as simdgroup number `member` of a team. The team shares query [K::DIM] and weight [32 TEAM], each
// of QUERIES values, and `shared` [TEAM QUERIES] if it is more than one; query q sees positions before last[q]. Keys are KEY_WORDS 16-bit words apart, values VALUE_WORDS.
// `means`, `index` and `cache` are those of means.h; plain keys do not read the first two.
template <int QUERIES, int TEAM, bool MASKED, class K, class V, int KEY_WORDS, int VALUE_WORDS, class Query, class Weight, class Shared, class Keys, class Pairs, class Values, class Means, class Index, class Cache, class Bias, class Partial>
TQ_FN void tq_attend(int lane, int member, TQ_THREAD const tq_block& block, Query query, Weight weight, Shared shared, Keys keys, Pairs pairs, Values values, Means means, Index index, TQ_THREAD Cache& cache, TQ_THREAD const int* last, Bias bias, TQ_THREAD const int64_t* bias_rows, TQ_THREAD Partial& partial) {
  using SPLIT = tq_split<V, TEAM>;
  using WEIGHTS = tq_rows<QUERIES, 32 * TEAM>;
  constexpr int UNIT = V::VALUES, SPAN = SPLIT::SPAN, VALUES = SPLIT::VALUES;
  constexpr int AHEAD = QUERIES > 4 ? 4 : 8;  // loads at once; more take registers that other warps need
  constexpr int TURNS = int(SPLIT::LANES) / int(SPLIT::SLOTS);  // tokens of a lane's values
  int place = 32 * member + lane;
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
    partial.maximum[q] = TQ_MASKED;
    partial.sum[q] = 0.0f;
    TQ_UNROLL for (int i = 0; i < VALUES; i++) partial.output[q * VALUES + i] = 0.0f;
  }
  for (int base = block.start; base < block.stop; base += 32 * TEAM) {
    int token = base + place;
    int position = token < block.gap_start ? token : token + block.gap;
    bool valid = token < block.stop;
    float score[QUERIES], mean_scores[QUERIES];
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = 0.0f;
    tq_add_means<int(K::DIM)>(lane, base + 32 * member, block.stop, query, means, index, cache, mean_scores);
    float value_gain = 0.0f;
    if (valid) {
      auto key = keys + int64_t(token) * KEY_WORDS;
      tq_score_key<QUERIES, K>(query, key, pairs + int64_t(token) * (KEY_WORDS / 2), score);
      float gain = K::gain(key);
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
        score[q] = Cache::ADDS ? tq_fma(score[q], gain, mean_scores[q]) : tq_mul(score[q], gain);
        if (MASKED) score[q] = tq_larger(tq_fma(bias[bias_rows[q] + position], TQ_LOG2E, score[q]), TQ_MASKED);
      }
      auto value = values + int64_t(token) * VALUE_WORDS;
      value_gain = V::gain(value);
    }
    float p[QUERIES], maximum[QUERIES];
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) maximum[q] = tq_simd_max(valid && position < last[q] ? score[q] : TQ_MASKED);
    if (TEAM > 1) tq_share<QUERIES, TEAM>(lane, member, shared, maximum, tq_maximum());
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
      bool visible = valid && position < last[q];
      float largest = maximum[q];
      if (largest > partial.maximum[q]) {  // the same in all lanes
        float factor = tq_exp2(tq_sub(partial.maximum[q], largest));
        partial.maximum[q] = largest;
        partial.sum[q] = tq_mul(partial.sum[q], factor);
        TQ_UNROLL for (int i = 0; i < VALUES; i++) partial.output[q * VALUES + i] = tq_mul(partial.output[q * VALUES + i], factor);
      }
      p[q] = visible ? tq_exp2(tq_sub(score[q], partial.maximum[q])) : 0.0f;
      partial.sum[q] = tq_add(partial.sum[q], p[q]);
      p[q] = tq_mul(p[q], value_gain);
    }
    if (TEAM == 1) tq_team_barrier<TEAM>();  // a larger team met for its maxima
    WEIGHTS::store(weight, place, p);
    tq_team_barrier<TEAM>();
    int tokens = block.stop - base < 32 * TEAM ? block.stop - base : 32 * TEAM;
    if (place < int(SPLIT::SLOTS) * SPAN) {
      TQ_UNROLL_BY(int(SPLIT::UNITS) > 1 ? 1 : AHEAD < TURNS ? AHEAD : TURNS) for (int slot = place / SPAN; slot < tokens; slot += int(SPLIT::SLOTS)) {
        auto value = values + int64_t(base + slot) * VALUE_WORDS;
        WEIGHTS::load(weight, slot, p);
        TQ_UNROLL for (int u = 0; u < int(SPLIT::UNITS); u++) {
          int unit = u * int(SPLIT::LANES) + place % SPAN;
          if (int(V::COUNT) % int(SPLIT::LANES) == 0 || unit < int(V::COUNT)) {
            float decoded[UNIT];
            V::load(value, unit, decoded);
            TQ_UNROLL for (int q = 0; q < QUERIES; q++)
              TQ_UNROLL for (int i = 0; i < UNIT; i++) {
                int n = q * VALUES + u * UNIT + i;
                partial.output[n] = tq_fma(p[q], decoded[i], partial.output[n]);
              }
          }
        }
      }
    }
  }
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) partial.sum[q] = tq_simd_sum(partial.sum[q]);
  if (TEAM > 1) tq_share<QUERIES, TEAM>(lane, member, shared, partial.sum, tq_sum());
}

// Stores the partial attention of query row q at `index`.
template <class V, int TEAM, class Outputs, class Floats, class Partial>
TQ_FN void tq_store(int lane, int member, int q, int64_t index, TQ_THREAD const Partial& partial, Outputs outputs, Floats maxima, Floats totals) {
  using SPLIT = tq_split<V, TEAM>;
  int place = 32 * member + lane;
  if (place == 0) {
    maxima[index] = partial.maximum[q];
    totals[index] = partial.sum[q];
  }
  TQ_UNROLL for (int u = 0; u < int(SPLIT::UNITS); u++)
    TQ_UNROLL for (int i = 0; i < int(V::VALUES); i++) {
      float lane_output = partial.output[q * int(SPLIT::VALUES) + u * int(V::VALUES) + i];
      float output = lane_output;
      TQ_UNROLL for (int slot = 1; slot < int(SPLIT::SLOTS); slot++)
        output = tq_add(output, simd_shuffle(lane_output, ushort((lane + slot * int(SPLIT::SPAN)) & 31)));
      int unit = u * int(SPLIT::LANES) + place;
      if (place < int(SPLIT::SPAN) && unit < int(V::COUNT)) outputs[index * int(V::DIM) + V::dim(unit, i)] = output;
    }
}
