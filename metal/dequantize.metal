// Decodes rows of the cache in rotated space: `RowLayout`'s keys and values, without the inverse rotation.
//
// One thread takes one unit, see units.h.
//
//   packed_rows [B, H, S, 2 W]: 16-bit words, see packing.h; any strides but the last, so a part of a larger buffer will do
//   keys_out [B, H, S, KEY_DIM], values_out [B, H, S, VALUE_DIM]: T
//
// Grid (at least B H S units of the kind with more of them, 2, 1), threadgroup (256, 1, 1).
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

//// body

using ROW = tq_row<KEY_DIM, KEY_BITS, KEY_WIDE, VALUE_DIM, VALUE_BITS, VALUE_WIDE>;
constexpr int KEY_UNITS = tq_unit<KEY_DIM, KEY_BITS>::COUNT, VALUE_UNITS = tq_unit<VALUE_DIM, VALUE_BITS>::COUNT;

bool key = thread_position_in_grid.y == 0;
uint units = key ? KEY_UNITS : VALUE_UNITS;
uint row = thread_position_in_grid.x / units;
int unit = int(thread_position_in_grid.x % units);
uint heads = packed_rows_shape[1], tokens = packed_rows_shape[2];
if (row < packed_rows_shape[0] * heads * tokens) {
  uint batch = row / (heads * tokens), head = row / tokens % heads, token = row % tokens;
  auto words = packed_rows +
               (batch * packed_rows_strides[0] + head * packed_rows_strides[1] + token * packed_rows_strides[2]);
  if (key) {
    tq_decode_unit<T, KEY_FULL, KEY_DIM, KEY_BITS, KEY_WIDE>(
        words + int(ROW::KEYS), words + int(ROW::KEY_SCALE), unit, keys_out + row * uint(KEY_DIM));
  } else {
    tq_decode_unit<T, VALUE_FULL, VALUE_DIM, VALUE_BITS, VALUE_WIDE>(
        words + int(ROW::VALUES), words + int(ROW::VALUE_SCALE), unit, values_out + row * uint(VALUE_DIM));
  }
}
