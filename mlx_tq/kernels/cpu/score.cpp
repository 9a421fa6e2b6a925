// Scores of packed keys for a round of eviction: <query, K> + sum over f of weight_f |K_f|, with a token in each lane.
#include <vector>

#include "calls.h"
#include "matrix.h"
#include "pool.h"
#include "rotation.h"
#include "tiles.h"

namespace tq {

namespace {

void score_tile(const Score& s, int64_t place, int64_t start) {
  static thread_local Floats64 memory;
  static thread_local std::vector<char> copies;
  const int64_t batch = place / s.heads, head = place % s.heads;
  const int count = int(std::min<int64_t>(TILE, s.tokens - start));
  memory.resize(size_t(s.dim + s.pairs + s.group) * TILE);
  float *const tile = memory.data(), *const norms = tile + s.dim * TILE, *const scores = norms + s.pairs * TILE;
  copies.resize(copied_bytes(s.format, s.dim));
  const char* rows[TILE];
  for (int t = 0; t < count; t++) rows[t] = s.rows + batch * s.strides[0] + head * s.strides[1] + (start + t) * s.strides[2];
  alignas(64) float gains[TILE];
  load_gains(rows, count, s.scale_offset, s.format, s.wide_scale, s.dim, gains);
  copy_last_codes(rows, count, true, s.format, s.dim, copies.data());
  const bool sorted = s.groups.order;
  const int stored = decode_tile(rows, count, s.format, s.dim, s.groups.widths_of(place, s.dim), *s.levels, tile);
  std::fill(tile + stored * TILE, tile + s.dim * TILE, 0.0f);

  const int turned = sorted ? GROUP : s.dim;  // dims that are rotated together
  const float factor = 1 / std::sqrt(float(turned));
  for (int first = 0; first < TILE; first += LANES) {
    Floats key[MAX_DIM];
    for (int d = 0; d < s.dim; d++)
      key[d] = load<Floats>(tile + d * TILE + first) * load<Floats>(gains + first) * s.groups.size(place, s.dim, d);
    if (s.key_scale)
      for (int lane = 0; lane < LANES && first + lane < count; lane++) {
        const uint16_t* const mean = s.means + (place * s.mean_count + s.mean_index[start + first + lane]) * s.dim;
        for (int d = 0; d < s.dim; d++) key[d][lane] += half_to_float(mean[d]);
      }
    if (s.rotation.signs) {
      for (int d = 0; d < s.dim; d += turned) hadamard(key + d, turned, s.rotation, true);
      for (int d = 0; d < s.dim; d++) key[d] *= s.rotation.signs[d % turned] * factor;
    }
    if (sorted) {
      Floats by_dim[MAX_DIM];
      for (int d = 0; d < s.dim; d++) by_dim[s.groups.order[place * s.dim + d]] = key[d];
      std::copy_n(by_dim, s.dim, key);
    }
    for (int d = 0; d < s.dim; d++) {
      if (s.key_scale) key[d] /= s.key_scale[place * s.dim + d];
      store(tile + d * TILE + first, key[d]);
    }
    for (int64_t f = 0; f < s.pairs; f++) {
      const Floats a = key[s.pair_dims[f]], b = key[s.pair_dims[s.pairs + f]];
      store(norms + f * TILE + first, root(a * a + b * b));
    }
  }
  multiply<false>(int(s.group), s.queries + head * s.group * s.dim, s.dim, tile, TILE, s.dim, scores, TILE, TILE);
  multiply<true>(int(s.group), s.weights + head * s.group * s.pairs, s.pairs, norms, TILE, int(s.pairs), scores, TILE, TILE);
  for (int64_t g = 0; g < s.group; g++) memcpy(s.scores + (place * s.group + g) * s.tokens + start, scores + g * TILE, 4 * count);
}

}  // namespace
}  // namespace tq

extern "C" void tq_score(const tq::Score* score) {
  const int64_t tiles = (score->tokens + tq::TILE - 1) / tq::TILE;
  tq::share(score->threads, score->batch * score->heads * tiles,
            [&](int64_t piece) { tq::score_tile(*score, piece / tiles, piece % tiles * tq::TILE); });
}
