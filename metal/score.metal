// Scores packed keys for an eviction round: <w, K> + sum over f of weight_f |K_f|, for each query head.
//
// One simdgroup takes one key: it decodes the codes once, rotates the key back in registers, and scores it with the
// virtual query w and the weights of each query head of its KV head. |K_f| is the norm of a pair of dims that RoPE
// rotates.
//
//   packed_rows [B, H, capacity, 2 W]: 16-bit words, see packing.h; any strides but the last
//   key_flips: sign flips of the rotation, see rotation.h
//   virtual_queries [H, G, KEY_DIM], pair_weights [H, G, F]: float
//   rope_pairs [2, F]: the dims of each pair
//   score_sizes [8]: S, the number of tokens, and F
//   key_scores [B, H, G, S]: float
//
// Only if NORMALIZED, contiguous:
//
//   key_scale [B, H, KEY_DIM]: float, divides keys
//   key_means [B, H, n, KEY_DIM]: half, added before keys are rotated back
//   mean_index [at least S]: int, which mean a row has
//
// Only if KEY_SORTED:
//
//   key_groups [B, H, ...]: see sorted_keys.h
//
// Only if KEY_TRELLIS or VALUE_TRELLIS:
//
//   trellis_levels [7, 256]: half, levels of the states of 1 to 7 bits
//
// Grid (32 SIMDGROUPS ceil(S / SIMDGROUPS), B H, 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "rotation.h"
#include "softmax.h"
#include "units.h"
#if TQ_TRELLIS
#include "trellis.h"
#endif
#if TQ_SORTED
#include "sorted_keys.h"
#endif
#if TQ_NORMALIZED
#include "key_scale.h"
#endif

//// body

using ROW = tq_row<KEY_DIM, KEY_BITS, KEY_WIDE, VALUE_DIM, VALUE_BITS, VALUE_WIDE>;
#if TQ_SORTED
constexpr int KEY_KIND = TQ_BY_GROUP;
#else
constexpr int KEY_KIND = KEY_TRELLIS;
#endif
using KEYS = tq_vectors<KEY_DIM, KEY_BITS, KEY_WIDE, KEY_FULL, int(ROW::KEY_SCALE), KEY_KIND>;
constexpr int N = (KEY_DIM + 31) / 32, PAIRS = (KEY_DIM / 2 + 31) / 32;
threadgroup float key_values[SIMDGROUPS * KEY_DIM];
#if TQ_TRELLIS
auto key_levels = trellis_levels + tq_table<KEY_KIND == TQ_BY_STATE, KEY_BITS>();
#else
constexpr int key_levels = 0;
#endif

uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
int token = int(threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup);
int tokens = score_sizes[0], pairs = score_sizes[1];
uint heads = packed_rows_shape[1], group = virtual_queries_shape[1];
uint batch = threadgroup_position_in_grid.y / heads, head = threadgroup_position_in_grid.y % heads;
if (token < tokens) {
  auto key = key_values + simdgroup * KEY_DIM;
  auto row_words = packed_rows + (batch * packed_rows_strides[0] + head * packed_rows_strides[1] + token * packed_rows_strides[2]);
#if TQ_SORTED
  auto dims = key_groups + (batch * heads + head) * uint(tq_group_words<KEY_DIM>());
  auto words = tq_make_sorted(row_words, key_levels, dims);
#else
  auto words = tq_words<KEY_TRELLIS>::make(row_words, key_levels);
#endif
  float gain = KEYS::gain(words);
#if TQ_NORMALIZED
  uint place = batch * heads + head;
  auto mean = key_means + (int64_t(place) * key_means_shape[2] + mean_index[token]) * KEY_DIM;
#endif
  for (int unit = int(lane); unit < int(KEYS::COUNT); unit += 32) {
    float values[KEYS::VALUES];
    KEYS::load(words, unit, values);
    TQ_UNROLL for (int i = 0; i < int(KEYS::VALUES); i++) {
      int dim = KEYS::dim(unit, i);
#if TQ_NORMALIZED
      key[dim] = tq_fma(values[i], gain, static_cast<float>(mean[dim]));
#else
      key[dim] = tq_mul(values[i], gain);
#endif
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float x[N];
  TQ_UNROLL for (int j = 0; j < N; j++) {
    int dim = 32 * j + int(lane);
    x[j] = 0.0f;
    if (dim < KEY_DIM) x[j] = key[dim];
  }
#if TQ_SORTED
  tq_transform_groups<KEY_DIM, true>(x, key_flips, lane);
  float factor = tq_div(1.0f, tq_sqrt(static_cast<float>(TQ_GROUP)));
  simdgroup_barrier(mem_flags::mem_threadgroup);
  TQ_UNROLL for (int j = 0; j < N; j++) key[int(dims[32 * j + int(lane)])] = tq_mul(x[j], factor);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  TQ_UNROLL for (int j = 0; j < N; j++) x[j] = key[32 * j + int(lane)];
#else
  if (KEY_ROTATED) {
    tq_hadamard<KEY_DIM, KEY_ORDER>(x, key_flips + (N + KEY_ORDER), lane);
    tq_flip_signs<KEY_DIM>(x, key_flips, lane);
    float factor = tq_div(1.0f, tq_sqrt(static_cast<float>(KEY_DIM)));
    TQ_UNROLL for (int j = 0; j < N; j++) x[j] = tq_mul(x[j], factor);
  }
#endif
#if TQ_NORMALIZED
  tq_divide<KEY_DIM>(x, key_scale + place * uint(KEY_DIM), lane);
#endif
  if (KEY_ROTATED || NORMALIZED) {
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + int(lane);
      if (dim < KEY_DIM) key[dim] = x[j];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  float length[PAIRS];
  TQ_UNROLL for (int k = 0; k < PAIRS; k++) {
    int pair = 32 * k + int(lane);
    length[k] = 0.0f;
    if (pair < pairs) {
      float a = key[rope_pairs[pair]], b = key[rope_pairs[pairs + pair]];
      length[k] = tq_sqrt(tq_fma(a, a, tq_mul(b, b)));
    }
  }
  uint row = head * group, out = (batch * heads + head) * group;
  for (uint g = 0; g < group; g++) {
    auto query = virtual_queries + (row + g) * uint(KEY_DIM);
    auto weight = pair_weights + (row + g) * uint(pairs);
    float sum = 0.0f;
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + int(lane);
      if (dim < KEY_DIM) sum = tq_fma(query[dim], x[j], sum);
    }
    TQ_UNROLL for (int k = 0; k < PAIRS; k++) {
      int pair = 32 * k + int(lane);
      if (pair < pairs) sum = tq_fma(weight[pair], length[k], sum);
    }
    sum = tq_simd_sum(sum);
    if (lane == 0) key_scores[int64_t(out + g) * tokens + token] = sum;
  }
}
