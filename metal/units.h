// Decoding of a vector unit by unit. A unit is the smallest number of 16-bit words that holds whole codes, such as one for
// 4-bit codes, three for 3-bit codes, or two for fp32. FULL is the dtype of values that are stored in 16 bits as they are.
#include "codebook.h"
#include "packing.h"

template <int D, int BITS>
struct tq_unit {
  enum {
    SHARED = BITS > 16 ? 16 : BITS & -BITS,  // greatest common divisor of BITS and 16
    VALUES = 16 / SHARED,                    // of a unit
    COUNT = D / VALUES,                      // units of a vector
    WORDS = BITS / SHARED,                   // of a unit
    PAIRED = BITS <= 16 && COUNT % 2 == 0    // two adjacent units are whole 32-bit words
  };

  // The index of word number n of a unit.
  static TQ_FN int place(int unit, int n) { return BITS == 32 ? 2 * unit + n : n * COUNT + unit; }

  // The dim of value number i of a unit.
  static TQ_FN int dim(int unit, int i) { return BITS == 8 ? 2 * unit + i : i * COUNT + unit; }
};

// Decodes the values of a unit, before the gain, from the lower halves of its words.
template <class FULL, int BITS>
TQ_FN void tq_decode_words(TQ_THREAD const uint* words, TQ_THREAD float* values) {
  constexpr int TURBO_BITS = BITS > 4 ? 4 : BITS;
  if (BITS == 32) {
    values[0] = as_type<float>(words[0] | words[BITS == 32 ? 1 : 0] << 16);
  } else if (BITS == 16) {
    values[0] = static_cast<float>(as_type<FULL>(ushort(words[0])));
  } else if (BITS == 8) {
    // Flipping the sign bit adds 128. As in codebook.h, the bits are read as the low ones of a float above 2^23.
    uint pair = words[0] ^ 0x8080u;
    values[0] = tq_sub(as_type<float>((pair & 0xFFu) | 0x4B000000u), 8388608.0f + 128.0f);
    values[1] = tq_fma(as_type<float>((pair & 0xFF00u) | 0x4B000000u), 1.0f / 256.0f, -(8388608.0f / 256.0f + 128.0f));
  } else if (BITS == 3) {
    uint top = 0;
    TQ_UNROLL for (int third = 0; third < 3; third++) {
      uint word = words[BITS == 3 ? third : 0];
      top |= (word >> 15 & 1u) << (third + 1);
      tq_levels<3, 5>::decode(word << 1, values + 5 * third);
    }
    values[15] = tq_level_at<3, 0>(top);
  } else {
    tq_levels<TURBO_BITS, 16 / TURBO_BITS>::decode(words[0] << 1, values);
  }
}

// Decodes a unit of a vector of 16-bit words.
template <class FULL, int D, int BITS, class Words>
TQ_FN void tq_load_unit(Words words, int unit, TQ_THREAD float* values) {
  using UNIT = tq_unit<D, BITS>;
  uint loaded[UNIT::WORDS];
  TQ_UNROLL for (int n = 0; n < int(UNIT::WORDS); n++) loaded[n] = words[UNIT::place(unit, n)];
  tq_decode_words<FULL, BITS>(loaded, values);
}

// The gain of a vector, which multiplies its values, from its scale.
template <int D, int BITS>
TQ_FN float tq_gain_of(float scale) {
  return tq_mul(scale, BITS == 8 ? 1.0f / 127.0f : tq_div(1.0f, tq_sqrt(static_cast<float>(D))));
}

// The gain from the 16-bit words of the scale.
template <int D, int BITS, bool WIDE, class Words>
TQ_FN float tq_gain(Words scale_words) {
  if (BITS > 8) return 1.0f;
  float scale = WIDE ? as_type<float>(uint(scale_words[0]) | uint(scale_words[WIDE ? 1 : 0]) << 16)
                     : static_cast<float>(as_type<half>(ushort(scale_words[0])));
  return tq_gain_of<D, BITS>(scale);
}

#define TQ_STATES 256  // states of a trellis

// How a code becomes a level: by a polynomial, as the state of a trellis (trellis.h), with the other codes of its byte
// (byte_levels.h), or as the state of a trellis of its group's width (sorted_keys.h). All but the first look it up.
#define TQ_BY_POLYNOMIAL 0
#define TQ_BY_STATE 1
#define TQ_BY_BYTE 2
#define TQ_BY_GROUP 3

// The words of a vector and a table of levels.
template <class Words, class Levels>
struct tq_coded {
  Words words;
  Levels levels;
  TQ_FN tq_coded operator+(int64_t count) const { return {words + count, levels}; }
  TQ_FN ushort operator[](int place) const { return words[place]; }
};

// The words of a vector, with the levels that KIND looks up.
template <int KIND>
struct tq_words {
  template <class Words, class Levels>
  static TQ_FN Words make(Words words, Levels) {
    return words;
  }
};

// Vectors of D values of BITS, with a scale (if the format has one) SCALE words after the first word.
template <int D, int BITS, bool WIDE, class FULL, int SCALE, int KIND>
struct tq_vectors : tq_unit<D, BITS> {
  enum { DIM = D };

  template <class Words>
  static TQ_FN void load(Words words, int unit, TQ_THREAD float* values) {
    tq_load_unit<FULL, D, BITS>(words, unit, values);
  }
  // Decodes loaded words, of which the lower halves count.
  template <class Words>
  static TQ_FN void decode(Words, TQ_THREAD const uint* words, TQ_THREAD float* values) {
    tq_decode_words<FULL, BITS>(words, values);
  }
  template <class Words>
  static TQ_FN float gain(Words words) {
    return tq_gain<D, BITS, WIDE>(words + SCALE);
  }
};
