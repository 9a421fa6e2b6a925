// Keys of sorted dims, as in `mlx_tq.codec.formats.sorted_pairs`: each group of 32 dims is a ring of trellis codes of its
// own width, and the rings follow each other.
//
// key_groups has for each head, in 16-bit words: its D dims in order; the size of each group, half; and for each group
// its width plus eight times the number of its first word.
#include "rotation.h"
#include "trellis.h"

#define TQ_GROUP 32

template <int D>
constexpr TQ_FN int tq_group_words() { return D + 2 * (D / TQ_GROUP); }
template <int D, class Groups>
TQ_FN float tq_size(Groups groups, int group) { return static_cast<float>(as_type<half>(ushort(groups[D + group]))); }
template <int D, class Groups>
TQ_FN uint tq_place(Groups groups, int group) { return groups[D + D / TQ_GROUP + group]; }

// Puts the dims of a vector in order.
template <int D, class Dims>
TQ_FN void tq_arrange(TQ_THREAD float* x, Dims dims, uint lane) {
  constexpr int N = D / TQ_GROUP;
  float given[N];
  TQ_UNROLL for (int j = 0; j < N; j++) given[j] = x[j];
  TQ_UNROLL for (int j = 0; j < N; j++) {
    uint dim = dims[TQ_GROUP * j + int(lane)];
    TQ_UNROLL for (int i = 0; i < N; i++) {
      float value = simd_shuffle(given[i], ushort(dim % TQ_GROUP));
      x[j] = dim / TQ_GROUP == uint(i) ? value : x[j];
    }
  }
}

// Transforms each group by itself, with the same signs; register j of a lane is of group j.
template <int D, bool INVERSE, class Flips>
TQ_FN void tq_transform_groups(TQ_THREAD float* x, Flips flips, uint lane) {
  TQ_UNROLL for (int j = 0; j < D / TQ_GROUP; j++) {
    if (!INVERSE) tq_flip_signs<TQ_GROUP>(x + j, flips, lane);
    tq_hadamard<TQ_GROUP, 1>(x + j, flips + 1, lane);
    if (INVERSE) tq_flip_signs<TQ_GROUP>(x + j, flips, lane);
  }
}

// The words of a key, the levels of all widths, and the groups of its head.
template <class Words, class Levels, class Groups>
struct tq_sorted_key {
  Words words;
  Levels levels;
  Groups groups;
  TQ_FN tq_sorted_key operator+(int64_t count) const { return {words + count, levels, groups}; }
};
template <class Words, class Levels, class Groups>
TQ_FN tq_sorted_key<Words, Levels, Groups> tq_make_sorted(Words words, Levels levels, Groups groups) {
  return {words, levels, groups};
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

// As `tq_vectors` of units.h, for tq_sorted_key. A unit has the values at even or at odd places of a group: those of the
// ring's units with even or odd numbers.
template <int D, int BITS, bool WIDE, class FULL, int SCALE>
struct tq_vectors<D, BITS, WIDE, FULL, SCALE, TQ_BY_GROUP> {
  enum { DIM = D, VALUES = TQ_GROUP / 2, COUNT = D / VALUES };

  static TQ_FN int dim(int unit, int i) { return unit / 2 * TQ_GROUP + 2 * i + unit % 2; }

  template <class Key>
  static TQ_FN void load(TQ_THREAD const Key& key, int unit, TQ_THREAD float* values) {
    uint place = tq_place<D>(key.groups, unit / 2);
    auto words = key.words + int(place >> 3);
    switch (place & 7u) {
      case 1: load_half<1>(words, key.levels, unit % 2, values); break;
      case 2: load_half<2>(words, key.levels, unit % 2, values); break;
      case 3: load_half<3>(words, key.levels, unit % 2, values); break;
      case 4: load_half<4>(words, key.levels, unit % 2, values); break;
      case 5: load_half<5>(words, key.levels, unit % 2, values); break;
      case 6: load_half<6>(words, key.levels, unit % 2, values); break;
      case 7: load_half<7>(words, key.levels, unit % 2, values); break;
      default: TQ_UNROLL for (int i = 0; i < int(VALUES); i++) values[i] = 0.0f;
    }
    float size = tq_size<D>(key.groups, unit / 2);
    TQ_UNROLL for (int i = 0; i < int(VALUES); i++) values[i] = tq_mul(values[i], size);
  }
  template <class Key>
  static TQ_FN float gain(TQ_THREAD const Key& key) {
    return tq_gain<D, BITS, WIDE>(key.words + SCALE);
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
};
