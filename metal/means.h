// What means of blocks of tokens add to scores of normalized keys: <query, mean>, once for all tokens in a row that share one.
#include "numbers.h"
#include "softmax.h"

// What is known of plain keys, which have none.
struct tq_plain {
  enum { ADDS = 0 };
};
template <int D, class Query, class Means, class Index>
TQ_FN void tq_add_means(int, int, int, Query, Means, Index, TQ_THREAD tq_plain&, TQ_THREAD float*) {}
#if TQ_NORMALIZED

#define TQ_NONE uint(0xFFFFFFFFu)

TQ_FN uint tq_simd_least(uint value) {
  TQ_UNROLL for (int stride = 16; stride > 0; stride /= 2) {
    uint other = simd_shuffle_xor(value, ushort(stride));
    value = other < value ? other : value;
  }
  return value;
}

// Of a head whose tokens share means: an index says which one a token has; where not INDEXED it is that of `first` and the
// token's number together, by TOKENS. `part` is what mean number `at` adds.
template <int QUERIES, int TOKENS>
struct tq_known {
  enum { ADDS = 1 };
  bool indexed;
  int first;
  uint at;
  float part[QUERIES];
};

// Leaves in lane l what the mean of token base + l adds, of means [n, D]; where there is no such token, any number.
template <int D, int QUERIES, int TOKENS, class Query, class Means, class Index>
TQ_FN void tq_add_means(int lane, int base, int stop, Query query, Means means, Index index, TQ_THREAD tq_known<QUERIES, TOKENS>& known, TQ_THREAD float* added) {
  int token = base + lane < stop ? base + lane : stop - 1;
  uint mine = uint(known.indexed ? index[token] : (known.first + base) / TOKENS);
  uint next = known.indexed ? tq_simd_least(mine) : mine;
  while (next != TQ_NONE) {  // all lanes alike
    if (next != known.at) {
      known.at = next;
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) known.part[q] = 0.0f;
      TQ_UNROLL for (int dim = lane; dim < D; dim += 32) {
        float asked[QUERIES], value = static_cast<float>(means[int64_t(next) * D + dim]);
        tq_numbers<QUERIES>::unpack(query[dim], asked);
        TQ_UNROLL for (int q = 0; q < QUERIES; q++) known.part[q] = tq_fma(asked[q], value, known.part[q]);
      }
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) known.part[q] = tq_simd_sum(known.part[q]);
    }
    if (mine == next)
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) added[q] = known.part[q];
    next = known.indexed ? tq_simd_least(mine > next ? mine : TQ_NONE) : TQ_NONE;
  }
}
#endif
