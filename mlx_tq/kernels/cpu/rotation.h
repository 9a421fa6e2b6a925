// Walsh-Hadamard rotations, in the order of additions of mlx_tq/codec/rotation.py.
#pragma once
#include "formats.h"

namespace tq {

constexpr int MAX_ORDER = 28;

// R = H diag(signs) / sqrt(dim), with H of `order` m and dim = m 2^k. `matrix` [m, m] is the part of H that is not of
// Sylvester's kind, row by row. Vectors are not rotated where `signs` is null.
struct Rotation {
  const float* signs;
  const float* matrix;
  int32_t order;
  int32_t padding;
};

// The unnormalized transform H x, or that of H's transpose, in place: of a vector of floats, or one in each lane.
template <class T>
inline void hadamard(T* x, int dim, const Rotation& rotation, bool transpose) {
  const int order = rotation.order, power = dim / order;
  for (int stride = 1; stride < power; stride *= 2)
    for (int start = 0; start < dim; start += 2 * stride)
      for (int i = start; i < start + stride; i++) {
        const T a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
  if (order == 1) return;
  T column[MAX_ORDER];
  for (int i = 0; i < power; i++) {
    for (int row = 0; row < order; row++) column[row] = x[row * power + i];
    for (int row = 0; row < order; row++) {
      T total = column[0] * rotation.matrix[transpose ? row : row * order];
      for (int c = 1; c < order; c++) total = total + column[c] * rotation.matrix[transpose ? c * order + row : row * order + c];
      x[row * power + i] = total;
    }
  }
}

inline void rotate(float* x, int dim, const Rotation& rotation) {
  if (!rotation.signs) return;
  for (int i = 0; i < dim; i++) x[i] *= rotation.signs[i];
  hadamard(x, dim, rotation, false);
  const float factor = 1 / std::sqrt(float(dim));
  for (int i = 0; i < dim; i++) x[i] *= factor;
}

// Puts dims in the order of a head, and rotates its groups.
inline void rotate_groups(float* x, int dim, const uint16_t* order, const Rotation& rotation) {
  float sorted[MAX_DIM];
  for (int i = 0; i < dim; i++) sorted[i] = x[order[i]];
  for (int i = 0; i < dim; i += GROUP) rotate(sorted + i, GROUP, rotation);
  memcpy(x, sorted, 4 * dim);
}

inline void rotate_back(float* x, int dim, const Rotation& rotation) {
  if (!rotation.signs) return;
  hadamard(x, dim, rotation, true);
  const float factor = 1 / std::sqrt(float(dim));
  for (int i = 0; i < dim; i++) x[i] *= rotation.signs[i] * factor;
}

}  // namespace tq
