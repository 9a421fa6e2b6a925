// Decodes rows of the cache in rotated space, without the inverse rotation, and rotates the tokens that follow them.
//
// Of packed rows a thread takes one unit, see units.h; of other tokens a simdgroup takes one vector.
//
//   packed_rows [B, H, S, 2 W]: 16-bit words, see packing.h; any strides but the last, so a part of a larger buffer will do
//   full_keys [B, H, L, KEY_DIM], full_values [B, H, L, VALUE_DIM]: T, any strides; anything where L is 0
//   key_flips, value_flips: see rotation.h
//   dequantize_sizes [8]: L, and the threads that decode, a multiple of 256
//   keys_out [B, H, S + L, KEY_DIM], values_out [B, H, S + L, VALUE_DIM]: T
//
// Grid (the threads that decode, at least B H S units of the kind with more of them, then 32 B H L, 2, 1), threadgroup
// (256, 1, 1).
#include "rotation.h"
#include "units.h"

template <class T, class FULL, int D, int BITS, bool WIDE, class Words, class Out>
TQ_FN void tq_decode_unit(Words words, Words scale_words, int unit, Out out) {
  constexpr int VALUES = tq_unit<D, BITS>::VALUES;
  float values[VALUES];
  tq_load_unit<FULL, D, BITS>(words, unit, values);
  float gain = tq_gain<D, BITS, WIDE>(scale_words);
  TQ_UNROLL for (int i = 0; i < VALUES; i++)
    out[tq_unit<D, BITS>::dim(unit, i)] = static_cast<T>(BITS > 8 ? values[i] : tq_mul(values[i], gain));
}

// Rotates a vector, or copies it where it is not ROTATED.
template <class T, int D, int M, bool ROTATED, class Vector, class Flips, class Out>
TQ_FN void tq_follow(Vector vector, int64_t stride, Flips flips, Out out, uint lane) {
  if (ROTATED) {
    tq_rotate<T, D, M, false>(vector, stride, flips, out, lane);
  } else {
    for (int dim = int(lane); dim < D; dim += 32) out[dim] = vector[dim * stride];
  }
}

//// body

using ROW = tq_row<KEY_DIM, KEY_BITS, KEY_WIDE, VALUE_DIM, VALUE_BITS, VALUE_WIDE>;
constexpr int KEY_UNITS = tq_unit<KEY_DIM, KEY_BITS>::COUNT, VALUE_UNITS = tq_unit<VALUE_DIM, VALUE_BITS>::COUNT;

bool key = thread_position_in_grid.y == 0;
uint heads = packed_rows_shape[1], tokens = packed_rows_shape[2];
uint following = dequantize_sizes[0], decoding = dequantize_sizes[1], all = tokens + following;
if (thread_position_in_grid.x < decoding) {
  uint units = key ? KEY_UNITS : VALUE_UNITS;
  uint row = thread_position_in_grid.x / units;
  int unit = int(thread_position_in_grid.x % units);
  if (row < packed_rows_shape[0] * heads * tokens) {
    uint batch = row / (heads * tokens), head = row / tokens % heads, token = row % tokens;
    uint out = (batch * heads + head) * all + token;
    auto words = packed_rows +
                 (batch * packed_rows_strides[0] + head * packed_rows_strides[1] + token * packed_rows_strides[2]);
    if (key) {
      tq_decode_unit<T, KEY_FULL, KEY_DIM, KEY_BITS, KEY_WIDE>(
          words + int(ROW::KEYS), words + int(ROW::KEY_SCALE), unit, keys_out + out * uint(KEY_DIM));
    } else {
      tq_decode_unit<T, VALUE_FULL, VALUE_DIM, VALUE_BITS, VALUE_WIDE>(
          words + int(ROW::VALUES), words + int(ROW::VALUE_SCALE), unit, values_out + out * uint(VALUE_DIM));
    }
  }
} else {
  uint row = (thread_position_in_grid.x - decoding) / 32u, lane = thread_index_in_simdgroup;
  if (row < packed_rows_shape[0] * heads * following) {
    uint batch = row / (heads * following), head = row / following % heads, token = row % following;
    uint out = (batch * heads + head) * all + tokens + token;
    if (key) {
      auto vector = full_keys + (batch * full_keys_strides[0] + head * full_keys_strides[1] + token * full_keys_strides[2]);
      tq_follow<T, KEY_DIM, KEY_ORDER, KEY_ROTATED>(vector, full_keys_strides[3], key_flips, keys_out + out * uint(KEY_DIM), lane);
    } else {
      auto vector =
          full_values + (batch * full_values_strides[0] + head * full_values_strides[1] + token * full_values_strides[2]);
      tq_follow<T, VALUE_DIM, VALUE_ORDER, VALUE_ROTATED>(
          vector, full_values_strides[3], value_flips, values_out + out * uint(VALUE_DIM), lane);
    }
  }
}
