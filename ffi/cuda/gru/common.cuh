// Shared by the kernels of the GRU.

__device__ inline float high_part(float x) {
  const uint32 packed = pack(0.f, x);  // bfloat16: the upper half of a float32
  return __uint_as_float(packed & 0xffff0000u);
}

// One register of an operand: two 16-bit elements of a plane, or one in TF32.
__device__ inline uint32 operand_pair(float first, float second, int plane) {
  return plane == 0 ? pack(first, second) : pack(first - high_part(first), second - high_part(second));
}

// The gate as it is saved where pre-activations are clipped: +2 or -2 if this one was.
__device__ inline float marked(float gate, float before, float clip) {
  return before >= clip ? 2.f : before <= -clip ? -2.f : gate;
}

__device__ inline bool is_finite(float clip) { return clip < 3.4e38f; }

// The rows of a problem that some blocks compute together, each for its own units.
struct Place {
  int rank;  // of the block: it owns the hidden units rank * kUnits and the next ones
  int problem, group, direction, first_row;
  bool reversed;

  __device__ Place(const GruArguments& p, int item, int block) : rank(block) {
    problem = item / p.tiles;
    group = problem / p.directions;
    direction = problem % p.directions;
    first_row = item % p.tiles * kRows;
    reversed = p.reversed >> direction & 1;
  }
  __device__ int time(const GruArguments& p, int step) const { return reversed ? p.steps - 1 - step : step; }
};

__device__ inline float element(const void* array, long long index) {
  return widen(static_cast<const T*>(array)[index]);
}

// Weights that are multiplied by the word of 16 bytes that a lane has of a row of states or gradients. Register i
// belongs to product i / 2 of the word, and to the first or second half of its terms, i % 2.
constexpr int kWordTerms = 16 / kBytes;
struct WordWeights {
  uint32 at[kPlanes][4];

  // Loads weights that are `stride` apart. Those after the first `count` are zero.
  __device__ WordWeights(const T* from, int stride, int count) {
    float values[kWordTerms];
    constexpr int per_load = 16 / sizeof(T);
    if (stride == 1 && count >= kWordTerms && reinterpret_cast<unsigned long long>(from) % 16 == 0) {
      alignas(16) T loaded[kWordTerms];
#pragma unroll
      for (int k = 0; k < kWordTerms; k += per_load)
        *reinterpret_cast<uint4*>(loaded + k) = *reinterpret_cast<const uint4*>(from + k);
#pragma unroll
      for (int k = 0; k < kWordTerms; ++k) values[k] = widen(loaded[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kWordTerms; ++k) values[k] = k < count ? widen(from[k * stride]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if MODE == 1
      at[0][i] = as_tf32(values[i]);
#else
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
        at[plane][i] = operand_pair(values[2 * i], values[2 * i + 1], plane);
#endif
    }
  }
};

constexpr int kAhead = 10;  // steps between the prefetch of an array to the L2 cache and its use

__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
