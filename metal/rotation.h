// Walsh-Hadamard transforms and sums of a vector of D = M P values that lies across a simdgroup: lane l holds dims l,
// l + 32, l + 64, ... in an array of ceil(D / 32), with zeros past D. P is a power of two, at most 32 where M > 1.
//
// Which values change sign is data ("flips"), uint32: the rotation's signs (bit l of word j is dim 32 j + l), then a
// word for each row of the M-point Hadamard matrix (bit r is its column r), then a word for each of its columns.
#include "tq_compat.h"

#define TQ_LANES 32u

TQ_FN float tq_flip(float value, uint bit) { return as_type<float>(as_type<uint>(value) ^ (bit << 31)); }

// Multiply by the rotation's signs.
template <int D, class Flips>
TQ_FN void tq_flip_signs(TQ_THREAD float* x, Flips flips, uint lane) {
  TQ_UNROLL for (int j = 0; j < (D + 31) / 32; j++) x[j] = tq_flip(x[j], (flips[j] >> lane) & 1u);
}

// The element of row `row`, column `column` of the vector seen as M rows of P.
template <int P>
TQ_FN float tq_element(TQ_THREAD const float* x, int row, uint column) {
  constexpr int ROWS = P < 32 ? 32 / P : 1;  // rows in one array element of the simdgroup
  return simd_shuffle(x[row / ROWS], ushort(column + P * (row % ROWS)));
}

// The unnormalized transform, in the order of `mlx_tq.codec.rotation.hadamard`: butterflies of stride 1, 2, 4, ..., then
// the M-point transform with the rows summed left to right. `matrix` holds the flips of the M-point matrix or of its
// transpose.
template <int D, int M, class Flips>
TQ_FN void tq_hadamard(TQ_THREAD float* x, Flips matrix, uint lane) {
  constexpr int P = D / M, N = (D + 31) / 32;
  TQ_UNROLL for (int stride = 1; stride < P && stride < 32; stride *= 2)
    TQ_UNROLL for (int j = 0; j < N; j++) {
      float other = simd_shuffle_xor(x[j], ushort(stride));
      x[j] = (lane & uint(stride)) ? tq_sub(other, x[j]) : tq_add(x[j], other);
    }
  TQ_UNROLL for (int stride = 1; stride < P / 32; stride *= 2)
    TQ_UNROLL for (int j = 0; j < N; j++)
      if ((j & stride) == 0) {
        float even = x[j], odd = x[j + stride];
        x[j] = tq_add(even, odd);
        x[j + stride] = tq_sub(even, odd);
      }
  if (M > 1) {
    uint signs[N];
    float sum[N];
    TQ_UNROLL for (int j = 0; j < N; j++) {
      uint row = (TQ_LANES * uint(j) + lane) / P;
      signs[j] = row < uint(M) ? matrix[row] : 0u;
    }
    TQ_UNROLL for (int row = 0; row < M; row++) {
      float value = tq_element<P>(x, row, lane % P);
      TQ_UNROLL for (int j = 0; j < N; j++) {
        float term = tq_flip(value, (signs[j] >> row) & 1u);
        sum[j] = row == 0 ? term : tq_add(sum[j], term);
      }
    }
    TQ_UNROLL for (int j = 0; j < N; j++) x[j] = TQ_LANES * uint(j) + lane < uint(D) ? sum[j] : 0.0f;
  }
}
