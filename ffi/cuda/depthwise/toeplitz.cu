// The forward pass of a depthwise convolution of 16-bit elements along axes 0 and 2, or its input gradient with
// GRADIENT, by tensor cores. In one channel, 16 neighboring results of 8 rows are a matrix: the sum over the rows k0 of
// the window of
//   results[16, 8] += weights_k0[16, inputs] * elements_k0[inputs, 8],
// where column n of elements_k0 is a part of row n + k0 of the input, and weights_k0 is a Toeplitz matrix:
// weights_k0[m, i] = w[k0, i - m], or zero outside of the window. All of its tiles of 8 x 8 consist of NONZERO
// different ones.
//
// The host defines T, GRADIENT, TAPS_LAST, RELU, K0, K2, CC, TILES, BLOCKS and SHARED_BYTES. K0 and K2 are the window,
// both strides and dilations are 1. A block computes CC channels of items: TILES x 16 columns of `length` times 8 rows
// of an image. It walks along axis 0 and copies 8 rows of all channels at a time, which it transposes to a plane for
// each channel in shared memory, a ring of rows. A warp computes one channel after the other. The results of 8 rows
// replace the oldest 8 rows of their plane.
//
// A tensor core multiplies zeros of the Toeplitz matrix by elements that a result does not depend on. If one of these
// is infinite or NaN, the sums are computed without tensor cores.
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int NONZERO = ceil_div(K2 + 7, 8);
constexpr int COLUMNS = 16 * TILES;                 // of results
constexpr int BLOCKS_IN = 2 * TILES + NONZERO - 1;  // of 8 columns of the input
constexpr int IN2 = 8 * BLOCKS_IN;
constexpr int BEFORE = ceil_div(K0 - 1, 8);  // groups of 8 rows before the first results
constexpr int RING = 8 * (BEFORE + 1);       // rows
constexpr int ROW_BYTES = 16 * (BLOCKS_IN | 1), PLANE_BYTES = RING * ROW_BYTES + 16;  // odd multiples, for the banks
constexpr int GROUPS = CC / 8;                                                        // of 8 channels, 16 bytes
constexpr int STAGE_BYTES = 8 * IN2 * CC * 2;
// The weights of a row of the window with zeros around them, w[t] for -8 <= t < 8 NONZERO, and the same from -7 on: a
// pair of neighbors is a word of one of both.
constexpr int PADDED = 8 * NONZERO + 8;
constexpr int TAP_ROW_BYTES = 2 * PADDED * 2;
constexpr int WEIGHT_BYTES = CC * K0 * TAP_ROW_BYTES;
constexpr int UNROLLED = K0 <= 13 ? K0 : 4;
constexpr int PLANES_AT = STAGE_BYTES, WEIGHTS_AT = PLANES_AT + CC * PLANE_BYTES;
constexpr int STARTS_AT = WEIGHTS_AT + WEIGHT_BYTES;  // what the sums of the channels begin with
static_assert(STARTS_AT + CC * 4 == SHARED_BYTES, "");

struct Item {
  int image, row, column;  // the first result
};

__device__ inline Item item_at(int index, const DepthwiseArguments& p) {
  const int strip = index % p.tiles[2], segment = index / p.tiles[2] % p.tiles[0];
  return {index / (p.tiles[2] * p.tiles[0]), segment * p.length * 8, strip * COLUMNS};
}

// The stage has the pixels of 8 rows, each with its groups of channels in another order: without bank conflicts for 8
// neighboring pixels.
__device__ inline unsigned group_offset(int column, int group) {
  constexpr int SHARING = 8 / GROUPS;  // neighboring pixels in 128 bytes
  return (group ^ column / SHARING % GROUPS) * 16;
}
constexpr int PIXEL_BYTES = GROUPS * 16;

// Copies rows of one item after the other from the input to the stage.
struct Copier {
  static constexpr int SLOTS = IN2 * GROUPS;                                              // 16-byte pieces of a row
  static constexpr int PARTS = SLOTS <= 64 ? 4 : SLOTS <= 128 ? 2 : 1, EACH = 8 / PARTS;  // of the 8 rows
  static constexpr int PASSES = ceil_div(SLOTS * PARTS, THREADS);
  static_assert(PARTS == 1 || PASSES == 1, "");

  int item, stage, row;
  const T* from;        // the row of the image
  int offsets[PASSES];  // of the elements of a row that this thread copies; negative outside of the array
  unsigned to[PASSES];

  __device__ inline void aim(const T* in, const DepthwiseArguments& p) {
    const Item at = item_at(item, p);
    row = at.row - p.padding[0] + threadIdx.x / SLOTS % PARTS * EACH;
    const int width = p.in[2] * p.channels;
    from = in + static_cast<long long>(at.image) * p.in[0] * width + static_cast<long long>(row) * width;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int index = pass * THREADS + threadIdx.x, slot = index % SLOTS, column = slot / GROUPS;
      const int i2 = at.column - p.padding[2] + column, channel = blockIdx.x * CC + slot % GROUPS * 8;
      const bool valid = static_cast<unsigned>(i2) < static_cast<unsigned>(p.in[2]) && column < COLUMNS + K2 - 1 &&
                         channel < p.channels;
      offsets[pass] = valid ? i2 * p.channels + channel : -1;
      to[pass] = (index / SLOTS * EACH * IN2 + column) * PIXEL_BYTES + group_offset(column, slot % GROUPS);
    }
  }

  __device__ inline void copy_rows(unsigned char* memory, const T* in, const DepthwiseArguments& p) {
    const int width = p.in[2] * p.channels;
    const T* next = from;
#pragma unroll
    for (int i = 0; i < EACH; ++i, next += width) {
      const bool inside = static_cast<unsigned>(row + i) < static_cast<unsigned>(p.in[0]);
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        if (SLOTS * PARTS % THREADS != 0 && pass * THREADS + threadIdx.x >= SLOTS * PARTS) break;
        const bool valid = inside && offsets[pass] >= 0;
        copy_async<16>(memory + to[pass] + i * IN2 * PIXEL_BYTES, next + (valid ? offsets[pass] : 0), valid);
      }
    }
    row += 8, from += 8 * width;
    if (++stage == p.stages) {
      stage = 0, item += gridDim.y;
      if (item < p.items) aim(in, p);
    }
  }
};

// Transposes the rows of the stage to 8 rows of the planes. Returns whether an element is infinite or NaN.
__device__ inline bool transpose_rows(unsigned shared, int ring_row) {
  constexpr unsigned EXPONENT = ELEMENT_IS_BFLOAT16 ? 0x7f80 : 0x7c00;
  // A warp takes two rows of every other block of 8 pixels. Two groups of channels at once are four matrices.
  const int lane = threadIdx.x % 32, rows = threadIdx.x / 32 % 4 * 2, half = threadIdx.x / 128;
  const unsigned from = shared + ((rows + lane / 16) * IN2 + half * 8 + lane % 8) * PIXEL_BYTES;
  const unsigned to =
      shared + PLANES_AT + lane / 4 * PLANE_BYTES + (ring_row + rows) * ROW_BYTES + half * 16 + lane % 4 * 4;
  unsigned largest = 0;
#pragma unroll
  for (int groups = 0; groups < GROUPS; groups += 2) {
    const unsigned own = from + group_offset(lane % 8, groups + lane / 8 % 2);
#pragma unroll
    for (int block = 0; block < BLOCKS_IN; block += 2) {
      if (BLOCKS_IN % 2 != 0 && block == BLOCKS_IN - 1 && half != 0) break;
      unsigned pairs[4];
      load_transposed(pairs, own + block * 8 * PIXEL_BYTES);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_shared(to + (groups + i % 2) * 8 * PLANE_BYTES + i / 2 * ROW_BYTES + block * 16, pairs[i]);
        largest = larger_halves(largest, pairs[i] & 0x7fff7fff);
      }
    }
  }
  return (largest & 0xffff) >= EXPONENT || largest >> 16 >= EXPONENT;
}

// Computes 8 rows of the results of one channel from the rows of its plane, of which `row` is the first that this
// thread addresses. The addresses are those of this thread: of that row, of the weights, and for the results.
__device__ inline void multiply_channel(unsigned from, int row, unsigned weights, unsigned to, float bias) {
  constexpr int PARTS = TILES <= 2 ? 2 : 1;  // sums that need not wait for each other
  float sums[TILES][PARTS][4];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][part][i] = part == 0 ? bias : 0.f;
#pragma unroll UNROLLED
  for (int k0 = 0; k0 < K0; ++k0) {
    unsigned a[NONZERO + 2];  // a[i]: the tile of weights on diagonal i - 1
    a[0] = a[NONZERO + 1] = 0;
#pragma unroll
    for (int i = 0; i < NONZERO; ++i) a[i + 1] = load_shared(weights + k0 * TAP_ROW_BYTES + i * 16);
    unsigned b[ceil_div(BLOCKS_IN, 4) * 4];
#pragma unroll
    for (int block = 0; block < BLOCKS_IN; block += 4) {
      constexpr int LAST = BLOCKS_IN % 4;
      if (block + 4 <= BLOCKS_IN || LAST == 3) {  // a fourth block may be the next row's, or behind the plane
        load_matrices<4>(b + block, from + block * 16);
      } else {
        load_matrices<LAST == 2 ? 2 : 1>(b + block, from + block * 16);
      }
    }
#pragma unroll
    for (int k = 0; k <= NONZERO; k += 2)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        float (&sum)[4] = sums[tile][k / 2 % PARTS];
        if (k < NONZERO) {
          multiply_add(sum, a[k + 1], a[k], a[k + 2], a[k + 1], b[2 * tile + k], b[2 * tile + k + 1]);
        } else {
          multiply_add(sum, a[k + 1], a[k], b[2 * tile + k]);
        }
      }
    from += ROW_BYTES;
    if (++row == RING) row = 0, from -= RING * ROW_BYTES;
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    float total[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[i] = sums[tile][0][i] + (PARTS == 2 ? sums[tile][PARTS - 1][i] : 0.f);
      if (RELU) total[i] = total[i] < 0 ? 0.f : total[i];  // keeps NaN
    }
    store_transposed(to + tile * 32, pack(total[0], total[1]), pack(total[2], total[3]));
  }
}

// The same without products by zeros. `oldest` is the first row of the results.
__device__ __noinline__ void add_channel(unsigned char* plane, const unsigned char* weights, float bias, int oldest) {
  constexpr int EACH = ceil_div(COLUMNS, 32);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = 0; row < 8; ++row) {
    float sums[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) sums[i] = bias;
#pragma unroll 1
    for (int k0 = 0; k0 < K0; ++k0) {
      const T* const elements = reinterpret_cast<const T*>(plane + (oldest + row + k0) % RING * ROW_BYTES);
      const T* const taps = reinterpret_cast<const T*>(weights + k0 * TAP_ROW_BYTES) + 8;
#pragma unroll 8
      for (int k2 = 0; k2 < K2; ++k2)
#pragma unroll
        for (int i = 0; i < EACH; ++i)
          if (i * 32 + lane < COLUMNS) sums[i] += widen(taps[k2]) * widen(elements[i * 32 + lane + k2]);
    }
    __syncwarp();  // all have read this row of the input, which no later row of the results depends on
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      T* const result = reinterpret_cast<T*>(plane + (oldest + row) * ROW_BYTES) + i * 32 + lane;
      if (i * 32 + lane < COLUMNS) narrow(RELU && sums[i] < 0 ? 0.f : sums[i], result);  // keeps NaN
    }
  }
}

// Writes 8 rows of results from the planes. A warp takes 8 columns of two groups of channels; several warps share their
// rows if there are fewer of these.
__device__ inline void write_rows(T* out, unsigned shared, const Item& item, int first_row, int oldest,
                                  const DepthwiseArguments& p) {
  constexpr int PIECES = TILES * GROUPS, PARTS = PIECES >= 8 ? 1 : 8 / PIECES, EACH = 8 / PARTS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp % PARTS * EACH;
  const bool is_odd = lane % 2 != 0;
  const int width = p.out[2] * p.channels;
#pragma unroll 1
  for (int piece = warp / PARTS; piece < PIECES; piece += WARPS / PARTS) {
    const int groups = piece % (GROUPS / 2) * 2, block = piece / (GROUPS / 2);
    const int i2 = item.column + block * 8 + lane / 4;
    const int channel = blockIdx.x * CC + groups * 8 + (is_odd ? 6 + lane % 4 * 2 : lane % 4 * 2);
    const int rows = i2 < p.out[2] && channel < p.channels ? p.out[0] - first_row : 0;  // to write
    T* to =
        out + (static_cast<long long>(item.image) * p.out[0] + first_row + first) * width + i2 * p.channels + channel;
    const unsigned from = shared + PLANES_AT + (groups * 8 + lane % 16) * PLANE_BYTES +
                          (oldest + first + lane / 16) * ROW_BYTES + block * 16;
#pragma unroll
    for (int row = 0; row < EACH; row += 2) {
      unsigned pairs[4];  // of two channels of a pixel: of both groups in a row, then in the next one
      load_transposed(pairs, from + row * ROW_BYTES);
#pragma unroll
      for (int i = 0; i < 2; ++i, to += width) {
        const unsigned given = of_neighbor(is_odd ? pairs[2 * i] : pairs[2 * i + 1]);
        const unsigned words[2] = {is_odd ? given : pairs[2 * i], is_odd ? pairs[2 * i + 1] : given};
        store_if(first + row + i < rows, to, words);
      }
    }
  }
}

// w: [K0, K2, C], or [C, K0, K2] with TAPS_LAST. A gradient reverses the window.
__device__ inline void load_weights(unsigned char* to, const T* w, int channels) {
  for (int word = threadIdx.x; word < WEIGHT_BYTES / 4; word += THREADS) reinterpret_cast<unsigned*>(to)[word] = 0;
  __syncthreads();
  constexpr int TAPS = K0 * K2;
#pragma unroll 8
  for (int index = threadIdx.x; index < TAPS * CC; index += THREADS) {
    const int own = TAPS_LAST ? index / TAPS : index % CC, tap = TAPS_LAST ? index % TAPS : index / CC;
    const int channel = blockIdx.x * CC + own, used = GRADIENT ? TAPS - 1 - tap : tap;
    if (channel >= channels) continue;
    const T weight = w[TAPS_LAST ? channel * TAPS + tap : tap * channels + channel];
    T* const row = reinterpret_cast<T*>(to + (own * K0 + used / K2) * TAP_ROW_BYTES);
    row[8 + used % K2] = row[PADDED + 7 + used % K2] = weight;
  }
}

// The grid is (chunks of CC channels, blocks that share the items). bias: [C] or null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_convolution(const T* __restrict__ in, const T* __restrict__ w, const T* __restrict__ bias,
                          T* __restrict__ out, const DepthwiseArguments p) {
  unsigned char* const memory = shared_memory();
  const unsigned shared = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Copier copier;
  copier.item = blockIdx.y, copier.stage = 0;
  if (copier.item < p.items) copier.aim(in, p), copier.copy_rows(memory, in, p);
  commit_copies();
  load_weights(memory + WEIGHTS_AT, w, p.channels);
  float* const starts = reinterpret_cast<float*>(memory + STARTS_AT);
  for (int own = threadIdx.x; own < CC; own += THREADS) {
    const int channel = blockIdx.x * CC + own;
    starts[own] = bias != nullptr && channel < p.channels ? widen(bias[channel]) : 0.f;
  }
  // The pair of weights t and t + 1 with t = 2 (lane % 4) - lane / 4 on the first diagonal.
  const int t = lane % 4 * 2 - lane / 4;
  const unsigned weights = shared + WEIGHTS_AT + (t % 2 == 0 ? t + 8 : PADDED + t + 7) * 2;
  const unsigned planes = shared + PLANES_AT + lane % 8 * ROW_BYTES;

#pragma unroll 1
  for (int index = blockIdx.y; index < p.items; index += gridDim.y) {
    const Item item = item_at(index, p);
    int finite = BEFORE + 1;  // groups of 8 rows since the last one with an element that is not finite
    int ring_row = 0;
#pragma unroll 1
    for (int stage = 0; stage < p.stages; ++stage) {
      wait_for_copies<0>();
      __syncthreads();  // the stage is there, and the oldest rows of the planes are written to the output
      const bool found = any_thread(transpose_rows(shared, ring_row));
      if (copier.item < p.items) copier.copy_rows(memory, in, p);
      commit_copies();
      finite = found ? 0 : finite + 1;
      ring_row = ring_row + 8 == RING ? 0 : ring_row + 8;  // of the oldest rows
      if (stage < BEFORE) continue;
#pragma unroll 1
      for (int own = warp; own < CC; own += WARPS) {
        const float start = starts[own];
        if (finite > BEFORE) {
          const unsigned plane = planes + own * PLANE_BYTES + ring_row * ROW_BYTES;
          multiply_channel(plane + lane / 8 * 16, ring_row + lane % 8, weights + own * K0 * TAP_ROW_BYTES,
                           plane + lane / 8 % 2 * 16, start);
        } else {
          add_channel(memory + PLANES_AT + own * PLANE_BYTES, memory + WEIGHTS_AT + own * K0 * TAP_ROW_BYTES, start,
                      ring_row);
        }
      }
      __syncthreads();
      write_rows(out, shared, item, item.row + (stage - BEFORE) * 8, ring_row, p);
    }
  }
}
