// Attention of a few queries over one block of tokens: the first of two passes, see merge.metal.
//
// A threadgroup is one simdgroup. It takes QUERIES query rows of one KV head (row n is query n % L of head n / L) and a
// block of packed tokens or of tokens in the model's type, 32 tokens at a time. For scores a lane is a token: each code
// is decoded once for all queries, and no lane waits for another. For values a lane is a unit of the vector (see
// units.h), or as many lanes as there are units share the 32 tokens.
//
//   queries [B, Hq, L, KEY_DIM]: T, any strides
//   key_flips: of the rotation of packed keys, see rotation.h
//   packed_rows [B, H, capacity, 2 W]: 16-bit words, see packing.h; any strides but the last
//   full_keys [B, H, S, KEY_DIM], full_values [B, H, S, VALUE_DIM]: T as 16-bit words; any strides but the last
//   visible_ranges [at least B L, 2]: the tokens [first, last) of the sequence that a query of a batch row sees
//   mask_bias [B, Hq, L, tokens]: added to scores where MASKED, else anything; any strides
//   score_scale [8]: the first multiplies scores
//   attend_sizes [8]: tokens of the prefix, packed tokens, and blocks of them
//   block_outputs [B, H, N, BLOCKS, VALUE_DIM], block_maxima, block_sums [B, H, N, BLOCKS]: float, unnormalised, N = G L.
//     Maxima count powers of two. Blocks of packed tokens come first; their outputs are rotated.
//
// Grid (32, BLOCKS, B H ceil(N / QUERIES)), threadgroup (32, 1, 1).
#include "rotation.h"
#include "softmax.h"
#include "units.h"

// Tokens [start, stop) of one kind. In the sequence, those from `fold` on stand `shift` tokens later.
struct tq_block {
  int start, stop, fold, shift;
};

// Block number `block` of `blocks` that tokens [start, stop) are cut into, each of whole 32 but the last.
TQ_FN void tq_cut(int start, int stop, int block, int blocks, TQ_THREAD tq_block& tokens) {
  int size = ((stop - start + blocks - 1) / blocks + 31) / 32 * 32;
  tokens.start = start + block * size;
  tokens.stop = tokens.start + size < stop ? tokens.start + size : stop;
}

// A number of each query row, loaded and stored at once.
template <int QUERIES>
struct tq_numbers {
  using type = float;
  static TQ_FN type pack(TQ_THREAD const float* x) { return x[0]; }
  static TQ_FN void unpack(type packed, TQ_THREAD float* x) { x[0] = packed; }
};
template <>
struct tq_numbers<2> {
  using type = float2;
  static TQ_FN type pack(TQ_THREAD const float* x) {
    float2 packed;
    packed.x = x[0], packed.y = x[1];
    return packed;
  }
  static TQ_FN void unpack(type packed, TQ_THREAD float* x) { x[0] = packed.x, x[1] = packed.y; }
};
template <>
struct tq_numbers<4> {
  using type = float4;
  static TQ_FN type pack(TQ_THREAD const float* x) {
    float4 packed;
    packed.x = x[0], packed.y = x[1], packed.z = x[2], packed.w = x[3];
    return packed;
  }
  static TQ_FN void unpack(type packed, TQ_THREAD float* x) {
    x[0] = packed.x, x[1] = packed.y, x[2] = packed.z, x[3] = packed.w;
  }
};

// What the lanes keep of each query row, and of each row's values.
template <int QUERIES, int VALUES>
struct tq_sums {
  float maximum[QUERIES], sum[QUERIES], output[QUERIES * VALUES];
};

// How values are shared among lanes: SPAN lanes to a token, SLOTS tokens at once, and UNITS units to a lane.
template <class V>
struct tq_share {
  enum {
    SPAN = int(V::COUNT) < 32 ? int(V::COUNT) : 32,
    SLOTS = 32 / SPAN,
    UNITS = (int(V::COUNT) + 31) / 32,
    VALUES = UNITS * int(V::VALUES)
  };
};

// Attend to a block. The lanes share query [K::DIM] and weight [32], each of QUERIES numbers.
template <int QUERIES, bool MASKED, class K, class V, class Query, class Weight, class Keys, class Values, class Bias, class Sums>
TQ_FN void tq_attend(int lane, TQ_THREAD const tq_block& block, Query query, Weight weight, Keys keys, int64_t key_stride, Values values, int64_t value_stride, TQ_THREAD const int* first, TQ_THREAD const int* last, Bias bias, TQ_THREAD const int64_t* bias_rows, int64_t bias_stride, TQ_THREAD Sums& sums) {
  using SHARE = tq_share<V>;
  using NUMBERS = tq_numbers<QUERIES>;
  constexpr int UNIT = V::VALUES, SPAN = SHARE::SPAN, VALUES = SHARE::VALUES;
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
    sums.maximum[q] = TQ_MASKED;
    sums.sum[q] = 0.0f;
    TQ_UNROLL for (int i = 0; i < VALUES; i++) sums.output[q * VALUES + i] = 0.0f;
  }
  for (int base = block.start; base < block.stop; base += 32) {
    int token = base + lane;
    int place = token < block.fold ? token : token + block.shift;  // in the sequence
    bool there = token < block.stop;
    float score[QUERIES];
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = 0.0f;
    float value_gain = 0.0f;
    if (there) {
      auto key = keys + token * key_stride;
      for (int unit = 0; unit < int(K::COUNT); unit++) {
        float decoded[K::VALUES];
        K::load(key, unit, decoded);
        TQ_UNROLL for (int i = 0; i < int(K::VALUES); i++) {
          float asked[QUERIES];
          NUMBERS::unpack(query[K::dim(unit, i)], asked);
          TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = tq_fma(asked[q], decoded[i], score[q]);
        }
      }
      float gain = K::gain(key);
      TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
        score[q] = tq_mul(score[q], gain);
        if (MASKED) score[q] = tq_larger(tq_fma(bias[bias_rows[q] + place * bias_stride], TQ_LOG2E, score[q]), TQ_MASKED);
      }
      value_gain = V::gain(values + token * value_stride);
    }
    float p[QUERIES];
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
      bool seen = there && place >= first[q] && place < last[q];
      float largest = tq_simd_max(seen ? score[q] : TQ_MASKED);
      if (largest > sums.maximum[q]) {  // all lanes alike
        float factor = tq_exp2(tq_sub(sums.maximum[q], largest));
        sums.maximum[q] = largest;
        sums.sum[q] = tq_mul(sums.sum[q], factor);
        TQ_UNROLL for (int i = 0; i < VALUES; i++) sums.output[q * VALUES + i] = tq_mul(sums.output[q * VALUES + i], factor);
      }
      p[q] = seen ? tq_exp2(tq_sub(score[q], sums.maximum[q])) : 0.0f;
      sums.sum[q] = tq_add(sums.sum[q], p[q]);
      p[q] = tq_mul(p[q], value_gain);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    weight[lane] = NUMBERS::pack(p);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    int tokens = block.stop - base < 32 ? block.stop - base : 32;
    if (lane < int(SHARE::SLOTS) * SPAN) {
      for (int slot = lane / SPAN; slot < tokens; slot += int(SHARE::SLOTS)) {
        auto value = values + (base + slot) * value_stride;
        NUMBERS::unpack(weight[slot], p);
        TQ_UNROLL for (int u = 0; u < int(SHARE::UNITS); u++) {
          int unit = u * 32 + lane % SPAN;
          if (unit < int(V::COUNT)) {
            float decoded[UNIT];
            V::load(value, unit, decoded);
            TQ_UNROLL for (int q = 0; q < QUERIES; q++)
              TQ_UNROLL for (int i = 0; i < UNIT; i++) {
                int at = q * VALUES + u * UNIT + i;
                sums.output[at] = tq_fma(p[q], decoded[i], sums.output[at]);
              }
          }
        }
      }
    }
  }
}

// Store query rows row, row + 1, ... of a block: `count` of them.
template <int QUERIES, class V, class Outputs, class Numbers, class Sums>
TQ_FN void tq_store(int lane, int count, uint row, uint block, uint blocks, TQ_THREAD const Sums& sums, Outputs outputs, Numbers maxima, Numbers totals) {
  using SHARE = tq_share<V>;
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
    uint at = (row + uint(q)) * blocks + block;
    float total = tq_simd_sum(sums.sum[q]);
    if (lane == 0 && q < count) {
      maxima[at] = sums.maximum[q];
      totals[at] = total;
    }
    TQ_UNROLL for (int u = 0; u < int(SHARE::UNITS); u++)
      TQ_UNROLL for (int i = 0; i < int(V::VALUES); i++) {
        float mine = sums.output[q * int(SHARE::VALUES) + u * int(V::VALUES) + i];
        float all = mine;
        TQ_UNROLL for (int slot = 1; slot < int(SHARE::SLOTS); slot++)
          all = tq_add(all, simd_shuffle(mine, ushort((lane + slot * int(SHARE::SPAN)) & 31)));
        int unit = u * 32 + lane;
        if (lane < int(SHARE::SPAN) && unit < int(V::COUNT) && q < count) outputs[at * uint(V::DIM) + V::dim(unit, i)] = all;
      }
  }
}

//// body

using ROW = tq_row<KEY_DIM, KEY_BITS, KEY_WIDE, VALUE_DIM, VALUE_BITS, VALUE_WIDE>;
using PACKED_KEYS = tq_vectors<KEY_DIM, KEY_BITS, KEY_WIDE, KEY_FULL, int(ROW::KEY_SCALE)>;
using PACKED_VALUES = tq_vectors<VALUE_DIM, VALUE_BITS, VALUE_WIDE, VALUE_FULL, int(ROW::VALUE_SCALE) - int(ROW::VALUES)>;
using FULL_KEYS = tq_vectors<KEY_DIM, FULL_BITS, false, FULL_WORD, 0>;
using FULL_VALUES = tq_vectors<VALUE_DIM, FULL_BITS, false, FULL_WORD, 0>;
constexpr int N = (KEY_DIM + 31) / 32;
using NUMBERS = tq_numbers<QUERIES>;
using PACK = typename NUMBERS::type;
threadgroup PACK query[KEY_DIM];
threadgroup PACK weight[32];

uint lane = thread_index_in_simdgroup;
uint block = threadgroup_position_in_grid.y, blocks = threadgroups_per_grid.y;
uint length = queries_shape[2], heads = packed_rows_shape[1], group = queries_shape[1] / heads;
uint rows = group * length, tiles = (rows + QUERIES - 1) / QUERIES;
uint head = threadgroup_position_in_grid.z / tiles % heads, batch = threadgroup_position_in_grid.z / (tiles * heads);
uint row = threadgroup_position_in_grid.z % tiles * QUERIES;
int prefix = attend_sizes[0], body = attend_sizes[1], packed_blocks = attend_sizes[2];
bool packed = int(block) < packed_blocks;

int first[QUERIES], last[QUERIES];
int64_t bias_rows[QUERIES];
int from = 0x7FFFFFFF, to = 0;
float asked[QUERIES * N];
TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
  uint n = row + uint(q) < rows ? row + uint(q) : rows - 1;
  uint query_head = head * group + n / length, token = n % length;
  first[q] = visible_ranges[2 * (batch * length + token)];
  last[q] = visible_ranges[2 * (batch * length + token) + 1];
  from = first[q] < from ? first[q] : from;
  to = last[q] > to ? last[q] : to;
  if (MASKED) bias_rows[q] = batch * mask_bias_strides[0] + query_head * mask_bias_strides[1] + token * mask_bias_strides[2];
  auto vector = queries + (batch * queries_strides[0] + query_head * queries_strides[1] + token * queries_strides[2]);
  TQ_THREAD float* x = asked + q * N;
  TQ_UNROLL for (int j = 0; j < N; j++) {
    int dim = 32 * j + int(lane);
    x[j] = dim < KEY_DIM ? tq_mul(static_cast<float>(vector[dim * queries_strides[3]]), score_scale[0]) : 0.0f;
  }
  if (KEY_ROTATED && packed) {
    float factor = tq_div(1.0f, tq_sqrt(static_cast<float>(KEY_DIM)));
    tq_flip_signs<KEY_DIM>(x, key_flips, lane);
    tq_hadamard<KEY_DIM, KEY_ORDER>(x, key_flips + N, lane);
    TQ_UNROLL for (int j = 0; j < N; j++) x[j] = tq_mul(x[j], factor);
  }
}
TQ_UNROLL for (int j = 0; j < N; j++) {
  int dim = 32 * j + int(lane);
  float numbers[QUERIES];
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) numbers[q] = tq_mul(asked[q * N + j], TQ_LOG2E);
  if (dim < KEY_DIM) query[dim] = NUMBERS::pack(numbers);
}
simdgroup_barrier(mem_flags::mem_threadgroup);

uint at = (batch * heads + head) * rows + row;
int count = rows - row < uint(QUERIES) ? int(rows - row) : QUERIES;
if (packed) {
  from = from > prefix ? from - prefix : 0;
  to = to - prefix < body ? to - prefix : body;
  tq_block tokens;
  tq_cut(from, to, int(block), packed_blocks, tokens);
  tokens.fold = 0;
  tokens.shift = prefix;
  auto words = packed_rows + (batch * packed_rows_strides[0] + head * packed_rows_strides[1]);
  tq_sums<QUERIES, int(tq_share<PACKED_VALUES>::VALUES)> sums;
  tq_attend<QUERIES, MASKED, PACKED_KEYS, PACKED_VALUES>(
      int(lane), tokens, query, weight, words + int(ROW::KEYS), packed_rows_strides[2], words + int(ROW::VALUES),
      packed_rows_strides[2], first, last, mask_bias, bias_rows, mask_bias_strides[3], sums);
  tq_store<QUERIES, PACKED_VALUES>(int(lane), count, at, block, blocks, sums, block_outputs, block_maxima, block_sums);
} else {
  tq_block tokens;
  tq_cut(0, full_keys_shape[2], int(block) - packed_blocks, int(blocks) - packed_blocks, tokens);
  tokens.fold = prefix;
  tokens.shift = body;
  auto keys = full_keys + (batch * full_keys_strides[0] + head * full_keys_strides[1]);
  auto values = full_values + (batch * full_values_strides[0] + head * full_values_strides[1]);
  tq_sums<QUERIES, int(tq_share<FULL_VALUES>::VALUES)> sums;
  tq_attend<QUERIES, MASKED, FULL_KEYS, FULL_VALUES>(
      int(lane), tokens, query, weight, keys, full_keys_strides[2], values, full_values_strides[2], first, last, mask_bias,
      bias_rows, mask_bias_strides[3], sums);
  tq_store<QUERIES, FULL_VALUES>(int(lane), count, at, block, blocks, sums, block_outputs, block_maxima, block_sums);
}
