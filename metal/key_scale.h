// The scale of normalized keys: keys are multiplied by it, queries divided.
#include "tq_compat.h"

template <int D, class Scale>
TQ_FN void tq_multiply(TQ_THREAD float* x, Scale scale, uint lane) {
  TQ_UNROLL for (int j = 0; j < (D + 31) / 32; j++) {
    int dim = 32 * j + int(lane);
    if (dim < D) x[j] = tq_mul(x[j], scale[dim]);
  }
}
template <int D, class Scale>
TQ_FN void tq_divide(TQ_THREAD float* x, Scale scale, uint lane) {
  TQ_UNROLL for (int j = 0; j < (D + 31) / 32; j++) {
    int dim = 32 * j + int(lane);
    if (dim < D) x[j] = tq_div(x[j], scale[dim]);
  }
}
