// Vectors whose codes are a ring of bits, as in `mlx_tq.codec.formats.trellis`: a value's level has the number that its own bits make
// with those before them.
#include "units.h"

// Words of a vector, and the levels of its states beside them.
template <class Words, class Levels>
struct tq_ring {
  Words words;
  Levels levels;
  TQ_FN tq_ring operator+(int64_t count) const { return {words + count, levels}; }
  TQ_FN ushort operator[](int place) const { return words[place]; }
};

template <>
struct tq_words<true> {
  template <class Words, class Levels>
  static TQ_FN tq_ring<Words, Levels> with(Words words, Levels levels) {
    return {words, levels};
  }
};

// Where the levels of a width begin in those of 2, 3 and 4 bits.
template <bool TRELLIS, int BITS>
constexpr TQ_FN int tq_table() { return TRELLIS ? (BITS - 2) * TQ_STATES : 0; }

// Like `tq_vectors` of units.h, of a tq_ring. A unit's first values reach into the unit before it.
template <int D, int BITS, bool WIDE, class FULL, int SCALE>
struct tq_vectors<D, BITS, WIDE, FULL, SCALE, true> : tq_unit<D, BITS> {
  using UNIT = tq_unit<D, BITS>;
  enum { DIM = D, PAIRED = 0 };

  template <class Ring>
  static TQ_FN void load(TQ_THREAD const Ring& ring, int unit, TQ_THREAD float* values) {
    constexpr int WORDS = UNIT::WORDS, VALUES = UNIT::VALUES;
    uint before = ring[UNIT::place(unit == 0 ? int(UNIT::COUNT) - 1 : unit - 1, WORDS - 1)];
    TQ_UNROLL for (int n = 0; n < WORDS; n++) {
      uint word = ring[UNIT::place(unit, n)], both = before << 16 | word;
      before = word;
      TQ_UNROLL for (int i = 0; i < VALUES; i++) {
        int end = BITS * (i + 1);  // of the value's bits, counted from the unit's first
        if (end > 16 * n && end <= 16 * (n + 1)) {
          half level = ring.levels[int((both >> (16 * (n + 1) - end)) & uint(TQ_STATES - 1))];
          values[i] = static_cast<float>(level);
        }
      }
    }
  }
  static TQ_FN void decode(TQ_THREAD const uint*, TQ_THREAD float*) {}  // of what is PAIRED
  template <class Ring>
  static TQ_FN float gain(TQ_THREAD const Ring& ring) {
    return tq_gain<D, BITS, WIDE>(ring.words + SCALE);
  }
};
