// Encoding: boundaries, levels rounded as the codec rounds them, packing, and sums in the codec's order.
#include "codebook.h"
#include "packing.h"
#include "rotation.h"

// 3, 7 and 15 boundaries.
TQ_CONSTANT float tq_boundaries[25] = {
    -0.981598794f, 0.0f, 0.981598794f,
    -1.74800968f, -1.04978824f, -0.500705719f, 0.0f, 0.500705719f, 1.04978824f, 1.74800968f,
    -2.40618968f, -1.85047317f, -1.43164015f, -1.09433603f, -0.800955653f, -0.528093457f, -0.262993634f, 0.0f,
    0.262993634f, 0.528093457f, 0.800955653f, 1.09433603f, 1.43164015f, 1.85047317f, 2.40618968f};

// The number of boundaries below a value.
template <int BITS>
TQ_FN uint tq_code(float value) {
  constexpr int FIRST = (1 << BITS) - BITS - 2;
  uint code = 0;
  TQ_UNROLL for (int i = 0; i < (1 << BITS) - 1; i++) code += value > tq_boundaries[FIRST + i] ? 1u : 0u;
  return code;
}

// The level of a code, as the codec rounds it.
template <int BITS>
TQ_FN float tq_level(uint code) {
  float u = tq_sub(static_cast<float>(code), static_cast<float>((1 << BITS) - 1) * 0.5f);
  float square = tq_mul(u, u);
  float slope = BITS == 2 ? tq_third<BITS>() : tq_add(tq_mul(tq_fifth<BITS>(), square), tq_third<BITS>());
  return tq_mul(u, tq_add(tq_mul(slope, square), tq_first<BITS>()));
}

// Word number `word` of the packed codes of D values, from one byte per code.
template <int D, int BITS, class Codes>
TQ_FN ushort tq_pack_word(Codes codes, int word) {
  uint packed = 0;
  if (BITS == 8) {
    packed = uint(codes[2 * word]) | uint(codes[2 * word + 1]) << 8;
  } else if (BITS == 3) {
    constexpr int COUNT = D / 16;  // words with planes of one kind
    int third = word / COUNT, i = word % COUNT;
    TQ_UNROLL for (int plane = 0; plane < 5; plane++)
      packed |= uint(codes[(5 * third + plane) * COUNT + i]) << (3 * plane);
    packed |= ((uint(codes[15 * COUNT + i]) >> third) & 1u) << 15;
  } else {
    constexpr int COUNT = D * BITS / 16;
    TQ_UNROLL for (int plane = 0; plane < 16 / BITS; plane++)
      packed |= uint(codes[plane * COUNT + word]) << (BITS * plane);
  }
  return ushort(packed);
}

// The sum of a vector in the order of `mlx_tq.codec.rotation.pairwise_sum`, in every lane. Overwrites x.
template <int D, int M>
TQ_FN float tq_pairwise_sum(TQ_THREAD float* x) {
  constexpr int P = D / M, N = (D + 31) / 32;
  TQ_UNROLL for (int stride = 1; stride < P && stride < 32; stride *= 2)
    TQ_UNROLL for (int j = 0; j < N; j++) x[j] = tq_add(x[j], simd_shuffle_xor(x[j], ushort(stride)));
  TQ_UNROLL for (int stride = 1; stride < P / 32; stride *= 2)
    TQ_UNROLL for (int j = 0; j < N; j += 2 * stride) x[j] = tq_add(x[j], x[j + stride]);
  float total = tq_element<P>(x, 0, 0);
  TQ_UNROLL for (int row = 1; row < M; row++) total = tq_add(total, tq_element<P>(x, row, 0));
  return total;
}

// The largest value of a simdgroup, in every lane.
TQ_FN uint tq_largest(uint value) {
  TQ_UNROLL for (int stride = 1; stride < 32; stride *= 2) {
    uint other = simd_shuffle_xor(value, ushort(stride));
    value = other > value ? other : value;
  }
  return value;
}

// The scale of a vector y that is stored as `level`, by RULE: 0 the norm; 1 preserves the norm of the decoded vector;
// 2 least squares; 3 unbiased, at most 1.3 times that. Overwrites level.
template <int D, int M, int RULE>
TQ_FN float tq_scale(TQ_THREAD const float* y, float norm, TQ_THREAD float* level) {
  constexpr int N = (D + 31) / 32;
  if (RULE == 0) return norm;
  float product[N];
  TQ_UNROLL for (int j = 0; j < N; j++) {
    product[j] = tq_mul(y[j], level[j]);
    level[j] = tq_mul(level[j], level[j]);
  }
  float energy = tq_pairwise_sum<D, M>(level);
  if (RULE == 1) return tq_div(tq_mul(norm, tq_sqrt(static_cast<float>(D))), tq_sqrt(energy));
  float agreement = tq_pairwise_sum<D, M>(product);
  agreement = agreement < 0.0f ? 0.0f : agreement;
  float least = tq_div(agreement, energy);
  if (RULE == 2) return least;
  float unbiased = tq_mul(norm, tq_div(tq_mul(norm, static_cast<float>(D)), agreement)), largest = tq_mul(1.3f, least);
  return norm > 0.0f ? (unbiased < largest ? unbiased : largest) : 0.0f;
}

// Transforms a vector, and sets `square` to the squares of its dims before.
template <int D, int M, class Flips>
TQ_FN void tq_transform(TQ_THREAD float* x, TQ_THREAD float* square, Flips flips, uint lane) {
  constexpr int N = (D + 31) / 32;
  TQ_UNROLL for (int j = 0; j < N; j++) square[j] = tq_mul(x[j], x[j]);
  tq_flip_signs<D>(x, flips, lane);
  tq_hadamard<D, M>(x, flips + N, lane);
}

// Rounds each value to its nearest level.
struct tq_nearest_levels {
  template <int D, int M, class Flips>
  TQ_FN void transform(TQ_THREAD float* x, TQ_THREAD float* square, Flips flips, uint lane) const {
    tq_transform<D, M>(x, square, flips, lane);
  }
  // Writes a vector's codes to `codes` and returns its scale.
  template <int D, int M, int BITS, int RULE, class Codes>
  TQ_FN float encode(TQ_THREAD const float* y, float norm, Codes codes, uint lane) const {
    constexpr int N = (D + 31) / 32;
    float factor = norm > 0.0f ? tq_div(1.0f, norm) : 0.0f, level[N];
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + int(lane);
      uint code = tq_code<BITS>(tq_mul(y[j], factor));
      level[j] = dim < D ? tq_level<BITS>(code) : 0.0f;
      if (dim < D) codes[dim] = uchar(code);
    }
    return tq_scale<D, M, RULE>(y, norm, level);
  }
  template <int D, int BITS, class Codes>
  static TQ_FN ushort pack(Codes codes, int word) {
    return tq_pack_word<D, BITS>(codes, word);
  }
};
