// Attention of a few queries over one block of tokens: the first of two passes, see merge.metal.
//
// A threadgroup is one simdgroup. It takes QUERIES query rows of one KV head (row n is query n % L of head n / L) and a
// block of packed tokens or of tokens in the model's type.
//
//   queries [B, Hq, L, KEY_DIM]: T, any strides
//   key_flips: of the rotation of packed keys, see rotation.h
//   packed_rows [B, H, capacity, 2 W]: 16-bit words, see packing.h; any strides but the last
//   row_pairs [B, H, capacity, W]: the same as 32-bit words
//   full_keys [B, H, S, KEY_DIM], full_values [B, H, S, VALUE_DIM]: T as 16-bit words; any strides but the last
//   visible_ranges [at least B L, 2]: the tokens [first, last) of the sequence that a query of a batch row sees
//   mask_bias [B, Hq, L, tokens]: added to scores where MASKED, else anything; any strides
//   score_scale [8]: the first multiplies scores
//   attend_sizes [8]: tokens of the prefix, packed tokens, and blocks of them
//   block_outputs [B, H, N, BLOCKS, VALUE_DIM], block_maxima, block_sums [B, H, N, BLOCKS]: float, unnormalised, N = G L.
//     Maxima count powers of two. Blocks of packed tokens come first; their outputs are rotated.
//
// Grid (32, BLOCKS, B H ceil(N / QUERIES)), threadgroup (32, 1, 1).
#include "attention.h"

//// body

using PACK = typename tq_numbers<QUERIES>::type;
threadgroup PACK query[KEY_DIM];
threadgroup PACK weight[32];
uint block = threadgroup_position_in_grid.y, blocks = threadgroups_per_grid.y;
bool leads = true;

#include "tile.inc"

TQ_UNROLL for (int q = 0; q < QUERIES; q++)
  if (q < count) {
    uint place = (at + uint(q)) * blocks + block;
    if (packed) {
      tq_store<PACKED_VALUES>(int(lane), q, place, sums, block_outputs, block_maxima, block_sums);
    } else {
      tq_store<FULL_VALUES>(int(lane), q, place, sums, block_outputs, block_maxima, block_sums);
    }
  }
