// Shared by the kernels of the GRU.

// The hidden units of a call. Where they fill the blocks, the compiler knows their number, and addresses have constant
// offsets.
__device__ inline int hidden_of(const GruArguments& p) { return FILLED ? kPadded : p.hidden; }

// The gate as it is saved where pre-activations are clipped: +2 or -2 if this one was.
__device__ inline float marked(float gate, float before, float clip) {
  return before >= clip ? 2.f : before <= -clip ? -2.f : gate;
}

__device__ inline float within(float before, float clip) { return CLIP ? bounded(before, clip) : before; }

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

// Steps between the prefetch of an array to the L2 cache and its use. Blocks on tensor cores take longer for a step, in
// which all of them load so much that the cache does not hold it for many steps.
constexpr int kAhead = UNITS == HIDDEN ? 3 : 10;
