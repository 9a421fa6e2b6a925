// Metal's numbers as C++ classes: a float that counts its operations, half, bfloat and short vectors.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "machine.h"

namespace tqsim {

// Counts an operation, unless the compiler does it.
constexpr void count_at_runtime(Operation operation) {
  if (!__builtin_is_constant_evaluated()) count(operation);
}

// uint. What is done to it is counted: codes are taken out of words with it. A wider operand gives a wider result.
struct Uint {
  uint32_t v;
  Uint() = default;
  template <class T, std::enable_if_t<std::is_convertible_v<T, uint32_t>, int> = 0>
  constexpr Uint(T value) : v(static_cast<uint32_t>(value)) {}
  constexpr operator uint32_t() const { return v; }

  Uint& operator++() { return ++v, *this; }
  Uint operator++(int) { return v++; }
  template <class T> Uint& operator+=(T b) { return *this = Uint(*this + b); }
  template <class T> Uint& operator-=(T b) { return *this = Uint(*this - b); }
  template <class T> Uint& operator*=(T b) { return *this = Uint(*this * b); }
  template <class T> Uint& operator/=(T b) { return *this = Uint(*this / b); }
  template <class T> Uint& operator|=(T b) { return *this = Uint(*this | b); }
  template <class T> Uint& operator&=(T b) { return *this = Uint(*this & b); }
  template <class T> Uint& operator<<=(T b) { return *this = Uint(*this << b); }
  template <class T> Uint& operator>>=(T b) { return *this = Uint(*this >> b); }
  Uint operator~() const { return count(INTEGER), ~v; }
};

template <class T>
using if_number = std::enable_if_t<std::is_arithmetic_v<T>>;
template <class T>
using or_wider = std::conditional_t<(sizeof(T) > 4), T, Uint>;

#define TQSIM_OPERATOR(op)                                                                                   \
  constexpr Uint operator op(Uint a, Uint b) { return count_at_runtime(INTEGER), Uint(a.v op b.v); }                       \
  template <class T, class = if_number<T>>                                                                   \
  constexpr or_wider<T> operator op(Uint a, T b) { return count_at_runtime(INTEGER), or_wider<T>(a.v op b); }                     \
  template <class T, class = if_number<T>>                                                                   \
  constexpr or_wider<T> operator op(T a, Uint b) { return count_at_runtime(INTEGER), or_wider<T>(a op b.v); }
TQSIM_OPERATOR(+)
TQSIM_OPERATOR(-)
TQSIM_OPERATOR(*)
TQSIM_OPERATOR(/)
TQSIM_OPERATOR(%)
TQSIM_OPERATOR(&)
TQSIM_OPERATOR(|)
TQSIM_OPERATOR(^)
TQSIM_OPERATOR(<<)
TQSIM_OPERATOR(>>)
#undef TQSIM_OPERATOR

#define TQSIM_COMPARISON(op)                                                                                 \
  inline bool operator op(Uint a, Uint b) { return a.v op b.v; }                                             \
  template <class T, class = if_number<T>> bool operator op(Uint a, T b) { return a.v op b; }                \
  template <class T, class = if_number<T>> bool operator op(T a, Uint b) { return a op b.v; }
TQSIM_COMPARISON(<)
TQSIM_COMPARISON(>)
TQSIM_COMPARISON(<=)
TQSIM_COMPARISON(>=)
TQSIM_COMPARISON(==)
TQSIM_COMPARISON(!=)
#undef TQSIM_COMPARISON

// fp32. Every operation rounds once (the build forbids contraction) and is counted. Only construction is implicit, so
// that no expression silently leaves the class.
struct Float {
  float v;
  Float() = default;
  template <class T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
  constexpr Float(T value) : v(static_cast<float>(value)) {}
  template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
  constexpr Float(T value) : v(static_cast<float>(value)) { count_at_runtime(CONVERT); }
  explicit Float(Uint value) : Float(value.v) {}
  template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  explicit operator T() const { return static_cast<T>(v); }

  constexpr Float operator-() const { return -v; }
  friend constexpr Float operator+(Float a, Float b) { return count_at_runtime(ADD), a.v + b.v; }
  friend constexpr Float operator-(Float a, Float b) { return count_at_runtime(ADD), a.v - b.v; }
  friend constexpr Float operator*(Float a, Float b) { return count_at_runtime(MULTIPLY), a.v * b.v; }
  friend constexpr Float operator/(Float a, Float b) { return count_at_runtime(DIVIDE), a.v / b.v; }
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
