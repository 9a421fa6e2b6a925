// One value of each query row, loaded and stored four or two at a time.
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

// Arrays of N values of each of QUERIES rows, in threadgroup memory: PARTS arrays [N] of the pack of PART rows.
template <int QUERIES, int N>
struct tq_rows {
  enum { PART = QUERIES % 4 == 0 ? 4 : QUERIES % 2 == 0 ? 2 : 1, PARTS = QUERIES / PART, SIZE = PARTS * N };
  using PACK = tq_pack<PART>;
  using type = typename PACK::type;

  template <class Pointer>
  static TQ_FN void store(Pointer rows, int place, TQ_THREAD const float* x) {
    TQ_UNROLL for (int part = 0; part < int(PARTS); part++) rows[part * N + place] = PACK::pack(x + part * int(PART));
  }
  template <class Pointer>
  static TQ_FN void load(Pointer rows, int place, TQ_THREAD float* x) {
    TQ_UNROLL for (int part = 0; part < int(PARTS); part++) PACK::unpack(rows[part * N + place], x + part * int(PART));
  }
};
