// The differences between Metal and CUDA, so that kernels have one text. The tests' simulator compiles the Metal side.
//
// Rules that keep a kernel portable: pointers into device memory are `auto` or a template parameter, pointers into a
// thread's own arrays are TQ_THREAD; every lane of a simdgroup takes part in every collective; threadgroups are whole.
// Arithmetic goes through tq_add and its like, which round once each, so that codes are the same on every backend.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

#define TQ_FN __device__ __forceinline__
#define TQ_CONSTANT __device__ const
#define TQ_THREAD
#define TQ_UNROLL _Pragma("unroll")
// nvcc would unroll some loops until registers run out; Metal's compiler may decide by itself.
#define TQ_ROLLED _Pragma("unroll 1")
// Unrolls a loop so that COUNT iterations load before the first one waits: nvcc moves loads up, and a warp that waits for
// each of them leaves an SM idle. Metal's compiler may decide by itself.
#define TQ_PRAGMA(text) _Pragma(#text)
#define TQ_UNROLL_BY(count) TQ_PRAGMA(unroll (count))
#define threadgroup __shared__

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

TQ_FN float tq_add(float a, float b) { return __fadd_rn(a, b); }
TQ_FN float tq_sub(float a, float b) { return __fsub_rn(a, b); }
TQ_FN float tq_mul(float a, float b) { return __fmul_rn(a, b); }
TQ_FN float tq_div(float a, float b) { return __fdiv_rn(a, b); }
TQ_FN float tq_sqrt(float a) { return __fsqrt_rn(a); }
TQ_FN float tq_rint(float a) { return rintf(a); }
TQ_FN float tq_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TQ_FN float tq_exp2(float a) { return exp2f(a); }

// CUDA variables for the attributes that mlx passes in Metal.
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define thread_position_in_grid (dim3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z))
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)

template <class T> TQ_FN T simd_shuffle(T v, ushort lane) { return __shfl_sync(0xFFFFFFFFu, v, lane); }
template <class T> TQ_FN T simd_shuffle_xor(T v, ushort mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
TQ_FN void simdgroup_barrier(mem_flags) { __syncwarp(); }
TQ_FN void threadgroup_barrier(mem_flags) { __syncthreads(); }

template <class To, class From>
TQ_FN To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

TQ_FN uint extract_bits(uint x, uint offset, uint bits) { return x >> offset & ((1u << bits) - 1u); }

// Casts a pointer into device memory.
template <class To, class Pointer>
TQ_FN auto tq_recast(Pointer pointer) {
  return reinterpret_cast<const To*>(pointer);
}

#else

#pragma METAL fp contract(off)

#define TQ_FN inline
#define TQ_CONSTANT constant
#define TQ_THREAD thread
#define TQ_UNROLL _Pragma("clang loop unroll(full)")
#define TQ_ROLLED
#define TQ_UNROLL_BY(count)

TQ_FN float tq_add(float a, float b) { return a + b; }
TQ_FN float tq_sub(float a, float b) { return a - b; }
TQ_FN float tq_mul(float a, float b) { return a * b; }
TQ_FN float tq_div(float a, float b) { return metal::precise::divide(a, b); }
TQ_FN float tq_sqrt(float a) { return metal::precise::sqrt(a); }
TQ_FN float tq_rint(float a) { return metal::rint(a); }
TQ_FN float tq_fma(float a, float b, float c) { return metal::fma(a, b, c); }
TQ_FN float tq_exp2(float a) { return metal::fast::exp2(a); }

template <class To, class Pointer>
TQ_FN auto tq_recast(Pointer pointer) {
  return reinterpret_cast<const device To*>(pointer);
}

#endif
