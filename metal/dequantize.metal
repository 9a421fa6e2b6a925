// Decodes rows of the cache in rotated space: `RowLayout`'s keys and values, without the inverse rotation.
//
// One thread takes one unit, the fewest 16-bit words that hold whole codes: one, or three for tq3.
//
//   packed_rows [B, H, S, 2 W]: 16-bit words, see packing.h; any strides but the last, so a part of a larger buffer will do
//   keys_out [B, H, S, KEY_DIM], values_out [B, H, S, VALUE_DIM]: T
//
// Grid (at least B H S units of the kind with more of them, 2, 1), threadgroup (256, 1, 1).
#include "codebook.h"
#include "packing.h"

// Decodes unit number `unit` of a vector's words. FULL is the model's type where 16 bits of it are stored.
template <class T, class FULL, int D, int BITS, bool WIDE, class Words, class Out>
TQ_FN void tq_decode_unit(Words words, Words scale_words, int unit, Out out) {
  if (BITS == 16) {
    out[unit] = static_cast<T>(static_cast<float>(as_type<FULL>(ushort(words[unit]))));
  } else if (BITS == 32) {
    out[unit] = static_cast<T>(as_type<float>(uint(words[2 * unit]) | uint(words[2 * unit + 1]) << 16));
  } else {
    float scale = WIDE ? as_type<float>(uint(scale_words[0]) | uint(scale_words[WIDE ? 1 : 0]) << 16)
                       : static_cast<float>(as_type<half>(ushort(scale_words[0])));
    float gain = tq_mul(scale, BITS == 8 ? 1.0f / 127.0f : tq_div(1.0f, tq_sqrt(static_cast<float>(D))));
    if (BITS == 8) {
      uint pair = words[unit];
      // Shifted up and back as signed numbers, which extends their sign.
      out[2 * unit] = static_cast<T>(tq_mul(static_cast<float>(as_type<int>(pair << 24) >> 24), gain));
      out[2 * unit + 1] = static_cast<T>(tq_mul(static_cast<float>(as_type<int>(pair << 16) >> 24), gain));
    } else if (BITS == 3) {
      constexpr int COUNT = D / 16;
      uint top = 0;
      TQ_UNROLL for (int third = 0; third < 3; third++) {
        uint word = words[third * COUNT + unit];
        top |= (word >> 15) << third;
        TQ_UNROLL for (int plane = 0; plane < 5; plane++)
          out[(5 * third + plane) * COUNT + unit] = static_cast<T>(tq_mul(tq_level<3>((word >> (3 * plane)) & 7u), gain));
      }
      out[15 * COUNT + unit] = static_cast<T>(tq_mul(tq_level<3>(top), gain));
    } else {
      constexpr int COUNT = D * BITS / 16, TURBO_BITS = BITS > 4 ? 4 : BITS;
      uint word = words[unit];
      TQ_UNROLL for (int plane = 0; plane < 16 / BITS; plane++) {
        uint code = (word >> (BITS * plane)) & ((1u << TURBO_BITS) - 1u);
        out[plane * COUNT + unit] = static_cast<T>(tq_mul(tq_level<TURBO_BITS>(code), gain));
      }
    }
  }
}

//// body

using ROW = tq_row<KEY_DIM, KEY_BITS, KEY_WIDE, VALUE_DIM, VALUE_BITS, VALUE_WIDE>;
constexpr int KEY_UNITS = tq_units<KEY_DIM, KEY_BITS>::COUNT, VALUE_UNITS = tq_units<VALUE_DIM, VALUE_BITS>::COUNT;

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
