// Metal's numbers as C++ classes: a float that counts its operations, half, bfloat and short vectors.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "machine.h"

namespace tqsim {

// fp32. Every operation rounds once (the build forbids contraction) and is counted. Only construction is implicit, so
// that no expression silently leaves the class.
struct Float {
  float v;
  Float() = default;
  template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  constexpr Float(T value) : v(static_cast<float>(value)) {}
  template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  explicit operator T() const { return static_cast<T>(v); }

  Float operator-() const { return -v; }
  friend Float operator+(Float a, Float b) { return count(ADD), a.v + b.v; }
  friend Float operator-(Float a, Float b) { return count(ADD), a.v - b.v; }
  friend Float operator*(Float a, Float b) { return count(MULTIPLY), a.v * b.v; }
  friend Float operator/(Float a, Float b) { return count(DIVIDE), a.v / b.v; }
  Float& operator+=(Float b) { return *this = *this + b; }
  Float& operator-=(Float b) { return *this = *this - b; }
  Float& operator*=(Float b) { return *this = *this * b; }
  Float& operator/=(Float b) { return *this = *this / b; }
  friend bool operator<(Float a, Float b) { return count(COMPARE), a.v < b.v; }
  friend bool operator>(Float a, Float b) { return count(COMPARE), a.v > b.v; }
  friend bool operator<=(Float a, Float b) { return count(COMPARE), a.v <= b.v; }
  friend bool operator>=(Float a, Float b) { return count(COMPARE), a.v >= b.v; }
  friend bool operator==(Float a, Float b) { return count(COMPARE), a.v == b.v; }
  friend bool operator!=(Float a, Float b) { return count(COMPARE), a.v != b.v; }
};

inline Float fused(Float a, Float b, Float c) { return count(FMA), std::fmaf(a.v, b.v, c.v); }

template <class To, class From>
To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

// fp16. The result of each operation rounds to fp16.
struct half {
  _Float16 v;
  half() = default;
  half(Float f) : v(static_cast<_Float16>(f.v)) {}
  template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  half(T value) : v(static_cast<_Float16>(static_cast<float>(value))) {}
  operator Float() const { return static_cast<float>(v); }
};

// bfloat16, rounded to nearest even.
struct bfloat {
  uint16_t v;
  bfloat() = default;
  bfloat(Float f) {
    const uint32_t u = bits<uint32_t>(f.v);
    const bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    v = static_cast<uint16_t>(nan ? (u >> 16) | 0x40u : (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
  template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  bfloat(T value) : bfloat(Float(value)) {}
  operator Float() const { return bits<float>(static_cast<uint32_t>(v) << 16); }
};

template <class T>
using if_short = std::enable_if_t<std::is_same_v<T, half> || std::is_same_v<T, bfloat>, T>;
template <class T> if_short<T> operator+(T a, T b) { return Float(a) + Float(b); }
template <class T> if_short<T> operator-(T a, T b) { return Float(a) - Float(b); }
template <class T> if_short<T> operator*(T a, T b) { return Float(a) * Float(b); }
template <class T> if_short<T> operator/(T a, T b) { return Float(a) / Float(b); }

template <class T, int N>
struct vec;
template <class T>
struct vec<T, 2> {
  T x, y;
};
template <class T>
struct vec<T, 3> {
  T x, y, z;
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
};

}  // namespace tqsim
