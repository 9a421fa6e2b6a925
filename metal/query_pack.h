// One value of each query row, loaded and stored together.
#include "tq_compat.h"

template <int QUERIES>
struct tq_pack {
  using type = float;
  static TQ_FN type pack(TQ_THREAD const float* x) { return x[0]; }
  static TQ_FN void unpack(type packed, TQ_THREAD float* x) { x[0] = packed; }
};
template <>
struct tq_pack<2> {
  using type = float2;
  static TQ_FN type pack(TQ_THREAD const float* x) {
    float2 packed;
    packed.x = x[0], packed.y = x[1];
    return packed;
  }
  static TQ_FN void unpack(type packed, TQ_THREAD float* x) { x[0] = packed.x, x[1] = packed.y; }
};
template <>
struct tq_pack<4> {
  using type = float4;
  static TQ_FN type pack(TQ_THREAD const float* x) {
    float4 packed;
    packed.x = x[0], packed.y = x[1], packed.z = x[2], packed.w = x[3];
    return packed;
  }
  static TQ_FN void unpack(type packed, TQ_THREAD float* x) {
    x[0] = packed.x, x[1] = packed.y, x[2] = packed.z, x[3] = packed.w;
  }
};
