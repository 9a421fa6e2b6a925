// Products of small matrices in registers.
#pragma once
#include "vectors.h"

namespace tq {

constexpr int ROWS = 6;                       // of a product
constexpr int COLUMNS = LANES == 8 ? 2 : 4;   // vectors of a row: ROWS COLUMNS sums fit the registers
constexpr int TERMS = 32;                     // that are summed one after another: sums of such sums round less

// C [R, COUNT vectors] = A [R, depth] B [depth, COUNT vectors], added to C if ADD. A pitch is the distance of rows.
template <int R, int COUNT, bool ADD>
inline void multiply_block(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int depth, float* c, int64_t c_pitch) {
  Floats total[R][COUNT];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) total[r][j] = Floats{};
  for (int k = 0; k < depth; k++) {
    Floats row[COUNT];
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) row[j] = load<Floats>(b + k * b_pitch + j * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats factor = splat(a[r * a_pitch + k]);
#pragma GCC unroll 8
      for (int j = 0; j < COUNT; j++) total[r][j] += factor * row[j];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) {
      float* const to = c + r * c_pitch + j * LANES;
      store(to, ADD ? load<Floats>(to) + total[r][j] : total[r][j]);
    }
}

template <int R, bool ADD>
void multiply_rows(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int depth, float* c, int64_t c_pitch, int width) {
  int first = 0;
  for (; first + COLUMNS * LANES <= width; first += COLUMNS * LANES)
    multiply_block<R, COLUMNS, ADD>(a, a_pitch, b + first, b_pitch, depth, c + first, c_pitch);
  for (; first + 2 * LANES <= width; first += 2 * LANES)
    multiply_block<R, 2, ADD>(a, a_pitch, b + first, b_pitch, depth, c + first, c_pitch);
  for (; first < width; first += LANES) multiply_block<R, 1, ADD>(a, a_pitch, b + first, b_pitch, depth, c + first, c_pitch);
}

// The same for any number of rows, in sums of `depth` terms.
template <bool ADD>
void multiply_terms(int rows, const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int depth, float* c, int64_t c_pitch, int width) {
  int row = 0;
  for (; row + ROWS <= rows; row += ROWS)
    multiply_rows<ROWS, ADD>(a + row * a_pitch, a_pitch, b, b_pitch, depth, c + row * c_pitch, c_pitch, width);
  a += row * a_pitch;
  c += row * c_pitch;
  switch (rows - row) {
    case 5: return multiply_rows<5, ADD>(a, a_pitch, b, b_pitch, depth, c, c_pitch, width);
    case 4: return multiply_rows<4, ADD>(a, a_pitch, b, b_pitch, depth, c, c_pitch, width);
    case 3: return multiply_rows<3, ADD>(a, a_pitch, b, b_pitch, depth, c, c_pitch, width);
    case 2: return multiply_rows<2, ADD>(a, a_pitch, b, b_pitch, depth, c, c_pitch, width);
    case 1: return multiply_rows<1, ADD>(a, a_pitch, b, b_pitch, depth, c, c_pitch, width);
  }
}

// C [rows, width] = A [rows, depth] B [depth, width], added to C if ADD. The width is rounded up to whole vectors.
template <bool ADD>
void multiply(int rows, const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int depth, float* c, int64_t c_pitch, int width) {
  multiply_terms<ADD>(rows, a, a_pitch, b, b_pitch, depth < TERMS ? depth : TERMS, c, c_pitch, width);
  for (int first = TERMS; first < depth; first += TERMS)
    multiply_terms<true>(rows, a + first, a_pitch, b + first * b_pitch, b_pitch, depth - first < TERMS ? depth - first : TERMS, c, c_pitch, width);
}

}  // namespace tq
