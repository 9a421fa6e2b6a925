// Trellis codes, as in `mlx_tq.codec.formats.trellis`: the codes of a vector are a ring of bits, and the level of a value is
// that of the state which its own bits and the bits before them form.
#include "units.h"

#define TQ_WINDOW 8  // bits of a state

template <>
struct tq_words<TQ_BY_STATE> {
  template <class Words, class Levels>
  static TQ_FN tq_coded<Words, Levels> make(Words words, Levels levels) {
    return {words, levels};
  }
};

// The offset of the levels of BITS in trellis_levels.
template <bool TRELLIS, int BITS>
constexpr TQ_FN int tq_table() { return TRELLIS ? (BITS - 1) * TQ_STATES : 0; }

// As `tq_vectors` of units.h, for tq_coded words. The states of a unit's first values include bits of the previous unit.
template <int D, int BITS, bool WIDE, class FULL, int SCALE>
struct tq_vectors<D, BITS, WIDE, FULL, SCALE, TQ_BY_STATE> : tq_unit<D, BITS> {
  using UNIT = tq_unit<D, BITS>;
  enum { DIM = D, PAIRED = 0 };

  template <class Ring>
  static TQ_FN void load(TQ_THREAD const Ring& ring, int unit, TQ_THREAD float* values) {
    uint previous = last_word(ring, unit == 0 ? int(UNIT::COUNT) - 1 : unit - 1);
    load_next(ring, unit, previous, values);
  }
  template <class Ring>
  static TQ_FN uint last_word(TQ_THREAD const Ring& ring, int unit) { return ring[UNIT::place(unit, int(UNIT::WORDS) - 1)]; }
  // Loads a unit after the one that ends with word `previous`, and sets that to its own last word.
  template <class Ring>
  static TQ_FN void load_next(TQ_THREAD const Ring& ring, int unit, TQ_THREAD uint& previous, TQ_THREAD float* values) {
    constexpr int WORDS = UNIT::WORDS, VALUES = UNIT::VALUES;
    TQ_UNROLL for (int n = 0; n < WORDS; n++) {
      uint word = ring[UNIT::place(unit, n)], both = previous << 16 | word;
      previous = word;
      TQ_UNROLL for (int i = 0; i < VALUES; i++) {
        int end = BITS * (i + 1);  // end of the value's bits, counted from the unit's first bit
        if (end > 16 * n && end <= 16 * (n + 1)) {
          half level = ring.levels[int(extract_bits(both, uint(16 * (n + 1) - end), TQ_WINDOW))];
          values[i] = static_cast<float>(level);
        }
      }
    }
  }
  template <class Ring>
  static TQ_FN void decode(TQ_THREAD const Ring&, TQ_THREAD const uint*, TQ_THREAD float*) {}  // only PAIRED vectors are decoded so
  template <class Ring>
  static TQ_FN float gain(TQ_THREAD const Ring& ring) {
    return tq_gain<D, BITS, WIDE>(ring.words + SCALE);
  }
};
