// Rotates vectors, or rotates them back if INVERSE; one simdgroup per vector, in fp32.
//
//   vectors [A, B, C, DIM]: T, any strides
//   rotation_flips: see rotation.h
//   rotated [A B C, DIM]: T
//
// Only if NORMALIZED: key_scale [A, H, DIM]: float, divides vectors before the rotation, one for B / H heads. Results
// are clamped to the range of fp16 if CLAMPED.
//
// Grid (32 SIMDGROUPS ceil(A B C / SIMDGROUPS), 1, 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "vectors.h"
#if TQ_NORMALIZED
#include "key_scale.h"
#endif

//// body

uint lane = thread_index_in_simdgroup;
uint row = threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup;
uint middle = vectors_shape[1], inner = vectors_shape[2];
if (row < vectors_shape[0] * middle * inner) {
  auto vector = vectors + (row / (middle * inner) * vectors_strides[0] + row / inner % middle * vectors_strides[1] +
                           row % inner * vectors_strides[2]);
  float x[(DIM + 31) / 32];
  tq_load_vector<DIM>(vector, vectors_strides[3], x, lane);
#if TQ_NORMALIZED
  uint heads = key_scale_shape[1], head = row / inner / (middle / heads);
  tq_divide<DIM>(x, key_scale + head * uint(DIM), lane);
#endif
  tq_rotate<T, DIM, ORDER, INVERSE, CLAMPED>(x, rotation_flips, rotated + int64_t(row) * DIM, lane);
}
