// Vectors of LANES floats, as wide as the processor's, and the operations on them that C++ has no operators for.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace tq {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#if defined(__ARM_NEON)
typedef __fp16 Half;
#else
typedef _Float16 Half;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint64_t Longs __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}
template <class Vector>
inline void store(void* to, Vector vector) {
  memcpy(to, &vector, sizeof vector);
}

inline Floats splat(float value) { return value - Floats{}; }  // a broadcast; a sum with 0 would turn -0 into 0
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats as_floats(Words bits) { return (Floats)bits; }

inline Floats root(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  for (int lane = 0; lane < LANES; lane++) x[lane] = std::sqrt(x[lane]);
  return x;
#endif
}

inline float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
#endif
}
inline float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

inline float dot(const float* a, const float* b, int size) {
  Floats total{};
  int i = 0;
  for (; i + LANES <= size; i += LANES) total += load<Floats>(a + i) * load<Floats>(b + i);
  float rest = 0;
  for (; i < size; i++) rest += a[i] * b[i];
  return sum(total) + rest;
}

// 2^x for x up to 127, within 2e-7 of it; 2^-126 for less. The polynomial is that of the Cephes library's exp2f.
inline Floats exp2(Floats x) {
  constexpr float ROUNDING = 12582912.0f;  // 1.5 2^23: a sum with it is rounded to an integer, in the low bits
  x = larger(x, splat(-126.0f));
  const Floats shifted = x + ROUNDING;
  const Floats rest = x - (shifted - ROUNDING);
  Floats power = splat(1.535336188319500e-4f);
  for (float coefficient : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                            6.931472028550421e-1f, 1.0f})
    power = power * rest + coefficient;
  return as_floats((Words)power + ((Words)shifted << 23));
}

// Floats from bits of half precision, and of bfloat16, in the lower halves of words.
inline Floats from_half(Words bits) {
  const Halves half = __builtin_convertvector(bits, Halves);
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)half);
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps((__m128i)half);
#elif defined(__ARM_NEON)
  return (Floats)vcvt_f32_f16((float16x4_t)half);
#else
  Floats result;
  for (int i = 0; i < LANES; i++) {
    Half value;
    memcpy(&value, (const char*)&half + 2 * i, 2);
    result[i] = float(value);
  }
  return result;
#endif
}
inline Floats from_bfloat(Words bits) { return as_floats(bits << 16); }
inline float half_to_float(uint16_t bits) { return from_half(Words{} + bits)[0]; }

// The elements of a table of 16 floats at the lower four bits of each index.
inline Floats look_up(const float* table, Words index) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  const __m256i places = (__m256i)index;
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), places);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), places);
  return (Floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
#else
  Floats result;
  for (int i = 0; i < LANES; i++) result[i] = table[index[i] & 15];
  return result;
#endif
}

// The elements of a table of floats.
inline Floats gather(const float* table, Words index) {
#if defined(__AVX512F__)
  return (Floats)_mm512_i32gather_ps((__m512i)index, table, 4);
#elif defined(__AVX2__)
  return (Floats)_mm256_i32gather_ps(table, (__m256i)index, 4);
#else
  Floats result;
  for (int i = 0; i < LANES; i++) result[i] = table[index[i]];
  return result;
#endif
}

#if defined(__AVX512VBMI__)
// The elements of a table of 256 halves, whose low bytes are before their high bytes, at four bytes of each word: those
// from bits `shift`, `shift` - `step`, ... on.
inline void look_up_bytes(const uint8_t* table, Words words, int shift, int step, Floats* values) {
  alignas(64) static constexpr uint8_t ORDER[64] = {  // of bytes 4 lane + number: 0 and 2 of eight lanes, then 1 and 3
      0,  4,  8,  12, 16, 20, 24, 28, 2,  6,  10, 14, 18, 22, 26, 30, 32, 36, 40, 44, 48, 52, 56, 60, 34, 38, 42, 46, 50, 54, 58, 62,
      1,  5,  9,  13, 17, 21, 25, 29, 3,  7,  11, 15, 19, 23, 27, 31, 33, 37, 41, 45, 49, 53, 57, 61, 35, 39, 43, 47, 51, 55, 59, 63};
  uint64_t offsets = 0;
  for (int i = 0; i < 4; i++) offsets |= uint64_t(shift - step * i & 31) << 8 * i;
  offsets |= (offsets | 0x20202020u) << 32;  // of the upper word of two
  __m512i places = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(offsets), (__m512i)words);
  places = _mm512_permutexvar_epi8(_mm512_load_si512(ORDER), places);
  const __mmask64 upper = _mm512_movepi8_mask(places);
  const auto bytes = [&](const uint8_t* plane) {
    const auto part = [&](int number) { return _mm512_loadu_si512(plane + 64 * number); };
    return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(part(0), places, part(1)), _mm512_permutex2var_epi8(part(2), places, part(3)));
  };
  const __m512i low = bytes(table), high = bytes(table + 256);
  const __m512i pairs[] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  values[0] = (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(pairs[0]));
  values[1] = (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(pairs[0], 1));
  values[2] = (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(pairs[1]));
  values[3] = (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(pairs[1], 1));
}
#endif

// Lanes of two vectors: that of number n of a where n < LANES, else of number n - LANES of b.
template <int... NUMBERS>
inline Words select(Words a, Words b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, NUMBERS...);
#else
  return __builtin_shuffle(a, b, Words{NUMBERS...});
#endif
}

// Moves each lane to the next one of COUNT, and the last to the first.
template <int COUNT, int... LANE>
inline Words turn_lanes(Words x, std::integer_sequence<int, LANE...>) {
  return select<(LANE % COUNT ? LANE - 1 : LANE + COUNT - 1)...>(x, x);
}
template <int COUNT>
inline Words turn_lanes(Words x) {
  return turn_lanes<COUNT>(x, std::make_integer_sequence<int, LANES>{});
}

// Swaps lanes of pairs of rows that are STEP / UNIT apart, as one step of a transposition.
template <int STEP, int UNIT, int... LANE>
inline void swap_lanes(Words* rows, std::integer_sequence<int, LANE...>) {
  constexpr int APART = STEP / UNIT;
#pragma GCC unroll 16
  for (int i = 0; i < LANES / UNIT; i++)
    if ((i & APART) == 0) {
      const Words a = rows[i], b = rows[i + APART];
      rows[i] = select<((LANE & STEP) ? LANES + LANE - STEP : LANE)...>(a, b);
      rows[i + APART] = select<((LANE & STEP) ? LANES + LANE : LANE + STEP)...>(a, b);
    }
}

// Transposes a matrix of LANES / UNIT rows, whose elements are UNIT lanes each.
template <int UNIT = 1>
inline void transpose(Words* rows) {
  constexpr std::make_integer_sequence<int, LANES> lanes{};
  if constexpr (UNIT <= 1) swap_lanes<1, UNIT>(rows, lanes);
  if constexpr (UNIT <= 2 && LANES > 2) swap_lanes<2, UNIT>(rows, lanes);
  if constexpr (UNIT <= 4 && LANES > 4) swap_lanes<4, UNIT>(rows, lanes);
  if constexpr (UNIT <= 8 && LANES > 8) swap_lanes<8, UNIT>(rows, lanes);
}

}  // namespace tq
