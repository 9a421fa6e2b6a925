// Attention of many queries over one block of tokens by products of 8x8 matrices in half precision, as FlashAttention-2
// (Dao 2023) does: in place of attend.metal. Only on Metal.
//
// A threadgroup takes QUERIES = 8 SIMDGROUPS query rows of one KV head (row n is query n % L of head n / L), eight for
// each simdgroup, and one block of tokens. It decodes TOKENS keys to threadgroup memory, then as many values.
//
//   rotated_queries, plain_queries [B, H, N, KEY_DIM]: half, for packed and for full-precision tokens; rows are padded
//     to N, a multiple of QUERIES
//   query_factors [2, B, H, N]: float, of their scores in powers of two
//   attend_sizes: as in attend.metal
//   packed_rows, full_keys, full_values: as in attend.metal, of one cache; and key_groups only if KEY_SORTED
//   block_outputs, block_maxima, block_sums: as in attend.metal
//
// Only if NORMALIZED:
//
//   mean_scores [B, H, N, capacity]: float, score of each query row and mean in powers of two
//   mean_index [capacity]: int, as in attend.metal
//
// Grid (32 SIMDGROUPS, BLOCKS, B H tiles), threadgroup (32 SIMDGROUPS, 1, 1).
#include "attention.h"
#include "matrix.h"

//// body

constexpr int TEAM = 1, THREADS = 32 * SIMDGROUPS, WIDTH = KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM;
constexpr int TOKENS = 32, COLUMNS = TOKENS / 8, STRIDE = WIDTH + 8;
constexpr int KEY_PARTS = KEY_DIM / 8, VALUE_PARTS = VALUE_DIM / 8;
threadgroup half tile[TOKENS * STRIDE];
threadgroup float gains[TOKENS];

#include "attend_tile.inc"

uint block = threadgroup_position_in_grid.y;
if (int(block) >= blocks) return;
bool packed = int(block) < packed_blocks;
int simdgroup = int(simdgroup_index_in_threadgroup), thread_number = 32 * simdgroup + int(lane);
int column = tq_matrix_column(int(lane)), place = 8 * simdgroup + tq_matrix_row(int(lane));
uint n = row + uint(place) < rows ? row + uint(place) : rows - 1;
int last = packed_tokens + full_tokens - (attend_sizes[3] ? int(length - 1 - n % length) : 0);
uint padded = tiles * uint(QUERIES), first = kv_head * padded + row;
uint query_row = first + uint(place);
float query_factor = query_factors[(packed ? uint(0) : threadgroups_per_grid.z * uint(QUERIES)) + query_row];

simdgroup_half8x8 query[KEY_PARTS];
TQ_UNROLL for (int i = 0; i < KEY_PARTS; i++) {
  auto queries = (packed ? rotated_queries : plain_queries) + int64_t(first + 8u * uint(simdgroup)) * KEY_DIM;
  simdgroup_load(query[i], queries + 8 * i, KEY_DIM);
}
simdgroup_float8x8 output[VALUE_PARTS];
TQ_UNROLL for (int i = 0; i < VALUE_PARTS; i++) tq_clear(output[i]);
float maximum = TQ_MASKED, sum = 0.0f;

tq_block tokens;
if (packed) {
  tq_block_range(packed_tokens, int(block), packed_blocks, tokens);
} else {
  tq_block_range(full_tokens, int(block) - packed_blocks, blocks - packed_blocks, tokens);
}
int gap_start = packed ? 0 : sink_tokens, gap = packed ? sink_tokens : packed_tokens;
auto words = tq_recast<ushort>(TQ_SELECT(packed_rows, source) + int64_t(first_row) * (int(ROW::WORDS) / 2));
#if TQ_SORTED
auto dims = TQ_SELECT(key_groups, source) + int64_t(source_head) * tq_group_words<KEY_DIM>();
auto packed_keys = tq_make_sorted(words + int(ROW::KEYS), levels + 0, dims);
#else
auto packed_keys = tq_words<KEY_KIND>::make(words + int(ROW::KEYS), tq_pick<KEY_TABLE>::pick(levels, key_table + 0));
#endif
auto packed_values = tq_words<VALUE_KIND>::make(words + int(ROW::VALUES), tq_pick<VALUE_TABLE>::pick(levels + KEY_STATES, value_bytes));
constexpr int KEY_WORDS = KEY_DIM * FULL_BITS / 16, VALUE_WORDS = VALUE_DIM * FULL_BITS / 16;
auto keys = tq_recast<ushort>(TQ_SELECT(full_keys, source)) + int64_t(source_head) * capacity * KEY_WORDS;
auto values = tq_recast<ushort>(TQ_SELECT(full_values, source)) + int64_t(source_head) * capacity * VALUE_WORDS;
#if TQ_NORMALIZED
uint mean_entry = 9 + 9 * (threadgroups_per_grid.z / tiles) + 3 * kv_head;
auto row_means = TQ_SELECT(mean_scores, source) + int64_t(query_row) * attend_sizes[mean_entry];
#endif

for (int base = tokens.start; base < tokens.stop; base += TOKENS) {
  int present = tokens.stop - base < TOKENS ? tokens.stop - base : TOKENS;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (packed) {
    tq_fill_tile<PACKED_KEYS, TOKENS, STRIDE, THREADS, false>(thread_number, present, packed_keys + int64_t(base) * int(ROW::WORDS), int(ROW::WORDS), tile);
    for (int t = thread_number; t < present; t += THREADS) {
      auto key = packed_keys + int64_t(base + t) * int(ROW::WORDS);
      gains[t] = PACKED_KEYS::gain(key);
    }
  } else {
    tq_fill_tile<FULL_KEYS, TOKENS, STRIDE, THREADS, false>(thread_number, present, keys + int64_t(base) * KEY_WORDS, KEY_WORDS, tile);
    for (int t = thread_number; t < present; t += THREADS) gains[t] = 1.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_float8x8 scores[COLUMNS];
  TQ_UNROLL for (int j = 0; j < COLUMNS; j++) {
    tq_clear(scores[j]);
    TQ_UNROLL for (int i = 0; i < KEY_PARTS; i++) {
      simdgroup_half8x8 key;
      simdgroup_load(key, tile + (8 * j * STRIDE + 8 * i), STRIDE, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(scores[j], query[i], key, scores[j]);
    }
  }
  float score[2 * COLUMNS], largest = maximum;
  TQ_UNROLL for (int j = 0; j < COLUMNS; j++)
    TQ_UNROLL for (int e = 0; e < 2; e++) {
      int t = 8 * j + column + e, token = base + t, position = token < gap_start ? token : token + gap;
      float x = TQ_MASKED;
      if (t < present && position < last) {
        x = tq_mul(tq_mul(scores[j].thread_elements()[e], query_factor), gains[t]);
#if TQ_NORMALIZED
        if (packed) {
          int mean = attend_sizes[mean_entry + 2] ? TQ_SELECT(mean_index, source)[token] : (attend_sizes[mean_entry + 1] + token) / MEAN_TOKENS;
          x = tq_add(x, row_means[mean]);
        }
#endif
      }
      score[2 * j + e] = x;
      largest = tq_larger(largest, x);
    }
  largest = tq_row_max(largest);
  float factor = tq_exp2(tq_sub(maximum, largest));
  maximum = largest;
  sum = tq_mul(sum, factor);
  simdgroup_half8x8 weight[COLUMNS];
  TQ_UNROLL for (int j = 0; j < COLUMNS; j++)
    TQ_UNROLL for (int e = 0; e < 2; e++) {
      float p = score[2 * j + e] > TQ_MASKED ? tq_exp2(tq_sub(score[2 * j + e], maximum)) : 0.0f;
      sum = tq_add(sum, p);
      weight[j].thread_elements()[e] = static_cast<half>(tq_mul(p, TQ_WEIGHT_UNIT));
    }
  TQ_UNROLL for (int i = 0; i < VALUE_PARTS; i++)
    TQ_UNROLL for (int e = 0; e < 2; e++) output[i].thread_elements()[e] = tq_mul(output[i].thread_elements()[e], factor);

  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (packed) {
    tq_fill_tile<PACKED_VALUES, TOKENS, STRIDE, THREADS, true>(thread_number, present, packed_values + int64_t(base) * int(ROW::WORDS), int(ROW::WORDS), tile);
  } else {
    tq_fill_tile<FULL_VALUES, TOKENS, STRIDE, THREADS, false>(thread_number, present, values + int64_t(base) * VALUE_WORDS, VALUE_WORDS, tile);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  TQ_UNROLL for (int i = 0; i < VALUE_PARTS; i++)
    TQ_UNROLL for (int j = 0; j < COLUMNS; j++) {
      simdgroup_half8x8 value;
      simdgroup_load(value, tile + (8 * j * STRIDE + 8 * i), STRIDE);
      simdgroup_multiply_accumulate(output[i], weight[j], value, output[i]);
    }
}

sum = tq_row_sum(sum);
if (row + uint(place) < rows) {
  int64_t index = int64_t(row_index + uint(place)) * attend_sizes[8] + block;
  if (column == 0) {
    block_maxima[index] = maximum;
    block_sums[index] = sum;
  }
  TQ_UNROLL for (int i = 0; i < VALUE_PARTS; i++)
    TQ_UNROLL for (int e = 0; e < 2; e++)
      block_outputs[index * VALUE_DIM + (8 * i + column + e)] = tq_mul(output[i].thread_elements()[e], 1.0f / TQ_WEIGHT_UNIT);
}
