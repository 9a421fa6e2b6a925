// Attention of a few queries over one block of tokens: the first of two passes; merge.metal is the second.
//
// A threadgroup is a team of TEAM simdgroups, see attention.h. It takes QUERIES query rows of one KV head (row n is query
// n % L of head n / L), and one block of tokens, which are either packed or in the model's dtype. All arrays are
// contiguous.
//
//   queries [B, Hq, L, KEY_DIM]: T
//   key_flips: sign flips of the rotation of packed keys, see rotation.h
//   mask_bias [B, Hq, L, tokens], or 1 for each of the first three: float, added to scores. Read only if MASKED.
//   attend_sizes: Hq, H, L, whether the mask is causal, the bits of the factor of scores, the strides of mask_bias
//     along B, Hq and L, and BLOCKS; then for each KV head of each row of the batch: sink tokens, packed tokens,
//     full-precision tokens (sinks and window), where its packed rows begin in packed_rows, its number in the other
//     arrays of its source, the capacity of full_keys, blocks of packed tokens, blocks, and the number of its source
//   packed_rows [..., W]: 32-bit words, each of two 16-bit words as in packing.h; those of a head lie side by side
//   full_keys [..., capacity, KEY_DIM], full_values [..., capacity, VALUE_DIM]: of each head, in the model's dtype
//   block_outputs [B, H, N, BLOCKS, VALUE_DIM], block_maxima, block_sums [B, H, N, BLOCKS]: float, unnormalized, with
//     N = G L. Maxima are in powers of two. Blocks of packed tokens come first; their outputs are in rotated space.
//
// Only if NORMALIZED:
//
//   attend_sizes, after the numbers above, for each KV head of each row of the batch: the capacity of key_means, the
//     number of rows before its first packed row, and whether mean_index says which mean a token has; else MEAN_TOKENS
//     tokens share one
//   key_scale [..., KEY_DIM]: float, divides the queries of packed keys of each head
//   key_means [..., capacity, KEY_DIM]: half, of each head
//   mean_index [capacity]: int
//
// Only if KEY_SORTED:
//
//   key_groups: of each head, see sorted_keys.h
//
// Only if KEY_TRELLIS or VALUE_TRELLIS:
//
//   trellis_levels [7, 256]: half, levels of the states of 1 to 7 bits
//
// Inputs from packed_rows on, without trellis_levels, come SOURCES times: a source has the arrays of a batch, of one row
// of it, or of KV heads that keep the same tokens.
//
// Grid (32 TEAM, BLOCKS, B H ceil(N / QUERIES)), threadgroup (32 TEAM, 1, 1).
#include "attention.h"

//// body

using QUERY_ROWS = tq_rows<QUERIES, KEY_DIM>;
using WEIGHT_ROWS = tq_rows<QUERIES, 32 * TEAM>;
using PACK = typename QUERY_ROWS::type;
constexpr int THREADS = 32 * TEAM;
threadgroup PACK query[QUERY_ROWS::SIZE];
threadgroup PACK weight[WEIGHT_ROWS::SIZE];
threadgroup float shared[TEAM > 1 ? TEAM * QUERIES : 1];

#include "attend_tile.inc"

uint block = threadgroup_position_in_grid.y;
if (int(block) >= blocks) return;
int member = int(simdgroup_index_in_threadgroup);
bool leader = true;

#include "attend_block.inc"

TQ_UNROLL for (int q = 0; q < QUERIES; q++)
  if (q < count) {
    int64_t index = int64_t(row_index + uint(q)) * attend_sizes[8] + block;
    if (packed) {
      tq_store<PACKED_VALUES, TEAM>(int(lane), member, q, index, partial, block_outputs, block_maxima, block_sums);
    } else {
      tq_store<FULL_VALUES, TEAM>(int(lane), member, q, index, partial, block_outputs, block_maxima, block_sums);
    }
  }
