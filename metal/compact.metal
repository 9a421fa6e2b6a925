// Gathers the packed rows that an eviction keeps; one simdgroup per row.
//
//   packed_rows [B, H, S, W]: any strides but the last
//   kept_rows [N]: indices into S, ascending
//   compact_sizes [8]: N and the capacity
//   compacted [B, H, capacity, W]: only the first N rows are written
//
// Grid (32 N rounded up to the threadgroup, B H, 1), threadgroup (256, 1, 1).
#include "tq_compat.h"

//// body

uint row = thread_position_in_grid.x / 32u, heads = packed_rows_shape[1], words = packed_rows_shape[3];
uint batch = threadgroup_position_in_grid.y / heads, head = threadgroup_position_in_grid.y % heads;
if (row < uint(compact_sizes[0])) {
  auto source = packed_rows + (batch * packed_rows_strides[0] + head * packed_rows_strides[1] + kept_rows[row] * packed_rows_strides[2]);
  auto target = compacted + (int64_t(batch * heads + head) * compact_sizes[1] + row) * words;
  for (uint word = thread_index_in_simdgroup; word < words; word += 32) target[word] = source[word];
}
