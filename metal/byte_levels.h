// Levels of 2 and 4 bit codes from a table in threadgroup memory: those of all codes of a byte, by the byte.
#include "query_pack.h"
#include "units.h"

template <int BITS>
struct tq_byte {
  enum { CODES = 8 / BITS, BYTES = 256 };
  using PACK = tq_pack<CODES>;
  using type = typename PACK::type;

  static TQ_FN type levels(uint byte) {
    float values[CODES];
    tq_levels<BITS, int(CODES)>::decode(byte << 1, values);
    return PACK::pack(values);
  }
};

// The second of two values if SECOND, of different types.
template <bool SECOND>
struct tq_pick {
  template <class A, class B>
  static TQ_FN A pick(A a, B) { return a; }
};
template <>
struct tq_pick<true> {
  template <class A, class B>
  static TQ_FN B pick(A, B b) { return b; }
};

template <>
struct tq_words<TQ_BY_BYTE> {
  template <class Words, class Levels>
  static TQ_FN tq_coded<Words, Levels> make(Words words, Levels levels) {
    return {words, levels};
  }
};

// As `tq_vectors` of units.h, for tq_coded words.
template <int D, int BITS, bool WIDE, class FULL, int SCALE>
struct tq_vectors<D, BITS, WIDE, FULL, SCALE, TQ_BY_BYTE> : tq_unit<D, BITS> {
  using BYTE = tq_byte<BITS>;
  enum { DIM = D };

  template <class Coded>
  static TQ_FN void load(TQ_THREAD const Coded& coded, int unit, TQ_THREAD float* values) {
    uint words[1];
    words[0] = coded[unit];
    decode(coded, words, values);
  }
  template <class Coded>
  static TQ_FN void decode(TQ_THREAD const Coded& coded, TQ_THREAD const uint* words, TQ_THREAD float* values) {
    BYTE::PACK::unpack(coded.levels[int(extract_bits(words[0], 0, 8))], values);
    BYTE::PACK::unpack(coded.levels[int(extract_bits(words[0], 8, 8))], values + int(BYTE::CODES));
  }
  template <class Coded>
  static TQ_FN float gain(TQ_THREAD const Coded& coded) {
    return tq_gain<D, BITS, WIDE>(coded.words + SCALE);
  }
};
