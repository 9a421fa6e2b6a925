// Tiles of stored vectors: their decoders by format, and their gains.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "formats.h"

namespace tq {

inline const KeyDecoder KEY_DECODERS[FORMATS] = {decode_keys<FP32>, decode_keys<FP16>, decode_keys<BF16>, decode_keys<Q8>,
    decode_keys<TQ4>, decode_keys<TQ3>, decode_keys<TQ2>, decode_keys<TCQ4>, decode_keys<TCQ3>, decode_keys<TCQ2>, decode_keys<TCQ7>, decode_keys<TCQ6>, decode_keys<TCQ5>, decode_keys<TCQ1>};
inline const ValueDecoder VALUE_DECODERS[FORMATS] = {decode_values<FP32>, decode_values<FP16>, decode_values<BF16>, decode_values<Q8>,
    decode_values<TQ4>, decode_values<TQ3>, decode_values<TQ2>, decode_values<TCQ4>, decode_values<TCQ3>, decode_values<TCQ2>};

// Decodes `count` keys to the columns of `tile` [dim, TILE] without gain and sizes, and returns how many dims are stored.
// Columns after the last key, up to a whole vector, repeat it.
inline int decode_tile(const char* const* keys, int count, int format, int dim, const int32_t* widths, const Levels& levels, float* tile) {
  constexpr FormatNumber RINGS[] = {TCQ1, TCQ1, TCQ2, TCQ3, TCQ4, TCQ5, TCQ6, TCQ7};
  const int pairs = (dim * BITS_OF[format] / 16 + 1) / 2;  // of 16-bit words
  int stored = format < STCQ4 ? dim : 0;
  while (stored < dim && widths[stored / GROUP]) stored += GROUP;
  for (int first = 0; first < TILE && first < count; first += LANES) {
    Words words[MAX_DIM + LANES];
    for (int pair = 0; pair < pairs; pair += LANES) load_square(keys, first, count, pair, words + pair);
    if (format < STCQ4) {
      KEY_DECODERS[format](words, dim, levels, tile + first);
      continue;
    }
    const Words* ring = words;
    for (int d = 0; d < stored; d += GROUP) {
      const int width = widths[d / GROUP];
      KEY_DECODERS[RINGS[width]](ring, GROUP, levels, tile + d * TILE + first);
      ring += GROUP * width / 32;
    }
  }
  return stored;
}

// Loads what multiplies the values of stored vectors, whose scales are `offset` bytes after their codes: TILE gains, of
// which those from `count` on are undefined.
inline void load_gains(const char* const* rows, int count, int32_t offset, int32_t format, bool wide, int dim, float* gains) {
  if (format < Q8) {
    std::fill_n(gains, TILE, 1.0f);
    return;
  }
  const float factor = format == Q8 ? 1.0f / 127 : 1 / std::sqrt(float(dim));
  if (wide) {
    for (int t = 0; t < count; t++) memcpy(gains + t, rows[t] + offset, 4);
    for (int t = 0; t < count; t++) gains[t] *= factor;
    return;
  }
  uint16_t scales[TILE] = {};
  for (int t = 0; t < count; t++) memcpy(scales + t, rows[t] + offset, 2);
  for (int t = 0; t < TILE; t += LANES)
    store(gains + t, from_half(__builtin_convertvector(load<Halves>(scales + t), Words)) * factor);
}

inline size_t code_bytes(int32_t format, int dim) { return size_t(dim) * BITS_OF[format] / 8; }

// Moves the codes of a vector to `copy`, before SLACK more bytes, and returns their end.
inline char* copy_codes(const char*& codes, int32_t format, int dim, char* copy) {
  memcpy(copy, codes, code_bytes(format, dim));
  codes = copy;
  return copy + code_bytes(format, dim) + SLACK;
}

// Moves to `copies` the codes of the vectors of a tile that decoders read past the end of memory: those that begin less
// than SLACK bytes before the last one, or all where vectors are not in order. Returns the end of the copies.
inline char* copy_last_codes(const char** codes, int count, bool in_order, int32_t format, int dim, char* copies) {
  const char* const last = codes[count - 1];
  for (int t = count - 1; t >= 0 && !(in_order && last - codes[t] >= SLACK); t--)
    copies = copy_codes(codes[t], format, dim, copies);
  return copies;
}
inline size_t copied_bytes(int32_t format, int dim) { return TILE * (code_bytes(format, dim) + SLACK); }

// Memory of floats that starts at a cache line.
class Floats64 {
 public:
  void resize(size_t count) {
    if (count <= size_) return;
    memory_.reset(static_cast<float*>(aligned_alloc(64, (4 * count + 63) / 64 * 64)));
    size_ = count;
  }
  float* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(float* memory) const { free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  size_t size_ = 0;
};

}  // namespace tq
