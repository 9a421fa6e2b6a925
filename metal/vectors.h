// Loads a vector into a simdgroup, and stores it rotated.
#include "rotation.h"

#define TQ_FP16_MAX 65504.0f

TQ_FN float tq_clamp(float x) { return x > TQ_FP16_MAX ? TQ_FP16_MAX : x < -TQ_FP16_MAX ? -TQ_FP16_MAX : x; }

// Loads a vector whose dims are `stride` apart.
template <int D, class Vector>
TQ_FN void tq_load_vector(Vector vector, int64_t stride, TQ_THREAD float* x, uint lane) {
  TQ_UNROLL for (int j = 0; j < (D + 31) / 32; j++) {
    int dim = 32 * j + int(lane);
    x[j] = dim < D ? static_cast<float>(vector[dim * stride]) : 0.0f;
  }
}

// Stores R x, or R^T x if INVERSE, clamped to the range of fp16 if CLAMPED; R = H diag(signs) / sqrt(D).
template <class T, int D, int M, bool INVERSE, bool CLAMPED, class Flips, class Out>
TQ_FN void tq_rotate(TQ_THREAD float* x, Flips flips, Out out, uint lane) {
  constexpr int N = (D + 31) / 32;
  if (!INVERSE) tq_flip_signs<D>(x, flips, lane);
  tq_hadamard<D, M>(x, flips + (INVERSE ? N + M : N), lane);
  if (INVERSE) tq_flip_signs<D>(x, flips, lane);
  float root = tq_sqrt(static_cast<float>(D)), factor = tq_div(1.0f, root);
  TQ_UNROLL for (int j = 0; j < N; j++) {
    int dim = 32 * j + int(lane);
    float y = INVERSE ? tq_mul(x[j], factor) : tq_div(x[j], root);
    if (dim < D) out[dim] = static_cast<T>(CLAMPED ? tq_clamp(y) : y);
  }
}
