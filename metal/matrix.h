// 8x8 matrices that a simdgroup holds: each lane has two neighboring elements of a row, as in mlx's own kernels.
#include "softmax.h"

// Weights are stored times this, so that small ones keep their precision in half precision.
#define TQ_WEIGHT_UNIT 16384.0f

TQ_FN int tq_matrix_row(int lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }
TQ_FN int tq_matrix_column(int lane) { return (lane & 8) >> 1 | (lane & 1) << 1; }

TQ_FN void tq_clear(TQ_THREAD simdgroup_float8x8& matrix) {
  TQ_UNROLL for (int e = 0; e < 2; e++) matrix.thread_elements()[e] = 0.0f;
}

// Reductions over the four lanes of a row.
TQ_FN float tq_row_max(float value) {
  value = tq_larger(value, simd_shuffle_xor(value, ushort(1)));
  return tq_larger(value, simd_shuffle_xor(value, ushort(8)));
}
TQ_FN float tq_row_sum(float value) {
  value = tq_add(value, simd_shuffle_xor(value, ushort(1)));
  return tq_add(value, simd_shuffle_xor(value, ushort(8)));
}

// Decodes the vectors of up to TOKENS tokens to rows of `tile`, STRIDE apart, times their gain if GAIN; absent ones are
// zeros.
template <class V, int TOKENS, int STRIDE, int THREADS, bool GAIN, class Words, class Tile>
TQ_FN void tq_fill_tile(int thread_number, int tokens, Words words, int token_words, Tile tile) {
  constexpr int COUNT = V::COUNT;
  for (int place = thread_number; place < TOKENS * COUNT; place += THREADS) {
    int token = place / COUNT, unit = place % COUNT;
    float values[V::VALUES];
    float factor = 0.0f;
    if (token < tokens) {
      auto vector = words + int64_t(token) * token_words;
      V::load(vector, unit, values);
      factor = GAIN ? V::gain(vector) : 1.0f;
    }
    TQ_UNROLL for (int i = 0; i < int(V::VALUES); i++)
      tile[token * STRIDE + V::dim(unit, i)] = static_cast<half>(token < tokens ? tq_mul(values[i], factor) : 0.0f);
  }
}
