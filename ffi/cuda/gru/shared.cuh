// Shared memory by its addresses, which are shorter than pointers.

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// The same value, which the compiler keeps in a register instead of computing it again where it is used.
__device__ inline unsigned kept(unsigned value) {
  asm volatile("mov.b32 %0, %0;" : "+r"(value));
  return value;
}

template <class A>
__device__ inline A* kept(A* pointer) {
  asm volatile("mov.b64 %0, %0;" : "+l"(pointer));
  return pointer;
}

__device__ inline void store_float(unsigned address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ inline void store_half(unsigned address, unsigned short value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
__device__ inline float load_float(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ inline uint4 load_word(unsigned address) {
  uint4 word;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(address)
               : "memory");
  return word;
}
__device__ inline void store_word(unsigned address, uint4 word) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w)
               : "memory");
}
