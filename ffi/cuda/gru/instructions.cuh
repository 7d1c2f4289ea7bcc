// Instructions that C++ has no name for.

__device__ inline float approximate_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A pre-activation within [-clip, clip]; NaN stays NaN.
__device__ inline float bounded(float before, float clip) {
  float within;
  asm("{ .reg .f32 low;\n max.NaN.f32 low, %1, %2;\n min.NaN.f32 %0, low, %3; }"
      : "=f"(within)
      : "f"(before), "f"(-clip), "f"(clip));
  return within;
}

__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Barriers of all threads of the block where some only arrive. A thread that waits sees what others stored before they
// arrived or waited.
template <int BARRIER, int THREADS>
__device__ inline void arrive_at() {
  asm volatile("bar.arrive %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}
template <int BARRIER, int THREADS>
__device__ inline void wait_at() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

// Changes the registers of each thread of four warps, from those that the kernel was launched with.
template <int COUNT>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Operands and sums of the products of tensor cores.

// Two operands of a product of 16-bit numbers, in one register.
__device__ inline unsigned pack(float low, float high) {
  unsigned packed;
#if MODE == 2 || ELEMENT_IS_BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

__device__ inline unsigned as_tf32(float x) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

struct Sums {
  float at[4];
};

// The sums of a tile of 16 x 8: += a b, for 16 (16-bit) or 8 (TF32) terms.
__device__ inline void multiply_add(Sums& sums, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  float (&d)[4] = sums.at;
#if MODE == 1
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#elif MODE == 2 || ELEMENT_IS_BFLOAT16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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
