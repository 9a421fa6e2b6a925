// The levels of 2, 3 and 4 bit codes and the boundaries between them, as in `mlx_tq.codec.codebook`.
#include "tq_compat.h"

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

// The level of a code: an odd polynomial in u = code - (2^bits - 1) / 2.
template <int BITS>
TQ_FN float tq_level(uint code) {
  constexpr float FIRST = BITS == 2 ? 0.892886937f : BITS == 3 ? 0.490661204f : 0.262654811f;
  constexpr float THIRD = BITS == 2 ? 0.0506925024f : BITS == 3 ? 0.00478869537f : 0.000129166088f;
  constexpr float FIFTH = BITS == 2 ? 0.0f : BITS == 3 ? 0.000436545699f : 2.9582452e-05f;
  float u = tq_sub(static_cast<float>(code), static_cast<float>((1 << BITS) - 1) * 0.5f);
  float square = tq_mul(u, u);
  float slope = BITS == 2 ? THIRD : tq_add(tq_mul(FIFTH, square), THIRD);
  return tq_mul(u, tq_add(tq_mul(slope, square), FIRST));
}
