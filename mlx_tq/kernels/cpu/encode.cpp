// Encodes keys and values into packed rows, bit for bit as mlx_tq/codec does: a vector in each lane, so that a loop over
// dims adds in the codec's order. Compiled without contraction of sums of products.
#include <algorithm>
#include <atomic>
#include <memory>

#include "calls.h"
#include "formats.h"
#include "pool.h"
#include "rotation.h"

namespace tq {

namespace {

constexpr float FP16_MAX = 65504.0f, TINY = 7.703719777548943e-34f;  // 2^-110
constexpr float LARGEST_RATIO = 1.3f;
constexpr int PIECE = 64;  // vectors
constexpr int CUT_CONTEXT = 16;
constexpr float FORBIDDEN = 1e9f;

inline Floats choose(Ints condition, Floats yes, Floats no) { return condition ? yes : no; }
inline Floats clip(Floats x) {
  x = choose(x > FP16_MAX, splat(FP16_MAX), x);
  return choose(x < -FP16_MAX, splat(-FP16_MAX), x);
}
inline Floats magnitude(Floats x) { return as_floats((Words)x & 0x7FFFFFFFu); }

inline uint16_t to_half(float x) {
#if defined(__AVX2__)
  return uint16_t(_cvtss_sh(x, 0));
#else
  const Half half = static_cast<Half>(x);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
#endif
}
inline uint16_t to_bfloat(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(bits >> 16 | 0x40);  // NaN
  return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// LANES vectors on their way to codes.
class Encoder {
 public:
  Encoder(const Encoding& encoding, const Vectors& vectors) : e_(encoding), v_(vectors), dim_(vectors.dim) {}

  // Encodes vectors number `first` to first + count of all, which belong to one head; count is at most LANES.
  void run(int64_t first, int count) {
    load_vectors(first, count);
    const int bits = BITS_OF[v_.format];
    if (bits > 8) {
      store_full(first, count);
    } else if (bits == 8) {
      encode_q8();
    } else if (v_.format >= STCQ4) {
      encode_sorted(first / e_.tokens);
    } else {
      encode_turbo(bits, v_.format >= TCQ4);
    }
    if (bits <= 8) store_scales(first, count);
    if (bits <= 8) store_words(first, count, dim_ * bits / 16);
    for (int lane = 0; lane < count; lane++) {
      const bool finite = peak_[lane] <= 3.4028234e38f, nan = peak_[lane] != peak_[lane];
      broken += !finite;
      if (bits > 8) {
        clamped += v_.format == FP16 && finite && peak_[lane] > v_.limit;
      } else {
        clamped += !nan && (peak_[lane] > v_.limit || full_[lane]);
      }
    }
  }

  int64_t clamped = 0, broken = 0;

 private:
  char* row(int64_t number) const { return e_.rows + number * e_.row_bytes; }

  void load_vectors(int64_t first, int count) {
    const float* from[LANES];
    int64_t place[LANES], center[LANES];
    for (int lane = 0; lane < LANES; lane++) {
      const int64_t number = first + std::min(lane, count - 1), token = number % e_.tokens;
      place[lane] = number / e_.tokens;
      const int64_t head = place[lane] % e_.heads, batch = place[lane] / e_.heads;
      from[lane] = v_.vectors + batch * v_.strides[0] + head * v_.strides[1] + token * v_.strides[2];
      center[lane] = v_.scale ? place[lane] * v_.center_count + v_.center_index[token] : 0;
    }
    peak_ = Floats{};
    for (int d = 0; d < dim_; d++) {
      Floats x;
      for (int lane = 0; lane < LANES; lane++) x[lane] = from[lane][d];
      if (v_.scale) {
        Floats scale, mean;
        for (int lane = 0; lane < LANES; lane++) {
          scale[lane] = v_.scale[place[lane] * dim_ + d];
          mean[lane] = v_.centers[center[lane] * dim_ + d];
        }
        x = x * scale - mean;
      }
      const Floats size = magnitude(x);
      peak_ = choose((size > peak_) | (size != size), size, peak_);
      x_[d] = x;
    }
  }

  void rotate() {
    for (int d = 0; d < dim_; d++) x_[d] = x_[d] * v_.rotation.signs[d];
    hadamard(x_, dim_, v_.rotation, false);
  }

  // The sum in the order of `pairwise_sum`. Overwrites the terms.
  Floats add(Floats* terms) const {
    const int power = dim_ & -dim_, order = power == dim_ ? 1 : 4 * (dim_ / power), row = dim_ / order;
    for (int r = 0; r < order; r++)
      for (int count = row; count > 1; count /= 2)
        for (int i = 0; i < count / 2; i++) terms[r * row + i] = terms[r * row + 2 * i] + terms[r * row + 2 * i + 1];
    Floats total = terms[0];
    for (int r = 1; r < order; r++) total = total + terms[r * row];
    return total;
  }

  void encode_q8() {
    for (int d = 0; d < dim_; d++) x_[d] = clip(x_[d]);
    rotate();
    Floats peak{};
    for (int d = 0; d < dim_; d++) {
      const Floats size = magnitude(x_[d]);
      peak = choose((size > peak) | (size != size), size, peak);
    }
    const Floats factor = choose(peak > TINY, 127.0f / peak, Floats{});
    for (int d = 0; d < dim_; d += 2) {
      Words pair{};
      for (int i = 0; i < 2; i++) {
        const Floats scaled = x_[d + i] * factor;
        const Floats rounded = (scaled + 12582912.0f) - 12582912.0f;  // to even, as magnitudes are at most 127
        pair |= ((Words)__builtin_convertvector(rounded, Ints) & 0xFFu) << (8 * i);
      }
      words_[d / 2] = pair;
    }
    scale_ = peak / std::sqrt(float(dim_));
  }

  void encode_turbo(int bits, bool trellis) {
    for (int d = 0; d < dim_; d++) {
      x_[d] = clip(x_[d]);
      terms_[d] = x_[d] * x_[d];
    }
    const Floats norm = root(add(terms_));
    rotate();
    const Floats factor = choose(norm > 0.0f, 1.0f / norm, Floats{});
    if (trellis) {
      find_ring(0, dim_, bits, factor, words_);
    } else {
      find_codes(bits, factor);
    }
    scale_ = choose_scale(norm);
  }

  // Encodes keys of a head as groups of sorted dims.
  void encode_sorted(int64_t place) {
    const float* const factors = v_.factors + place * dim_;
    const uint16_t* const order = v_.groups.order + place * dim_;
    const int32_t* const widths = v_.groups.widths_of(place, dim_);
    for (int d = 0; d < dim_; d++) {
      levels_[d] = clip(x_[d]) * factors[d];
      terms_[d] = levels_[d] * levels_[d];
    }
    const Floats norm = root(add(terms_)), factor = choose(norm > 0.0f, 1.0f / norm, Floats{});
    const float spread = std::sqrt(float(dim_ / GROUP));
    for (int d = 0; d < dim_; d++) x_[d] = levels_[order[d]] * v_.rotation.signs[d % GROUP];
    Words* words = words_;
    for (int start = 0; start < dim_; start += GROUP) {
      const int width = widths[start / GROUP];
      hadamard(x_ + start, GROUP, v_.rotation, false);
      for (int d = start; d < start + GROUP; d++) {
        x_[d] = x_[d] * spread;
        levels_[d] = Floats{};
      }
      if (width) find_ring(start, GROUP, width, factor, words);
      words += GROUP * width / 16;
    }
    scale_ = v_.rule == RAW ? norm : weighted_scale(v_.weights + place * (dim_ / GROUP));
  }

  // The scale of a vector whose groups count with weights.
  Floats weighted_scale(const float* weights) {
    for (int d = 0; d < dim_; d++) terms_[d] = levels_[d] * levels_[d] * weights[d / GROUP];
    const Floats energy = add(terms_);
    for (int d = 0; d < dim_; d++) terms_[d] = x_[d] * x_[d] * weights[d / GROUP];
    const Floats square = add(terms_);
    if (v_.rule == MATCHED) return choose(square > 0.0f, root(square / energy), Floats{});
    for (int d = 0; d < dim_; d++) terms_[d] = x_[d] * levels_[d] * weights[d / GROUP];
    Floats product = add(terms_);
    product = choose(product < 0.0f, Floats{}, product);
    const Floats least = product / energy, unbiased = square / product, most = LARGEST_RATIO * least;
    return choose(square > 0.0f, v_.rule == LEAST_SQUARES ? least : choose(unbiased < most, unbiased, most), Floats{});
  }

  // Sets words_ to packed codes, and levels_ to their levels.
  void find_codes(int bits, Floats factor) {
    const float *boundaries = e_.boundaries[bits - 2], *coefficients = e_.coefficients[bits - 2];
    const int count = (1 << bits) - 1;
    for (int d = 0; d < dim_; d++) {
      const Floats t = x_[d] * factor;
      Ints code{};
      for (int i = 0; i < count; i++) code -= t > boundaries[i];
      const Floats u = __builtin_convertvector(code, Floats) - 0.5f * float(count), square = u * u;
      Floats slope = splat(coefficients[2]) * square;
      slope = (slope + coefficients[1]) * square;
      levels_[d] = u * (slope + coefficients[0]);
      codes_[d] = (Words)code;
    }
    if (bits == 3) {
      const int units = dim_ / 16;
      for (int third = 0; third < 3; third++)
        for (int i = 0; i < units; i++) {
          Words word = (codes_[15 * units + i] >> third & 1) << 15;
          for (int plane = 0; plane < 5; plane++) word |= codes_[(5 * third + plane) * units + i] << (3 * plane);
          words_[third * units + i] = word;
        }
    } else {
      const int units = dim_ * bits / 16;
      for (int i = 0; i < units; i++) {
        Words word{};
        for (int plane = 0; plane < 16 / bits; plane++) word |= codes_[plane * units + i] << (bits * plane);
        words_[i] = word;
      }
    }
  }

  // Sets `words` to the packed codes of `dim` dims from `start` on, and levels_ to their levels, by the search of
  // mlx_tq/codec/formats/trellis.py for the ring of codes of least squared error.
  void find_ring(int start, int dim, int bits, Floats factor, Words* words) {
    const int per_unit = unit_values(bits), units = dim / per_unit, groups = STATES >> bits;
    const float* const levels = e_.levels->trellis[bits - 1];
    for (int unit = 0; unit < units; unit++)
      for (int i = 0; i < per_unit; i++) terms_[unit * per_unit + i] = x_[start + i * units + unit] * factor;
    const int half = std::min(CUT_CONTEXT, dim / 2);
    for (int i = 0; i < half; i++) {
      ends_[i] = terms_[dim - half + i];
      ends_[half + i] = terms_[i];
    }
    Floats best[STATES / 2];
    for (int g = 0; g < groups; g++) best[g] = Floats{};
    search(ends_, 2 * half, bits, levels, best);
    Ints group{};
    Floats least = best[0];
    for (int g = 1; g < groups; g++) {
      group = best[g] < least ? Ints{} + g : group;
      least = best[g] < least ? best[g] : least;
    }
    Ints state{};
    for (int t = 2 * half - 1; t >= half - 1; t--) {
      state = trace(group, t, bits);
      group = state >> bits;
    }
    group = state & (groups - 1);  // where the ring begins and ends
    for (int g = 0; g < groups; g++) best[g] = choose(group == g, Floats{}, splat(FORBIDDEN));
    search(terms_, dim, bits, levels, best);
    for (int t = dim - 1; t >= 0; t--) {
      state = trace(group, t, bits);
      group = state >> bits;
      const int d = t % per_unit * units + t / per_unit;
      codes_[d] = (Words)state & ((1u << bits) - 1);
      levels_[start + d] = gather(levels, (Words)state);
    }
    for (int n = 0; n < per_unit * bits / 16; n++)
      for (int unit = 0; unit < units; unit++) {
        Words word{};
        for (int i = 0; i < per_unit; i++) {
          const int shift = 16 * (n + 1) - bits * (i + 1);  // a code may reach over the end of its word
          if (shift <= -bits || shift >= 16) continue;
          const Words code = codes_[i * units + unit];
          word |= shift >= 0 ? code << shift : code >> -shift;
        }
        words[n * units + unit] = word & 0xFFFFu;
      }
  }

  // Finds the cheapest way to each group, and stores the branch taken in choices_. The number of a branch replaces the
  // lowest bits of its cost, so that one comparison finds both.
  void search(const Floats* values, int count, int bits, const float* levels, Floats* best) {
    switch (bits) {
      case 1: return search_bits<1>(values, count, levels, best);
      case 2: return search_bits<2>(values, count, levels, best);
      case 3: return search_bits<3>(values, count, levels, best);
      case 4: return search_bits<4>(values, count, levels, best);
      case 5: return search_bits<5>(values, count, levels, best);
      case 6: return search_bits<6>(values, count, levels, best);
      default: return search_bits<7>(values, count, levels, best);
    }
  }
  template <int BITS>
  void search_bits(const Floats* values, int count, const float* levels, Floats* best) {
    constexpr int GROUPS = STATES >> BITS, BRANCHES = 1 << BITS;
    Floats next[GROUPS];
    for (int t = 0; t < count; t++) {
      const Floats value = values[t];
      // State g + b GROUPS follows group (g + b GROUPS) >> BITS.
      for (int g = 0; g < GROUPS; g++) {
        Ints least;
        for (int b = 0; b < BRANCHES; b++) {
          const int state = g + b * GROUPS;
          const Floats difference = value - levels[state], cost = difference * difference + best[state >> BITS];
          const Ints candidate = (Ints)(((Words)cost & ~uint32_t(BRANCHES - 1)) | uint32_t(b));
          least = b == 0 ? candidate : candidate < least ? candidate : least;
        }
        next[g] = (Floats)least;
        choices_[t * GROUPS + g] = __builtin_convertvector(least & (BRANCHES - 1), Bytes);
      }
      for (int g = 0; g < GROUPS; g++) best[g] = next[g];
    }
  }
  // The best state at value t of a search if the next state is in a group.
  Ints trace(Ints group, int t, int bits) const {
    const int groups = STATES >> bits;
    Ints state;
    for (int lane = 0; lane < LANES; lane++) state[lane] = group[lane] + choices_[t * groups + group[lane]][lane] * groups;
    return state;
  }

  Floats choose_scale(Floats norm) {
    if (v_.rule == RAW) return norm;
    for (int d = 0; d < dim_; d++) terms_[d] = levels_[d] * levels_[d];
    const Floats energy = add(terms_);
    if (v_.rule == MATCHED) return norm * std::sqrt(float(dim_)) / root(energy);
    for (int d = 0; d < dim_; d++) terms_[d] = x_[d] * levels_[d];
    Floats product = add(terms_);
    product = choose(product < 0.0f, Floats{}, product);
    const Floats least = product / energy;
    if (v_.rule == LEAST_SQUARES) return least;
    const Floats unbiased = norm * (norm * float(dim_) / product), most = LARGEST_RATIO * least;
    return choose(norm > 0.0f, choose(unbiased < most, unbiased, most), Floats{});
  }

  void store_scales(int64_t first, int count) {
    for (int lane = 0; lane < count; lane++) {
      const float scale = scale_[lane] > FP16_MAX ? FP16_MAX : scale_[lane];
      char* const to = row(first + lane) + v_.scales;
      const uint16_t half = to_half(scale);
      full_[lane] = v_.wide_scale ? scale >= FP16_MAX : half == 0x7BFF;
      if (v_.wide_scale) {
        memcpy(to, &scale, 4);
      } else {
        memcpy(to, &half, 2);
      }
    }
  }

  void store_words(int64_t first, int count, int words) {
    for (int lane = 0; lane < count; lane++) {
      char* const to = row(first + lane) + v_.codes;
      for (int i = 0; i < words; i++) {
        const uint16_t word = uint16_t(words_[i][lane]);
        memcpy(to + 2 * i, &word, 2);
      }
    }
  }

  void store_full(int64_t first, int count) {
    for (int lane = 0; lane < count; lane++) {
      char* const to = row(first + lane) + v_.codes;
      for (int d = 0; d < dim_; d++) {
        float x = x_[d][lane];
        if (v_.clips && v_.format == FP16) x = x > FP16_MAX ? FP16_MAX : x < -FP16_MAX ? -FP16_MAX : x;
        if (v_.format == FP32) {
          memcpy(to + 4 * d, &x, 4);
        } else {
          const uint16_t bits = v_.format == FP16 ? to_half(x) : to_bfloat(x);
          memcpy(to + 2 * d, &bits, 2);
        }
      }
    }
  }

  const Encoding& e_;
  const Vectors& v_;
  const int dim_;
  Floats x_[MAX_DIM], terms_[MAX_DIM], levels_[MAX_DIM], ends_[2 * CUT_CONTEXT];
  Words codes_[MAX_DIM], words_[MAX_DIM];
  Bytes choices_[MAX_DIM * STATES / 4];
  Floats peak_, scale_;
  bool full_[LANES];
};

}  // namespace
}  // namespace tq

extern "C" void tq_encode(tq::Encoding* encoding) {
  using namespace tq;
  const int64_t places = encoding->batch * encoding->heads, pieces = (encoding->tokens + PIECE - 1) / PIECE;  // of a head
  std::atomic<int64_t> clamped{0}, broken{0};
  share(encoding->threads, 2 * places * pieces, [&](int64_t piece) {
    const auto encoder = std::make_unique<Encoder>(*encoding, encoding->parts[piece % 2]);
    const int64_t head = piece / 2 / pieces * encoding->tokens;
    const int64_t start = head + piece / 2 % pieces * PIECE, stop = std::min(start + PIECE, head + encoding->tokens);
    for (int64_t first = start; first < stop; first += LANES) encoder->run(first, int(std::min<int64_t>(LANES, stop - first)));
    clamped += encoder->clamped;
    broken += encoder->broken;
  });
  encoding->clamped = clamped;
  encoding->broken = broken;
}
