// Attention of a few queries over one block of tokens: the first of two passes, see merge.metal.
//
// A threadgroup is one simdgroup. It takes QUERIES query rows of one KV head (row n is query n % L of head n / L) and a
// block of packed tokens or of tokens in the model's type. All arrays are contiguous.
//
//   queries [B, Hq, L, KEY_DIM]: T
//   key_flips: of the rotation of packed keys, see rotation.h
//   mask_bias [B, Hq, L, tokens], or 1 for each of the first three: float, added to scores where MASKED, else anything
//   attend_sizes: Hq, H, L, whether queries see no later ones, the bits of what multiplies scores, and the steps of
//     mask_bias from one B, Hq and L to the next; then, for each row of the batch, sink tokens, packed tokens,
//     those in the model's type, the capacities of packed_rows and of full_keys, blocks of packed tokens, blocks, and BLOCKS
//   packed_rows [B, H, capacity, W]: 32-bit words, two of packing.h's in each
//   full_keys [B, H, capacity, KEY_DIM], full_values [B, H, capacity, VALUE_DIM]: the model's type
//   block_outputs [B, H, N, BLOCKS, VALUE_DIM], block_maxima, block_sums [B, H, N, BLOCKS]: float, unnormalised, N = G L.
//     Maxima count powers of two. Blocks of packed tokens come first; their outputs are rotated.
//
// Where NORMALIZED also:
//
//   attend_sizes: behind the above, for each row of the batch, the capacity of key_means, the row's number of its first packed
//     token, and whether mean_index tells which mean a token has; else MEAN_TOKENS tokens share one
//   key_scale [B, H, KEY_DIM]: float, by which queries of packed keys are divided
//   key_means [B, H, capacity, KEY_DIM]: half
//   mean_index [capacity]: int, or anything
//
// Where KEY_TRELLIS or VALUE_TRELLIS also, and once:
//
//   trellis_levels [3, 256]: half, of states of 2, 3 and 4 bits
//
// Inputs from packed_rows on come once, or SOURCES times: then each row of the batch has its own, with B = 1.
//
// Grid (32, BLOCKS, B H ceil(N / QUERIES)), threadgroup (32, 1, 1).
#include "attention.h"

//// body

using PACK = typename tq_numbers<QUERIES>::type;
#if TQ_TRELLIS
constexpr int THREADS = 32;
#endif
threadgroup PACK query[KEY_DIM];
threadgroup PACK weight[32];

#include "tile.inc"

uint block = threadgroup_position_in_grid.y;
if (int(block) >= blocks) return;
bool leads = true;

#include "block.inc"

TQ_UNROLL for (int q = 0; q < QUERIES; q++)
  if (q < count) {
    uint place = (at + uint(q)) * uint(attend_sizes[entry + 7]) + block;
    if (packed) {
      tq_store<PACKED_VALUES>(int(lane), q, place, sums, block_outputs, block_maxima, block_sums);
    } else {
      tq_store<FULL_VALUES>(int(lane), q, place, sums, block_outputs, block_maxima, block_sums);
    }
  }
