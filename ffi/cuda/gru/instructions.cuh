// Instructions that C++ has no name for.

__device__ inline float approximate_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A pre-activation within [-clip, clip]; NaN stays NaN. No bound is an infinite clip.
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
