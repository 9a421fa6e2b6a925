// Rotates vectors: R x, or R^T x where INVERSE, with R = H diag(signs) / sqrt(D). One simdgroup takes one vector, in fp32.
//
//   vectors [A, B, C, DIM]: T, any strides
//   rotation_flips: see rotation.h
//   rotated [A B C, DIM]: T
//
// Grid (32 SIMDGROUPS, ceil(A B C / SIMDGROUPS), 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "rotation.h"

//// body

constexpr int N = (DIM + 31) / 32;
uint lane = thread_index_in_simdgroup;
uint row = threadgroup_position_in_grid.y * SIMDGROUPS + simdgroup_index_in_threadgroup;
uint middle = vectors_shape[1], inner = vectors_shape[2];
if (row < vectors_shape[0] * middle * inner) {
  auto vector = vectors + (row / (middle * inner) * vectors_strides[0] + row / inner % middle * vectors_strides[1] +
                           row % inner * vectors_strides[2]);
  float x[N];
  TQ_UNROLL for (int j = 0; j < N; j++) {
    int dim = 32 * j + int(lane);
    x[j] = dim < DIM ? static_cast<float>(vector[dim * vectors_strides[3]]) : 0.0f;
  }
  if (!INVERSE) tq_flip_signs<DIM>(x, rotation_flips, lane);
  tq_hadamard<DIM, ORDER>(x, rotation_flips + (INVERSE ? N + ORDER : N), lane);
  if (INVERSE) tq_flip_signs<DIM>(x, rotation_flips, lane);
  float root = tq_sqrt(static_cast<float>(DIM)), factor = tq_div(1.0f, root);
  TQ_UNROLL for (int j = 0; j < N; j++) {
    int dim = 32 * j + int(lane);
    float y = INVERSE ? tq_mul(x[j], factor) : tq_div(x[j], root);
    if (dim < DIM) rotated[row * uint(DIM) + dim] = static_cast<T>(y);
  }
}
