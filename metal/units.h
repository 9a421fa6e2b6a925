// Decodes a vector unit by unit: a unit is the fewest 16-bit words that hold whole codes, one, or three for 3 bits, or
// two for fp32. FULL is the model's type where 16 bits of it are stored.
#include "codebook.h"
#include "packing.h"

template <int D, int BITS>
struct tq_unit {
  enum {
    VALUES = BITS > 8 ? 1 : BITS == 3 ? 16 : 16 / BITS,  // in one unit
    COUNT = D / VALUES,                                  // of units
    WORDS = BITS == 3 ? 3 : BITS == 32 ? 2 : 1,          // of one unit
    PAIRED = BITS <= 16 && COUNT % 2 == 0                // two units side by side are in whole 32-bit words
  };

  // Where a unit's word number n is.
  static TQ_FN int place(int unit, int n) { return BITS == 32 ? 2 * unit + n : n * COUNT + unit; }

  // The dim of a unit's value number i.
  static TQ_FN int dim(int unit, int i) { return BITS == 8 ? 2 * unit + i : i * COUNT + unit; }
};

// A unit's values before their vector's gain, from the lower halves of its words.
template <class FULL, int BITS>
TQ_FN void tq_decode_words(TQ_THREAD const uint* words, TQ_THREAD float* values) {
  constexpr int TURBO_BITS = BITS > 4 ? 4 : BITS;
  if (BITS == 32) {
    values[0] = as_type<float>(words[0] | words[BITS == 32 ? 1 : 0] << 16);
  } else if (BITS == 16) {
    values[0] = static_cast<float>(as_type<FULL>(ushort(words[0])));
  } else if (BITS == 8) {
    uint pair = words[0];
    // Shifted up and back as signed numbers, which extends their sign.
    TQ_UNROLL for (int i = 0; i < 2; i++) values[i] = static_cast<float>(as_type<int>(pair << (24 - 8 * i)) >> 24);
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

// The same from the 16-bit words of a vector.
template <class FULL, int D, int BITS, class Words>
TQ_FN void tq_load_unit(Words words, int unit, TQ_THREAD float* values) {
  using UNIT = tq_unit<D, BITS>;
  uint found[UNIT::WORDS];
  TQ_UNROLL for (int n = 0; n < int(UNIT::WORDS); n++) found[n] = words[UNIT::place(unit, n)];
  tq_decode_words<FULL, BITS>(found, values);
}

// What multiplies a vector's values, from its scale.
template <int D, int BITS>
TQ_FN float tq_gain_of(float scale) {
  return tq_mul(scale, BITS == 8 ? 1.0f / 127.0f : tq_div(1.0f, tq_sqrt(static_cast<float>(D))));
}

// The same from the scale's 16-bit words.
template <int D, int BITS, bool WIDE, class Words>
TQ_FN float tq_gain(Words scale_words) {
  if (BITS > 8) return 1.0f;
  float scale = WIDE ? as_type<float>(uint(scale_words[0]) | uint(scale_words[WIDE ? 1 : 0]) << 16)
                     : static_cast<float>(as_type<half>(ushort(scale_words[0])));
  return tq_gain_of<D, BITS>(scale);
}

#define TQ_STATES 256  // of a trellis

// The words of a vector; where TRELLIS with the levels of its codes beside them, see trellis.h.
template <bool TRELLIS>
struct tq_words {
  template <class Words, class Levels>
  static TQ_FN Words with(Words words, Levels) {
    return words;
  }
};

// Vectors of one kind: D values of BITS, whose scale, where there is one, is SCALE words after their first word. Where
// TRELLIS their codes are a ring, see trellis.h.
template <int D, int BITS, bool WIDE, class FULL, int SCALE, bool TRELLIS>
struct tq_vectors : tq_unit<D, BITS> {
  enum { DIM = D };

  template <class Words>
  static TQ_FN void load(Words words, int unit, TQ_THREAD float* values) {
    tq_load_unit<FULL, D, BITS>(words, unit, values);
  }
  static TQ_FN void decode(TQ_THREAD const uint* words, TQ_THREAD float* values) { tq_decode_words<FULL, BITS>(words, values); }
  template <class Words>
  static TQ_FN float gain(Words words) {
    return tq_gain<D, BITS, WIDE>(words + SCALE);
  }
};

// The same where there is no pointer to pairs of words.
template <class Vectors>
struct tq_apart : Vectors {
  enum { PAIRED = 0 };
};
