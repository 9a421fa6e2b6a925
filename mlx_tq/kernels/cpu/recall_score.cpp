// Scores of archived keys in blocks of tokens: the largest of each block, and the log of the sum of their exponentials.
#include <vector>

#include "calls.h"
#include "matrix.h"
#include "pool.h"
#include "tiles.h"

namespace tq {

namespace {

constexpr float LOG2E = 1.4426950408889634f;

void score_block(const RecallScore& r, int64_t head, int64_t block) {
  static thread_local Floats64 memory;
  static thread_local std::vector<char> copies;
  memory.resize(size_t(r.dim + r.rows) * TILE);
  float *const tile = memory.data(), *const scores = tile + r.dim * TILE;
  copies.resize(copied_bytes(r.format, r.dim));
  float* const maxima = r.maxima + head * r.rows * r.blocks + block;
  float* const sums = r.log_sums + head * r.rows * r.blocks + block;
  for (int64_t start = r.starts[block]; start < r.starts[block + 1]; start += TILE) {
    const int count = int(std::min<int64_t>(TILE, r.starts[block + 1] - start));
    const char *codes[TILE], *scales[TILE];
    for (int t = 0; t < count; t++) {
      codes[t] = r.codes + head * r.code_head_stride + (start + t) * r.code_stride;
      scales[t] = r.scales + head * r.scale_head_stride + (start + t) * r.scale_stride;
    }
    alignas(64) float gains[TILE];
    load_gains(scales, count, 0, r.format, r.wide_scale, r.dim, gains);
    copy_last_codes(codes, count, true, r.format, r.dim, copies.data());
    const int stored = decode_tile(codes, count, r.format, r.dim, r.groups.widths_of(head, r.dim), *r.levels, tile);
    multiply<false>(int(r.rows), r.queries + head * r.rows * r.dim, r.dim, tile, TILE, stored, scores, TILE, count);
    const int width = (count + LANES - 1) / LANES * LANES;
    for (int64_t row = 0; row < r.rows; row++) {
      float* const score = scores + row * TILE;
      const float* const means = r.mean_scores ? r.mean_scores + (head * r.rows + row) * r.means : nullptr;
      float most = start == r.starts[block] ? -INFINITY : maxima[row * r.blocks];
      if (means)
        for (int t = 0; t < count; t++) score[t] = score[t] * gains[t] + means[r.mean_index[start + t]];
      Floats peak = splat(most);
      for (int t = 0; t < width; t += LANES) {
        Floats x = load<Floats>(score + t);
        if (!means) x *= load<Floats>(gains + t);
        if (t + LANES > count)
          for (int lane = count - t; lane < LANES; lane++) x[lane] = -INFINITY;
        store(score + t, x);
        peak = larger(peak, x);
      }
      most = largest(peak);
      Floats total{};
      for (int t = 0; t < width; t += LANES) total += exp2((load<Floats>(score + t) - most) * LOG2E);
      float sum_here = sum(total) - float(width - count) * 1.1754944e-38f;  // exp2 is 2^-126 for less
      if (start > r.starts[block]) sum_here += sums[row * r.blocks] * std::exp(maxima[row * r.blocks] - most);
      maxima[row * r.blocks] = most;
      sums[row * r.blocks] = sum_here;
    }
  }
  for (int64_t row = 0; row < r.rows; row++) sums[row * r.blocks] = maxima[row * r.blocks] + std::log(sums[row * r.blocks]);
}

}  // namespace
}  // namespace tq

extern "C" void tq_recall_score(const tq::RecallScore* recall) {
  tq::share(recall->threads, recall->heads * recall->blocks, [&](int64_t piece) {
    tq::score_block(*recall, piece / recall->blocks, piece % recall->blocks);
  });
}
