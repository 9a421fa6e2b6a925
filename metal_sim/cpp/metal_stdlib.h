// The part of the Metal Shading Language that the kernels use, as C++17 over the simulated machine.
//
// Last, this header renames float and uint, so nothing may be included after it.
#pragma once
#include "memory.h"
#include "numbers.h"

using ushort = unsigned short;
using uchar = unsigned char;
using tqsim::bfloat;
using tqsim::half;
using float16_t = half;
using bfloat16_t = bfloat;
using uint2 = tqsim::vec<tqsim::Uint, 2>;
using uint3 = tqsim::vec<tqsim::Uint, 3>;
using uint4 = tqsim::vec<tqsim::Uint, 4>;
using float2 = tqsim::vec<tqsim::Float, 2>;
using float4 = tqsim::vec<tqsim::Float, 4>;

template <class To, class From>
To as_type(From value) { return tqsim::bits<To>(value); }

namespace metal {

using tqsim::Float;

inline Float fma(Float a, Float b, Float c) { return tqsim::fused(a, b, c); }
inline Float exp2(Float x) { return count(tqsim::TRANSCENDENTAL), std::exp2(x.v); }
inline Float exp(Float x) { return count(tqsim::TRANSCENDENTAL), std::exp(x.v); }
inline Float sqrt(Float x) { return count(tqsim::TRANSCENDENTAL), std::sqrt(x.v); }
inline Float rsqrt(Float x) { return count(tqsim::TRANSCENDENTAL), 1.0f / std::sqrt(x.v); }
inline Float rint(Float x) { return count(tqsim::ADD), std::nearbyint(x.v); }
inline Float fabs(Float x) { return std::fabs(x.v); }
inline Float fmin(Float a, Float b) { return count(tqsim::COMPARE), std::fmin(a.v, b.v); }
inline Float fmax(Float a, Float b) { return count(tqsim::COMPARE), std::fmax(a.v, b.v); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline Float max(Float a, Float b) { return a < b ? b : a; }  // also of an element of threadgroup memory
template <class T> T select(T a, T b, bool c) { return c ? b : a; }
inline tqsim::Uint extract_bits(tqsim::Uint x, uint32_t offset, uint32_t bits) {
  return count(tqsim::INTEGER), x.v >> offset & ((1u << bits) - 1);
}
inline tqsim::Uint popcount(tqsim::Uint x) { return count(tqsim::INTEGER), __builtin_popcount(x.v); }
namespace precise {
inline Float divide(Float a, Float b) { return a / b; }
using metal::exp;
using metal::exp2;
using metal::sqrt;
}  // namespace precise
namespace fast {
using metal::exp;
using metal::exp2;
}  // namespace fast

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

// Each takes the line that it is called from: lanes that meet must come from the same one.
inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  tqsim::meet_threadgroup({"threadgroup_barrier", line, 0}, flags == mem_flags::mem_threadgroup);
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  tqsim::meet_simdgroup(0, {"simdgroup_barrier", line, 0}, flags == mem_flags::mem_threadgroup);
}

template <class T>
uint64_t to_slot(T value) {
  uint64_t slot = 0;
  memcpy(&slot, &value, sizeof value);
  return slot;
}
template <class T>
T from_slot(uint64_t slot) {
  T value;
  memcpy(&value, &slot, sizeof value);
  return value;
}

// What `lane` brought; every bit set where there is no such lane, which Metal leaves undefined.
template <class T>
T shuffled(T value, uint32_t lane, tqsim::Site site) {
  const tqsim::Brought all = tqsim::meet_simdgroup(to_slot(value), site);
  const bool there = lane < tqsim::LANES && (all.lanes >> lane & 1u);
  return from_slot<T>(there ? all.slots[lane] : ~0ull);
}
template <class T> T simd_shuffle(T v, ushort lane, int line = __builtin_LINE()) {
  return shuffled(v, lane, {"simd_shuffle", line, 0});
}
template <class T> T simd_broadcast(T v, ushort lane, int line = __builtin_LINE()) {
  return shuffled(v, lane, {"simd_broadcast", line, lane});
}
template <class T> T simd_shuffle_xor(T v, ushort mask, int line = __builtin_LINE()) {
  return shuffled(v, tqsim::self().lane ^ mask, {"simd_shuffle_xor", line, mask});
}
template <class T> T simd_shuffle_down(T v, ushort delta, int line = __builtin_LINE()) {
  return shuffled(v, tqsim::self().lane + delta, {"simd_shuffle_down", line, delta});
}
template <class T> T simd_shuffle_up(T v, ushort delta, int line = __builtin_LINE()) {
  return shuffled(v, tqsim::self().lane - delta, {"simd_shuffle_up", line, delta});
}

// A reduction over all lanes, as a tree of halves. It counts as what a simdgroup of 32 does: five shuffles and five
// operations in each lane.
template <class T, class Combine>
T reduced(T value, Combine combine, tqsim::Operation operation, tqsim::Site site) {
  const tqsim::Brought all = tqsim::meet_simdgroup(to_slot(value), site);
  uint64_t* const counted = tqsim::machine->dispatch->operations;
  const uint64_t before = counted[operation];
  T values[tqsim::LANES];
  bool there[tqsim::LANES];
  for (uint32_t i = 0; i < tqsim::LANES; i++) {
    there[i] = all.lanes >> i & 1u;
    if (there[i]) values[i] = from_slot<T>(all.slots[i]);
  }
  for (uint32_t width = tqsim::LANES / 2; width; width /= 2)
    for (uint32_t i = 0; i < width; i++) {
      if (!there[i + width]) continue;
      values[i] = there[i] ? combine(values[i], values[i + width]) : values[i + width];
      there[i] = true;
    }
  counted[operation] = before + 5;
  counted[tqsim::COLLECTIVE] += 4;
  return values[0];
}
template <class T> T simd_sum(T v, int line = __builtin_LINE()) {
  return reduced(v, [](T a, T b) { return T(a + b); }, tqsim::ADD, {"simd_sum", line, 0});
}
template <class Space> auto simd_sum(tqsim::Reference<Space> element, int line = __builtin_LINE()) {
  return simd_sum(typename Space::Value(element), line);
}
template <class T> T simd_max(T v, int line = __builtin_LINE()) {
  return reduced(v, [](T a, T b) { return max(a, b); }, tqsim::COMPARE, {"simd_max", line, 0});
}
template <class T> T simd_min(T v, int line = __builtin_LINE()) {
  return reduced(v, [](T a, T b) { return min(a, b); }, tqsim::COMPARE, {"simd_min", line, 0});
}

// An 8x8 matrix of a simdgroup. Each lane has two neighboring elements of a row, as on Apple GPUs.
template <class T>
struct simdgroup_matrix {
  T elements[2];
  T* thread_elements() { return elements; }
};
using simdgroup_half8x8 = simdgroup_matrix<half>;
using simdgroup_float8x8 = simdgroup_matrix<Float>;
struct ulong2 {
  uint64_t x, y;
  ulong2(uint64_t x, uint64_t y) : x(x), y(y) {}
};

inline uint32_t matrix_row(uint32_t lane) { return (lane >> 4) * 4 + (lane >> 1 & 3); }
inline uint32_t matrix_column(uint32_t lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }
inline uint32_t matrix_lane(uint32_t row, uint32_t column) {
  return (row >> 2) * 16 + (column >> 2) * 8 + (row & 3) * 2 + (column >> 1 & 1);
}

// What a matrix operation loads or multiplies is counted, and not that lanes meet.
inline tqsim::Brought meet_for_matrix(uint64_t slot, const tqsim::Site& site) {
  const tqsim::Brought all = tqsim::meet_simdgroup(slot, site);
  tqsim::machine->dispatch->operations[tqsim::COLLECTIVE]--;
  return all;
}
template <class T, class Pointer>
void simdgroup_load(simdgroup_matrix<T>& m, Pointer source, int64_t stride, ulong2 origin = {0, 0}, bool transpose = false, int line = __builtin_LINE()) {
  meet_for_matrix(0, {"simdgroup_load", line, transpose});
  const uint32_t lane = tqsim::self().lane;
  for (uint32_t e = 0; e < 2; e++) {
    const int64_t row = matrix_row(lane) + (transpose ? 0 : origin.y), column = matrix_column(lane) + e + origin.x;
    m.elements[e] = static_cast<T>(transpose ? source[column * stride + row] : source[row * stride + column]);
  }
}
// The sums of products of 16 bits are in fp32, term by term.
template <class A, class B>
void simdgroup_multiply_accumulate(simdgroup_matrix<Float>& d, const simdgroup_matrix<A>& a, const simdgroup_matrix<B>& b, const simdgroup_matrix<Float>& c, int line = __builtin_LINE()) {
  struct Both {
    simdgroup_matrix<A> a;
    simdgroup_matrix<B> b;
  };
  static_assert(sizeof(Both) <= sizeof(uint64_t), "factors of 16 bits");
  const tqsim::Brought all = meet_for_matrix(to_slot(Both{a, b}), {"simdgroup_multiply_accumulate", line, 0});
  const uint32_t lane = tqsim::self().lane, row = matrix_row(lane), column = matrix_column(lane);
  for (uint32_t e = 0; e < 2; e++) {
    float sum = c.elements[e].v;
    for (uint32_t k = 0; k < 8; k++) {
      const auto left = from_slot<Both>(all.slots[matrix_lane(row, k)]).a.elements[k & 1];
      const auto right = from_slot<Both>(all.slots[matrix_lane(k, column + e)]).b.elements[(column + e) & 1];
      sum = std::fmaf(static_cast<float>(left.v), static_cast<float>(right.v), sum);
    }
    d.elements[e] = sum;
  }
  count(tqsim::MATRIX, 16);
}

}  // namespace metal

using namespace metal;

#define thread
#define device
#define constant
#define uint tqsim::Uint
#define float tqsim::Float
