// What mlx writes before a kernel's text for NVIDIA, as far as ours use it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
using float16_t = __half;
using bfloat16_t = __nv_bfloat16;
template <class T>
struct Eight {
  T values[8];
  __device__ T operator[](int i) const { return values[i]; }
};
using Shape = Eight<int32_t>;
using Strides = Eight<int64_t>;
