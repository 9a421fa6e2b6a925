// Scores archived keys: for each query and block of tokens, the largest score and the sum of weights.
//
// A threadgroup takes one block of one KV head, and all queries. It decodes SPAN keys at a time into threadgroup
// memory, so each code is loaded and decoded once for any number of queries; then every SIMDGROUPS-th simdgroup scores
// QUERIES queries against them. A lane is a token; if keys are so wide that SPAN is less than 32, the remaining lanes
// are the same tokens for the next queries.
//
//   key_codes [1, H, S, words]: 16-bit words, see packing.h; any strides but the last
//   key_scales [1, H, S]: half or float, any strides; not read if the format has no scale
//   query_tiles [H, T, KEY_DIM, QUERIES]: float, contiguous; N queries in tiles of QUERIES, padded with zeros. They are
//     divided by the scale of normalized keys, and rotated as keys are.
//   block_starts [at least n + 1]: int, the start of each block, and the end of the last; no block is empty
//   recall_sizes [8]: N and n
//   block_maxima, block_sums [H, N, n]: float; sums of exp(score - maximum)
//
// Only if NORMALIZED, contiguous:
//
//   key_means [1, H, m, KEY_DIM]: half, added to keys
//   mean_index [at least S]: int, which mean a key has
//
// Only if KEY_SORTED:
//
//   key_groups [1, H, ...]: see sorted_keys.h
//
// Only if KEY_TRELLIS:
//
//   trellis_levels [7, 256]: half, levels of the states of 1 to 7 bits
//
// Grid (32 SIMDGROUPS n, H, 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "query_pack.h"
#include "softmax.h"
#include "units.h"
#if TQ_TRELLIS
#include "trellis.h"
#endif
#if TQ_SORTED
#include "sorted_keys.h"
#endif

//// body

#if TQ_SORTED
constexpr int KEY_KIND = TQ_BY_GROUP;
#else
constexpr int KEY_KIND = KEY_TRELLIS;
#endif
using KEYS = tq_vectors<KEY_DIM, KEY_BITS, KEY_WIDE, KEY_FULL, 0, KEY_KIND>;
constexpr int PITCH = SPAN + 1;  // between dims, so that lanes neither write dims nor read tokens in the same bank
constexpr int THREADS = 32 * SIMDGROUPS, PARTS = 32 / SPAN, QUADS = QUERIES / 4;
threadgroup float key_values[KEY_DIM * PITCH];
#if TQ_TRELLIS
auto key_levels = trellis_levels + tq_table<KEY_KIND == TQ_BY_STATE, KEY_BITS>();
#else
constexpr int key_levels = 0;
#endif

int lane = int(thread_index_in_simdgroup), simdgroup = int(simdgroup_index_in_threadgroup);
uint block = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
uint rows = uint(recall_sizes[0]), blocks = uint(recall_sizes[1]);
int tiles = int(rows + QUERIES - 1) / QUERIES;
int token = lane % SPAN, part = lane / SPAN;
auto head_queries = tq_recast<float4>(query_tiles) + int64_t(head) * tiles * (KEY_DIM * QUADS);
auto head_codes = key_codes + int64_t(head) * key_codes_strides[1];
#if TQ_SORTED
auto head_keys = tq_make_sorted(head_codes, key_levels, key_groups + head * uint(tq_group_words<KEY_DIM>()));
#else
auto head_keys = tq_words<KEY_TRELLIS>::make(head_codes, key_levels);
#endif
int begin = block_starts[block], stop = block_starts[block + 1];
for (int start = begin; start < stop; start += SPAN) {
  int count = stop - start < SPAN ? stop - start : SPAN;
  if (start > begin) threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 32 * simdgroup + lane; i < count * int(KEYS::COUNT); i += THREADS) {
    int key = i / int(KEYS::COUNT), unit = i % int(KEYS::COUNT);
    int64_t place = start + key;
    float values[KEYS::VALUES], gain = 1.0f;
    auto words = head_keys + place * key_codes_strides[2];
    KEYS::load(words, unit, values);
    if (KEY_BITS <= 8)
      gain = tq_gain_of<KEY_DIM, KEY_BITS>(static_cast<float>(key_scales[int64_t(head) * key_scales_strides[1] + place * key_scales_strides[2]]));
#if TQ_NORMALIZED
    auto mean = key_means + (int64_t(head) * key_means_shape[2] + mean_index[place]) * KEY_DIM;
#endif
    TQ_UNROLL for (int v = 0; v < int(KEYS::VALUES); v++) {
      int dim = KEYS::dim(unit, v);
#if TQ_NORMALIZED
      key_values[dim * PITCH + key] = tq_fma(values[v], gain, static_cast<float>(mean[dim]));
#else
      key_values[dim * PITCH + key] = tq_mul(values[v], gain);
#endif
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  bool valid = token < count;
  auto key = key_values + (valid ? token : count - 1);
  for (int first = simdgroup * PARTS; first < tiles; first += SIMDGROUPS * PARTS) {
    int tile = first + part < tiles ? first + part : tiles - 1;  // every lane must reach the shuffles below
    auto query = head_queries + tile * (KEY_DIM * QUADS);
    float score[QUERIES];
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = 0.0f;
    for (int dim = 0; dim < KEY_DIM; dim++) {
      float value = key[dim * PITCH];
      TQ_UNROLL for (int quad = 0; quad < QUADS; quad++) {
        float query_values[4];
        tq_pack<4>::unpack(query[dim * QUADS + quad], query_values);
        TQ_UNROLL for (int i = 0; i < 4; i++) score[4 * quad + i] = tq_fma(query_values[i], value, score[4 * quad + i]);
      }
    }
    float maximum = 0.0f, sum = 0.0f;  // of the query whose result this lane stores
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
      float largest = tq_simd_max<SPAN>(valid ? score[q] : TQ_MASKED);
      float weight = tq_exp2(tq_mul(tq_sub(score[q], largest), TQ_LOG2E));
      float total = tq_simd_sum<SPAN>(valid ? weight : 0.0f);
      if (token == q) maximum = largest, sum = total;
    }
    uint row = uint(tile * QUERIES + token);
    if (token < QUERIES && first + part < tiles && row < rows) {
      int64_t place = (int64_t(head) * rows + row) * blocks + block;
      if (start > begin) {  // this lane stored the result of the earlier tokens
        float previous = block_maxima[place], larger = tq_larger(previous, maximum);
        sum = tq_mul(sum, tq_exp2(tq_mul(tq_sub(maximum, larger), TQ_LOG2E)));
        sum = tq_fma(block_sums[place], tq_exp2(tq_mul(tq_sub(previous, larger), TQ_LOG2E)), sum);
        maximum = larger;
      }
      block_maxima[place] = maximum;
      block_sums[place] = sum;
    }
  }
}
