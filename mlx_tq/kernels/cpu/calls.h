// Arguments of the kernels; attend.py, encode.py and score.py declare the same layouts.
#pragma once
#include "formats.h"
#include "rotation.h"

namespace tq {

// Rows in one piece of memory.
struct Buffer {
  const char *keys, *values;                  // of row number `first` of KV head 0
  int64_t key_stride, value_stride;           // bytes between rows
  int64_t key_head_stride, value_head_stride;
  int64_t first;
};

// Tokens of one cache that are stored alike.
struct Part {
  const Buffer* buffers;
  const int32_t* index;                       // which row token t is; null: row t
  const int32_t* ranges;                      // [heads, 2]: first token and number of tokens of each KV head; null: all
  int64_t buffer_count;
  int64_t tokens, position;                   // position of the first token in the sequence; others follow
  int32_t key_scale, value_scale;             // bytes from a row's first to its scale; not read in full precision
  int32_t key_format, value_format;
  int32_t wide_key_scale, wide_value_scale;   // fp32, not fp16
  int32_t rotated;                            // whether queries are divided by the scale of keys, and rotated
  int32_t window;                             // sliding window of a causal query, itself included; 0: none
};

struct Cache {
  const Part* parts;
  const float* key_scale;          // of normalized keys [heads, key_dim]; null for plain keys
  const uint16_t* means;           // fp16 [heads, means, key_dim]
  const int32_t* mean_index;       // of row t; null: (mean_first + t) / MEAN_TOKENS
  KeyGroups groups;                // of packed keys
  int64_t mean_head_stride;        // in elements
  int64_t part_count, tokens, mean_first;
  int64_t packed_head;             // with by_head: which KV head of the packed rows is this one; else not read
};

// The first tokens of several sequences, which their own caches leave out.
struct Prefix {
  Cache cache;
  const int64_t* sequences;        // ascending
  int64_t sequence_count;
};

struct Attention {
  const float* queries;            // [batch, query_heads, length, key_dim]
  int64_t query_strides[3];        // in elements
  const Cache* caches;             // see by_head
  const Prefix* prefixes;          // at most one of each sequence; none with by_head or a mask
  const char* mask;                // null, bool or float added to scores: [batch, query_heads, length, tokens]
  int64_t mask_strides[4];         // in elements
  const float* sinks;              // attention-sink logits [query_heads], or null
  float* output;                   // [batch, query_heads, length, value_dim], or null where only sums are wanted
  float* log_sums;                 // of exponentials of scores [batch, query_heads, length], or null
  const Levels* levels;
  Rotation key_rotation, value_rotation;
  int64_t batch, heads, query_heads, length, prefix_count;
  int32_t key_dim, value_dim;
  int32_t causal, mask_is_bool;
  int32_t by_head;                 // 1: a cache for each KV head, caches[batch * heads + head]; 0: one for each sequence
  int32_t threads;
  float scale;
};

enum Rule : int32_t { RAW, MATCHED, LEAST_SQUARES, UNBIASED };

// Keys or values.
struct Vectors {
  const float* vectors;     // [batch, heads, tokens, dim]
  int64_t strides[3];       // in elements
  Rotation rotation;
  const float* scale;       // multiplies vectors [batch, heads, dim], or null
  const float* centers;     // subtracted then [batch, heads, center_count, dim]
  const int32_t* center_index;  // of each token
  KeyGroups groups;         // [batch, heads, ...]
  const float* factors;     // of sorted keys: one over the size of each dim's group [batch, heads, dim]
  const float* weights;     // of the groups' errors [batch, heads, dim / GROUP]
  int64_t center_count;
  int32_t dim, format, rule;
  int32_t codes, scales;    // their first byte in a row
  int32_t wide_scale;       // fp32, not fp16
  int32_t clips;            // whether fp16 values are clipped to its range
  float limit;              // the largest value that does not count as clamped
};

struct Encoding {
  Vectors parts[2];
  char* rows;               // [batch, heads, tokens, row_bytes]
  int64_t row_bytes;
  const float* boundaries[3];   // of codes of 2, 3 and 4 bits
  const float* coefficients[3]; // of their levels
  const Levels* levels;
  int64_t batch, heads, tokens;
  int64_t clamped, broken;  // result: vectors that were clamped, and that are not finite
  int32_t threads, padding;
};

struct Score {
  const char* rows;           // of token 0 of KV head 0 of row 0 of the batch
  int64_t strides[3];         // of batch, heads and tokens, in bytes
  const float* queries;       // [heads, group, dim]
  const float* weights;       // of the norms of RoPE pairs [heads, group, pairs]
  const int32_t* pair_dims;   // [2, pairs]
  const float* key_scale;     // divides normalized keys [batch, heads, dim], or null
  const uint16_t* means;      // fp16 [batch, heads, mean_count, dim]
  const int32_t* mean_index;  // of each token
  KeyGroups groups;           // [batch, heads, ...]
  float* scores;              // [batch, heads, group, tokens]
  const Levels* levels;
  Rotation rotation;
  int64_t batch, heads, group, tokens, pairs, mean_count;
  int32_t dim, format, scale_offset, wide_scale, threads, padding;
};

struct RecallScore {
  const float* queries;       // rotated, times the scale of scores [heads, rows, dim]
  const char *codes, *scales; // of token 0 of KV head 0
  int64_t code_stride, code_head_stride, scale_stride, scale_head_stride;  // in bytes
  const float* mean_scores;   // [heads, rows, means], or null for plain keys
  const int32_t* mean_index;  // of each token
  const int64_t* starts;      // of blocks [blocks + 1]
  KeyGroups groups;           // queries are times the sizes
  float *maxima, *log_sums;   // [heads, rows, blocks]
  const Levels* levels;
  int64_t heads, rows, blocks, means;
  int32_t dim, format, wide_scale, threads;
};

}  // namespace tq

// What Python calls.
extern "C" {
void tq_announce();
void tq_attend(const tq::Attention* attention);
void tq_encode(tq::Encoding* encoding);
void tq_score(const tq::Score* score);
void tq_recall_score(const tq::RecallScore* recall);
}
