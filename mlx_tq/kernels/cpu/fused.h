// Products of queries and keys, and of weights and values, that read codes and write no decoded vector to memory.
#pragma once
#include <algorithm>
#include <cfloat>
#include <vector>

#include "formats.h"
#include "matrix.h"

namespace tq {

// Whether the processor multiplies bytes: then 8-bit keys need not become floats.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool MULTIPLIES_BYTES = true;
// Adds to each lane the products of its four unsigned bytes and four signed ones.
inline Ints add_products(Ints total, Words bytes, int32_t factors) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)bytes, _mm512_set1_epi32(factors));
#else
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)bytes, _mm256_set1_epi32(factors));
#endif
}
#else
constexpr bool MULTIPLIES_BYTES = false;
inline Ints add_products(Ints total, Words, int32_t) { return total; }
#endif

constexpr int DIGITS = 3;

// Queries as integers of three signed bytes, times a unit: that is 24 bits, as many as a float has. Sums of products of
// each byte are exact.
class ByteQueries {
 public:
  void set(const float* queries, int rows, int dim) {
    constexpr int LARGEST = 127 * 65536 + 127 * 256 + 120;  // of three digits, and room for rounding
    dim_ = dim;
    digits_.resize(size_t(rows) * DIGITS * dim);
    offsets_.resize(size_t(rows) * DIGITS);
    units_.resize(rows);
    float query[MAX_DIM + LANES] = {};
    for (int r = 0; r < rows; r++) {
      memcpy(query, queries + r * dim, 4 * dim);
      Floats size{}, broken{};
      for (int d = 0; d < dim; d += LANES) {
        const Floats x = load<Floats>(query + d);
        size = larger(size, as_floats((Words)x & 0x7FFFFFFFu));
        broken += x * 0.0f;  // NaN if one is not finite
      }
      const float most = largest(size);
      units_[r] = most / LARGEST + sum(broken);
      const float factor = units_[r] > 0 ? std::min(LARGEST / most, FLT_MAX) : 0;
      Ints offsets[DIGITS] = {};
      for (int d = 0; d < dim; d += LANES) {
        const Floats x = factor > 0 ? load<Floats>(query + d) * factor : Floats{};
        Ints rest = __builtin_convertvector(x + (x < 0.0f ? splat(-0.5f) : splat(0.5f)), Ints);
        for (int i = 0; i < DIGITS; i++) {
          const Ints digit = rest << 24 >> 24;
          const Bytes bytes = __builtin_convertvector(digit, Bytes);
          memcpy(digits_.data() + (r * DIGITS + i) * dim + d, &bytes, std::min(LANES, dim - d));
          offsets[i] -= 128 * digit;  // codes are multiplied as code + 128, which is not negative
          rest = (rest - digit) >> 8;
        }
      }
      for (int i = 0; i < DIGITS; i++) {
        offsets_[r * DIGITS + i] = 0;
        for (int lane = 0; lane < LANES; lane++) offsets_[r * DIGITS + i] += offsets[i][lane];
      }
    }
  }

  // Scores `count` keys of 8 bits without their gain: scores [rows, TILE]. `words` has room for a tile of codes.
  void score(int rows, const char* const* keys, int count, Words* words, float* scores) const {
    const int lines = dim_ / 4, groups = TILE / LANES;
    for (int group = 0; group < groups; group++)
      for (int line = 0; line < lines; line += LANES) {
        Words square[LANES];
        load_square(keys, group * LANES, count, line, square);
        for (int i = 0; i < LANES && line + i < lines; i++) words[group * lines + line + i] = square[i] ^ 0x80808080u;
      }
    for (int group = 0; group < groups; group++) {
      int row = 0;
      for (; row + 3 <= rows; row += 3) score_rows<3>(row, words + group * lines, scores + group * LANES);
      if (rows - row == 2) score_rows<2>(row, words + group * lines, scores + group * LANES);
      if (rows - row == 1) score_rows<1>(row, words + group * lines, scores + group * LANES);
    }
  }

 private:
  template <int R>
  void score_rows(int row, const Words* words, float* scores) const {
    Ints total[R * DIGITS];
#pragma GCC unroll 9
    for (int i = 0; i < R * DIGITS; i++) total[i] = Ints{} + offsets_[row * DIGITS + i];
    const int8_t* const digits = digits_.data() + row * DIGITS * dim_;
    for (int line = 0; line < dim_ / 4; line++) {
      const Words codes = words[line];
#pragma GCC unroll 9
      for (int i = 0; i < R * DIGITS; i++) {
        int32_t four;
        memcpy(&four, digits + i * dim_ + 4 * line, 4);
        total[i] = add_products(total[i], codes, four);
      }
    }
    for (int r = 0; r < R; r++) {
      Floats score{};
      for (int i = DIGITS - 1; i >= 0; i--) score = score * 256.0f + __builtin_convertvector(total[r * DIGITS + i], Floats);
      store(scores + (row + r) * TILE, score * units_[row + r]);
    }
  }

  int dim_ = 0;
  std::vector<int8_t> digits_;    // [rows, DIGITS, dim], the lowest first
  std::vector<int32_t> offsets_;  // [rows, DIGITS]
  std::vector<float> units_;      // [rows]
};

// Adds weights [R, TILE] times `count` values of format TQ4, whose units fill whole vectors, to `output` [R, pitch].
template <int R>
void add_values_of_rows(const float* weights, const char* const* values, int count, int dim, const Levels& levels, float* output, int pitch) {
  constexpr int PLANES = Format<TQ4>::UNIT;
  const int units = dim / PLANES;
  for (int unit = 0; unit < units; unit += LANES)
    for (int first = 0; first < count; first += TERMS) {
      Floats total[R][PLANES] = {};
      for (int t = first; t < count && t < first + TERMS; t++) {
        const Words words = __builtin_convertvector(load<Halves>(values[t] + 2 * unit), Words);
        Floats value[PLANES];
        decode_units<TQ4>(&words, levels, value);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const Floats weight = splat(weights[r * TILE + t]);
#pragma GCC unroll 4
          for (int i = 0; i < PLANES; i++) total[r][i] += weight * value[i];
        }
      }
      for (int r = 0; r < R; r++)
        for (int i = 0; i < PLANES; i++) {
          float* const to = output + r * pitch + i * units + unit;
          store(to, load<Floats>(to) + total[r][i]);
        }
    }
}

// The same for up to four rows; returns whether it could.
inline bool add_values(int rows, const float* weights, const char* const* values, int count, int format, int dim, const Levels& levels, float* output, int pitch) {
  if (format != TQ4 || dim % (Format<TQ4>::UNIT * LANES) != 0) return false;
  switch (rows) {
    case 1: add_values_of_rows<1>(weights, values, count, dim, levels, output, pitch); return true;
    case 2: add_values_of_rows<2>(weights, values, count, dim, levels, output, pitch); return true;
    case 3: add_values_of_rows<3>(weights, values, count, dim, levels, output, pitch); return true;
    case 4: add_values_of_rows<4>(weights, values, count, dim, levels, output, pitch); return true;
    default: return false;
  }
}

}  // namespace tq
