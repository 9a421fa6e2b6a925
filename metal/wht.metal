// Rotates vectors, or back where INVERSE. One simdgroup takes one vector, in fp32.
//
//   vectors [A, B, C, DIM]: T, any strides
//   rotation_flips: see rotation.h
//   rotated [A B C, DIM]: T
//
// Grid (32 SIMDGROUPS, ceil(A B C / SIMDGROUPS), 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "rotation.h"

//// body

uint lane = thread_index_in_simdgroup;
uint row = threadgroup_position_in_grid.y * SIMDGROUPS + simdgroup_index_in_threadgroup;
uint middle = vectors_shape[1], inner = vectors_shape[2];
if (row < vectors_shape[0] * middle * inner) {
  auto vector = vectors + (row / (middle * inner) * vectors_strides[0] + row / inner % middle * vectors_strides[1] +
                           row % inner * vectors_strides[2]);
  tq_rotate<T, DIM, ORDER, INVERSE>(vector, vectors_strides[3], rotation_flips, rotated + row * uint(DIM), lane);
}
