// Statistics of rows: the layout of the kernels for samples that are one run of `width` elements. LANES threads share a
// row, each with VECTORS items of it; a block has THREADS / LANES rows at a time. LANES is a power of two or a multiple
// of
// 32. The rows of the next STAGES - 1 rounds are on their way to shared memory while a block computes.

constexpr int kLanes = LANES;
constexpr int kItems = VECTORS;
constexpr int kThreads = THREADS;
constexpr int kRows = kThreads / kLanes;
constexpr int kWarps = kThreads / 32;
constexpr bool kKeepsColumns = kItems * kVector <= 16;  // scale and bias are in registers

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

__device__ inline float dot(const float (&a)[kVector], const float (&b)[kVector]) {
  float sum = a[0] * b[0];
#pragma unroll
  for (int j = 1; j < kVector; ++j) sum = fmaf(a[j], b[j], sum);
  return sum;
}
__device__ inline float sum_of(const float (&values)[kVector]) {
  float sum = values[0];
#pragma unroll
  for (int j = 1; j < kVector; ++j) sum += values[j];
  return sum;
}

// The sums over a row of COUNT values of each thread, in every thread of the row. `turn` counts the calls.
template <int COUNT>
__device__ inline void sum_over_row(float (&values)[COUNT], unsigned turn) {
  constexpr int kInWarp = kLanes < 32 ? kLanes : 32;
#pragma unroll
  for (int distance = 1; distance < kInWarp; distance *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += __shfl_xor_sync(~0u, values[i], distance);
  if constexpr (kLanes > 32) {
    constexpr int kWarpsOfRow = kLanes / 32;
    __shared__ float sums[2][kWarps][COUNT];  // other warps may still read those of the call before
    float (&own)[kWarps][COUNT] = sums[turn % 2];
    const int warp = threadIdx.x / 32, first = warp / kWarpsOfRow * kWarpsOfRow;
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) own[warp][i] = values[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      values[i] = 0.f;
#pragma unroll
      for (int w = 0; w < kWarpsOfRow; ++w) values[i] += own[first + w][i];
    }
  }
}

// The rows of ARRAYS arrays that are on their way: for each thread, a ring of its items. A thread reads its own alone.
template <int ARRAYS>
struct Ring {
  unsigned filled = 0, read = 0;  // stages

  // Starts to copy a row; zeros where it does not exist.
  __device__ void copy(const Element* const (&from)[ARRAYS], size_t offset, const Lane& lane, bool exists) {
#pragma unroll
    for (int array = 0; array < ARRAYS; ++array)
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const bool valid = exists && lane.exists[k];
        const Element* const item = from[array] + offset + lane.column(k);
        if constexpr (kItemBytes >= 4) {
          copy_async<kItemBytes>(place(filled, array, k), item, valid);
        } else {
          *reinterpret_cast<Element*>(place(filled, array, k)) = valid ? *item : Element();
        }
      }
    commit_copies();
    filled = filled + 1 == STAGES ? 0 : filled + 1;
  }

  // The items of the oldest row. The next copy overwrites them.
  __device__ void take(Item (&items)[ARRAYS][kItems]) {
    wait_for_copies<STAGES - 1>();
#pragma unroll
    for (int array = 0; array < ARRAYS; ++array)
#pragma unroll
      for (int k = 0; k < kItems; ++k) items[array][k] = *reinterpret_cast<const Item*>(place(read, array, k));
    read = read + 1 == STAGES ? 0 : read + 1;
  }

 private:
  __device__ static unsigned char* place(unsigned stage, int array, int k) {
    return shared_memory() + (((stage * ARRAYS + array) * kItems + k) * kThreads + threadIdx.x) * sizeof(Item);
  }
};

// The elements of scale or bias in the columns of a thread.
__device__ inline void load_columns(const float* from, const Lane& lane, float (&values)[kItems][kVector]) {
  constexpr int kFloats = kVector < 4 ? kVector : 4;
  struct alignas(4 * kFloats) Floats {
    float values[kFloats];
  };
#pragma unroll
  for (int k = 0; k < kItems; ++k)
#pragma unroll
    for (int j = 0; j < kVector; j += kFloats) {
      Floats floats = {};
      if (lane.exists[k]) floats = *reinterpret_cast<const Floats*>(from + lane.column(k) + j);
#pragma unroll
      for (int i = 0; i < kFloats; ++i) values[k][j + i] = floats.values[i];
    }
}
