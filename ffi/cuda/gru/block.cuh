// Shared by the kernels of single blocks, forward and backward. A block computes kRows rows of a problem. Its registers
// hold all recurrent weights, so that no state leaves the multiprocessor, and it multiplies in float32. The first
// kMultiplying threads compute the recurrent products. Each other thread has one unit of one row: it computes the gates
// and writes the next operand to shared memory while the first threads wait; it stores results and loads inputs while
// they compute.

constexpr int kMultiplying = gru_block_multiplying(kPadded);  // threads, which come first
constexpr int kSumsStride = gru_block_sums_stride(kPadded);   // of rows

// Barriers of both kinds of threads: the operands of products, and their sums, are in shared memory.
enum { kOperandsReady = 1, kSumsReady = 2 };

__device__ inline int row_in_block() { return (threadIdx.x - kMultiplying) / kPadded; }
__device__ inline int unit_in_block() { return (threadIdx.x - kMultiplying) % kPadded; }

// A butterfly reduce-scatter of SETS sets of SIZE values over the lanes whose numbers differ in BIT and lower bits. With
// each bit, a lane keeps one half of its sets, the second if it has the bit. Once there is one set, all keep it.
template <int BIT, int SETS, int SIZE>
__device__ inline void add_over_lanes(float* values) {
  if constexpr (BIT > 0) {
    constexpr int left = SETS > 1 ? SETS / 2 : 1, count = left * SIZE;
    const bool upper = (threadIdx.x & BIT) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      float own = values[i], other = own;
      if (SETS > 1) {
        own = upper ? values[count + i] : values[i];
        other = upper ? values[i] : values[count + i];
      }
      values[i] = own + __shfl_xor_sync(~0u, other, BIT);
    }
    add_over_lanes<BIT / 2, left, SIZE>(values);
  }
}
