/* Emulates ffi/cuda/gru/instructions.cuh and the intrinsic functions that the GRU's kernels for single blocks call,
   after kernel_emulation.h. */
static float approximate_tanh(float x) { return std::tanh(x); }
static float bounded(float before, float clip) {
  return std::isnan(before) ? before : std::min(std::max(before, -clip), clip);
}
static void prefetch(const void* address) {
  const char* from = static_cast<const char*>(address);
  bool inside = false;
  for (const auto& array : arrays) inside = inside || (from >= array.first && from < array.second);
  if (!inside) fail("a prefetch from outside of the arrays");
}

#define __expf(x) std::exp(float(x)) /* the name is one of glibc */
static float __fdividef(float x, float y) { return x / y; }
struct float2 {
  float x, y;
};

/* The value of another lane of the warp. */
static float __shfl_xor_sync(unsigned, float value, int bits) {
  static std::vector<float> given(1024);
  given[threadIdx.x] = value;
  __syncwarp();
  const float found = given[threadIdx.x ^ bits];
  __syncwarp();
  return found;
}

/* Registers are not emulated. */
template <int>
static void take_registers() {}
template <int>
static void give_registers() {}

/* Barriers where some threads only arrive. */
static std::vector<unsigned> arrivals(16);
template <int BARRIER, int THREADS>
static void arrive_at() {
  ++arrivals[BARRIER];
  __syncwarp();  // lets other threads run: a store that wrongly follows the arrival comes too late for them
}
template <int BARRIER, int THREADS>
static void wait_at() {
  const unsigned all = (arrivals[BARRIER]++ / THREADS + 1) * THREADS;
  for (int turns = 0; arrivals[BARRIER] < all; ++turns) {
    if (turns == 1000) fail("threads wait at a barrier of the block");
    __syncwarp();
  }
}
