// Scores of packed keys for a round of eviction: <query, K> + sum over f of weight_f |K_f|, with a token in each lane.
#include <vector>

#include "matrix.h"
#include "pool.h"
#include "rotation.h"
#include "tiles.h"

namespace tq {

// score.py declares the same layout.
struct Score {
  const char* rows;           // of token 0 of KV head 0 of row 0 of the batch
  int64_t strides[3];         // of batch, heads and tokens, in bytes
  const float* queries;       // [heads, group, dim]
  const float* weights;       // of the norms of RoPE pairs [heads, group, pairs]
  const int32_t* pair_dims;   // [2, pairs]
  const float* key_scale;     // divides normalized keys [batch, heads, dim], or null
  const uint16_t* means;      // fp16 [batch, heads, mean_count, dim]
  const int32_t* mean_index;  // of each token
  float* scores;              // [batch, heads, group, tokens]
  const Levels* levels;
  Rotation rotation;
  int64_t batch, heads, group, tokens, pairs, mean_count;
  int32_t dim, format, scale_offset, wide_scale, threads, padding;
};

namespace {

void score_tile(const Score& s, int64_t place, int64_t start) {
  static thread_local Floats64 memory;
  static thread_local std::vector<char> copy;
  const int64_t batch = place / s.heads, head = place % s.heads;
  const int count = int(std::min<int64_t>(TILE, s.tokens - start));
  memory.resize(size_t(s.dim + s.pairs + s.group) * TILE);
  float *const tile = memory.data(), *const norms = tile + s.dim * TILE, *const scores = norms + s.pairs * TILE;
  copy.resize(code_bytes(s.format, s.dim) + SLACK);
  const char* rows[TILE];
  for (int t = 0; t < count; t++) rows[t] = s.rows + batch * s.strides[0] + head * s.strides[1] + (start + t) * s.strides[2];
  alignas(64) float gains[TILE];
  load_gains(rows, count, s.scale_offset, s.format, s.wide_scale, s.dim, gains);
  copy_codes(rows[count - 1], s.format, s.dim, copy.data());  // decoders read further than the codes
  KEY_DECODERS[s.format](rows, count, s.dim, *s.levels, tile);

  const float factor = 1 / std::sqrt(float(s.dim));
  for (int first = 0; first < TILE; first += LANES) {
    Floats key[MAX_DIM];
    for (int d = 0; d < s.dim; d++) key[d] = load<Floats>(tile + d * TILE + first) * load<Floats>(gains + first);
    if (s.key_scale)
      for (int lane = 0; lane < LANES && first + lane < count; lane++) {
        const uint16_t* const mean = s.means + (place * s.mean_count + s.mean_index[start + first + lane]) * s.dim;
        for (int d = 0; d < s.dim; d++) key[d][lane] += half_to_float(mean[d]);
      }
    if (s.rotation.signs) {
      hadamard(key, s.dim, s.rotation, true);
      for (int d = 0; d < s.dim; d++) key[d] *= s.rotation.signs[d] * factor;
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
