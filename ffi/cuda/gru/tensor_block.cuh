// Shared by the kernels of single blocks that multiply on tensor cores, forward and backward. A block computes all
// hidden units of kRows rows of a problem, and holds all recurrent weights, so that no state leaves the multiprocessor.
// Every warp multiplies for 16 units: it writes the sums to shared memory, where the threads that compute the gates of
// these units and rows read them; they write the next operands there.

static_assert(kPlanes == 1, "");
constexpr int kRowBytes = gru_tensor_block_row_bytes(MODE, kPadded);  // of operands
constexpr int kStride = gru_tensor_block_stride(kPadded);             // of rows of sums
constexpr int kWords = kPadded * kBytes / 64;                         // 16-byte words of a row that one lane reads
constexpr int kOperandArrays = BACKWARD ? 3 : 1, kSumArrays = BACKWARD ? 1 : 3;  // of gates, or for all gates
constexpr int kOperandBytes = kRows * kRowBytes, kSumBytes = kRows * kStride * 4;
// Blocks on a multiprocessor, where registers suffice. In TF32 with 96 hidden units, two would spill some.
constexpr int kResident = kPadded < 96 || (kPadded == 96 && MODE == 0) ? 2 : 1;
constexpr int kKeptGates = gru_tensor_block_kept_gates(MODE, kPadded, BACKWARD, LINEAR);

// Shared memory: operands, sums, weights.
constexpr int kSums = kOperandArrays * kOperandBytes, kOtherWeights = kSums + kSumArrays * kSumBytes;
static_assert(kOtherWeights + (3 - kKeptGates) * kPadded * kPadded * kBytes ==
                  gru_tensor_block_shared_bytes(MODE, kPadded, kRows, BACKWARD, LINEAR),
              "");

__device__ inline int unit_of_thread() { return threadIdx.x % kPadded; }
__device__ inline int row_of_thread() { return threadIdx.x / kPadded; }  // the first of its rows

// The weights of a lane for the units of its warp: operands a of the products with both halves of each word.
struct Weights {
  uint32 at[kKeptGates][kWords][2][kPlanes][4];
  unsigned others;  // in shared memory, where only this thread reads them

  __device__ Weights(const GruArguments& p, const Place& place, unsigned shared)
      : others(kept(shared + kOtherWeights + threadIdx.x * 16)) {
    const int H = hidden_of(p), warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const T* const r = static_cast<const T*>(p.r) + static_cast<long long>(place.problem) * 3 * H * H;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        uint32 halves[2][kPlanes][4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int unit = warp * 16 + g + row * 8, term = (word * 4 + c) * kWordTerms;
          const T* const from = r + gate * H * H + (BACKWARD ? term * H + unit : unit * H + term);
          const WordWeights loaded(from, BACKWARD ? H : 1, unit < H ? H - term : 0);
#pragma unroll
          for (int i = 0; i < 4; ++i) halves[i / 2][0][row + i % 2 * 2] = loaded.at[0][i];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32(&a)[4] = halves[half][0];
          if (gate >= kKeptGates) {
            store_word(address_of(gate, word, half), make_uint4(a[0], a[1], a[2], a[3]));
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) at[gate < kKeptGates ? gate : 0][word][half][0][i] = a[i];
          }
        }
      }
  }

  __device__ unsigned address_of(int gate, int word, int half) const {
    return others + (((gate - kKeptGates) * kWords + word) * 2 + half) * kThreads * 16;
  }

  __device__ void multiply(Products<1>& sums, int gate, int word, int half, const uint32 (&b)[kPlanes][2]) const {
    if (gate < kKeptGates) {
      sums.add(at[gate < kKeptGates ? gate : 0][word][half], b, 0);
    } else {
      const uint4 loaded = load_word(address_of(gate, word, half));
      const uint32 a[kPlanes][4] = {{loaded.x, loaded.y, loaded.z, loaded.w}};
      sums.add(a, b, 0);
    }
  }
};

// Products of some gates, of the operands of all rows, for the units of the warp. Forward, the gates have one operand
// and a sum each; backward, an operand each, and one sum.
template <int FIRST, int GATES>
__device__ inline void multiply(const Weights& weights, unsigned shared) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const unsigned from = shared + g * kRowBytes + c * 16;
  Products<1> sums[GATES][ROW_TILES];
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    uint4 words[ROW_TILES];
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate) {
      if (BACKWARD || gate == 0) {
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
          words[tile] =
              load_word(from + (BACKWARD ? FIRST + gate : 0) * kOperandBytes + tile * kTile * kRowBytes + word * 64);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
          const uint4& w = words[tile];
          const uint32 b[kPlanes][2] = {{half == 0 ? w.x : w.z, half == 0 ? w.y : w.w}};
          weights.multiply(sums[gate][tile], FIRST + gate, word, half, b);
        }
    }
  }
  // Element j of a sum: unit g or g + 8 of the warp, row 2 c or 2 c + 1 of the tile.
  const unsigned to = shared + kSums + (2 * c * kStride + warp * 16 + g) * 4;
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned place = to + ((tile * kTile + (j & 1)) * kStride + (j >> 1) * 8) * 4;
      float sum = 0;
#pragma unroll
      for (int gate = 0; gate < GATES; ++gate) {
        if (!BACKWARD) store_float(place + (FIRST + gate) * kSumBytes, sums[gate][tile].sum(j));
        sum = gate == 0 ? sums[gate][tile].sum(j) : sum + sums[gate][tile].sum(j);
      }
      if (BACKWARD) store_float(place, sum);
    }
}

// Which rows of the block are reset in a step. Each lane loads the flag of one row, and then its warp shares the flags:
// those that are being loaded take one register of a thread, instead of one for each of its rows.
class Resets {
  static_assert(kRows <= 32, "");
  const bool loads_;
  const int stride_;  // of a step
  const unsigned char* from_;

 public:
  // The first step is at `time`, the next one at `time + towards`.
  __device__ Resets(const GruArguments& p, const Place& place, int time, int towards)
      : loads_(RESETS && lane() < kRows && place.first_row + lane() < p.rows),
        stride_(towards * p.rows),
        from_(p.reset + (static_cast<long long>(place.group) * p.steps + time) * p.rows + place.first_row + lane()) {}

  // The flag of the lane. Not shared yet, so that nothing waits for the load.
  __device__ unsigned char load() const { return loads_ ? *from_ : static_cast<unsigned char>(0); }
  __device__ void move() { from_ += stride_; }

  // The rows that are reset: bit 0 is the first row of the thread. All threads of a warp call it.
  __device__ static uint32 shared(unsigned char flag) {
    return RESETS ? __ballot_sync(~0u, flag != 0) >> row_of_thread() : 0;
  }
  __device__ static bool is_set(uint32 rows, int item) { return RESETS && (rows >> item * kItemRows & 1) != 0; }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
};

// Items whose gates a thread computes beside each other, so that their instructions do not wait for each other.
constexpr int kAtOnce = kItems < 4 ? kItems : 4;
static_assert(kItems % kAtOnce == 0, "");

// The operands of the items of a thread, in shared memory, and their sums.
struct Items {
  unsigned operands, sums;

  __device__ explicit Items(unsigned shared)
      : operands(kept(shared + row_of_thread() * kRowBytes + unit_of_thread() * kBytes)),
        sums(kept(shared + kSums + (row_of_thread() * kStride + unit_of_thread()) * 4)) {}

  __device__ void store(int i, float value, int array = 0) const {
    store_operand<0>(operands + array * kOperandBytes + i * kItemRows * kRowBytes, value);
  }

  // Of kAtOnce items, from some arrays.
  template <int ARRAYS>
  __device__ void load_sums(int first, int first_array, float (&values)[ARRAYS][kAtOnce]) const {
#pragma unroll
    for (int array = 0; array < ARRAYS; ++array)
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        values[array][k] = load_float(sums + (first_array + array) * kSumBytes + (first + k) * kItemRows * kStride * 4);
  }
};
