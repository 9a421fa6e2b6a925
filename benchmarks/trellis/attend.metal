// A sketch of pass 1 of attention: `tq_attend` over one block of tokens of one KV head, whose codes are tq's or a trellis's.
//
//   asked [H, D, QUERIES]: float, rotated and scaled; trellis_levels [STATES]: float; token_count: int [1]
//   packed_rows [H, tokens, W]: 32-bit words, see packing.h; D and BITS make W whole
//   block_outputs [H, blocks, QUERIES, D], block_maxima, block_sums [H, blocks, QUERIES]: float
//
// KIND 0: tq, 1: a trellis whose levels are in threadgroup memory, 2: whose levels are computed.
//
// Grid (32, blocks, H), threadgroup (32, 1, 1).
// A trellis's words are a ring of bits, the first value's highest; the WINDOW bits that end with a value's own BITS are the place of
// its level. Dims are in the order of tq's units.
#include "attention.h"

// The words of a vector, and where levels are.
template <class Words, class Levels>
struct tcq_words {
  Words words;
  Levels levels;
  TQ_FN tcq_words operator+(int64_t count) const { return {words + count, levels}; }
  TQ_FN ushort operator[](int place) const { return words[place]; }
};

template <class Words, class Levels>
TQ_FN tcq_words<Words, Levels> tcq_with(Words words, Levels levels) {
  return {words, levels};
}

// A level without a table: a hash of its place, whose four bytes are summed.
TQ_FN float tcq_computed(uint state) {
  uint hashed = state * 34038481u + 76625530u;
  uint pairs = (hashed & 0x00FF00FFu) + ((hashed >> 8) & 0x00FF00FFu);
  uint sum = (pairs + (pairs >> 16)) & 0x7FFu;
  return tq_sub(as_type<float>(sum | 0x4B000000u), 8389118.0f);  // 2^23 and the mean, 510
}

template <int D, int BITS, int WINDOW, bool COMPUTED, int SCALE>
struct tcq_vectors : tq_unit<D, BITS> {
  using UNIT = tq_unit<D, BITS>;
  enum { DIM = D, PAIRED = 0 };

  template <class Words>
  static TQ_FN void load(Words words, int unit, TQ_THREAD float* values) {
    constexpr int COUNT = int(UNIT::COUNT), WORDS = int(UNIT::WORDS);
    uint before = words[UNIT::place(unit == 0 ? COUNT - 1 : unit - 1, WORDS - 1)];
    TQ_UNROLL for (int n = 0; n < WORDS; n++) {
      uint word = words[UNIT::place(unit, n)], both = before << 16 | word;
      before = word;
      TQ_UNROLL for (int i = 0; i < int(UNIT::VALUES); i++) {
        int end = BITS * (i + 1);  // of the value's bits, counted from the unit's first
        if (end > 16 * n && end <= 16 * (n + 1)) {
          int shift = 16 * (n + 1) - end;
          uint state = (shift == 0 ? both : both >> shift) & uint((1 << WINDOW) - 1);
          values[i] = COMPUTED ? tcq_computed(state) : words.levels[int(state)];
        }
      }
    }
  }
  static TQ_FN void decode(TQ_THREAD const uint*, TQ_THREAD float*) {}  // of what is PAIRED
  template <class Words>
  static TQ_FN float gain(Words words) {
    return tq_gain<D, BITS, false>(words + SCALE);
  }
};

// What reads vectors of KIND 0: tq, 1: a trellis with a table, 2: one whose levels are computed.
template <int KIND, int D, int BITS, int WINDOW, int SCALE>
struct tcq_kind {
  using type = tcq_vectors<D, BITS, WINDOW, KIND == 2, SCALE>;
};
template <int D, int BITS, int WINDOW, int SCALE>
struct tcq_kind<0, D, BITS, WINDOW, SCALE> {
  using type = tq_vectors<D, BITS, false, ushort, SCALE>;
};

//// body

using ROW = tq_row<D, BITS, false, D, BITS, false>;
using PACK = typename tq_numbers<QUERIES>::type;
constexpr int STATES = KIND == 1 ? 1 << WINDOW : 1;
threadgroup PACK query[D];
threadgroup PACK weight[32];
threadgroup float levels[STATES];

int lane = int(thread_index_in_simdgroup);
uint head = threadgroup_position_in_grid.z, block = threadgroup_position_in_grid.y, blocks = threadgroups_per_grid.y;
int tokens = token_count[0];
for (int dim = lane; dim < D; dim += 32) {
  float numbers[QUERIES];
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) numbers[q] = asked[(head * uint(D) + uint(dim)) * uint(QUERIES) + uint(q)];
  query[dim] = tq_numbers<QUERIES>::pack(numbers);
}
if (KIND == 1)
  for (int state = lane; state < STATES; state += 32) levels[state] = trellis_levels[state];
threadgroup_barrier(mem_flags::mem_threadgroup);

tq_block cut;
tq_cut(tokens, int(block), int(blocks), cut);
cut.fold = 0;
cut.shift = 0;
int last[QUERIES];
int64_t bias_rows[QUERIES];
TQ_UNROLL for (int q = 0; q < QUERIES; q++) last[q] = tokens, bias_rows[q] = 0;
auto pairs = packed_rows + int64_t(head) * tokens * (int(ROW::WORDS) / 2);
auto rows = tq_recast<ushort>(pairs);
auto keys = tcq_with(rows + int(ROW::KEYS), levels), values = tcq_with(rows + int(ROW::VALUES), levels);
using KEYS = typename tcq_kind<KIND, D, BITS, WINDOW, int(ROW::KEY_SCALE)>::type;
using VALUES = typename tcq_kind<KIND, D, BITS, WINDOW, int(ROW::VALUE_SCALE) - int(ROW::VALUES)>::type;
tq_sums<QUERIES, tq_share<VALUES>::VALUES> sums;
tq_plain plain;
tq_attend<QUERIES, false, KEYS, VALUES, int(ROW::WORDS), int(ROW::WORDS)>(
    lane, cut, query, weight, keys, pairs, values, rows, rows, plain, last, rows, bias_rows, sums);
TQ_UNROLL for (int q = 0; q < QUERIES; q++)
  tq_store<VALUES>(lane, q, (head * blocks + block) * uint(QUERIES) + uint(q), sums, block_outputs, block_maxima, block_sums);
