// Shared by the kernels of single blocks, forward and backward. A block computes kRows rows of a problem: its registers
// hold all recurrent weights, so that no state leaves the multiprocessor, and it multiplies in float32. Some threads
// multiply. Each of the others has one unit of one row: it adds the sums up to gates and stores what the next products
// multiply, while those that multiply wait; then it stores results and loads inputs, while they multiply.

constexpr int kMultiplying = gru_block_multiplying(kPadded);  // threads, which come first
constexpr int kSumsStride = gru_block_sums_stride(kPadded);   // of rows

// Barriers of both kinds of threads: the operands of products, and their sums, are in shared memory.
enum { kOperandsReady = 1, kSumsReady = 2 };

__device__ inline int row_in_block() { return (threadIdx.x - kMultiplying) / kPadded; }
__device__ inline int unit_in_block() { return (threadIdx.x - kMultiplying) % kPadded; }

// Sums of SETS sets of SIZE values over lanes whose numbers differ in BIT and lower bits. With each bit, lanes give one
// half of the sets away and keep the other, those with the bit set the second. Once there is one set, all keep it.
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
