// The instructions of the kernels that have no name in CUDA C++: loads and stores with a policy of the L2 cache, flags
// in global memory, and conversions of pairs.
typedef unsigned long long uint64;

// Policies of the L2 cache: data that is read once leaves it first.
__device__ inline uint64 read_once() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64 read_again() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <int BYTES, int WORDS>
__device__ inline void load_words(const void* from, uint64 policy, unsigned (&words)[WORDS]) {
  if constexpr (BYTES == 16) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from), "l"(policy));
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(from), "l"(policy));
  } else if constexpr (BYTES == 4) {
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(words[0]) : "l"(from), "l"(policy));
  } else {
    unsigned short half;
    asm volatile("ld.global.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(half) : "l"(from), "l"(policy));
    words[0] = half;
  }
}

template <int BYTES, int WORDS>
__device__ inline void store_words(void* to, uint64 policy, const unsigned (&words)[WORDS]) {
  if constexpr (BYTES == 16) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]), "l"(policy)
                 : "memory");
  } else if constexpr (BYTES == 8) {
    *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else if constexpr (BYTES == 4) {
    *static_cast<unsigned*>(to) = words[0];
  } else {
    *static_cast<unsigned short*>(to) = static_cast<unsigned short>(words[0]);
  }
}

__device__ inline void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Two numbers rounded to 16 bits, the first in the low half.
__device__ inline unsigned narrow_pair(float low, float high) {
  unsigned pair;
#if ELEMENT_IS_BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

__device__ inline void set_flag(uint64* flag, uint64 value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ inline uint64 get_flag(const uint64* flag) {
  uint64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
// Adds one to a number of 32 bits, and returns what it was.
__device__ inline unsigned count(void* number) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(number) : "memory");
  return before;
}
__device__ inline void fence_of_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ inline void stop() { asm volatile("trap;"); }
