// The part of scores that comes from the means of normalized keys: <query, mean>, computed once for consecutive tokens
// that share a mean.
#include "query_pack.h"
#include "softmax.h"

// Plain keys have no means.
struct tq_no_means {
  enum { ADDS = 0 };
};
template <int D, class Query, class Means, class Index>
TQ_FN void tq_add_means(int, int, int, Query, Means, Index, TQ_THREAD tq_no_means&, TQ_THREAD float*) {}
#if TQ_NORMALIZED

#define TQ_NONE uint(0xFFFFFFFFu)

TQ_FN uint tq_simd_min(uint value) {
  TQ_UNROLL for (int stride = 16; stride > 0; stride /= 2) {
    uint other = simd_shuffle_xor(value, ushort(stride));
    value = other < value ? other : value;
  }
  return value;
}

// The mean of a token is index[token] if `indexed`, else (first + token) / TOKENS. `score` is <query, mean> for mean
// number `mean`.
template <int QUERIES, int TOKENS>
struct tq_mean_cache {
  enum { ADDS = 1 };
  bool indexed;
  int first;
  uint mean;
  float score[QUERIES];
};

// Sets mean_scores in lane l to <query, mean> of token base + l, for means [n, D]; undefined if there is no such token.
template <int D, int QUERIES, int TOKENS, class Query, class Means, class Index>
TQ_FN void tq_add_means(int lane, int base, int stop, Query query, Means means, Index index, TQ_THREAD tq_mean_cache<QUERIES, TOKENS>& cache, TQ_THREAD float* mean_scores) {
  int token = base + lane < stop ? base + lane : stop - 1;
  uint number = uint(cache.indexed ? index[token] : (cache.first + base) / TOKENS);
  uint mean = cache.indexed ? tq_simd_min(number) : number;
  while (mean != TQ_NONE) {  // the same in all lanes
    if (mean != cache.mean) {
      cache.mean = mean;
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) cache.score[q] = 0.0f;
      TQ_UNROLL for (int dim = lane; dim < D; dim += 32) {
        float query_values[QUERIES], mean_value = static_cast<float>(means[int64_t(mean) * D + dim]);
        tq_rows<QUERIES, D>::load(query, dim, query_values);
        TQ_UNROLL for (int q = 0; q < QUERIES; q++) cache.score[q] = tq_fma(query_values[q], mean_value, cache.score[q]);
      }
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) cache.score[q] = tq_simd_sum(cache.score[q]);
    }
    if (number == mean)
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) mean_scores[q] = cache.score[q];
    mean = cache.indexed ? tq_simd_min(number > mean ? number : TQ_NONE) : TQ_NONE;
  }
}
#endif
