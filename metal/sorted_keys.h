// Keys of sorted dims, as in `mlx_tq.codec.formats.sorted_pairs`: each group of 32 dims is a ring of trellis codes of its
// own width, and the rings follow each other.
//
// key_groups has for each head, in 16-bit words: its D dims in order; the size of each group, half; and for each group
// its width plus eight times the number of its first word.
#include "arranged.h"
#include "rotation.h"
#include "trellis.h"

#define TQ_GROUP 32

template <int D>
constexpr TQ_FN int tq_group_words() { return D + 2 * (D / TQ_GROUP); }

// The levels of all widths, and the sizes and places of a head's groups. Sizes multiply decoded values if SIZED; else
// those of the queries.
template <bool SIZED, class Levels, class Places>
struct tq_groups {
  Levels levels;
  Places places;
};
template <int D, bool SIZED, class Levels, class Dims>
TQ_FN tq_groups<SIZED, Levels, Dims> tq_head_groups(Levels levels, Dims dims) {
  return {levels, dims + D};
}
template <class Sizes>
TQ_FN float tq_size(Sizes sizes, int group) { return static_cast<float>(as_type<half>(ushort(sizes[group]))); }

// The means of keys over the sizes of their dims' groups: queries have been multiplied by those.
template <int D, class Means, class Sizes>
struct tq_resized {
  Means means;
  Sizes sizes;
  TQ_FN float operator[](int64_t place) const {
    return tq_div(static_cast<float>(means[place]), tq_size(sizes, int(place % D) / TQ_GROUP));
  }
};
template <int D, class Means, class Sizes>
TQ_FN tq_resized<D, Means, Sizes> tq_divide_by_sizes(Means means, Sizes sizes) { return {means, sizes}; }

// Transforms each group by itself, with the same signs; register j of a lane is of group j.
template <int D, bool INVERSE, class Flips>
TQ_FN void tq_transform_groups(TQ_THREAD float* x, Flips flips, uint lane) {
  TQ_UNROLL for (int j = 0; j < D / TQ_GROUP; j++) {
    if (!INVERSE) tq_flip_signs<TQ_GROUP>(x + j, flips, lane);
    tq_hadamard<TQ_GROUP, 1>(x + j, flips + 1, lane);
    if (INVERSE) tq_flip_signs<TQ_GROUP>(x + j, flips, lane);
  }
}

// Rotates the groups of a query, and multiplies them by their sizes.
template <int D, class Flips, class Sizes>
TQ_FN void tq_rotate_groups(TQ_THREAD float* x, Flips flips, Sizes sizes, uint lane) {
  tq_transform_groups<D, false>(x, flips, lane);
  float factor = tq_div(1.0f, tq_sqrt(static_cast<float>(TQ_GROUP)));
  TQ_UNROLL for (int j = 0; j < D / TQ_GROUP; j++) x[j] = tq_mul(x[j], tq_mul(tq_size(sizes, j), factor));
}

// A group of WIDTH bits.
template <int WIDTH>
struct tq_ring {
  using VECTOR = tq_vectors<TQ_GROUP, WIDTH, false, half, 0, TQ_BY_STATE>;

  template <class Words, class Levels>
  static TQ_FN tq_coded<Words, Levels> make(Words words, Levels levels) {
    return {words, levels + tq_table<true, WIDTH>()};
  }
};

template <>
struct tq_words<TQ_BY_GROUP> : tq_words<TQ_BY_STATE> {};

// As `tq_vectors` of units.h, for tq_coded words with tq_groups as levels. A unit has the values at even or at odd places
// of a group: those of the ring's units with even or odd numbers.
template <int D, int BITS, bool WIDE, class FULL, int SCALE>
struct tq_vectors<D, BITS, WIDE, FULL, SCALE, TQ_BY_GROUP> : tq_unit<D, BITS> {
  enum { DIM = D, VALUES = TQ_GROUP / 2, COUNT = D / VALUES, PAIRED = 0 };

  static TQ_FN int dim(int unit, int i) { return unit / 2 * TQ_GROUP + 2 * i + unit % 2; }

  template <class Ring>
  static TQ_FN void load(TQ_THREAD const Ring& ring, int unit, TQ_THREAD float* values) {
    uint place = ring.levels.places[D / TQ_GROUP + unit / 2];
    auto words = ring.words + int(place >> 3);
    switch (place & 7u) {
      case 1: load_half<1>(words, ring.levels.levels, unit % 2, values); break;
      case 2: load_half<2>(words, ring.levels.levels, unit % 2, values); break;
      case 3: load_half<3>(words, ring.levels.levels, unit % 2, values); break;
      case 4: load_half<4>(words, ring.levels.levels, unit % 2, values); break;
      case 5: load_half<5>(words, ring.levels.levels, unit % 2, values); break;
      default: TQ_UNROLL for (int i = 0; i < int(VALUES); i++) values[i] = 0.0f;
    }
    scale(ring.levels, unit, values);
  }
  template <class Ring>
  static TQ_FN void decode(TQ_THREAD const Ring&, TQ_THREAD const uint*, TQ_THREAD float*) {}  // only PAIRED vectors are decoded so
  template <class Ring>
  static TQ_FN float gain(TQ_THREAD const Ring& ring) {
    return tq_gain<D, BITS, WIDE>(ring.words + SCALE);
  }

  template <int WIDTH, class Words, class Levels>
  static TQ_FN void load_half(Words words, Levels levels, int parity, TQ_THREAD float* values) {
    using RING = typename tq_ring<WIDTH>::VECTOR;
    constexpr int COUNT = RING::COUNT;
    auto ring = tq_ring<WIDTH>::make(words, levels);
    TQ_UNROLL for (int unit = 0; unit < COUNT; unit += 2) {
      float decoded[RING::VALUES];
      RING::load(ring, unit + parity, decoded);
      TQ_UNROLL for (int i = 0; i < int(RING::VALUES); i++) values[(COUNT * i + unit) / 2] = decoded[i];
    }
  }
  template <class Levels, class Places>
  static TQ_FN void scale(TQ_THREAD const tq_groups<false, Levels, Places>&, int, TQ_THREAD float*) {}
  template <class Levels, class Places>
  static TQ_FN void scale(TQ_THREAD const tq_groups<true, Levels, Places>& groups, int unit, TQ_THREAD float* values) {
    float size = tq_size(groups.places, unit / 2);
    TQ_UNROLL for (int i = 0; i < int(VALUES); i++) values[i] = tq_mul(values[i], size);
  }
};
