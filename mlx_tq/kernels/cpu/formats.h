// Decoding of stored vectors, see mlx_tq/codec/packing.py and mlx_tq/codec/rows.py.
//
// A format stores a vector of D values in units: the smallest number of 16-bit words that holds whole values. Keys are
// decoded with a token in each lane, values with a unit in each lane: so scores and outputs are products of matrices.
#pragma once
#include <algorithm>
#include <numeric>
#include <type_traits>

#include "vectors.h"

namespace tq {

// The names are those of the formats; FP32, FP16 and BF16 are the model's own types. Sorted keys have groups of TCQ7 to
// TCQ1; their bits are the mean.
enum FormatNumber : int32_t { FP32, FP16, BF16, Q8, TQ4, TQ3, TQ2, TCQ4, TCQ3, TCQ2, TCQ7, TCQ6, TCQ5, TCQ1, STCQ4, STCQ3, STCQ2, FORMATS };

constexpr int BITS_OF[FORMATS] = {32, 16, 16, 8, 4, 3, 2, 4, 3, 2, 7, 6, 5, 1, 4, 3, 2};
constexpr int STATES = 256;  // of a trellis
constexpr int TILE = 64;     // tokens that are decoded at a time
static_assert(TILE % LANES == 0, "tiles are whole vectors");

// Levels of the tq formats, each repeated to 16 entries, so that bits above a code change nothing; those of each trellis
// state for 1 to 7 bits; and these in half precision: first their low bytes, then their high bytes.
struct Levels {
  float turbo[3][16];
  float trellis[7][STATES];
  uint8_t halves[7][2 * STATES];
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

// The levels of up to four trellis states in each word: the first begins at bit `shift`, and each next one BITS below it.
template <int BITS>
inline void decode_four(const Levels& levels, Words words, int shift, int count, Floats* values) {
#if defined(__AVX512VBMI__)
  Floats four[4];
  look_up_bytes(levels.halves[BITS - 1], words, shift, BITS, four);
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) values[i] = four[i];
#else
  for (int i = 0; i < count; i++) values[i] = gather(levels.trellis[BITS - 1], words >> (shift - BITS * i) & (STATES - 1));
#endif
}

// The values of units of trellis codes, one unit in each lane; `previous` is the last word of the unit before, in the
// ring of units.
template <int FORMAT>
inline void decode_states(Words previous, const Words* words, const Levels& levels, Floats* values) {
  using F = Format<FORMAT>;
#pragma GCC unroll 8
  for (int n = 0; n < F::UNIT_WORDS; n++) {
    const Words both = previous << 16 | words[n];
    previous = words[n];
    const int stop = 16 * (n + 1) / F::BITS;  // after the last value whose bits end in this word
#pragma GCC unroll 4
    for (int i = 16 * n / F::BITS; i < stop; i += 4)
      decode_four<F::BITS>(levels, both, 16 * (n + 1) - F::BITS * (i + 1), std::min(4, stop - i), values + i);
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

// Decodes keys, from pairs of their 16-bit words with a token in each lane, to columns of a tile [dim, TILE] without
// their gain.
template <int FORMAT>
void decode_keys(const Words* pairs, int dim, const Levels& levels, float* column) {
  using F = Format<FORMAT>;
  constexpr int BITS = F::BITS;
  if constexpr (BITS == 32) {
    for (int d = 0; d < dim; d++) store(column + d * TILE, pairs[d]);
  } else if constexpr (BITS == 16) {
    for (int d = 0; d < dim; d += 2) {
      const Words pair = pairs[d / 2];
      store(column + d * TILE, FORMAT == FP16 ? from_half(pair) : from_bfloat(pair));
      store(column + (d + 1) * TILE, FORMAT == FP16 ? from_half(pair >> 16) : as_floats(pair & 0xFFFF0000u));
    }
  } else if constexpr (BITS == 8) {
    for (int d = 0; d < dim; d += 4) {
      const Ints four = (Ints)pairs[d / 4];
      for (int i = 0; i < 4; i++) store(column + (d + i) * TILE, __builtin_convertvector(four << (24 - 8 * i) >> 24, Floats));
    }
  } else {
    const int units = dim / F::UNIT;
    // Word number n of a unit, in the lower half.
    const auto word = [&](int unit, int n) {
      const int place = n * units + unit;
      return place % 2 ? pairs[place / 2] >> 16 : pairs[place / 2];
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
        words[0] = pairs[unit / 2];
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
        const char* const last = codes + 2 * (F::UNIT_WORDS - 1) * units;  // words of the units
        Words previous;
        if (unit > 0) {
          previous = __builtin_convertvector(load<Halves>(last + 2 * (unit - 1)), Words);
        } else {
          previous = turn_lanes<LANES>(words[F::UNIT_WORDS - 1]);
          previous[0] = load<uint16_t>(last + 2 * (units - 1));
        }
        decode_states<FORMAT>(previous, words, levels, values);
      } else {
        decode_units<FORMAT>(words, levels, values);
      }
      for (int i = 0; i < F::UNIT; i++) store(out + i * units + unit, values[i]);
    }
  }
}

// Decodes LANES / UNITS value vectors of UNITS units to rows of `out`, `pitch` apart, without their gains.
template <int FORMAT, int UNITS>
inline void decode_together(const char* const* values, const Levels& levels, float* out, int pitch) {
  using F = Format<FORMAT>;
  constexpr int COUNT = LANES / UNITS;
  Words words[F::UNIT_WORDS];
  Floats decoded[F::UNIT];
  for (int n = 0; n < F::UNIT_WORDS; n++) {
    Longs loaded;  // four units in each
    for (int i = 0; i < LANES / 4; i++) loaded[i] = load<uint64_t>(values[4 * i / UNITS] + 2 * UNITS * n + 8 * i % (2 * UNITS));
    words[n] = __builtin_convertvector((Halves)loaded, Words);
  }
  if constexpr (F::TRELLIS)
    decode_states<FORMAT>(turn_lanes<UNITS>(words[F::UNIT_WORDS - 1]), words, levels, decoded);
  else
    decode_units<FORMAT>(words, levels, decoded);
  for (int i = 0; i < F::UNIT; i += COUNT) {
    Words rows[COUNT];
    for (int t = 0; t < COUNT; t++) rows[t] = (Words)decoded[i + t];
    transpose<UNITS>(rows);
    for (int t = 0; t < COUNT; t++) store(out + t * pitch + i * UNITS, rows[t]);
  }
}

// Decodes `count` value vectors to rows of `tile`, `pitch` apart, and LANES floats after the last.
template <int FORMAT>
void decode_values(const char* const* values, int count, int dim, const Levels& levels, float* tile, int pitch) {
  int t = 0;
  const auto decode_most = [&](auto units) {
    constexpr int UNITS = decltype(units)::value;
    if constexpr (UNITS <= LANES)
      for (; t + LANES / UNITS <= count; t += LANES / UNITS) decode_together<FORMAT, UNITS>(values + t, levels, tile + t * pitch, pitch);
  };
  if constexpr (Format<FORMAT>::BITS < 8) {
    switch (dim / Format<FORMAT>::UNIT) {
      case 4: decode_most(std::integral_constant<int, 4>()); break;
      case 8: decode_most(std::integral_constant<int, 8>()); break;
      case 16: decode_most(std::integral_constant<int, 16>()); break;
    }
  }
  for (; t < count; t++) decode_value<FORMAT>(values[t], dim, levels, tile + t * pitch);
}

using KeyDecoder = void (*)(const Words*, int, const Levels&, float*);
using ValueDecoder = void (*)(const char* const*, int, int, const Levels&, float*, int);

}  // namespace tq
