// Merges the partial attention of each query row's blocks: the second of two passes; attend.metal is the first.
//
// Blocks merge by their maxima and sums; the output of packed tokens is rotated back once, in registers. Each simdgroup
// of a threadgroup merges every SIMDGROUPS-th block, and the first simdgroup merges the simdgroups.
//
//   block_outputs, block_maxima, block_sums: results of the first pass, for rows [B, Hq, L] and BLOCKS blocks
//   value_flips: sign flips of the rotation of packed values, see rotation.h
//   sink_logits [Hq]: float, scores of a key with value zero. Read only if SINKS.
//   attend_sizes: as in attend.metal
//   attended [B, Hq, L, VALUE_DIM]: T
//
// Grid (32 SIMDGROUPS B Hq L, 1, 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "merge.h"

//// body

constexpr int N = (VALUE_DIM + 31) / 32;
threadgroup float parts[SIMDGROUPS * 64 * N];

int lane = int(thread_index_in_simdgroup), simdgroup = int(simdgroup_index_in_threadgroup);
uint row = threadgroup_position_in_grid.x;
int heads = attend_sizes[0], length = attend_sizes[2], group = heads / attend_sizes[1];
int entry = 9 + 9 * (int(row) / (group * length));
int packed_blocks = attend_sizes[entry + 6], blocks = attend_sizes[entry + 7];
int64_t place = int64_t(row) * attend_sizes[8];
float sink = SINKS ? tq_mul(sink_logits[int(row) / length % heads], TQ_LOG2E) : TQ_MASKED;
float part[2 * N];
float total = tq_merge<VALUE_DIM, SINKS>(lane, simdgroup, SIMDGROUPS, packed_blocks, blocks, sink,
                                         block_outputs + place * VALUE_DIM, block_maxima + place, block_sums + place, part);
TQ_UNROLL for (int i = 0; i < 2 * N; i++) parts[(simdgroup * 2 * N + i) * 32 + lane] = part[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup == 0) {
  for (int other = 1; other < SIMDGROUPS; other++)
    TQ_UNROLL for (int i = 0; i < 2 * N; i++) part[i] = tq_add(part[i], parts[(other * 2 * N + i) * 32 + lane]);
  tq_finish<T, VALUE_DIM, VALUE_ORDER, VALUE_ROTATED>(lane, part, total, value_flips, attended + int64_t(row) * VALUE_DIM);
}
