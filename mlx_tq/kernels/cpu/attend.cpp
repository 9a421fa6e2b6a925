// Attention of any number of queries over caches of packed and full-precision tokens, in place.
//
// Rows of queries of a KV head are cut into blocks, and where there are few rows, tokens into runs. Each piece of work
// is one block of rows and one run of tokens: it decodes a tile of keys, multiplies, decodes the values, multiplies,
// as FlashAttention-2 (Dao 2023) does. The last piece of a block of rows merges its runs. Sequences that
// share a prefix attend to it in joint blocks (Hydragen, Juravsky et al. 2024). No order of additions depends on the
// number of threads.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "calls.h"
#include "fused.h"
#include "matrix.h"
#include "pool.h"
#include "rotation.h"
#include "tiles.h"

namespace tq {
namespace {

constexpr int BLOCK_ROWS = 48;
constexpr int RUN_TOKENS = 512, MOST_RUNS = 64;  // of a block of at most SPLIT_ROWS rows, or of a prefix
constexpr int SPLIT_ROWS = 32;
constexpr float MASKED = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int MEAN_TOKENS = 128;

int round_up(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

// The queries of a block, as loaded for full-precision tokens and for packed ones.
struct Queries {
  Floats64 floats[2];
  ByteQueries bytes;  // those of packed tokens, where keys have 8 bits
  bool loaded[2] = {false, false};
};

// Of one thread.
struct Scratch {
  Floats64 keys, values, scores, mean_scores, partial;
  Queries queries;
  std::vector<char> rows;
};

// Unnormalized attention of a block of rows to some tokens: maximum, sum, and output, in the domain of powers of two.
struct Partial {
  float* maxima;   // [rows]
  float* sums;     // [rows]
  float* outputs;  // [rows, value_pitch]
};

// That to full-precision tokens, and that to packed tokens, whose output is in rotated space.
enum { PLAIN, ROTATED };
using Spaces = std::array<Partial, 2>;

// A block of rows of one KV head: those of one sequence, or of the sequences of a prefix one after another.
struct Block {
  const Cache* cache;
  const int64_t* sequences;
  int64_t head, first_row;
  int rows;
};

class Call {
 public:
  explicit Call(const Attention& call)
      : a_(call), group_rows_(call.query_heads / call.heads * call.length), value_pitch_(round_up(call.value_dim, LANES)), sequences_(call.batch), places_(call.batch) {
    for (int64_t b = 0; b < a_.batch; b++) {
      sequences_[b] = b;
      for (int64_t h = 0; h < a_.heads; h++) add_blocks(a_.caches[a_.by_head ? b * a_.heads + h : b], &sequences_[b], h, group_rows_);
    }
    sequence_block_count_ = blocks_.size();
    for (const Prefix* prefix = a_.prefixes; prefix < a_.prefixes + a_.prefix_count; prefix++) {
      for (int64_t i = 0; i < prefix->sequence_count; i++) places_[prefix->sequences[i]] = {prefix, blocks_.size(), i * group_rows_};
      for (int64_t h = 0; h < a_.heads; h++) add_blocks(prefix->cache, prefix->sequences, h, prefix->sequence_count * group_rows_);
    }
  }

  void run() {
    first_piece_ = first_float_ = {0};
    for (size_t i = 0; i < blocks_.size(); i++) {
      const int64_t runs = count_runs(blocks_[i], i >= sequence_block_count_);
      first_piece_.push_back(first_piece_.back() + runs);
      first_float_.push_back(first_float_.back() + runs * partial_floats(blocks_[i]));
    }
    const int64_t pieces = first_piece_.back();
    const bool split = pieces > int64_t(blocks_.size()) || a_.prefix_count;
    if (split) memory_.resize(first_float_.back());
    std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[blocks_.size()]);
    for (size_t i = 0; i < blocks_.size(); i++) left[i] = first_piece_[i + 1] - first_piece_[i];
    std::vector<Queries> prefix_queries(blocks_.size() - sequence_block_count_);  // loaded once for the many runs of a prefix
    for (size_t i = sequence_block_count_; i < blocks_.size(); i++)
      for (int64_t p = 0; p < blocks_[i].cache->part_count; p++) load_queries(blocks_[i], blocks_[i].cache->parts[p], prefix_queries[i - sequence_block_count_]);
    share(a_.threads, pieces, [&](int64_t turn) {
      static thread_local Scratch scratch;
      const int64_t piece = pieces - 1 - turn;  // the last rows see the most tokens
      const size_t number = std::upper_bound(first_piece_.begin(), first_piece_.end(), piece) - first_piece_.begin() - 1;
      const Block& block = blocks_[number];
      const int64_t start = first_piece_[number], runs = first_piece_[number + 1] - start;
      if (!split) scratch.partial.resize(partial_floats(block));
      const Spaces partial = split ? partial_of(number, piece) : split_partial(scratch.partial.data(), block.rows);
      for (const Partial& space : partial) clear(space, block.rows);
      scratch.queries.loaded[PLAIN] = scratch.queries.loaded[ROTATED] = false;
      attend_run(block, piece - start, runs, partial, number < sequence_block_count_ ? scratch.queries : prefix_queries[number - sequence_block_count_], scratch);
      if (a_.prefix_count || left[number].fetch_sub(1) > 1) return;
      finish(block, split ? merge_runs(number) : partial);
    });
    if (!a_.prefix_count) return;
    share(a_.threads, sequence_block_count_, [&](int64_t number) {
      const Spaces spaces = merge_runs(number);
      merge_prefix(blocks_[number], spaces);
      finish(blocks_[number], spaces);
    });
  }

 private:
  // Where the rows of a sequence are in the blocks of its prefix.
  struct Place {
    const Prefix* prefix;  // null without a prefix
    size_t first_block;
    int64_t first_row;
  };

  // Cuts rows of a KV head into blocks.
  void add_blocks(const Cache& cache, const int64_t* sequences, int64_t head, int64_t rows) {
    const int64_t size = block_rows(rows);
    for (int64_t row = 0; row < rows; row += size) blocks_.push_back({&cache, sequences, head, row, int(std::min(size, rows - row))});
  }
  static int64_t count_blocks(int64_t rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
  static int64_t block_rows(int64_t rows) { return (rows + count_blocks(rows) - 1) / count_blocks(rows); }

  int64_t count_runs(const Block& block, bool of_prefix) const {
    if (block.rows > SPLIT_ROWS && !of_prefix) return 1;
    int64_t tokens = 0;
    for (int64_t p = 0; p < block.cache->part_count; p++) tokens += block.cache->parts[p].tokens;
    return std::clamp<int64_t>((tokens + RUN_TOKENS - 1) / RUN_TOKENS, 1, MOST_RUNS);
  }

  // Merges the runs of a block, and returns them.
  Spaces merge_runs(size_t number) {
    const Spaces first = partial_of(number, first_piece_[number]);
    for (int64_t piece = first_piece_[number] + 1; piece < first_piece_[number + 1]; piece++)
      for (int space : {PLAIN, ROTATED}) merge(first[space], partial_of(number, piece)[space], blocks_[number].rows);
    return first;
  }

  // Adds the prefix of a block of a sequence.
  void merge_prefix(const Block& block, const Spaces& spaces) {
    const auto& [prefix, first_block, first_row] = places_[*block.sequences];
    if (!prefix) return;
    const int64_t rows = prefix->sequence_count * group_rows_, size = block_rows(rows);
    for (int r = 0; r < block.rows; r++) {
      const int64_t row = first_row + block.first_row + r;
      const size_t number = first_block + block.head * count_blocks(rows) + row / size;
      for (int64_t piece = first_piece_[number]; piece < first_piece_[number + 1]; piece++)
        for (int space : {PLAIN, ROTATED}) merge(row_of(spaces[space], r), row_of(partial_of(number, piece)[space], row % size), 1);
    }
  }
  Partial row_of(const Partial& partial, int64_t row) const { return {partial.maxima + row, partial.sums + row, partial.outputs + row * value_pitch_}; }

  int64_t partial_floats(const Block& block) const { return 2 * block.rows * (2 + value_pitch_); }
  Spaces split_partial(float* memory, int64_t rows) const {
    const int64_t outputs = rows * value_pitch_;
    float* const rest = memory + 2 * outputs;
    return {Partial{rest, rest + rows, memory}, Partial{rest + 2 * rows, rest + 3 * rows, memory + outputs}};
  }
  Spaces partial_of(size_t number, int64_t piece) {
    const Block& block = blocks_[number];
    return split_partial(memory_.data() + first_float_[number] + (piece - first_piece_[number]) * partial_floats(block), block.rows);
  }

  void clear(const Partial& partial, int rows) const {
    std::fill_n(partial.maxima, rows, MASKED);
    std::fill_n(partial.sums, rows, 0.0f);
    std::fill_n(partial.outputs, rows * value_pitch_, 0.0f);
  }

  void merge(const Partial& into, const Partial& from, int rows) const {
    for (int r = 0; r < rows; r++) {
      const float maximum = std::max(into.maxima[r], from.maxima[r]);
      const float keep = std::exp2(into.maxima[r] - maximum), add = std::exp2(from.maxima[r] - maximum);
      into.maxima[r] = maximum;
      into.sums[r] = into.sums[r] * keep + from.sums[r] * add;
      float* const to = into.outputs + r * value_pitch_;
      const float* const other = from.outputs + r * value_pitch_;
      for (int d = 0; d < a_.value_dim; d++) to[d] = to[d] * keep + other[d] * add;
    }
  }

  int64_t head_of(const Block& block, const Part& part) const {
    return a_.by_head && part.rotated ? block.cache->packed_head : block.head;
  }
  int64_t sequence(const Block& block, int row) const { return block.sequences[(block.first_row + row) / group_rows_]; }
  int64_t query_head(const Block& block, int row) const {
    return block.head * (a_.query_heads / a_.heads) + (block.first_row + row) % group_rows_ / a_.length;
  }
  int64_t query_number(const Block& block, int row) const { return (block.first_row + row) % a_.length; }

  // Stores the result of a block of rows.
  void finish(const Block& block, const Spaces& spaces) const {
    const auto& [plain, rotated] = spaces;
    for (int r = 0; r < block.rows; r++) rotate_back(rotated.outputs + r * value_pitch_, a_.value_dim, a_.value_rotation);
    merge(plain, rotated, block.rows);
    for (int r = 0; r < block.rows; r++) {
      const int64_t head = query_head(block, r);
      float maximum = plain.maxima[r], total = plain.sums[r], factor = 1;
      if (a_.sinks) {  // a key with value zero
        const float sink = a_.sinks[head] * LOG2E, most = std::max(maximum, sink);
        factor = std::exp2(maximum - most);
        total = total * factor + std::exp2(sink - most);
        maximum = most;
      }
      const int64_t place = (sequence(block, r) * a_.query_heads + head) * a_.length + query_number(block, r);
      factor = total == 0 ? 0 : factor / total;  // a query that sees no token has a total of 0
      for (int d = 0; a_.output && d < a_.value_dim; d++) a_.output[place * a_.value_dim + d] = plain.outputs[r * value_pitch_ + d] * factor;
      if (a_.log_sums) a_.log_sums[place] = total == 0 ? MASKED : (maximum + std::log2(total)) / LOG2E;
    }
  }

  // Loads the queries of a block, times the scale, for scores of a part in powers of two, unless they are loaded.
  void load_queries(const Block& block, const Part& part, Queries& queries) const {
    const Cache& cache = *block.cache;
    const int space = part.rotated ? ROTATED : PLAIN;
    if (queries.loaded[space]) return;
    queries.loaded[space] = true;
    queries.floats[space].resize(size_t(block.rows) * a_.key_dim);
    for (int r = 0; r < block.rows; r++) {
      const float* const from = a_.queries + sequence(block, r) * a_.query_strides[0] + query_head(block, r) * a_.query_strides[1] +
                                query_number(block, r) * a_.query_strides[2];
      float* const query = queries.floats[space].data() + r * a_.key_dim;
      for (int d = 0; d < a_.key_dim; d++) query[d] = from[d] * (a_.scale * LOG2E);
      if (!part.rotated) continue;
      if (cache.key_scale)
        for (int d = 0; d < a_.key_dim; d++) query[d] /= cache.key_scale[block.head * a_.key_dim + d];
      if (!cache.groups.order) {
        rotate(query, a_.key_dim, a_.key_rotation);
        continue;
      }
      rotate_groups(query, a_.key_dim, cache.groups.order + block.head * a_.key_dim, a_.key_rotation);
      for (int d = 0; d < a_.key_dim; d++) query[d] *= cache.groups.size(block.head, a_.key_dim, d);
    }
    if (multiplies_bytes(part)) queries.bytes.set(queries.floats[space].data(), block.rows, a_.key_dim);
  }

  // Attends to the tokens of run number `run` of `runs`, whose edges are those of tiles.
  void attend_run(const Block& block, int64_t run, int64_t runs, const Spaces& spaces, Queries& queries, Scratch& scratch) const {
    const Cache& cache = *block.cache;
    scratch.keys.resize(size_t(a_.key_dim) * TILE);
    scratch.values.resize(size_t(value_pitch_) * TILE + LANES);
    scratch.scores.resize(size_t(block.rows) * TILE);
    int64_t tiles = 0;
    for (int64_t p = 0; p < cache.part_count; p++) tiles += (cache.parts[p].tokens + TILE - 1) / TILE;
    int64_t first = tiles * run / runs, last = tiles * (run + 1) / runs;
    for (int64_t p = 0; p < cache.part_count && last > 0; p++) {
      const Part& part = cache.parts[p];
      const int64_t here = (part.tokens + TILE - 1) / TILE;
      const int64_t start = std::max<int64_t>(first, 0) * TILE, stop = std::min(std::min(last, here) * TILE, part.tokens);
      if (start < stop) {
        load_queries(block, part, queries);
        attend_part(block, part, start, stop, queries, spaces[part.rotated ? ROTATED : PLAIN], scratch);
      }
      first -= here;
      last -= here;
    }
  }

  void attend_part(const Block& block, const Part& part, int64_t start, int64_t stop, const Queries& queries, const Partial& partial, Scratch& scratch) const {
    const Cache& cache = *block.cache;
    int64_t offset = 0;
    if (part.ranges) {
      offset = part.ranges[2 * block.head];
      stop = std::min<int64_t>(stop, part.ranges[2 * block.head + 1]);
    }
    if (a_.causal) {  // the block's last query sees most, and the first begins earliest
      int64_t least = a_.length, most = 0;
      for (int r = 0; r < block.rows; r++) {
        least = std::min(least, query_number(block, r));
        most = std::max(most, query_number(block, r));
      }
      stop = std::min(stop, causal_end(cache, part, most));
      if (part.window) start = std::max(start, causal_end(cache, part, least) - part.window);
    }
    if (start >= stop) return;
    const bool normalized = part.rotated && cache.key_scale;
    int64_t first_mean = 0, mean_count = 0;
    if (normalized) mean_count = score_means(block, part, offset + start, offset + stop, queries.floats[ROTATED].data(), first_mean, scratch);
    for (int64_t base = start; base < stop; base += TILE) {
      const int count = int(std::min<int64_t>(TILE, stop - base));
      if (a_.mask && a_.mask_is_bool && is_hidden(block, part.position + base, count)) continue;
      attend_tile(block, part, offset + base, base, count, queries, partial, first_mean, mean_count, scratch);
    }
  }

  // The index in a part just behind a query's own position: where what it sees, and its window, end. It may be negative,
  // or past the part.
  int64_t causal_end(const Cache& cache, const Part& part, int64_t query) const { return cache.tokens - a_.length + query + 1 - part.position; }

  bool multiplies_bytes(const Part& part) const { return MULTIPLIES_BYTES && part.key_format == Q8 && a_.key_dim % 4 == 0; }

  int64_t mean_of(const Cache& cache, const Part& part, int64_t token) const {
    const int64_t row = row_of(part, token);
    return cache.mean_index ? cache.mean_index[row] : (cache.mean_first + row) / MEAN_TOKENS;
  }
  int64_t row_of(const Part& part, int64_t token) const { return part.index ? part.index[token] : token; }

  // Scores the means of a run's keys, [rows, means from first_mean on], and returns how many there are.
  int64_t score_means(const Block& block, const Part& part, int64_t start, int64_t stop, const float* queries, int64_t& first_mean, Scratch& scratch) const {
    const Cache& cache = *block.cache;
    int64_t least = mean_of(cache, part, start), most = least;
    if (!part.index && !cache.mean_index) {
      most = mean_of(cache, part, stop - 1);
    } else {
      for (int64_t token = start; token < stop; token++) {
        const int64_t mean = mean_of(cache, part, token);
        least = std::min(least, mean);
        most = std::max(most, mean);
      }
    }
    const int64_t count = most - least + 1;
    scratch.mean_scores.resize(size_t(block.rows) * count);
    float mean[MAX_DIM];
    for (int64_t n = 0; n < count; n++) {
      const uint16_t* const from = cache.means + block.head * cache.mean_head_stride + (least + n) * a_.key_dim;
      for (int d = 0; d < a_.key_dim; d++) mean[d] = half_to_float(from[d]) / cache.groups.size(block.head, a_.key_dim, d);
      for (int r = 0; r < block.rows; r++) scratch.mean_scores.data()[r * count + n] = dot(queries + r * a_.key_dim, mean, a_.key_dim);
    }
    first_mean = least;
    return count;
  }

  const char* mask_at(const Block& block, int row, int64_t position, int64_t size) const {
    return a_.mask + size * (sequence(block, row) * a_.mask_strides[0] + query_head(block, row) * a_.mask_strides[1] +
                             query_number(block, row) * a_.mask_strides[2] + position * a_.mask_strides[3]);
  }

  // Whether no query of the block sees any of some tokens.
  bool is_hidden(const Block& block, int64_t position, int count) const {
    for (int r = 0; r < block.rows; r++) {
      const char* const mask = mask_at(block, r, position, 1);
      for (int t = 0; t < count; t++)
        if (mask[t * a_.mask_strides[3]]) return false;
    }
    return true;
  }

  // Attends to `count` tokens from `token` on, which are `count` positions from `place` on after the part's first.
  void attend_tile(const Block& block, const Part& part, int64_t token, int64_t place, int count, const Queries& queries, const Partial& partial, int64_t first_mean, int64_t mean_count, Scratch& scratch) const {
    const Cache& cache = *block.cache;
    float* const scores = scratch.scores.data();
    const char *key_rows[TILE], *value_rows[TILE];
    const bool in_order = !part.index && part.buffer_count == 1;
    const int64_t head = head_of(block, part);
    for (int t = 0; t < count; t++) {
      const int64_t row = row_of(part, token + t);
      const Buffer* buffer = part.buffers + part.buffer_count - 1;
      while (row < buffer->first) buffer--;
      key_rows[t] = buffer->keys + head * buffer->key_head_stride + (row - buffer->first) * buffer->key_stride;
      value_rows[t] = buffer->values + head * buffer->value_head_stride + (row - buffer->first) * buffer->value_stride;
    }
    alignas(64) float key_gains[TILE], value_gains[TILE];
    load_gains(key_rows, count, part.key_scale, part.key_format, part.wide_key_scale, a_.key_dim, key_gains);
    load_gains(value_rows, count, part.value_scale, part.value_format, part.wide_value_scale, a_.value_dim, value_gains);
    int64_t means[TILE];
    bool one_mean = true;
    for (int t = 0; mean_count && t < count; t++) {
      means[t] = mean_of(cache, part, token + t) - first_mean;
      one_mean &= means[t] == means[0];
    }
    scratch.rows.resize(copied_bytes(part.key_format, a_.key_dim) + copied_bytes(part.value_format, a_.value_dim));
    char* const copies = copy_last_codes(key_rows, count, in_order, part.key_format, a_.key_dim, scratch.rows.data());
    copy_last_codes(value_rows, count, in_order, part.value_format, a_.value_dim, copies);
    if (multiplies_bytes(part)) {
      queries.bytes.score(block.rows, key_rows, count, reinterpret_cast<Words*>(scratch.keys.data()), scores);
    } else {
      const int32_t* const widths = cache.groups.widths_of(block.head, a_.key_dim);
      const int stored = decode_tile(key_rows, count, part.key_format, a_.key_dim, widths, *a_.levels, scratch.keys.data());
      multiply<false>(block.rows, queries.floats[part.rotated ? ROTATED : PLAIN].data(), a_.key_dim, scratch.keys.data(), TILE, stored, scores, TILE, TILE);
    }
    for (int r = 0; r < block.rows; r++) {
      float* const score = scores + r * TILE;
      const float* const mean_scores = scratch.mean_scores.data() + r * mean_count;
      for (int t = 0; t < TILE; t += LANES) {
        Floats x = load<Floats>(score + t) * load<Floats>(key_gains + t);
        if (mean_count && one_mean) x += mean_scores[means[0]];
        store(score + t, x);
      }
      if (mean_count && !one_mean)
        for (int t = 0; t < count; t++) score[t] += mean_scores[means[t]];
      int64_t visible = count;
      if (a_.causal) {
        const int64_t end = causal_end(cache, part, query_number(block, r)) - place;
        visible = std::min<int64_t>(count, end);
        if (part.window) std::fill_n(score, std::clamp<int64_t>(end - part.window, 0, TILE), MASKED);
      }
      for (int64_t t = std::max<int64_t>(visible, 0); t < TILE; t++) score[t] = MASKED;
      if (a_.mask) apply_mask(block, r, part.position + place, int(std::max<int64_t>(visible, 0)), score);
      weigh(score, r, value_gains, partial);
    }

    if (!a_.output) return;
    if (add_values(block.rows, scores, value_rows, count, part.value_format, a_.value_dim, *a_.levels, partial.outputs, value_pitch_)) return;
    float* const tile = scratch.values.data();
    VALUE_DECODERS[part.value_format](value_rows, count, a_.value_dim, *a_.levels, tile, value_pitch_);
    multiply<true>(block.rows, scores, TILE, tile, value_pitch_, count, partial.outputs, value_pitch_, a_.value_dim);
  }

  void apply_mask(const Block& block, int row, int64_t position, int count, float* score) const {
    const char* const mask = mask_at(block, row, position, a_.mask_is_bool ? 1 : 4);
    for (int t = 0; t < count; t++) {
      if (a_.mask_is_bool) {
        if (!mask[t * a_.mask_strides[3]]) score[t] = MASKED;
      } else {
        score[t] = std::max(score[t] + reinterpret_cast<const float*>(mask)[t * a_.mask_strides[3]] * LOG2E, MASKED);
      }
    }
  }

  // Replaces a row of scores by weights times the gains of values, and updates its maximum, sum and output.
  void weigh(float* score, int row, const float* value_gains, const Partial& partial) const {
    Floats most = load<Floats>(score);
    for (int t = LANES; t < TILE; t += LANES) most = larger(most, load<Floats>(score + t));
    const float maximum = std::max(partial.maxima[row], largest(most));
    if (maximum > partial.maxima[row]) {
      const float factor = std::exp2(partial.maxima[row] - maximum);
      partial.maxima[row] = maximum;
      partial.sums[row] *= factor;
      float* const output = partial.outputs + row * value_pitch_;
      for (int d = 0; d < value_pitch_; d += LANES) store(output + d, load<Floats>(output + d) * factor);
    }
    Floats total{};
    for (int t = 0; t < TILE; t += LANES) {
      const Floats x = load<Floats>(score + t), weight = x > MASKED ? exp2(x - maximum) : Floats{};
      total += weight + x * 0.0f;  // so that NaN stays NaN
      store(score + t, weight * load<Floats>(value_gains + t));
    }
    partial.sums[row] += sum(total);
  }

  const Attention& a_;
  const int64_t group_rows_;
  const int value_pitch_;
  std::vector<int64_t> sequences_;     // sequence numbers
  std::vector<Place> places_;          // of each sequence
  size_t sequence_block_count_;        // blocks before this index belong to sequences, the others to shared prefixes
  std::vector<Block> blocks_;
  std::vector<int64_t> first_piece_;   // of each block, and the number of pieces
  std::vector<int64_t> first_float_;   // of each block in `memory_`, and its size
  Floats64 memory_;                    // of the partial attention of all pieces, where some have to be merged
};

}  // namespace
}  // namespace tq

extern "C" void tq_attend(const tq::Attention* attention) { tq::Call(*attention).run(); }
