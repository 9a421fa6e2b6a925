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

}  // namespace metal

using namespace metal;

#define thread
#define device
#define constant
#define uint tqsim::Uint
#define float tqsim::Float
