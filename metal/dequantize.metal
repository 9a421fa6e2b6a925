// Decodes packed rows in rotated space, without the inverse rotation, and appends the full-precision tokens, rotated.
//
// One thread decodes one unit of a packed vector, see units.h; one simdgroup rotates one full-precision vector.
//
//   packed_rows [B, H, S, 2 W]: 16-bit words, see packing.h; any strides but the last, so it may be part of a buffer
//   full_keys [B, H, L, KEY_DIM], full_values [B, H, L, VALUE_DIM]: T, any strides; not read if L is 0
//   key_flips, value_flips: see rotation.h
//   dequantize_sizes [8]: L, and the number of threads that decode, a multiple of 256
//   keys_out [B, H, S + L, KEY_DIM], values_out [B, H, S + L, VALUE_DIM]: T
//
// Only if NORMALIZED, contiguous; keys are clamped to the range of fp16 if CLAMPED:
//
//   key_scale [B, H, KEY_DIM]: float, multiplies full-precision keys
//   key_means [B, H, n, KEY_DIM]: half, added to packed keys
//   mean_index [at least S]: int, which mean a row has
//
// Only if KEY_SORTED:
//
//   key_groups [B, H, ...]: see sorted_keys.h
//
// Only if KEY_TRELLIS or VALUE_TRELLIS:
//
//   trellis_levels [7, 256]: half, levels of the states of 1 to 7 bits
//
// Grid (the threads that decode, at least B H S units of keys or values, whichever have more, then 32 B H L, 2, 1),
// threadgroup (256, 1, 1).
#include "units.h"
#include "vectors.h"
#if TQ_TRELLIS
#include "trellis.h"
#endif
#if TQ_SORTED
#include "sorted_keys.h"
#endif
#if TQ_NORMALIZED
#include "key_scale.h"
#endif

// Decodes a unit, and adds the mean if NORMALIZED.
template <class T, class Vectors, bool SCALED, bool NORMALIZED, bool CLAMPED, class Words, class Mean, class Out>
TQ_FN void tq_decode_unit(Words words, int unit, Mean mean, Out out) {
  float values[Vectors::VALUES];
  Vectors::load(words, unit, values);
  float gain = Vectors::gain(words);
  TQ_UNROLL for (int i = 0; i < int(Vectors::VALUES); i++) {
    int dim = Vectors::dim(unit, i);
    float value = SCALED ? tq_mul(values[i], gain) : values[i];
    if (NORMALIZED) value = tq_add(value, static_cast<float>(mean[dim]));
    out[dim] = static_cast<T>(CLAMPED ? tq_clamp(value) : value);
  }
}

// Stores a full-precision vector, rotated if ROTATED.
template <class T, int D, int M, bool ROTATED, bool CLAMPED, class Flips, class Out>
TQ_FN void tq_store_vector(TQ_THREAD float* x, Flips flips, Out out, uint lane) {
  if (ROTATED) {
    tq_rotate<T, D, M, false, CLAMPED>(x, flips, out, lane);
  } else {
    TQ_UNROLL for (int j = 0; j < (D + 31) / 32; j++) {
      int dim = 32 * j + int(lane);
      if (dim < D) out[dim] = static_cast<T>(CLAMPED ? tq_clamp(x[j]) : x[j]);
    }
  }
}

#if TQ_SORTED

// Stores a full-precision key whose groups are rotated.
template <class T, int D, bool CLAMPED, class Flips, class Out>
TQ_FN void tq_store_groups(TQ_THREAD float* x, Flips flips, Out out, uint lane) {
  tq_transform_groups<D, false>(x, flips, lane);
  float root = tq_sqrt(static_cast<float>(D)), factor = tq_sqrt(static_cast<float>(D / TQ_GROUP));
  TQ_UNROLL for (int j = 0; j < D / TQ_GROUP; j++) {
    float y = tq_div(tq_mul(x[j], factor), root);
    out[TQ_GROUP * j + int(lane)] = static_cast<T>(CLAMPED ? tq_clamp(y) : y);
  }
}
#endif

//// body

using ROW = tq_row<KEY_DIM, KEY_BITS, KEY_WIDE, VALUE_DIM, VALUE_BITS, VALUE_WIDE>;
#if TQ_SORTED
constexpr int KEY_KIND = TQ_BY_GROUP;
#else
constexpr int KEY_KIND = KEY_TRELLIS;
#endif
using KEYS = tq_vectors<KEY_DIM, KEY_BITS, KEY_WIDE, KEY_FULL, int(ROW::KEY_SCALE), KEY_KIND>;
using VALUES = tq_vectors<VALUE_DIM, VALUE_BITS, VALUE_WIDE, VALUE_FULL, int(ROW::VALUE_SCALE) - int(ROW::VALUES), VALUE_TRELLIS>;
constexpr int KEY_UNITS = KEYS::COUNT, VALUE_UNITS = VALUES::COUNT;
#if TQ_TRELLIS
auto key_levels = trellis_levels + tq_table<KEY_KIND == TQ_BY_STATE, KEY_BITS>(), value_levels = trellis_levels + tq_table<VALUE_TRELLIS, VALUE_BITS>();
#else
constexpr int key_levels = 0, value_levels = 0;
#endif

bool key = thread_position_in_grid.y == 0;
uint heads = packed_rows_shape[1], tokens = packed_rows_shape[2];
uint full_tokens = dequantize_sizes[0], decoding_threads = dequantize_sizes[1], out_tokens = tokens + full_tokens;
if (thread_position_in_grid.x < decoding_threads) {
  uint units = key ? KEY_UNITS : VALUE_UNITS;
  uint row = thread_position_in_grid.x / units;
  int unit = int(thread_position_in_grid.x % units);
  if (row < packed_rows_shape[0] * heads * tokens) {
    uint batch = row / (heads * tokens), head = row / tokens % heads, token = row % tokens;
    int64_t out = int64_t(batch * heads + head) * out_tokens + token;
    auto words = packed_rows +
                 (batch * packed_rows_strides[0] + head * packed_rows_strides[1] + token * packed_rows_strides[2]);
    if (key) {
#if TQ_NORMALIZED
      auto mean = key_means + (int64_t(batch * heads + head) * key_means_shape[2] + mean_index[token]) * KEY_DIM;
#else
      auto mean = words;
#endif
#if TQ_SORTED
      auto dims = key_groups + (batch * heads + head) * uint(tq_group_words<KEY_DIM>());
      auto packed_key = tq_make_sorted(words + int(ROW::KEYS), key_levels, dims);
#else
      auto packed_key = tq_words<KEY_TRELLIS>::make(words + int(ROW::KEYS), key_levels);
#endif
      tq_decode_unit<T, KEYS, (KEY_BITS <= 8), NORMALIZED, CLAMPED>(
          packed_key + 0, unit, mean, keys_out + out * KEY_DIM);
    } else {
      tq_decode_unit<T, VALUES, (VALUE_BITS <= 8), false, false>(
          tq_words<VALUE_TRELLIS>::make(words + int(ROW::VALUES), value_levels), unit, words, values_out + out * VALUE_DIM);
    }
  }
} else {
  uint row = (thread_position_in_grid.x - decoding_threads) / 32u, lane = thread_index_in_simdgroup;
  if (row < packed_rows_shape[0] * heads * full_tokens) {
    uint batch = row / (heads * full_tokens), head = row / full_tokens % heads, token = row % full_tokens;
    int64_t out = int64_t(batch * heads + head) * out_tokens + tokens + token;
    if (key) {
      float x[(KEY_DIM + 31) / 32];
      auto vector = full_keys + (batch * full_keys_strides[0] + head * full_keys_strides[1] + token * full_keys_strides[2]);
      tq_load_vector<KEY_DIM>(vector, full_keys_strides[3], x, lane);
#if TQ_NORMALIZED
      tq_multiply<KEY_DIM>(x, key_scale + (batch * heads + head) * uint(KEY_DIM), lane);
#endif
#if TQ_SORTED
      tq_arrange<KEY_DIM>(x, key_groups + (batch * heads + head) * uint(tq_group_words<KEY_DIM>()), lane);
      tq_store_groups<T, KEY_DIM, CLAMPED>(x, key_flips, keys_out + out * KEY_DIM, lane);
#else
      tq_store_vector<T, KEY_DIM, KEY_ORDER, KEY_ROTATED, CLAMPED>(x, key_flips, keys_out + out * KEY_DIM, lane);
#endif
    } else {
      float x[(VALUE_DIM + 31) / 32];
      auto vector =
          full_values + (batch * full_values_strides[0] + head * full_values_strides[1] + token * full_values_strides[2]);
      tq_load_vector<VALUE_DIM>(vector, full_values_strides[3], x, lane);
      tq_store_vector<T, VALUE_DIM, VALUE_ORDER, VALUE_ROTATED, false>(x, value_flips, values_out + out * VALUE_DIM, lane);
    }
  }
}
