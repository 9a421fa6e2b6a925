// Encodes keys and values into packed rows, bit for bit as `RowLayout.encode`.
//
// One simdgroup encodes one vector in fp32: signs, Walsh-Hadamard transform, codes, scale. One dispatch has keys and
// values.
//
//   keys [B, H, S, KEY_DIM], values [B, H, S, VALUE_DIM]: T, any strides
//   key_flips, value_flips: see rotation.h
//   packed_rows [B H S, 2 W]: 16-bit words, see packing.h
//   health_flags [2, B H S]: for keys and values; bit 0: clamped to the range of fp16, bit 1: not finite
//
// Only if KEY_TRELLIS or VALUE_TRELLIS:
//
//   trellis_levels [7, 256]: half, levels of the states of 1 to 7 bits
//
// Only if KEY_SORTED:
//
//   key_groups [B, H, ...]: see sorted_keys.h
//
// Only if NORMALIZED, contiguous:
//
//   key_scale [B, H, KEY_DIM]: float, multiplies keys
//   key_centers [B, H, n, KEY_DIM]: float, subtracted from keys
//   mean_index [at least S]: int, which center a row has
//
// Grid (32 SIMDGROUPS ceil(B H S / SIMDGROUPS), 2, 1), threadgroup (32 SIMDGROUPS, 1, 1).
#include "encoding.h"
#include "vectors.h"
#if TQ_TRELLIS
#include "ring_search.h"
#endif
#if TQ_SORTED
#include "sorted_search.h"
#endif
#if TQ_NORMALIZED
#include "key_scale.h"
#endif

// Writes the int8 codes of a vector to `codes` and returns its scale, the largest coordinate.
template <int D, class Codes>
TQ_FN float tq_encode_q8(TQ_THREAD const float* y, Codes codes, uint lane) {
  constexpr int N = (D + 31) / 32;
  uint largest = 0;
  TQ_UNROLL for (int j = 0; j < N; j++) {
    uint magnitude = as_type<uint>(y[j]) & 0x7FFFFFFFu;  // magnitudes are ordered as their bits are
    largest = magnitude > largest ? magnitude : largest;
  }
  float peak = as_type<float>(tq_largest(largest));
  float factor = peak > 7.703719778e-34f ? tq_div(127.0f, peak) : 0.0f;  // 2^-110: the quotient of a smaller peak overflows
  TQ_UNROLL for (int j = 0; j < N; j++) {
    int dim = 32 * j + int(lane);
    int code = static_cast<int>(tq_rint(tq_mul(y[j], factor)));
    if (dim < D) codes[dim] = uchar(code & 255);
  }
  return tq_div(peak, tq_sqrt(static_cast<float>(D)));
}

// Encodes one vector of dtype T. FULL is the dtype that is stored in 16 bits as it is; CLAMPED if that is fp16 and
// values can exceed its range.
template <class T, class FULL, bool CLAMPED, int D, int M, int BITS, int RULE, bool WIDE, class Flips, class Words, class Flag,
          class Codes, class Search>
TQ_FN void tq_encode_vector(TQ_THREAD float* x, Flips flips, Words row, Words scale_words, Flag flag, Codes codes, TQ_THREAD const Search& search, uint lane) {
  constexpr int N = (D + 31) / 32, TURBO_BITS = BITS > 4 ? 4 : BITS;
  uint largest = 0;
  TQ_UNROLL for (int j = 0; j < N; j++) {
    uint magnitude = as_type<uint>(x[j]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  largest = tq_largest(largest);
  bool finite = largest < 0x7F800000u, nan = largest > 0x7F800000u;

  if (BITS > 8) {
    TQ_UNROLL for (int j = 0; j < N; j++) {
      int dim = 32 * j + int(lane);
      if (dim < D && BITS == 16) row[dim] = as_type<ushort>(static_cast<FULL>(CLAMPED ? tq_clamp(x[j]) : x[j]));
      if (dim < D && BITS == 32) {
        uint bits = as_type<uint>(x[j]);
        row[2 * dim] = ushort(bits & 0xFFFFu);
        row[2 * dim + 1] = ushort(bits >> 16);
      }
    }
    if (lane == 0) flag[0] = !finite ? 2 : CLAMPED && largest > as_type<uint>(TQ_FP16_MAX) ? 1 : 0;
    return;
  }

  // The limit rounded to T: 65536 in bfloat16.
  bool clamped = largest > as_type<uint>(static_cast<float>(static_cast<T>(TQ_FP16_MAX)));
  float square[N];
  TQ_UNROLL for (int j = 0; j < N; j++) x[j] = tq_clamp(x[j]);
  search.template transform<D, M>(x, square, flips, lane);
  float scale;
  if (BITS == 8) {
    scale = tq_encode_q8<D>(x, codes, lane);
  } else {
    scale = search.template encode<D, M, TURBO_BITS, RULE>(x, tq_sqrt(tq_pairwise_sum<D, M>(square)), codes, lane);
  }
  scale = scale < TQ_FP16_MAX ? scale : TQ_FP16_MAX;

  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int word = int(lane); word < D * BITS / 16; word += 32)
    row[word] = BITS == 8 ? tq_pack_word<D, 8>(codes, word) : search.template pack<D, TURBO_BITS>(codes, word);
  if (lane == 0) {
    uint wide = as_type<uint>(scale);
    ushort narrow = as_type<ushort>(static_cast<half>(scale));
    bool full = WIDE ? scale >= TQ_FP16_MAX : static_cast<float>(static_cast<half>(scale)) >= TQ_FP16_MAX;
    scale_words[0] = WIDE ? ushort(wide & 0xFFFFu) : narrow;
    if (WIDE) scale_words[1] = ushort(wide >> 16);
    flag[0] = uchar((!nan && (clamped || full) ? 1 : 0) | (finite ? 0 : 2));
  }
}

template <int D, class Center>
TQ_FN void tq_subtract(TQ_THREAD float* x, Center center, uint lane) {
  TQ_UNROLL for (int j = 0; j < (D + 31) / 32; j++) {
    int dim = 32 * j + int(lane);
    if (dim < D) x[j] = tq_sub(x[j], center[dim]);
  }
}

//// body

using ROW = tq_row<KEY_DIM, KEY_BITS, KEY_WIDE, VALUE_DIM, VALUE_BITS, VALUE_WIDE>;
constexpr int WIDEST = KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM;
threadgroup uchar codes[SIMDGROUPS * WIDEST];
#if TQ_TRELLIS
static_assert(SIMDGROUPS == 1, "one search at a time in a threadgroup's memory");
threadgroup float ring[WIDEST];
threadgroup float costs[2 * TQ_MAX_GROUPS];
threadgroup uchar choices[32 * WIDEST];
auto key_search = tq_code_search<KEY_TRELLIS>::make(trellis_levels + tq_table<KEY_TRELLIS, KEY_BITS>(), ring, costs, choices);
auto value_search = tq_code_search<VALUE_TRELLIS>::make(trellis_levels + tq_table<VALUE_TRELLIS, VALUE_BITS>(), ring, costs, choices);
#else
tq_nearest_levels key_search, value_search;
#endif

uint lane = thread_index_in_simdgroup;
uint simdgroup = simdgroup_index_in_threadgroup;
uint row = threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup;
uint heads = keys_shape[1], tokens = keys_shape[2];
uint rows = keys_shape[0] * heads * tokens;
if (row < rows) {
  uint batch = row / (heads * tokens), head = row / tokens % heads, token = row % tokens;
  auto scratch = codes + simdgroup * WIDEST;
  auto out = packed_rows + int64_t(row) * int(ROW::WORDS);
  float x[(WIDEST + 31) / 32];
  if (threadgroup_position_in_grid.y == 0) {
#if TQ_SORTED
    auto groups = key_groups + (batch * heads + head) * uint(tq_group_words<KEY_DIM>());
    auto search = tq_search_groups(trellis_levels + 0, ring, costs, choices, groups);
#else
    auto search = key_search;
#endif
    auto vector = keys + (batch * keys_strides[0] + head * keys_strides[1] + token * keys_strides[2]);
    tq_load_vector<KEY_DIM>(vector, keys_strides[3], x, lane);
#if TQ_NORMALIZED
    uint place = batch * heads + head;
    tq_multiply<KEY_DIM>(x, key_scale + place * uint(KEY_DIM), lane);
    tq_subtract<KEY_DIM>(x, key_centers + (int64_t(place) * key_centers_shape[2] + mean_index[token]) * KEY_DIM, lane);
    using KEY = float;
#else
    using KEY = T;
#endif
    tq_encode_vector<KEY, KEY_FULL, CLAMPED, KEY_DIM, KEY_ORDER, KEY_BITS, KEY_RULE, KEY_WIDE>(
        x, key_flips, out + int(ROW::KEYS), out + int(ROW::KEY_SCALE), health_flags + row, scratch, search, lane);
    if (lane == 0 && int(ROW::WORDS) > int(ROW::END)) out[int(ROW::END)] = 0;
  } else {
    auto vector = values + (batch * values_strides[0] + head * values_strides[1] + token * values_strides[2]);
    tq_load_vector<VALUE_DIM>(vector, values_strides[3], x, lane);
    tq_encode_vector<T, VALUE_FULL, false, VALUE_DIM, VALUE_ORDER, VALUE_BITS, VALUE_RULE, VALUE_WIDE>(
        x, value_flips, out + int(ROW::VALUES), out + int(ROW::VALUE_SCALE), health_flags + rows + row, scratch, value_search, lane);
  }
}
