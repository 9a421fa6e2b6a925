// Merging the partial attention of blocks for one query row. Blocks of packed tokens come first; their outputs are in
// rotated space.
#include "rotation.h"
#include "softmax.h"

// Returns the sum of the weights of all blocks, and of the sink if SINKS, and adds up the outputs of blocks first,
// first + step, ... In `part`, lane l has dims l, l + 32, ... of the output of packed tokens, then of full-precision
// tokens.
template <int D, bool SINKS, class Outputs, class Floats>
TQ_FN float tq_merge(int lane, int first, int step, int packed_blocks, int blocks, float sink, Outputs outputs, Floats maxima, Floats sums, TQ_THREAD float* part) {
  constexpr int N = (D + 31) / 32;
  float maximum = sink;
  for (int block = lane; block < blocks; block += 32) maximum = tq_larger(maximum, maxima[block]);
  maximum = tq_simd_max(maximum);
  float total = 0.0f;
  for (int block = lane; block < blocks; block += 32)
    total = tq_fma(sums[block], tq_exp2(tq_sub(maxima[block], maximum)), total);
  total = tq_simd_sum(total);
  if (SINKS) total = tq_add(total, tq_exp2(tq_sub(sink, maximum)));

  TQ_UNROLL for (int i = 0; i < 2 * N; i++) part[i] = 0.0f;
  TQ_UNROLL for (int side = 0; side < 2; side++)
    for (int block = first + side * packed_blocks; block < (side == 0 ? packed_blocks : blocks); block += step) {
      float factor = tq_exp2(tq_sub(maxima[block], maximum));
      TQ_UNROLL for (int j = 0; j < N; j++) {
        int dim = 32 * j + lane;
        if (dim < D) part[side * N + j] = tq_fma(factor, outputs[block * D + dim], part[side * N + j]);
      }
    }
  return total;
}

// Rotates the output of packed tokens back, and stores the row.
template <class T, int D, int M, bool ROTATED, class Flips, class Row>
TQ_FN void tq_finish(int lane, TQ_THREAD float* part, float total, Flips flips, Row attended) {
  constexpr int N = (D + 31) / 32;
  if (ROTATED) {
    float factor = tq_div(1.0f, tq_sqrt(static_cast<float>(D)));
    tq_hadamard<D, M>(part, flips + (N + M), lane);
    tq_flip_signs<D>(part, flips, lane);
    TQ_UNROLL for (int j = 0; j < N; j++) part[j] = tq_mul(part[j], factor);
  }
  // A query that sees no token has a total of 0.
  float factor = total > 0.0f ? tq_div(1.0f, total) : 0.0f;
  TQ_UNROLL for (int j = 0; j < N; j++) {
    int dim = 32 * j + lane;
    if (dim < D) attended[dim] = static_cast<T>(tq_mul(tq_add(part[j], part[N + j]), factor));
  }
}
