// Weights of normalized keys: they are multiplied by them, queries divided.
#include "tq_compat.h"

template <int D, class Weights>
TQ_FN void tq_weigh(TQ_THREAD float* x, Weights weights, uint lane) {
  TQ_UNROLL for (int j = 0; j < (D + 31) / 32; j++) {
    int dim = 32 * j + int(lane);
    if (dim < D) x[j] = tq_mul(x[j], weights[dim]);
  }
}
template <int D, class Weights>
TQ_FN void tq_divide(TQ_THREAD float* x, Weights weights, uint lane) {
  TQ_UNROLL for (int j = 0; j < (D + 31) / 32; j++) {
    int dim = 32 * j + int(lane);
    if (dim < D) x[j] = tq_div(x[j], weights[dim]);
  }
}
