// What the kernels of the GRU use of a cluster of blocks: asynchronous stores to the shared memory of its other blocks,
// counted by memory barriers.

// The number of blocks that a multiprocessor must have registers for. Without this bound, the compiler gives a thread
// up to 151 registers in 16-bit types with 256 hidden units, and only one block fits. With 128, two blocks fit, and
// more clusters run at once.
[[maybe_unused]] constexpr int kClusterResident = MODE == kGruHalf ? 2 : 1;

// The address of the same variable in the shared memory of another block of the cluster.
__device__ inline unsigned address_in(unsigned address, unsigned block) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline unsigned block_in_cluster() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier whose phases end when an announced number of bytes has arrived. announce() opens a phase, once for each.
__device__ inline void init_barrier(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void announce(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of a phase. A fault ends in an error instead of a hang.
__device__ inline void wait_for_phase(unsigned barrier, unsigned parity) {
#pragma unroll 1
  for (unsigned waits = 0; waits < 1u << 26; ++waits) {
    unsigned done;
    asm volatile("{ .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    if (done) return;
  }
  asm volatile("trap;");
}

// Stores 16 bytes to the shared memory of a block of the cluster, and counts them at its barrier.
__device__ inline void store_to(unsigned address, unsigned barrier, uint4 word) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w), "r"(barrier)
      : "memory");
}

__device__ inline void store_float_to(unsigned address, unsigned barrier, float value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
