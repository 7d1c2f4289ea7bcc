// The forward pass over columns. SUMS: computes the statistics; otherwise they are given. RESULT: writes
// y = act((x - mean) rstd scale + bias + residual).

enum ChannelValue { kTotal, kTotalOfSquares, kShifted, kDeviation, kMean, kSlope, kOffset };

#if SUMS
__device__ inline float variance(float mean_of_squares, float mean) {
  if (is_finite(mean) && isinf(mean_of_squares)) return mean_of_squares;  // both terms may be infinite
  const float found = mean_of_squares - mean * mean;
  return found < 0.f ? 0.f : found;
}

// Sums are of x - shift, which is close to the mean: an element of each channel, the median of three.
__device__ inline void find_shift(const NormColumns& a, const Place& place, const Element* x, float (&shift)[kSums]) {
  float values[kVector] = {};
#if CENTERED
  if (place.exists) {
    const uint64 policy = read_again();
    unpack(median(load_item(x + place.row(a, a.rows / 6), policy), load_item(x + place.row(a, a.rows / 2), policy),
                  load_item(x + place.row(a, a.rows - 1 - a.rows / 6), policy)),
           values);
  }
#endif
#pragma unroll
  for (int j = 0; j < kSums; ++j) shift[j] = is_finite(values[j]) ? values[j] : 0.f;
}

// From the sums of each channel: the mean, of twice the digits, and 1 / standard deviation of its group.
__device__ inline void finish(const NormColumns& a, const Place& place, const Scratch& scratch, bool writes) {
  float *const total = scratch.of(a, kTotal), *const squares = scratch.of(a, kTotalOfSquares);
  float *const shift = scratch.of(a, kShifted), *const deviation = scratch.of(a, kDeviation);
  float *const of_group = scratch.of(a, kMean), *const rstd_of_group = scratch.of(a, kSlope);
  for (unsigned c = threadIdx.x; c < a.width; c += kThreads) {
    const float mean = CENTERED ? total[c] / a.count : 0.f;
    squares[c] = CENTERED ? variance(squares[c] / a.count, mean) : squares[c] / a.count;
    deviation[c] = (shift[c] - shift[c - c % a.group]) + mean;
  }
  __syncthreads();
  if (CENTERED && a.group > 1) {
    sum_over_groups(
        a, [&](unsigned c) { return deviation[c]; },
        [&](unsigned group, float sum) { of_group[group] = sum / a.group; });
    __syncthreads();
    for (unsigned c = threadIdx.x; c < a.width; c += kThreads) {
      const float between = deviation[c] - of_group[c / a.group];
      squares[c] += between * between;
    }
    __syncthreads();
  }
  const auto finish_group = [&](unsigned group, float mean, float var) {
    const float rstd = rsqrtf(var + a.epsilon), first = shift[group * a.group];
    const float sum = __fadd_rn(first, mean), rest = is_finite(sum) ? mean - (sum - first) : 0.f;
    const unsigned index = place.sample * a.groups + place.channel / a.group + group;
    if (writes && place.channel + group * a.group < a.channels) {
      if (CENTERED) {
        a.arrays.mean[index] = sum;
        a.arrays.mean_low[index] = rest;
      }
      a.arrays.var[index] = var;
      a.arrays.rstd[index] = rstd;
    }
    total[group] = sum;
    deviation[group] = rest;
    rstd_of_group[group] = rstd;
  };
  if (a.group == 1) {
    for (unsigned c = threadIdx.x; c < a.width; c += kThreads) finish_group(c, deviation[c], squares[c]);
  } else {
    sum_over_groups(
        a, [&](unsigned c) { return squares[c]; },
        [&](unsigned group, float sum) { finish_group(group, CENTERED ? of_group[group] : 0.f, sum / a.group); });
  }
  __syncthreads();
}
#endif

// The sums of a thread: of x - shift and its square.
struct Moments {
  float first[kSums], second[kSums];

  __device__ Moments() {
#pragma unroll
    for (int j = 0; j < kSums; ++j) first[j] = second[j] = 0.f;
  }
  __device__ void add(const Item& item, const float (&shift)[kSums]) {
    float values[kVector];
    unpack(item, values);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float deviation = CENTERED ? values[j] - shift[j % kSums] : values[j];
      if (CENTERED) first[j % kSums] += deviation;
      second[j % kSums] = fmaf(deviation, deviation, second[j % kSums]);
    }
  }
};

// y of an item: (x - mean) slope + offset.
struct Affine {
  float mean[kSums], slope[kSums], offset[kSums];

  __device__ Item of(const Item& x, const Item& residual) const {
    float values[kVector], added[kVector];
    unpack(x, values);
#if RESIDUAL
    unpack(residual, added);
#endif
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int c = j % kSums;
      float z = fmaf(CENTERED ? values[j] - mean[c] : values[j], slope[c], offset[c]);
      if (RESIDUAL) z += added[j];
      values[j] = activated(z);
    }
    return packed(values);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) norm_columns_forward(const NormColumns a) {
  constexpr int kUnroll = 8;
  const Part part(a, blockIdx.x % a.blocks);
  const Scratch scratch(a, 1);
  const unsigned first_problem = blockIdx.x / a.blocks;
  const Element* const x = static_cast<const Element*>(a.arrays.x);
  const Element* const residual = static_cast<const Element*>(a.arrays.residual);
  Element* const y = static_cast<Element*>(a.arrays.result);
  Item* const stored = reinterpret_cast<Item*>(shared_memory()) + threadIdx.x;
  const uint64 once = read_once(), again = read_again();
#if SUMS
  Exchange exchange(a, first_problem);
#endif

  for (unsigned problem = first_problem; problem < a.problems; problem += a.teams) {
    const Place place(a, part, problem);
    const unsigned kept = min(place.items, kHeld + a.stored);
    Item held[kHeld];
#if SUMS
    float shift[kSums];
    find_shift(a, place, x, shift);
    if (part.lane == 0 && part.column < part.columns)
#pragma unroll
      for (int j = 0; j < kSums; ++j) scratch.of(a, kShifted)[place.own + j] = shift[j];
    Moments moments;
    unsigned i = kHeld;
    for (; i + kUnroll <= kept; i += kUnroll) {
      Item batch[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) batch[u] = load_item(x + place.item(a, i + u), once);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        moments.add(batch[u], shift);
        stored[(i + u - kHeld) * kThreads] = batch[u];
      }
    }
    for (; i < kept; ++i) {
      const Item item = load_item(x + place.item(a, i), once);
      moments.add(item, shift);
      stored[(i - kHeld) * kThreads] = item;
    }
    i = kHeld + a.stored;
    for (; i + kUnroll <= place.items; i += kUnroll) {
      Item batch[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) batch[u] = load_item(x + place.item(a, i + u), again);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) moments.add(batch[u], shift);
    }
    for (; i < place.items; ++i) moments.add(load_item(x + place.item(a, i), again), shift);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      held[u] = zero_item();
      if (u < place.items) held[u] = load_item(x + place.item(a, u), once);
    }
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
      if (u < place.items) moments.add(held[u], shift);

    exchange.sum(problem, part, place, moments.first, moments.second, scratch, kTotal, kTotalOfSquares, [&] {
#if RESULT && RESIDUAL
      prefetch(a, part, place, residual, 0, kHeld);
#else
      if (problem + a.teams >= a.problems) return;
      const Place next(a, part, problem + a.teams);
      prefetch(a, part, next, x, next.items > kHeld ? kHeld : 0, next.items > kHeld ? min(kept, kHeld + 18) : kHeld);
#endif
    });
    finish(a, place, scratch, exchange.team.rank == 0);
#endif

#if RESULT
    Affine affine;
    {
      const float *const mean = scratch.of(a, kTotal), *const rest = scratch.of(a, kDeviation);
      const float* const rstd = scratch.of(a, kSlope);
      const unsigned row = place.sample / a.samples * a.channels;
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        affine.mean[j] = affine.slope[j] = affine.offset[j] = 0.f;
        if (!place.exists) continue;
        const unsigned own = place.own + j, c = place.channel + own, group = own / a.group;
#if SUMS
        affine.mean[j] = mean[group];
        affine.slope[j] = __fmul_rn(a.arrays.scale[row + c], rstd[group]);
        const float correction = CENTERED ? rest[group] * affine.slope[j] : 0.f;
#else
        const unsigned index = place.sample * a.groups + place.channel / a.group + group;
        if (CENTERED) affine.mean[j] = a.arrays.given_mean[index];
        affine.slope[j] = __fmul_rn(a.arrays.scale[row + c], a.arrays.given_rstd[index]);
        const float* const low = a.arrays.given_mean_low;
        const float correction = low == nullptr ? 0.f : low[index] * affine.slope[j];
#endif
        affine.offset[j] = a.arrays.bias[row + c] - (is_finite(correction) ? correction : 0.f);
      }
    }
    const Item none = zero_item();
    constexpr int kPart = 4;
#if SUMS
#pragma unroll
    for (int u = 0; u < kHeld; u += kPart) {
      Item added[kPart];
#pragma unroll
      for (int v = 0; v < kPart; ++v) {
        added[v] = none;
        if (RESIDUAL && u + v < kHeld && u + v < place.items)
          added[v] = load_item(residual + place.item(a, u + v), once);
      }
#pragma unroll
      for (int v = 0; v < kPart; ++v)
        if (u + v < kHeld && u + v < place.items)
          store_item(y + place.item(a, u + v), affine.of(held[u + v < kHeld ? u + v : 0], added[v]));
    }
    const unsigned reread = kHeld + a.stored;
#else
    const unsigned reread = 0;
#endif
    unsigned r = place.items;
    for (; r >= reread + kUnroll; r -= kUnroll) {
      Item batch[kUnroll], added[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        batch[u] = load_item(x + place.item(a, r - 1 - u), once);
        added[u] = RESIDUAL ? load_item(residual + place.item(a, r - 1 - u), once) : none;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) store_item(y + place.item(a, r - 1 - u), affine.of(batch[u], added[u]));
    }
    for (; r > reread; --r)
      store_item(y + place.item(a, r - 1),
                 affine.of(load_item(x + place.item(a, r - 1), once),
                           RESIDUAL ? load_item(residual + place.item(a, r - 1), once) : none));
#if SUMS
    unsigned s = kHeld;
#if RESIDUAL
    for (; s + kUnroll <= kept; s += kUnroll) {
      Item added[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) added[u] = load_item(residual + place.item(a, s + u), once);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        store_item(y + place.item(a, s + u), affine.of(stored[(s + u - kHeld) * kThreads], added[u]));
    }
#endif
#pragma unroll 4
    for (; s < kept; ++s)
      store_item(y + place.item(a, s), affine.of(stored[(s - kHeld) * kThreads],
                                                 RESIDUAL ? load_item(residual + place.item(a, s), once) : none));
#endif
#endif
    __syncthreads();
  }
#if SUMS
  exchange.end();
#endif
}
