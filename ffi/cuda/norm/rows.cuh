// Statistics of rows: the layout of the kernels for samples that are one run of `width` elements. LANES threads share a
// row, each with VECTORS items of it; a block has THREADS / LANES rows at a time.

constexpr int kLanes = LANES;
constexpr int kItems = VECTORS;
constexpr int kThreads = THREADS;
constexpr int kRows = kThreads / kLanes;
constexpr int kWarps = kThreads / 32;

// The part of a thread: lane of its row, and the rows of the block that it has.
struct Lane {
  unsigned lane, row;
  bool exists[kItems];

  __device__ explicit Lane(unsigned width) : lane(threadIdx.x % kLanes), row(threadIdx.x / kLanes) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) exists[k] = column(k) < width;
  }
  __device__ unsigned column(int k) const { return (k * kLanes + lane) * kVector; }
};

// The sums over a row of COUNT values of each thread, in every thread of the row.
template <int COUNT>
__device__ inline void sum_over_row(float (&values)[COUNT]) {
  constexpr int kInWarp = kLanes < 32 ? kLanes : 32;
#pragma unroll
  for (int distance = 1; distance < kInWarp; distance *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += __shfl_xor_sync(~0u, values[i], distance);
  if constexpr (kLanes > 32) {
    constexpr int kWarpsOfRow = kLanes / 32;
    __shared__ float sums[kWarps][COUNT];
    const int warp = threadIdx.x / 32, first = warp / kWarpsOfRow * kWarpsOfRow;
    __syncthreads();  // the sums before were read
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) sums[warp][i] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      values[i] = 0.f;
#pragma unroll
      for (int w = 0; w < kWarpsOfRow; ++w) values[i] += sums[first + w][i];
    }
  }
}

// The values of one row for each of the items of a thread; those that do not exist are zero.
__device__ inline void load_row(const Element* from, const Lane& lane, bool exists, uint64 policy,
                                Item (&items)[kItems]) {
#pragma unroll
  for (int k = 0; k < kItems; ++k)
    items[k] = exists && lane.exists[k] ? load_item(from + lane.column(k), policy) : zero_item();
}

// The elements of scale or bias in the columns of a thread.
__device__ inline void load_columns(const float* from, const Lane& lane, float (&values)[kItems][kVector]) {
#pragma unroll
  for (int k = 0; k < kItems; ++k)
#pragma unroll
    for (int j = 0; j < kVector; ++j) values[k][j] = lane.exists[k] ? from[lane.column(k) + j] : 0.f;
}
