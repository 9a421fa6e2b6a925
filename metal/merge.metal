// Attention of each query row over all its tokens: the second of two passes, see attend.metal.
//
// Blocks merge by their maxima and sums; what came from packed tokens is rotated back once, in registers. Each simdgroup
// of a threadgroup merges every SIMDGROUPS-th block, the first one the simdgroups.
//
//   block_outputs, block_maxima, block_sums: of the first pass, for rows [B, Hq, L] and BLOCKS blocks
//   value_flips: of the rotation of packed values, see rotation.h
//   sink_logits [Hq]: float, scores of a key of value zero where SINKS, else anything
//   merge_sizes [8]: blocks of packed tokens, blocks, Hq, L
//   attended [B, Hq, L, VALUE_DIM]: T
//
// Grid (32 SIMDGROUPS, B Hq L, 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "rotation.h"
#include "softmax.h"

//// body

constexpr int N = (VALUE_DIM + 31) / 32;
threadgroup float parts[SIMDGROUPS * 64 * N];  // of packed tokens, then of others

int lane = int(thread_index_in_simdgroup), simdgroup = int(simdgroup_index_in_threadgroup);
uint row = threadgroup_position_in_grid.y;
int packed_blocks = merge_sizes[0], blocks = merge_sizes[1], heads = merge_sizes[2], length = merge_sizes[3];
auto outputs = block_outputs + row * uint(blocks * VALUE_DIM);
auto maxima = block_maxima + row * uint(blocks);
auto sums = block_sums + row * uint(blocks);
float sink = SINKS ? tq_mul(sink_logits[int(row) / length % heads], TQ_LOG2E) : TQ_MASKED;

float maximum = sink;
for (int block = lane; block < blocks; block += 32) maximum = tq_larger(maximum, maxima[block]);
maximum = tq_simd_max(maximum);
float total = 0.0f;
for (int block = lane; block < blocks; block += 32)
  total = tq_fma(sums[block], tq_exp2(tq_sub(maxima[block], maximum)), total);
total = tq_simd_sum(total);
if (SINKS) total = tq_add(total, tq_exp2(tq_sub(sink, maximum)));

float part[2 * N];
TQ_UNROLL for (int i = 0; i < 2 * N; i++) part[i] = 0.0f;
TQ_UNROLL for (int side = 0; side < 2; side++)
  for (int block = simdgroup + side * packed_blocks; block < (side == 0 ? packed_blocks : blocks); block += SIMDGROUPS) {
    float factor = tq_exp2(tq_sub(maxima[block], maximum));
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + lane;
      if (dim < VALUE_DIM) part[side * N + j] = tq_fma(factor, outputs[block * VALUE_DIM + dim], part[side * N + j]);
    }
  }
TQ_UNROLL for (int i = 0; i < 2 * N; i++) parts[(simdgroup * 2 * N + i) * 32 + lane] = part[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup == 0) {
  for (int other = 1; other < SIMDGROUPS; other++)
    TQ_UNROLL for (int i = 0; i < 2 * N; i++) part[i] = tq_add(part[i], parts[(other * 2 * N + i) * 32 + lane]);
  if (VALUE_ROTATED) {
    float factor = tq_div(1.0f, tq_sqrt(static_cast<float>(VALUE_DIM)));
    tq_hadamard<VALUE_DIM, VALUE_ORDER>(part, value_flips + (N + VALUE_ORDER), lane);
    tq_flip_signs<VALUE_DIM>(part, value_flips, lane);
    TQ_UNROLL for (int j = 0; j < N; j++) part[j] = tq_mul(part[j], factor);
  }
  // A query that sees nothing has weights of nothing.
  float factor = total > 0.0f ? tq_div(1.0f, total) : 0.0f;
  TQ_UNROLL for (int j = 0; j < N; j++) {
    int dim = 32 * j + lane;
    if (dim < VALUE_DIM) attended[row * uint(VALUE_DIM) + dim] = static_cast<T>(tq_mul(tq_add(part[j], part[N + j]), factor));
  }
}
