// The weight gradient of a depthwise convolution:
//   dw[kh, kw, c] = sum over n, i, j of dy[n, i, j, c] * x[n, i SH - PH + kh DH, j SW - PW + kw DW, c].
// With three spatial dimensions, n counts the planes of dy, and the blocks of tap kz of the first dimension read plane
// z SZ - PZ + kz DZ of x for plane z of dy.
// The host defines the names in capitals: the window, strides, dilation and tile, PLANES_ALIKE with two spatial
// dimensions, WHOLE_TILES if no tile has fewer than TN planes, WHOLE_BLOCKS if no block has fewer than CC channels. The
// sizes of the arrays are arguments, so that many calls share a kernel. A block computes CC channels for its share of
// the tiles of dy, which have TN planes, TH rows and TW columns, while the copies of the next STAGES - 1 tiles are in
// flight. A thread has one channel and SUB_H x SUB_W elements of a tile; neighboring threads have neighboring channels.
// It keeps KG x KW sums in registers, one per tap of the window. GROUPS threads share the rows of the window. Elements
// of a tile outside of dy are zeros, so an infinity or NaN in x may reach more taps of its channel than in exact
// arithmetic.
constexpr int XH = (TH - 1) * SH + (GROUPS * KG - 1) * DH + 1;  // rows and columns of x of a tile
constexpr int XW = (TW - 1) * SW + (KW - 1) * DW + 1;
constexpr int X_PIXELS = TN * XH * XW, DY_PIXELS = TN * TH * TW;
constexpr int SUBS_H = TH / SUB_H, SUBS_W = TW / SUB_W, SUBS = TN * SUBS_H * SUBS_W;
constexpr int THREADS = SUBS * GROUPS * CC;
constexpr int TAPS = KH * KW, OWN_TAPS = GROUPS * KG * KW;
constexpr int STAGE = (X_PIXELS + DY_PIXELS) * CC;  // elements

// The place of a tile among the tiles.
struct Tile {
  int plane, row, column;

  __device__ inline Tile(int index, const DepthwiseGradientArguments& p)
      : plane(index / p.columns / p.rows), row(index / p.columns % p.rows), column(index % p.columns) {}

  __device__ inline void advance(const Tile& step, const DepthwiseGradientArguments& p) {
    column += step.column, row += step.row, plane += step.plane;
    if (column >= p.columns) column -= p.columns, ++row;
    if (row >= p.rows) row -= p.rows, ++plane;
  }
};

// The plane of x that is multiplied with a plane of dy; -1 if that is padding.
__device__ inline int plane_of_x(int plane, int kz, const DepthwiseGradientArguments& p) {
  if (PLANES_ALIKE) return plane;
  const int z = plane % p.dy[0] * SZ - p.padding[0] + kz * DZ;
  return static_cast<unsigned>(z) < static_cast<unsigned>(p.x[0]) ? plane / p.dy[0] * p.x[0] + z : -1;
}

// Copies a box of `array`, [planes, *sizes, channels], that starts at row h, column w and channel c, to `box`,
// [TN, ROWS, COLUMNS, CC]. Its planes are planes[], of which -1 stands for zeros. Elements outside of the array are
// zeros. A thread stays in its column, so that a copy costs little more than a comparison.
template <int ROWS, int COLUMNS>
__device__ inline void copy_box(T* box, const T* array, const int (&sizes)[3], int channels, const int (&planes)[TN],
                                int h, int w, int c) {
  constexpr int LANES = COLUMNS * CC / VECTOR, PASSES = (LANES + THREADS - 1) / THREADS;
  constexpr int STEP = PASSES > 1 ? 1 : THREADS / LANES;  // rows that the threads copy at once
  const int first = PASSES > 1 ? 0 : threadIdx.x / LANES, height = sizes[1], width = sizes[2];
  const int pitch = width * channels;
  if (PASSES == 1 && THREADS % LANES != 0 && first >= STEP) return;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int lane = PASSES > 1 ? pass * THREADS + threadIdx.x : threadIdx.x % LANES;
    if (PASSES > 1 && LANES % THREADS != 0 && lane >= LANES) break;
    const int column = w + lane / (CC / VECTOR), channel = c + lane % (CC / VECTOR) * VECTOR;
    const bool inside =
        static_cast<unsigned>(column) < static_cast<unsigned>(width) && (WHOLE_BLOCKS || channel < channels);
    T* const to = box + first * COLUMNS * CC + lane * VECTOR;
#pragma unroll
    for (int n = 0; n < TN; ++n) {
      const T* const from =
          array + ((static_cast<long long>(planes[n]) * height + h + first) * width + column) * channels + channel;
#pragma unroll
      for (int row = 0; row < ROWS; row += STEP) {
        if (ROWS % STEP != 0 && row + first >= ROWS) break;
        const bool valid = inside && static_cast<unsigned>(h + first + row) < static_cast<unsigned>(height) &&
                           ((WHOLE_TILES && PLANES_ALIKE) || planes[n] >= 0);
        copy_async<VECTOR * sizeof(T)>(to + (n * ROWS + row) * COLUMNS * CC, from + static_cast<long long>(row) * pitch,
                                       valid);
      }
    }
  }
}

__device__ inline void copy_tile(T* stage, const T* x, const T* dy, const Tile& tile, int c, int kz,
                                 const DepthwiseGradientArguments& p) {
  int of_x[TN], of_dy[TN];
#pragma unroll
  for (int n = 0; n < TN; ++n) {
    const int plane = tile.plane * TN + n;
    of_dy[n] = WHOLE_TILES || plane < p.planes ? plane : -1;
    of_x[n] = of_dy[n] < 0 ? -1 : plane_of_x(plane, kz, p);
  }
  const int i = tile.row * TH, j = tile.column * TW;  // the first row and column in dy
  copy_box<XH, XW>(stage, x, p.x, p.channels, of_x, i * SH - p.padding[1], j * SW - p.padding[2], c);
  copy_box<TH, TW>(stage + X_PIXELS * CC, dy, p.dy, p.channels, of_dy, i, j, c);
}

// Adds the products of a thread's part of a tile to its taps. All register indices are compile-time constants.
__device__ inline void add_products(float (&sums)[KG][KW], const T* x, const T* dy) {
  float gradients[SUB_H][SUB_W];
#pragma unroll
  for (int i = 0; i < SUB_H; ++i)
#pragma unroll
    for (int j = 0; j < SUB_W; ++j) gradients[i][j] = widen(dy[(i * TW + j) * CC]);
#pragma unroll
  for (int row = 0; row < (SUB_H - 1) * SH + (KG - 1) * DH + 1; ++row) {
    float values[(SUB_W - 1) * SW + (KW - 1) * DW + 1];
#pragma unroll
    for (int column = 0; column < (SUB_W - 1) * SW + (KW - 1) * DW + 1; ++column)
      values[column] = widen(x[(row * XW + column) * CC]);  // the compiler removes unused loads
#pragma unroll
    for (int kh = 0; kh < KG; ++kh) {
      const int i = (row - kh * DH) / SH;
      if (row < kh * DH || (row - kh * DH) % SH != 0 || i >= SUB_H) continue;
#pragma unroll
      for (int j = 0; j < SUB_W; ++j)
#pragma unroll
        for (int kw = 0; kw < KW; ++kw) sums[kh][kw] += gradients[i][j] * values[j * SW + kw * DW];
    }
  }
}

// partial [gridDim.y, KZ, KH, KW, channels]: the sums over the tiles of each block. The grid is (KZ channels / CC,
// shares).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_weight_gradient_partial(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ partial,
                                      const __grid_constant__ DepthwiseGradientArguments p) {
  T* const stages = reinterpret_cast<T*>(shared_memory());
  const int kz = blockIdx.x % KZ, first = blockIdx.x / KZ * CC, c = threadIdx.x % CC, part = threadIdx.x / CC;
  const int group = part % GROUPS, sub = part / GROUPS;
  const int j = sub % SUBS_W * SUB_W, i = sub / SUBS_W % SUBS_H * SUB_H, n = sub / (SUBS_W * SUBS_H);
  const int own_x = ((n * XH + i * SH + group * KG * DH) * XW + j * SW) * CC + c;
  const int own_dy = (X_PIXELS + (n * TH + i) * TW + j) * CC + c;

  float sums[KG][KW];
#pragma unroll
  for (int kh = 0; kh < KG; ++kh)
#pragma unroll
    for (int kw = 0; kw < KW; ++kw) sums[kh][kw] = 0;

  const Tile step(gridDim.y, p);
  Tile next(blockIdx.y, p);  // to be copied
#pragma unroll
  for (int ahead = 0; ahead < STAGES - 1; ++ahead, next.advance(step, p)) {
    const int tile = blockIdx.y + ahead * gridDim.y;
    if (tile < p.tiles) copy_tile(stages + ahead * STAGE, x, dy, next, first, kz, p);
    commit_copies();
  }
  int stage = 0;
#pragma unroll 1
  for (int tile = blockIdx.y; tile < p.tiles; tile += gridDim.y, next.advance(step, p)) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // all threads see the tile, and no thread uses the previous stage
    if (tile + (STAGES - 1) * static_cast<int>(gridDim.y) < p.tiles)
      copy_tile(stages + (stage + STAGES - 1) % STAGES * STAGE, x, dy, next, first, kz, p);
    commit_copies();
    add_products(sums, stages + stage * STAGE + own_x, stages + stage * STAGE + own_dy);
    stage = (stage + 1) % STAGES;
  }

  __syncthreads();
  float* const gathered = reinterpret_cast<float*>(shared_memory());  // [SUBS, GROUPS * KG, KW, CC]
#pragma unroll
  for (int kh = 0; kh < KG; ++kh)
#pragma unroll
    for (int kw = 0; kw < KW; ++kw) gathered[(sub * OWN_TAPS + (group * KG + kh) * KW + kw) * CC + c] = sums[kh][kw];
  __syncthreads();
  for (int index = threadIdx.x; index < TAPS * CC; index += THREADS) {
    float sum = 0;
    for (int other = 0; other < SUBS; ++other) sum += gathered[other * OWN_TAPS * CC + index];
    const int channel = first + index % CC;
    if (WHOLE_BLOCKS || channel < p.channels)
      partial[((blockIdx.y * KZ + kz) * TAPS + index / CC) * p.channels + channel] = sum;
  }
}

// dw [KZ, KH, KW, channels], or [channels, KZ, KH, KW] with TAPS_LAST: the sum of `shares` partial sums, in a fixed
// order.
extern "C" __global__ void __launch_bounds__(32 * SLICES)
    depthwise_weight_gradient_sum(const float* __restrict__ partial, T* __restrict__ dw, int shares, int channels) {
  __shared__ float slices[SLICES][32];
  const int lane = threadIdx.x % 32, slice = threadIdx.x / 32, index = blockIdx.x * 32 + lane;
  const int elements = KZ * TAPS * channels;
  float sum = 0;
  if (index < elements)
    for (int share = slice; share < shares; share += SLICES)
      sum += partial[static_cast<long long>(share) * elements + index];
  slices[slice][lane] = sum;
  __syncthreads();
  if (slice > 0 || index >= elements) return;
  for (int other = 1; other < SLICES; ++other) sum += slices[other][lane];
  narrow(sum, &dw[TAPS_LAST ? index % channels * KZ * TAPS + index / channels : index]);
}
