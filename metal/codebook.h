// Levels of 2, 3 and 4 bit codes, as in `mlx_tq.codec.codebook`.
#include "tq_compat.h"

// The coefficients of u, u^3 and u^5 in a level, for u = code - (2^BITS - 1) / 2.
template <int BITS>
constexpr TQ_FN float tq_first() { return BITS == 2 ? 0.892886937f : BITS == 3 ? 0.490661204f : 0.262654811f; }
template <int BITS>
constexpr TQ_FN float tq_third() { return BITS == 2 ? 0.0506925024f : BITS == 3 ? 0.00478869537f : 0.000129166088f; }
template <int BITS>
constexpr TQ_FN float tq_fifth() { return BITS == 2 ? 0.0f : BITS == 3 ? 0.000436545699f : 2.9582452e-05f; }

// The level of the code at bit SHIFT of a word, from the word shifted left by one. The code's bits stay in place and
// are read as the low bits of a float above 2^23. This gives u times a power of two without a shift or a conversion;
// the coefficients cancel that power.
template <int BITS, int SHIFT>
TQ_FN float tq_level_at(uint doubled) {
  constexpr float UNIT = 2 << SHIFT, CUBE = UNIT * UNIT * UNIT;
  constexpr float FIRST = tq_first<BITS>() / UNIT, THIRD = tq_third<BITS>() / CUBE;
  constexpr float FIFTH = tq_fifth<BITS>() / (CUBE * UNIT * UNIT);
  constexpr float MIDDLE = 8388608.0f + ((1 << BITS) - 1) * (1 << SHIFT);
  constexpr uint FIELD = uint((1 << BITS) - 1) << (SHIFT + 1);
  float u = tq_sub(as_type<float>((doubled & FIELD) | 0x4B000000u), MIDDLE);
  float square = tq_mul(u, u);
  float slope = BITS == 2 ? THIRD : tq_fma(FIFTH, square, THIRD);
  return tq_mul(u, tq_fma(slope, square, FIRST));
}

// Levels of COUNT adjacent codes from bit 0 of a 16-bit word.
template <int BITS, int COUNT, int FIRST = 0>
struct tq_levels {
  static TQ_FN void decode(uint doubled, TQ_THREAD float* values) {
    values[0] = tq_level_at<BITS, BITS * FIRST>(doubled);
    tq_levels<BITS, COUNT - 1, FIRST + 1>::decode(doubled, values + 1);
  }
};
template <int BITS, int FIRST>
struct tq_levels<BITS, 0, FIRST> {
  static TQ_FN void decode(uint, TQ_THREAD float*) {}
};
