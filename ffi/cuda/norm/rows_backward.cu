// The backward pass over rows. With z the argument of the activation, g = dy act'(z) and xhat = (x - mean) rstd:
//   dx = rstd (g scale - sum(g scale) / n - xhat sum(g scale xhat) / n)
// and dbias and dscale are the sums of g and g xhat over the rows. A block adds them up over its rows; the last sums
// are over the blocks of a call, COLUMNS columns at a time. THIRD: the array by which z is known, where x is not
// enough: 1 for y, 2 for the residual. RESIDUAL: writes dresidual = g. RESULT: writes dx.

constexpr bool kComputesArgument = ACTIVATION != 0 && THIRD != 1;

// The statistics of a row; zeros if it does not exist. xhat = (x - mean) rstd + shift.
struct OfRow {
  float mean, shift, rstd;

  __device__ void load(const NormRows& a, unsigned row, bool exists) {
    rstd = exists ? a.arrays.given_rstd[row] : 0.f;
    mean = CENTERED && exists ? a.arrays.given_mean[row] : 0.f;
    shift = CENTERED && exists ? -a.arrays.given_mean_low[row] * rstd : 0.f;
  }
};

// The sums of dbias and dscale of one thread for its columns, over the rows of the block, to pairs [width].
__device__ inline void sum_over_rows(const Lane& lane, unsigned width, float (&gradient)[kItems][kVector],
                                     float (&product)[kItems][kVector], float2* to) {
  float2* const sums = reinterpret_cast<float2*>(shared_memory());
  wait_for_copies<0>();
  __syncthreads();  // the rings were read
#pragma unroll
  for (int k = 0; k < kItems; ++k)
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      for (int distance = kLanes; distance < 32; distance *= 2) {
        gradient[k][j] += __shfl_xor_sync(~0u, gradient[k][j], distance);
        product[k][j] += __shfl_xor_sync(~0u, product[k][j], distance);
      }
  constexpr int kLeft = kLanes < 32 ? kWarps : kRows;  // sums of a column
  const int left = kLanes < 32 ? threadIdx.x / 32 : lane.row;
  if (kLanes >= 32 || threadIdx.x % 32 < kLanes)
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!lane.exists[k]) continue;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float2 pair = make_float2(gradient[k][j], product[k][j]);
        if (kLeft == 1) {
          __stcg(to + lane.column(k) + j, pair);
        } else {
          sums[left * width + lane.column(k) + j] = pair;
        }
      }
    }
  if (kLeft == 1) return;
  __syncthreads();
  for (unsigned c = threadIdx.x; c < width; c += kThreads) {
    float2 sum = sums[c];
    for (int row = 1; row < kLeft; ++row) {
      sum.x += sums[row * width + c].x;
      sum.y += sums[row * width + c].y;
    }
    __stcg(to + c, sum);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) norm_rows_backward(const NormRows a) {
  const Lane lane(a.width);
  const unsigned call = blockIdx.x / a.blocks, block = blockIdx.x % a.blocks;
  const float n = static_cast<float>(a.width);
  Team team{a.flags + call * (a.blocks + 1), a.nonce, block, a.blocks, 1};
  if (SUMS && a.blocks > 1) team.begin();
  const unsigned first = call * a.rows, end = first + a.rows, step = a.blocks * kRows;
  constexpr int kArrays = THIRD == 0 ? 2 : 3;
  const Element* from[kArrays] = {static_cast<const Element*>(a.arrays.x), static_cast<const Element*>(a.arrays.dy)};
  if (THIRD) from[kArrays - 1] = static_cast<const Element*>(THIRD == 1 ? a.arrays.y : a.arrays.residual);
  Ring<kArrays> ring;
  unsigned ahead = first + block * kRows + lane.row;
  OfRow next;
  next.load(a, ahead, ahead < end);
  const auto copy = [&] {
    ring.copy(from, static_cast<size_t>(ahead) * a.width, lane, ahead < end);
    ahead += step;
  };
  for (int stage = 1; stage < STAGES; ++stage) copy();
  float scale[kItems][kVector], bias[kItems][kVector];
  load_columns(a.arrays.scale + static_cast<size_t>(call) * a.width, lane, scale);
  if (kComputesArgument) load_columns(a.arrays.bias + static_cast<size_t>(call) * a.width, lane, bias);
  float gradient[kItems][kVector] = {}, product[kItems][kVector] = {};

  unsigned turn = 0;
  for (unsigned start = first + block * kRows; start < end; start += step, ++turn) {
    copy();
    const unsigned row = start + lane.row;
    const bool exists = row < end;
    const OfRow own = next;
    next.load(a, row + step, row + step < end);
    Item items[kArrays][kItems];
    ring.take(items);
    float xhat[kItems][kVector], g[kItems][kVector], sums[2] = {0.f, 0.f};
    // What does not exist has dy = 0, so that g = 0.
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const float mean = lane.exists[k] ? own.mean : 0.f;
      float third[kVector];
      unpack(items[0][k], xhat[k]);
      unpack(items[1][k], g[k]);
#if THIRD
      unpack(items[2][k], third);
#endif
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        xhat[k][j] = fmaf(xhat[k][j] - mean, own.rstd, own.shift);
        float z = 0.f;
        if (kComputesArgument) z = fmaf(xhat[k][j], scale[k][j], bias[k][j]);
        if (THIRD == 1) z = third[j];
        if (THIRD == 2) z += third[j];
        g[k][j] = through_activation(z, g[k][j]);
        gradient[k][j] += g[k][j];
        product[k][j] = fmaf(g[k][j], xhat[k][j], product[k][j]);
      }
      if (RESIDUAL && exists && lane.exists[k])
        store_item(static_cast<Element*>(a.arrays.dresidual) + static_cast<size_t>(row) * a.width + lane.column(k),
                   packed(g[k]), read_again());
#pragma unroll
      for (int j = 0; j < kVector; ++j) g[k][j] *= scale[k][j];
      sums[0] += sum_of(g[k]);
      sums[1] += dot(g[k], xhat[k]);
    }
#if RESULT
    sum_over_row(sums, turn);
    const float level = CENTERED ? -own.rstd * (sums[0] / n) : 0.f, tilt = -own.rstd * (sums[1] / n);
    if (!exists) continue;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!lane.exists[k]) continue;
#pragma unroll
      for (int j = 0; j < kVector; ++j) g[k][j] = fmaf(xhat[k][j], tilt, fmaf(g[k][j], own.rstd, level));
      store_item(static_cast<Element*>(a.arrays.result) + static_cast<size_t>(row) * a.width + lane.column(k),
                 packed(g[k]), read_again());
    }
#endif
  }
#if SUMS
  float2* const partials = reinterpret_cast<float2*>(a.partials) + static_cast<size_t>(call) * a.blocks * a.width;
  sum_over_rows(lane, a.width, gradient, product, partials + static_cast<size_t>(block) * a.width);

  // The sums over the blocks: a block has COLUMNS columns at a time, and each of its threads a column of some blocks.
  constexpr unsigned kColumns = COLUMNS, kShares = kThreads / kColumns;
  const unsigned parts = (a.width + kColumns - 1) / kColumns, waiting = min(parts, a.blocks);
  if (a.blocks > 1) team.announce(0);
  if (block >= waiting) return;
  if (a.blocks > 1) team.wait(0);
  __syncthreads();
  __shared__ float2 totals[kWarps][kColumns];
  const unsigned warp = threadIdx.x / 32;
  for (unsigned part = block; part < parts; part += waiting) {
    const unsigned column = part * kColumns + threadIdx.x % kColumns;
    float2 total = make_float2(0.f, 0.f);
    if (column < a.width)
#pragma unroll 8
      for (unsigned r = threadIdx.x / kColumns; r < a.blocks; r += kShares) {
        const float2 other = __ldcg(partials + static_cast<size_t>(r) * a.width + column);
        total.x += other.x;
        total.y += other.y;
      }
#pragma unroll
    for (int distance = kColumns; distance < 32; distance *= 2) {
      total.x += __shfl_xor_sync(~0u, total.x, distance);
      total.y += __shfl_xor_sync(~0u, total.y, distance);
    }
    if (threadIdx.x % 32 < kColumns) totals[warp][threadIdx.x % 32] = total;
    __syncthreads();
    if (threadIdx.x < kColumns && column < a.width) {
      for (int w = 1; w < kWarps; ++w) {
        total.x += totals[w][threadIdx.x].x;
        total.y += totals[w][threadIdx.x].y;
      }
      const size_t at = static_cast<size_t>(call) * a.width + column;
      if (a.arrays.dbias != nullptr) a.arrays.dbias[at] = total.x;
      if (a.arrays.dscale != nullptr) a.arrays.dscale[at] = total.y;
    }
    __syncthreads();
  }
  if (a.blocks > 1) team.end(waiting);
#endif
}
