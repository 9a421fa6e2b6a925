// Reductions of a softmax in powers of two: scores are in units of log 2.
#include "tq_compat.h"

// Stands for minus infinity, so that fully masked scores have finite differences.
#define TQ_MASKED -1e30f
#define TQ_LOG2E 1.44269504f

TQ_FN float tq_larger(float a, float b) { return b > a ? b : a; }

// The reductions are over groups of SPAN lanes, a power of two.
template <int SPAN = 32>
TQ_FN float tq_simd_max(float value) {
  TQ_UNROLL for (int stride = SPAN / 2; stride > 0; stride /= 2) value = tq_larger(value, simd_shuffle_xor(value, ushort(stride)));
  return value;
}

template <int SPAN = 32>
TQ_FN float tq_simd_sum(float value) {
  TQ_UNROLL for (int stride = SPAN / 2; stride > 0; stride /= 2) value = tq_add(value, simd_shuffle_xor(value, ushort(stride)));
  return value;
}
