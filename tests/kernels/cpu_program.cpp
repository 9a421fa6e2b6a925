// Runs every CPU kernel on numbers of its own, without Python: under an emulator, or with sanitizers.
// Usage: cpu_program CODES FLOATS THREADS writes what kernels encode, and what they compute, to two files.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "calls.h"

using namespace tq;

namespace {

uint64_t state = 1;
uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t(state >> 32);
}
float random_float() { return float(int32_t(random_bits())) / 2147483648.0f; }
std::vector<float> floats(size_t count) {
  std::vector<float> result(count);
  for (float& x : result) x = random_float();
  return result;
}

FILE *codes, *results;
int threads;
Levels levels;
std::vector<float> boundaries[3], coefficients[3];

struct Rotated {
  std::vector<float> signs, matrix;
  int order;
  explicit Rotated(int dim) : signs(dim), order(dim) {
    while (order % 8 == 0) order /= 2;
    if (order == 4) order = 1;
    for (float& sign : signs) sign = random_bits() & 1 ? 1.0f : -1.0f;
    for (int i = 0; i < order * order; i++) matrix.push_back(random_bits() & 1 ? 1.0f : -1.0f);
  }
  Rotation rotation() const { return {signs.data(), matrix.data(), order, 0}; }
};

// Groups of sorted keys whose widths differ.
struct Groups {
  std::vector<uint16_t> order;
  std::vector<float> sizes, factors, weights;
  std::vector<int32_t> widths;
  Groups(int format, int dim, int64_t heads) {
    if (format < STCQ4) return;
    const int mean = BITS_OF[format], count = dim / GROUP;
    for (int64_t head = 0; head < heads; head++) {
      for (int d = 0; d < dim; d++) order.push_back(uint16_t((d * 5 + head) % dim));
      const int more[2][4] = {{1, -1}, {3, 0, -1, -2}};
      for (int g = 0; g < count; g++) widths.push_back(mean + more[count / 4][g]);
      for (int g = 0; g < count; g++) sizes.push_back(2.0f / (g + 1));
      for (int d = 0; d < dim; d++) factors.push_back((d / GROUP + 1) / 2.0f);
      for (int g = 0; g < count; g++) weights.push_back(4.0f / ((g + 1) * (g + 1)));
    }
  }
  KeyGroups described() const { return order.empty() ? KeyGroups{} : KeyGroups{order.data(), sizes.data(), widths.data()}; }
};

size_t bytes_of(int format, int dim) { return size_t(dim) * BITS_OF[format] / 8; }

struct Rows {
  int dim, key, value;
  size_t codes, size;
  Rotated key_rotation, value_rotation;
  Groups groups;
  std::vector<char> memory;  // exactly as long as the rows: what is read past them, an address sanitizer sees
};

Rows encode(int dim, int key, int value, int64_t heads, int64_t tokens, Rule rule) {
  const size_t size = (bytes_of(key, dim) + bytes_of(value, dim) + 4 + 3) / 4 * 4;
  Rows rows{dim, key, value, bytes_of(key, dim), size, Rotated(key < STCQ4 ? dim : GROUP), Rotated(dim), Groups(key, dim, heads), {}};
  rows.memory.resize(heads * tokens * rows.size);
  Encoding call{};
  std::vector<float> vectors[2] = {floats(heads * tokens * dim), floats(heads * tokens * dim)};
  const std::vector<float> centers = floats(heads * 2 * dim);
  std::vector<float> scale(heads * dim, 1.5f);
  std::vector<int32_t> index(tokens);
  for (int64_t t = 0; t < tokens; t++) index[t] = t % 2;
  for (int i = 0; i < 2; i++) {
    Vectors& part = call.parts[i];
    part.vectors = vectors[i].data();
    part.strides[0] = heads * tokens * dim;
    part.strides[1] = tokens * dim;
    part.strides[2] = dim;
    part.rotation = (i ? rows.value_rotation : rows.key_rotation).rotation();
    part.dim = dim;
    part.format = i ? value : key;
    part.rule = rule;
    part.codes = i ? int32_t(rows.codes) : 0;
    part.scales = int32_t(rows.codes + bytes_of(value, dim)) + 2 * i;
    part.clips = 1;
    part.limit = 65504.0f;
  }
  call.parts[0].scale = scale.data();
  call.parts[0].centers = centers.data();
  call.parts[0].center_index = index.data();
  call.parts[0].center_count = 2;
  call.parts[0].groups = rows.groups.described();
  call.parts[0].factors = rows.groups.factors.data();
  call.parts[0].weights = rows.groups.weights.data();
  call.rows = rows.memory.data();
  call.row_bytes = rows.size;
  for (int i = 0; i < 3; i++) {
    call.boundaries[i] = boundaries[i].data();
    call.coefficients[i] = coefficients[i].data();
  }
  call.levels = &levels;
  call.batch = 1;
  call.heads = heads;
  call.tokens = tokens;
  call.threads = threads;
  tq_encode(&call);
  fwrite(rows.memory.data(), 1, rows.memory.size(), codes);
  return rows;
}

void attend(const Rows& rows, int full, int64_t heads, int64_t tokens, int64_t length, bool selected) {
  const int64_t group = 3, window = 40, dim = rows.dim;
  std::vector<char> keys, values;
  for (auto* memory : {&keys, &values})
    for (int64_t i = 0; i < heads * window * dim; i++) {
      const float x = random_float();
      uint32_t bits;
      memcpy(&bits, &x, 4);
      if (full == FP16) bits = (random_bits() & 0x83FF) | 0x3400;
      if (full == BF16) bits >>= 16;
      memory->insert(memory->end(), (char*)&bits, (char*)&bits + (full == FP32 ? 4 : 2));
    }
  const int64_t size = full == FP32 ? 4 : 2;
  const Buffer plain{keys.data(), values.data(), dim * size, dim * size, window * dim * size, window * dim * size, 0};
  const int64_t row = rows.size;
  const Buffer packed{rows.memory.data(), rows.memory.data() + rows.codes, row, row, tokens * row, tokens * row, 0};
  std::vector<int32_t> ranges, index;
  for (int64_t h = 0; h < heads; h++) ranges.insert(ranges.end(), {int32_t(random_bits() % 5), int32_t(tokens - 5 * h - 5)});
  for (int64_t t = 0; t < tokens; t++) index.push_back(random_bits() % tokens);
  Part parts[2]{};
  parts[0].buffers = &packed;
  parts[0].key_scale = int32_t(rows.codes + bytes_of(rows.value, rows.dim));
  parts[0].value_scale = parts[0].key_scale + 2 - int32_t(rows.codes);
  parts[0].key_format = rows.key;
  parts[0].value_format = rows.value;
  parts[0].rotated = 1;
  parts[0].tokens = tokens;
  if (selected) {
    parts[0].ranges = ranges.data();
    parts[0].index = index.data();
  }
  parts[1].buffers = &plain;
  parts[1].key_format = parts[1].value_format = full;
  parts[1].tokens = window;
  parts[1].position = tokens;
  parts[0].buffer_count = parts[1].buffer_count = 1;
  const std::vector<float> scale(heads * dim, 1.5f), queries = floats(heads * group * length * dim), sinks = floats(heads * group);
  std::vector<uint16_t> means;
  for (int64_t i = 0; i < heads * (tokens / 128 + 1) * dim; i++) means.push_back((random_bits() & 0x83FF) | 0x3000);
  const int64_t sequences[] = {0, 1};
  const Cache cache{parts, scale.data(), means.data(), nullptr, rows.groups.described(), (tokens / 128 + 1) * dim, 2, tokens + window, 0};
  std::vector<float> output(heads * group * length * dim), log_sums(heads * group * length);
  Attention call{};
  call.queries = queries.data();
  call.query_strides[0] = heads * group * length * dim;
  call.query_strides[1] = length * dim;
  call.query_strides[2] = dim;
  call.caches = &cache;
  call.sinks = sinks.data();
  call.output = output.data();
  call.log_sums = log_sums.data();
  call.levels = &levels;
  call.key_rotation = rows.key_rotation.rotation();
  call.value_rotation = rows.value_rotation.rotation();
  call.batch = 1;
  call.heads = heads;
  call.query_heads = heads * group;
  call.length = length;
  call.key_dim = call.value_dim = rows.dim;
  call.causal = 1;
  call.threads = threads;
  call.scale = 1 / std::sqrt(float(dim));
  tq_attend(&call);
  for (const auto& array : {output, log_sums}) fwrite(array.data(), 4, array.size(), results);

  // Two sequences with these queries share the packed tokens.
  Prefix prefix{cache, sequences, 2};
  prefix.cache.part_count = 1;
  Cache own[] = {cache, cache};
  for (Cache& one : own) {
    one.parts = parts + 1;
    one.part_count = 1;
  }
  output.resize(2 * output.size());
  log_sums.resize(2 * log_sums.size());
  call.query_strides[0] = 0;
  call.caches = own;
  call.prefixes = &prefix;
  call.prefix_count = 1;
  call.output = output.data();
  call.log_sums = log_sums.data();
  call.batch = 2;
  tq_attend(&call);
  for (const auto& array : {output, log_sums}) fwrite(array.data(), 4, array.size(), results);
}

void score(const Rows& rows, int64_t heads, int64_t tokens) {
  const int64_t group = 2, pairs = rows.dim / 2;
  const std::vector<float> queries = floats(heads * group * rows.dim), weights = floats(heads * group * pairs);
  std::vector<int32_t> pair_dims;
  for (int i = 0; i < rows.dim; i++) pair_dims.push_back(i);
  std::vector<float> scores(heads * group * tokens);
  const int64_t row = rows.size, scale = rows.codes + bytes_of(rows.value, rows.dim);
  Score call{};
  call.rows = rows.memory.data();
  call.strides[0] = heads * tokens * row;
  call.strides[1] = tokens * row;
  call.strides[2] = row;
  call.queries = queries.data();
  call.weights = weights.data();
  call.pair_dims = pair_dims.data();
  call.scores = scores.data();
  call.levels = &levels;
  call.groups = rows.groups.described();
  call.rotation = rows.key_rotation.rotation();
  call.batch = 1;
  call.heads = heads;
  call.group = group;
  call.tokens = tokens;
  call.pairs = pairs;
  call.dim = rows.dim;
  call.format = rows.key;
  call.scale_offset = int32_t(scale);
  call.threads = threads;
  tq_score(&call);
  fwrite(scores.data(), 4, scores.size(), results);

  const std::vector<int64_t> starts{0, tokens / 3, tokens};
  std::vector<float> maxima(heads * group * 2), log_sums(heads * group * 2);
  RecallScore recall{};
  recall.queries = queries.data();
  recall.codes = rows.memory.data();
  recall.scales = rows.memory.data() + scale;
  recall.code_stride = recall.scale_stride = row;
  recall.code_head_stride = recall.scale_head_stride = tokens * row;
  recall.starts = starts.data();
  recall.maxima = maxima.data();
  recall.log_sums = log_sums.data();
  recall.groups = rows.groups.described();
  recall.levels = &levels;
  recall.heads = heads;
  recall.rows = group;
  recall.blocks = 2;
  recall.dim = rows.dim;
  recall.format = rows.key;
  recall.threads = threads;
  tq_recall_score(&recall);
  for (const auto& array : {maxima, log_sums}) fwrite(array.data(), 4, array.size(), results);
}

}  // namespace

int main(int, char** argv) {
  codes = fopen(argv[1], "wb");
  results = fopen(argv[2], "wb");
  threads = atoi(argv[3]);
  for (int i = 0; i < 3; i++) {
    const int count = 4 << i;
    for (int n = 0; n < 16; n++) levels.turbo[i][n] = 2.0f * (n % count) / (count - 1) - 1;
    for (int n = 1; n < count; n++) boundaries[i].push_back((levels.turbo[i][n - 1] + levels.turbo[i][n]) / 2);
    boundaries[i].resize(16, 1e30f);
    coefficients[i] = {2.0f / (count - 1), 0, 0, 0, 0, 0, 0, 0};
  }
  for (int i = 0; i < 7; i++)
    for (int state = 0; state < STATES; state++) {
      const Half half = random_float();
      levels.trellis[i][state] = half;
      uint16_t bits;
      memcpy(&bits, &half, 2);
      levels.halves[i][state] = bits & 255;
      levels.halves[i][STATES + state] = bits >> 8;
    }
  const int formats[] = {FP16, Q8, TQ4, TQ3, TQ2, TCQ4, TCQ3, TCQ2, STCQ4, STCQ3, STCQ2};
  int number = 0;
  for (int dim : {48, 64, 80, 128})
    for (int key : formats)
      for (int offset : {0, 3}) {
        const int value = formats[number++ % 8];  // sorted formats are for keys
        const int64_t heads = 2, tokens = offset ? 37 : 700, length = number % 3 ? 1 : 33;
        if (key >= STCQ4 && dim % GROUP) continue;
        const Rows rows = encode(dim, key, value, heads, tokens, Rule(number % 4));
        attend(rows, number % 3, heads, tokens, length, number % 4 == 1);
        if (key >= Q8) score(rows, heads, tokens);
      }
  return fclose(codes) | fclose(results);
}
