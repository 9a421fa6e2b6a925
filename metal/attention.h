// Attention of QUERIES query rows over one block of tokens, by one simdgroup: what attend.metal and attend_short.metal
// share.
//
// Tokens are taken 32 at a time. For scores a lane is a token: each code is decoded once for all queries, and no lane
// waits for another. For values a lane is a unit of the vector (see units.h), or as many lanes as there are units share
// the 32 tokens.
#include "means.h"
#include "rotation.h"
#include "units.h"
#if TQ_TRELLIS
#include "trellis.h"
#endif
#if TQ_NORMALIZED
#include "weights.h"
#endif

// Tokens [start, stop) of one kind. In the sequence, those from `fold` on stand `shift` tokens later.
struct tq_block {
  int start, stop, fold, shift;
};

// Block number `block` of `blocks` that tokens [0, stop) are cut into, each of whole 32 but the last.
TQ_FN void tq_cut(int stop, int block, int blocks, TQ_THREAD tq_block& tokens) {
  int size = ((stop + blocks - 1) / blocks + 31) / 32 * 32;
  tokens.start = block * size;
  tokens.stop = tokens.start + size < stop ? tokens.start + size : stop;
}

// What the lanes keep of each query row, and of each row's values.
template <int QUERIES, int VALUES>
struct tq_sums {
  float maximum[QUERIES], sum[QUERIES], output[QUERIES * VALUES];
};

// How values are shared among lanes: SPAN lanes to a token, SLOTS tokens at once, and UNITS units to a lane.
template <class V>
struct tq_share {
  enum {
    SPAN = int(V::COUNT) < 32 ? int(V::COUNT) : 32,
    SLOTS = 32 / SPAN,
    UNITS = (int(V::COUNT) + 31) / 32,
    VALUES = UNITS * int(V::VALUES)
  };
};

// Adds what a unit of a key makes of the scores.
template <int QUERIES, class K, class Query>
TQ_FN void tq_score(Query query, int unit, TQ_THREAD const float* decoded, TQ_THREAD float* score) {
  TQ_UNROLL for (int i = 0; i < int(K::VALUES); i++) {
    float asked[QUERIES];
    tq_numbers<QUERIES>::unpack(query[K::dim(unit, i)], asked);
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = tq_fma(asked[q], decoded[i], score[q]);
  }
}

// Attend to a block. The lanes share query [K::DIM] and weight [32], each of QUERIES numbers; query q sees the tokens of
// the sequence before last[q]. A token's key is KEY_WORDS 16-bit words behind the one before, its value VALUE_WORDS. Where
// K::PAIRED the words of keys are read from `pairs`, two by two, because each lane reads a row of its own: half as many
// loads that no other lane shares. Of means.h are `means`, `index` and `known`; the first two are anything where keys are plain.
template <int QUERIES, bool MASKED, class K, class V, int KEY_WORDS, int VALUE_WORDS, class Query, class Weight, class Keys, class Pairs, class Values, class Means, class Index, class Known, class Bias, class Sums>
TQ_FN void tq_attend(int lane, TQ_THREAD const tq_block& block, Query query, Weight weight, Keys keys, Pairs pairs, Values values, Means means, Index index, TQ_THREAD Known& known, TQ_THREAD const int* last, Bias bias, TQ_THREAD const int64_t* bias_rows, TQ_THREAD Sums& sums) {
  using SHARE = tq_share<V>;
  using NUMBERS = tq_numbers<QUERIES>;
  constexpr int UNIT = V::VALUES, SPAN = SHARE::SPAN, VALUES = SHARE::VALUES;
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
    sums.maximum[q] = TQ_MASKED;
    sums.sum[q] = 0.0f;
    TQ_UNROLL for (int i = 0; i < VALUES; i++) sums.output[q * VALUES + i] = 0.0f;
  }
  for (int base = block.start; base < block.stop; base += 32) {
    int token = base + lane;
    int place = token < block.fold ? token : token + block.shift;  // in the sequence
    bool there = token < block.stop;
    float score[QUERIES], added[QUERIES];
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = 0.0f;
    tq_add_means<int(K::DIM)>(lane, base, block.stop, query, means, index, known, added);
    float value_gain = 0.0f;
    if (there) {
      auto key = keys + int64_t(token) * KEY_WORDS;
      float decoded[K::VALUES];
      if (K::PAIRED) {
        auto paired = pairs + int64_t(token) * (KEY_WORDS / 2);
        TQ_ROLLED for (int unit = 0; unit < int(K::COUNT); unit += 2) {
          uint words[K::WORDS];
          TQ_UNROLL for (int n = 0; n < int(K::WORDS); n++) words[n] = paired[K::place(unit, n) / 2];
          K::decode(words, decoded);
          tq_score<QUERIES, K>(query, unit, decoded, score);
          TQ_UNROLL for (int n = 0; n < int(K::WORDS); n++) words[n] >>= 16;
          K::decode(words, decoded);
          tq_score<QUERIES, K>(query, unit + 1, decoded, score);
        }
      } else {
        TQ_ROLLED for (int unit = 0; unit < int(K::COUNT); unit++) {
          K::load(key, unit, decoded);
          tq_score<QUERIES, K>(query, unit, decoded, score);
        }
      }
      float gain = K::gain(key);
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
        score[q] = Known::ADDS ? tq_fma(score[q], gain, added[q]) : tq_mul(score[q], gain);
        if (MASKED) score[q] = tq_larger(tq_fma(bias[bias_rows[q] + place], TQ_LOG2E, score[q]), TQ_MASKED);
      }
      auto value = values + int64_t(token) * VALUE_WORDS;
      value_gain = V::gain(value);
    }
    float p[QUERIES];
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
      bool seen = there && place < last[q];
      float largest = tq_simd_max(seen ? score[q] : TQ_MASKED);
      if (largest > sums.maximum[q]) {  // all lanes alike
        float factor = tq_exp2(tq_sub(sums.maximum[q], largest));
        sums.maximum[q] = largest;
        sums.sum[q] = tq_mul(sums.sum[q], factor);
        TQ_UNROLL for (int i = 0; i < VALUES; i++) sums.output[q * VALUES + i] = tq_mul(sums.output[q * VALUES + i], factor);
      }
      p[q] = seen ? tq_exp2(tq_sub(score[q], sums.maximum[q])) : 0.0f;
      sums.sum[q] = tq_add(sums.sum[q], p[q]);
      p[q] = tq_mul(p[q], value_gain);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    weight[lane] = NUMBERS::pack(p);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    int tokens = block.stop - base < 32 ? block.stop - base : 32;
    if (lane < int(SHARE::SLOTS) * SPAN) {
      for (int slot = lane / SPAN; slot < tokens; slot += int(SHARE::SLOTS)) {
        auto value = values + int64_t(base + slot) * VALUE_WORDS;
        NUMBERS::unpack(weight[slot], p);
        TQ_UNROLL for (int u = 0; u < int(SHARE::UNITS); u++) {
          int unit = u * 32 + lane % SPAN;
          if (unit < int(V::COUNT)) {
            float decoded[UNIT];
            V::load(value, unit, decoded);
            TQ_UNROLL for (int q = 0; q < QUERIES; q++)
              TQ_UNROLL for (int i = 0; i < UNIT; i++) {
                int at = q * VALUES + u * UNIT + i;
                sums.output[at] = tq_fma(p[q], decoded[i], sums.output[at]);
              }
          }
        }
      }
    }
  }
}

// Store query row number q of a block at place `at`.
template <class V, class Outputs, class Numbers, class Sums>
TQ_FN void tq_store(int lane, int q, uint at, TQ_THREAD const Sums& sums, Outputs outputs, Numbers maxima, Numbers totals) {
  using SHARE = tq_share<V>;
  float total = tq_simd_sum(sums.sum[q]);
  if (lane == 0) {
    maxima[at] = sums.maximum[q];
    totals[at] = total;
  }
  TQ_UNROLL for (int u = 0; u < int(SHARE::UNITS); u++)
    TQ_UNROLL for (int i = 0; i < int(V::VALUES); i++) {
      float mine = sums.output[q * int(SHARE::VALUES) + u * int(V::VALUES) + i];
      float all = mine;
      TQ_UNROLL for (int slot = 1; slot < int(SHARE::SLOTS); slot++)
        all = tq_add(all, simd_shuffle(mine, ushort((lane + slot * int(SHARE::SPAN)) & 31)));
      int unit = u * 32 + lane;
      if (lane < int(SHARE::SPAN) && unit < int(V::COUNT)) outputs[at * uint(V::DIM) + V::dim(unit, i)] = all;
    }
}
