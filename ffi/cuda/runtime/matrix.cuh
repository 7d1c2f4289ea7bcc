// Device functions for products of small matrices by tensor cores, and for the matrices' way from and to shared memory.
// All 32 threads of a warp call them together. A matrix of 8 x 8 elements of 16 bits has a register in each thread:
// thread l has elements 2 (l % 4) and the next one of row l / 4.

__device__ inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

__device__ inline unsigned load_shared(unsigned address) {
  unsigned word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ inline void store_shared(unsigned address, unsigned word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// Loads COUNT matrices. Threads 8 i to 8 i + 7 give the addresses of the rows of matrix i, of 16 bytes each.
template <int COUNT>
__device__ inline void load_matrices(unsigned* to, unsigned row) {
  if constexpr (COUNT == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(row) : "memory");
  } else if constexpr (COUNT == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(row)
                 : "memory");
  } else {
    static_assert(COUNT == 4);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
  }
}

// Loads four matrices transposed: thread l has rows 2 (l % 4) and the next one of column l / 4.
__device__ inline void load_transposed(unsigned (&to)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// Stores two matrices transposed: the address of thread 8 i + j is that of column j of matrix i.
__device__ inline void store_transposed(unsigned column, unsigned first, unsigned second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(column), "r"(first), "r"(second)
               : "memory");
}

// sums += a b for a of 16 x 8 or 16 x 16 elements, b of 8 or 16 rows and 8 columns. The matrices of a are those of rows
// 0 to 7 and 8 to 15 with the first 8 terms, then with the next 8; those of b are transposed. Thread l has the sums of
// row l / 4 and columns 2 (l % 4) and the next one, then those of row l / 4 + 8.
__device__ inline void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned b) {
#if ELEMENT_IS_BFLOAT16
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
#endif
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(b));
}
__device__ inline void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
#if ELEMENT_IS_BFLOAT16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The larger of each of two unsigned numbers of 16 bits.
__device__ inline unsigned larger_halves(unsigned a, unsigned b) {
  unsigned larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// The value of thread l ^ 1.
__device__ inline unsigned of_neighbor(unsigned value) { return __shfl_xor_sync(~0u, value, 1); }

// A barrier of all threads of the block. Returns whether any of them gives true.
__device__ inline bool any_thread(bool value) { return __syncthreads_or(value) != 0; }
