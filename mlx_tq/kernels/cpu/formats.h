// Decoding of stored vectors, see mlx_tq/codec/packing.py and mlx_tq/codec/rows.py.
//
// A format stores a vector of D values in units: the smallest number of 16-bit words that holds whole values. Keys are
// decoded with a token in each lane, values with a unit in each lane: so scores and outputs are products of matrices.
#pragma once
#include <numeric>

#include "vectors.h"

namespace tq {

// The names are those of the formats; FP32, FP16 and BF16 are the model's own types. Sorted keys have groups of TCQ7 to
// TCQ1; their bits are the mean.
enum FormatNumber : int32_t { FP32, FP16, BF16, Q8, TQ4, TQ3, TQ2, TCQ4, TCQ3, TCQ2, TCQ7, TCQ6, TCQ5, TCQ1, STCQ4, STCQ3, STCQ2, FORMATS };

constexpr int BITS_OF[FORMATS] = {32, 16, 16, 8, 4, 3, 2, 4, 3, 2, 7, 6, 5, 1, 4, 3, 2};
constexpr int STATES = 256;  // of a trellis
constexpr int TILE = 64;     // tokens that are decoded at a time
static_assert(TILE % LANES == 0, "tiles are whole vectors");

// Levels of the tq formats, each repeated to 16 entries, so that bits above a code change nothing; then those of each
// trellis state for 1 to 7 bits.
struct Levels {
  float turbo[3][16];
  float trellis[7][STATES];
};

// Values of a unit of codes.
constexpr int unit_values(int bits) { return 16 / std::gcd(16, bits); }

template <int FORMAT>
struct Format {
  static constexpr bool TRELLIS = FORMAT >= TCQ4;
  static constexpr int BITS = BITS_OF[FORMAT];
  static constexpr int UNIT = unit_values(BITS);  // values
  static constexpr int UNIT_WORDS = UNIT * BITS / 16;
};

// The values of units of packed codes, one unit in each lane, from the lower halves of their words.
template <int FORMAT>
inline void decode_units(const Words* words, const Levels& levels, Floats* values) {
  constexpr int BITS = Format<FORMAT>::BITS;
  const float* const table = levels.turbo[BITS - 2];
  if constexpr (BITS == 3) {
    for (int n = 0; n < 3; n++)
      for (int i = 0; i < 5; i++) values[5 * n + i] = look_up(table, words[n] >> (3 * i));
    values[15] = look_up(table, (words[0] >> 15 & 1) | (words[1] >> 14 & 2) | (words[2] >> 13 & 4));
  } else {
    for (int i = 0; i < 16 / BITS; i++) values[i] = look_up(table, words[0] >> (BITS * i));
  }
}

// The same for trellis codes; `previous` is the last word of the unit before, in the ring of units.
template <int FORMAT>
inline void decode_states(Words previous, const Words* words, const Levels& levels, Floats* values) {
  using F = Format<FORMAT>;
  for (int n = 0; n < F::UNIT_WORDS; n++) {
    const Words both = previous << 16 | words[n];
    previous = words[n];
    for (int i = 0; i < F::UNIT; i++) {
      const int end = F::BITS * (i + 1);  // of the value's bits, from the first of the unit
      if (end > 16 * n && end <= 16 * (n + 1))
        values[i] = gather(levels.trellis[F::BITS - 1], both >> (16 * (n + 1) - end) & (STATES - 1));
    }
  }
}

constexpr int SLACK = 4 * LANES;  // bytes that decoders may read past the codes
constexpr int MAX_DIM = 1024;
constexpr int GROUP = 32;  // dims of a group of sorted keys

// How each KV head stores sorted keys, see mlx_tq/codec/formats/sorted_pairs.py.
struct KeyGroups {
  const uint16_t* order;   // of dims [heads, dim]; null for keys of other formats
  const float* sizes;      // of groups [heads, dim / GROUP]
  const int32_t* widths;   // bits of a code, from the widest group on [heads, dim / GROUP]

  const int32_t* widths_of(int64_t head, int dim) const { return order ? widths + head * (dim / GROUP) : nullptr; }
  // The size of the group of dim number d in order; 1 for keys of other formats.
  float size(int64_t head, int dim, int d) const { return order ? sizes[(head * dim + d) / GROUP] : 1; }
};

// Loads LANES words of LANES vectors, from vector `first` on: a vector in each lane. Lanes after the last repeat it.
inline void load_square(const char* const* vectors, int first, int count, int word, Words* square) {
  for (int lane = 0; lane < LANES; lane++)
    square[lane] = load<Words>(vectors[first + lane < count ? first + lane : count - 1] + 4 * word);
  transpose(square);
}

// Decodes `count` keys to the columns of `tile` [dim, TILE] without their gain; columns after them, up to a whole
// vector, repeat the last.
template <int FORMAT>
void decode_keys(const char* const* keys, int count, int dim, const Levels& levels, float* tile) {
  using F = Format<FORMAT>;
  constexpr int BITS = F::BITS;
  const int pairs = (dim * BITS / 16 + 1) / 2;  // of 16-bit words
  for (int first = 0; first < TILE && first < count; first += LANES) {
    Words transposed[MAX_DIM + LANES];  // pairs of words, a token in each lane
    for (int pair = 0; pair < pairs; pair += LANES) load_square(keys, first, count, pair, transposed + pair);
    float* const column = tile + first;
    const auto word_pair = [&](int pair) { return transposed[pair]; };
    if constexpr (BITS == 32) {
      for (int d = 0; d < dim; d++) store(column + d * TILE, word_pair(d));
    } else if constexpr (BITS == 16) {
      for (int d = 0; d < dim; d += 2) {
        const Words pair = word_pair(d / 2);
        store(column + d * TILE, FORMAT == FP16 ? from_half(pair) : from_bfloat(pair));
        store(column + (d + 1) * TILE, FORMAT == FP16 ? from_half(pair >> 16) : as_floats(pair & 0xFFFF0000u));
      }
    } else if constexpr (BITS == 8) {
      for (int d = 0; d < dim; d += 4) {
        const Ints four = (Ints)word_pair(d / 4);
        for (int i = 0; i < 4; i++) store(column + (d + i) * TILE, __builtin_convertvector(four << (24 - 8 * i) >> 24, Floats));
      }
    } else {
      const int units = dim / F::UNIT;
      // Word number n of a unit, in the lower half.
      const auto word = [&](int unit, int n) {
        const int place = n * units + unit;
        return place % 2 ? word_pair(place / 2) >> 16 : word_pair(place / 2);
      };
      const auto store_unit = [&](int unit, const Floats* values) {
        for (int i = 0; i < F::UNIT; i++) store(column + (i * units + unit) * TILE, values[i]);
      };
      Floats values[F::UNIT];
      Words words[F::UNIT_WORDS];
      if constexpr (F::TRELLIS) {
        Words previous = word(units - 1, F::UNIT_WORDS - 1);
        for (int unit = 0; unit < units; unit++) {
          for (int n = 0; n < F::UNIT_WORDS; n++) words[n] = word(unit, n) & 0xFFFFu;
          decode_states<FORMAT>(previous, words, levels, values);
          previous = words[F::UNIT_WORDS - 1];
          store_unit(unit, values);
        }
      } else if (F::UNIT_WORDS == 1 && units % 2 == 0) {
        for (int unit = 0; unit < units; unit += 2) {
          words[0] = word_pair(unit / 2);
          decode_units<FORMAT>(words, levels, values);
          store_unit(unit, values);
          words[0] >>= 16;
          decode_units<FORMAT>(words, levels, values);
          store_unit(unit + 1, values);
        }
      } else {
        for (int unit = 0; unit < units; unit++) {
          for (int n = 0; n < F::UNIT_WORDS; n++) words[n] = word(unit, n);
          decode_units<FORMAT>(words, levels, values);
          store_unit(unit, values);
        }
      }
    }
  }
}

// Decodes a value vector to `out` [dim] without its gain. Writes up to LANES floats more.
template <int FORMAT>
inline void decode_value(const char* codes, int dim, const Levels& levels, float* out) {
  using F = Format<FORMAT>;
  constexpr int BITS = F::BITS;
  if constexpr (BITS == 32) {
    memcpy(out, codes, 4 * dim);
  } else if constexpr (BITS == 16) {
    for (int d = 0; d < dim; d += LANES) {
      const Words bits = __builtin_convertvector(load<Halves>(codes + 2 * d), Words);
      store(out + d, FORMAT == FP16 ? from_half(bits) : from_bfloat(bits));
    }
  } else if constexpr (BITS == 8) {
    for (int d = 0; d < dim; d += LANES) store(out + d, __builtin_convertvector(load<Bytes>(codes + d), Floats));
  } else {
    const int units = dim / F::UNIT;
    // What a vector writes past its units is written again by the next: planes are in order, and groups overlap.
    for (int first = 0; first < units; first += LANES) {
      const int unit = first + LANES > units && units >= LANES ? units - LANES : first;
      Words words[F::UNIT_WORDS];
      Floats values[F::UNIT];
      for (int n = 0; n < F::UNIT_WORDS; n++)
        words[n] = __builtin_convertvector(load<Halves>(codes + 2 * (n * units + unit)), Words);
      if constexpr (F::TRELLIS) {
        const int last = (F::UNIT_WORDS - 1) * units;
        Halves before;
        uint16_t wrapped;
        memcpy(&wrapped, codes + 2 * (last + units - 1), 2);
        if (unit > 0) {
          before = load<Halves>(codes + 2 * (last + unit - 1));
        } else {
          memcpy((char*)&before + 2, codes + 2 * last, 2 * (LANES - 1));
          memcpy(&before, &wrapped, 2);
        }
        decode_states<FORMAT>(__builtin_convertvector(before, Words), words, levels, values);
      } else {
        decode_units<FORMAT>(words, levels, values);
      }
      for (int i = 0; i < F::UNIT; i++) store(out + i * units + unit, values[i]);
    }
  }
}

// Decodes `count` value vectors to rows of `tile`, `pitch` apart, and LANES floats after the last.
template <int FORMAT>
void decode_values(const char* const* values, int count, int dim, const Levels& levels, float* tile, int pitch) {
  for (int t = 0; t < count; t++) decode_value<FORMAT>(values[t], dim, levels, tile + t * pitch);
}

using KeyDecoder = void (*)(const char* const*, int, int, const Levels&, float*);
using ValueDecoder = void (*)(const char* const*, int, int, const Levels&, float*, int);

}  // namespace tq
