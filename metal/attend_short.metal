// Attention of a few queries over a short context: attend.metal and merge.metal in one kernel.
//
// A threadgroup takes QUERIES query rows of one KV head and all tokens, one block per simdgroup. The blocks' partial
// results go through threadgroup memory, ROUND query rows at a time, and one simdgroup merges each row.
//
//   inputs: those of attend.metal, with SIMDGROUPS blocks for each row of the batch, and value_flips and sink_logits of
//     merge.metal
//   attended [B, Hq, L, VALUE_DIM]: T
//
// Grid (32 SIMDGROUPS, 1, B H ceil(N / QUERIES)), threadgroup (32 SIMDGROUPS, 1, 1). SIMDGROUPS is at least ROUND.
#include "attention.h"
#include "merge.h"

//// body

using QUERY_ROWS = tq_rows<QUERIES, KEY_DIM>;
using WEIGHT_ROWS = tq_rows<QUERIES, 32>;
using PACK = typename QUERY_ROWS::type;
constexpr int TEAM = 1, THREADS = 32 * SIMDGROUPS, member = 0;
constexpr int ROUND = QUERIES * VALUE_DIM <= 512 ? QUERIES : VALUE_DIM < 512 ? 512 / VALUE_DIM : 1;
threadgroup PACK tile_queries[2 * QUERY_ROWS::SIZE];  // for packed tokens, then for full-precision tokens
threadgroup PACK weights[SIMDGROUPS * WEIGHT_ROWS::SIZE];
threadgroup float outputs[ROUND * SIMDGROUPS * VALUE_DIM];
threadgroup float maxima[ROUND * SIMDGROUPS];
threadgroup float totals[ROUND * SIMDGROUPS];

#include "attend_tile.inc"

uint block = simdgroup_index_in_threadgroup;
bool leader = block == 0 || int(block) == packed_blocks;
auto query = tile_queries + (int(block) < packed_blocks ? 0 : int(QUERY_ROWS::SIZE));
auto weight = weights + int(WEIGHT_ROWS::SIZE) * int(block);
auto shared = maxima + 0;  // a team of one shares nothing

#include "attend_block.inc"

TQ_UNROLL for (int start = 0; start < QUERIES; start += ROUND) {
  if (start > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
  TQ_UNROLL for (int i = 0; i < ROUND; i++)
    if (start + i < QUERIES) {
      uint place = uint(i * SIMDGROUPS) + block;
      if (packed) {
        tq_store<PACKED_VALUES, TEAM>(int(lane), member, start + i, place, partial, outputs, maxima, totals);
      } else {
        tq_store<FULL_VALUES, TEAM>(int(lane), member, start + i, place, partial, outputs, maxima, totals);
      }
    }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int q = start + int(block), place = int(block) * SIMDGROUPS;
  if (int(block) < ROUND && q < count) {
    float part[2 * ((VALUE_DIM + 31) / 32)];
    float sink = SINKS ? tq_mul(sink_logits[head * group + (row + uint(q)) / length], TQ_LOG2E) : TQ_MASKED;
    float total = tq_merge<VALUE_DIM, SINKS>(int(lane), 0, 1, packed_blocks, SIMDGROUPS, sink, outputs + place * VALUE_DIM,
                                             maxima + place, totals + place, part);
    tq_finish<T, VALUE_DIM, VALUE_ORDER, VALUE_ROTATED>(int(lane), part, total, value_flips,
                                                        attended + int64_t(row_index + uint(q)) * VALUE_DIM);
  }
}
