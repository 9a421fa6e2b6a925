// Attention of a few queries over packed rows, one block of tokens after another: the first of two passes.
//
// One simdgroup takes QUERIES query rows of one KV head and one block of tokens, 32 tokens at a time. For scores a lane
// is a token: each code is decoded once for all queries, and no lane waits for another. For values a lane is a unit of
// the row (see units.h), or as many lanes as there are units share the 32 tokens.
//
//   queries [B, H, N, KEY_DIM]: float, rotated, times the score's scale and log2 e; N a multiple of QUERIES
//   packed_rows [B, H, S, 2 W]: 16-bit words, see packing.h; any strides but the last
//   token_ranges [at least B, 2]: the first token of a batch row and the one after its last
//   block_outputs [B, H, N, BLOCKS, VALUE_DIM], block_maxima, block_sums [B, H, N, BLOCKS]: float, unnormalised
//
// Grid (32, BLOCKS, B H N / QUERIES), threadgroup (32, 1, 1).
#include "units.h"

// Stands for minus infinity: a block without tokens then has finite differences.
#define TQ_MASKED -1e30f

TQ_FN float tq_simd_max(float value) {
  TQ_UNROLL for (int stride = 16; stride > 0; stride /= 2) {
    float other = simd_shuffle_xor(value, ushort(stride));
    value = other > value ? other : value;
  }
  return value;
}

TQ_FN float tq_simd_sum(float value) {
  TQ_UNROLL for (int stride = 16; stride > 0; stride /= 2) value = tq_add(value, simd_shuffle_xor(value, ushort(stride)));
  return value;
}

//// body

using ROW = tq_row<KEY_DIM, KEY_BITS, KEY_WIDE, VALUE_DIM, VALUE_BITS, VALUE_WIDE>;
using KEY_UNIT = tq_unit<KEY_DIM, KEY_BITS>;
using VALUE_UNIT = tq_unit<VALUE_DIM, VALUE_BITS>;
// Lanes of one token when values are summed, tokens taken at once, and units of each lane.
constexpr int SPAN = int(VALUE_UNIT::COUNT) < 32 ? int(VALUE_UNIT::COUNT) : 32;
constexpr int SLOTS = 32 / SPAN, UNITS = (int(VALUE_UNIT::COUNT) + 31) / 32, VALUES = UNITS * int(VALUE_UNIT::VALUES);
threadgroup float query[QUERIES * KEY_DIM];
threadgroup float weight[QUERIES * 32];

int lane = int(thread_index_in_simdgroup);
int block = int(threadgroup_position_in_grid.y), blocks = int(threadgroups_per_grid.y);
uint tile = threadgroup_position_in_grid.z;
uint tiles = queries_shape[2] / QUERIES, heads = queries_shape[1];
uint head = tile / tiles % heads, batch = tile / (tiles * heads);
int first = token_ranges[2 * batch], last = token_ranges[2 * batch + 1];
int size = ((last - first + blocks - 1) / blocks + 31) / 32 * 32;  // of a block
int start = first + block * size, stop = start + size < last ? start + size : last;

auto asked = queries + tile * uint(QUERIES * KEY_DIM);
for (int i = lane; i < QUERIES * KEY_DIM; i += 32) query[i] = asked[i];
simdgroup_barrier(mem_flags::mem_threadgroup);

float maximum[QUERIES], sum[QUERIES], output[QUERIES * VALUES];
TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
  maximum[q] = TQ_MASKED;
  sum[q] = 0.0f;
  TQ_UNROLL for (int i = 0; i < VALUES; i++) output[q * VALUES + i] = 0.0f;
}

auto rows = packed_rows + (batch * packed_rows_strides[0] + head * packed_rows_strides[1]);
for (int base = start; base < stop; base += 32) {
  bool there = base + lane < stop;
  float score[QUERIES];
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = 0.0f;
  float value_gain = 0.0f;
  if (there) {
    auto row = rows + (base + lane) * packed_rows_strides[2];
    for (int unit = 0; unit < int(KEY_UNIT::COUNT); unit++) {
      float values[KEY_UNIT::VALUES];
      tq_load_unit<KEY_FULL, KEY_DIM, KEY_BITS>(row + int(ROW::KEYS), unit, values);
      TQ_UNROLL for (int q = 0; q < QUERIES; q++)
        TQ_UNROLL for (int i = 0; i < int(KEY_UNIT::VALUES); i++)
          score[q] = tq_fma(query[q * KEY_DIM + KEY_UNIT::dim(unit, i)], values[i], score[q]);
    }
    float gain = tq_gain<KEY_DIM, KEY_BITS, KEY_WIDE>(row + int(ROW::KEY_SCALE));
    TQ_UNROLL for (int q = 0; q < QUERIES; q++) score[q] = tq_mul(score[q], gain);
    value_gain = tq_gain<VALUE_DIM, VALUE_BITS, VALUE_WIDE>(row + int(ROW::VALUE_SCALE));
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
    float largest = tq_simd_max(there ? score[q] : TQ_MASKED);
    if (largest > maximum[q]) {  // all lanes alike
      float factor = tq_exp2(tq_sub(maximum[q], largest));
      maximum[q] = largest;
      sum[q] = tq_mul(sum[q], factor);
      TQ_UNROLL for (int i = 0; i < VALUES; i++) output[q * VALUES + i] = tq_mul(output[q * VALUES + i], factor);
    }
    float p = there ? tq_exp2(tq_sub(score[q], maximum[q])) : 0.0f;
    sum[q] = tq_add(sum[q], p);
    weight[q * 32 + lane] = tq_mul(p, value_gain);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  int tokens = stop - base < 32 ? stop - base : 32;
  if (lane < SLOTS * SPAN) {
    for (int token = lane / SPAN; token < tokens; token += SLOTS) {
      auto row = rows + (base + token) * packed_rows_strides[2] + int(ROW::VALUES);
      TQ_UNROLL for (int u = 0; u < UNITS; u++) {
        int unit = u * 32 + lane % SPAN;
        if (unit < int(VALUE_UNIT::COUNT)) {
          float values[VALUE_UNIT::VALUES];
          tq_load_unit<VALUE_FULL, VALUE_DIM, VALUE_BITS>(row, unit, values);
          TQ_UNROLL for (int q = 0; q < QUERIES; q++)
            TQ_UNROLL for (int i = 0; i < int(VALUE_UNIT::VALUES); i++) {
              int at = q * VALUES + u * int(VALUE_UNIT::VALUES) + i;
              output[at] = tq_fma(weight[q * 32 + token], values[i], output[at]);
            }
        }
      }
    }
  }
}

TQ_UNROLL for (int q = 0; q < QUERIES; q++) {
  float total = tq_simd_sum(sum[q]);
  uint at = (tile * QUERIES + q) * blocks + block;
  if (lane == 0) {
    block_maxima[at] = maximum[q];
    block_sums[at] = total;
  }
  TQ_UNROLL for (int u = 0; u < UNITS; u++)
    TQ_UNROLL for (int i = 0; i < int(VALUE_UNIT::VALUES); i++) {
      float mine = output[q * VALUES + u * int(VALUE_UNIT::VALUES) + i];
      float all = mine;
      TQ_UNROLL for (int slot = 1; slot < SLOTS; slot++) {
        int other = lane + slot * SPAN;
        all = tq_add(all, simd_shuffle(mine, ushort(other & 31)));
      }
      int unit = u * 32 + lane;
      if (lane < SPAN && unit < int(VALUE_UNIT::COUNT)) block_outputs[at * uint(VALUE_DIM) + VALUE_UNIT::dim(unit, i)] = all;
    }
}
