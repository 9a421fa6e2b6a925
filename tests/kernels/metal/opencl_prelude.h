// Metal's names in C++ for OpenCL 2021, declarations only: for clang's check of types and address spaces.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef int int32_t;
typedef long int64_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef half float16_t;
typedef half bfloat16_t;  // the same rules, but for rounding
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
template <class To, class From> To as_type(From value) { return __builtin_astype(value, To); }
struct ulong2 { ulong2(unsigned long x, unsigned long y); };
namespace metal {
template <class T> struct simdgroup_matrix {
  T elements[2];
  __private T* thread_elements() __private { return elements; }
};
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<float> simdgroup_float8x8;
template <class Pointer> void simdgroup_load(__private simdgroup_half8x8&, Pointer, int, ulong2 = ulong2(0, 0), bool = false);
void simdgroup_multiply_accumulate(__private simdgroup_float8x8&, __private const simdgroup_half8x8&, __private const simdgroup_half8x8&, __private const simdgroup_float8x8&);
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
float rint(float);
float fma(float, float, float);
uint extract_bits(uint x, uint offset, uint bits);
namespace fast {
float exp2(float);
}  // namespace fast
namespace precise {
float divide(float, float);
float sqrt(float);
}  // namespace precise
}  // namespace metal
using namespace metal;
