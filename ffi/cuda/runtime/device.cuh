// Device functions for the kernels: conversions, asynchronous copies and predicated stores. The host puts this text in
// front of the source of each kernel before NVRTC compiles it: the kernels include no files.

// The bits of a 16-bit number: of a bfloat16 where the host defines ELEMENT_IS_BFLOAT16 as 1, otherwise of a float16.
typedef unsigned short Half;

__device__ inline double widen(double value) { return value; }
__device__ inline float widen(float value) { return value; }
__device__ inline void narrow(double value, double* result) { *result = value; }
__device__ inline void narrow(float value, float* result) { *result = value; }

#if ELEMENT_IS_BFLOAT16
__device__ inline float widen(Half bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
__device__ inline void narrow(float value, Half* result) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(*result) : "f"(value));
}
#else
__device__ inline float widen(Half bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ inline void narrow(float value, Half* result) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(*result) : "f"(value)); }
#endif

// The dynamic shared memory of the block.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

// Copies BYTES from global to shared memory asynchronously. If not `valid`, writes zeros and reads nothing.
template <int BYTES>
__device__ inline void copy_async(void* shared, const void* global, bool valid) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(global), "r"(bytes), "n"(BYTES)
                 : "memory");
  }
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last LEFT groups of copies of this thread have completed.
template <int LEFT>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Writes one 16-bit number, or WORDS 32-bit words, to global memory if `valid`. The store has a predicate, so that no
// thread of a warp branches.
__device__ inline void store_if(bool valid, void* to, unsigned short value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u16 [%1], %2;}" ::"r"(static_cast<unsigned>(valid)),
               "l"(to), "h"(value)
               : "memory");
}
template <int WORDS>
__device__ inline void store_if(bool valid, void* to, const unsigned (&value)[WORDS]) {
  const unsigned given = valid;
  if constexpr (WORDS == 1) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u32 [%1], %2;}" ::"r"(given), "l"(to), "r"(value[0])
                 : "memory");
  } else if constexpr (WORDS == 2) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v2.u32 [%1], {%2, %3};}" ::"r"(given), "l"(to),
                 "r"(value[0]), "r"(value[1])
                 : "memory");
  } else {
    static_assert(WORDS == 4);
    asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.u32 [%1], {%2, %3, %4, %5};}" ::"r"(given),
                 "l"(to), "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
                 : "memory");
  }
}
