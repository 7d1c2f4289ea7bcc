// The forward pass over columns. SUMS: computes the statistics; otherwise they are given. RESULT: writes
// y = act((x - mean) rstd scale + bias + residual).

enum ChannelValue { kShift, kDeviation, kSquare, kScale, kBias, kMean, kSlope, kOffset };

// y = (x - mean) slope + offset, from the statistics of a channel and its scale and bias.
__device__ inline void set_affine(const NormColumns& a, const Scratch& scratch, unsigned c, float mean, float rest,
                                  float rstd, float scale, float bias) {
  const float slope = __fmul_rn(scale, rstd), correction = rest * slope;
  scratch.of(a, kMean)[c] = mean;
  scratch.of(a, kSlope)[c] = slope;
  scratch.of(a, kOffset)[c] = bias - (is_finite(correction) ? correction : 0.f);
}

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

struct GroupStatistics {
  float mean, rest, rstd;  // mean + rest has twice the digits
};

// The statistics of a group of the problem: its mean is shift + mean.
__device__ inline GroupStatistics finish_group(const NormColumns& a, const Place& place, unsigned group, float shift,
                                               float mean, float var, bool writes) {
  const float sum = __fadd_rn(shift, mean), rest = is_finite(sum) ? mean - (sum - shift) : 0.f;
  const GroupStatistics found{sum, rest, rsqrtf(var + a.epsilon)};
  const unsigned index = place.sample * a.groups + quotient(place.channel, a.group) + group;
  if (writes && place.channel + group * a.group.value < a.channels) {
    if (CENTERED) {
      a.arrays.mean[index] = found.mean;
      a.arrays.mean_low[index] = found.rest;
    }
    a.arrays.var[index] = var;
    a.arrays.rstd[index] = found.rstd;
  }
  return found;
}

// From the sums of a channel: what set_affine() sets, or, where groups have several channels, what finish_groups()
// needs.
__device__ inline void finish_channel(const NormColumns& a, const Place& place, const Scratch& scratch, unsigned c,
                                      float total, float total_of_squares, bool writes) {
  const float* const shift = scratch.of(a, kShift);
  const float mean = CENTERED ? total / a.count : 0.f, square = total_of_squares / a.count;
  const float var = CENTERED ? variance(square, mean) : square;
  if (a.group.value == 1) {
    const GroupStatistics found = finish_group(a, place, c, shift[c], mean, var, writes);
    set_affine(a, scratch, c, found.mean, found.rest, found.rstd, scratch.of(a, kScale)[c], scratch.of(a, kBias)[c]);
  } else {
    const float deviation = (shift[c] - shift[quotient(c, a.group) * a.group.value]) + mean;
    scratch.of(a, kDeviation)[c] = deviation;
    scratch.of(a, kSquare)[c] = var + deviation * deviation;
  }
}

__device__ inline void finish_groups(const NormColumns& a, const Place& place, const Scratch& scratch, bool writes) {
  const float *const deviation = scratch.of(a, kDeviation), *const square = scratch.of(a, kSquare);
  const float* const shift = scratch.of(a, kShift);
  const float channels = static_cast<float>(a.group.value);
  GroupStatistics* const found = reinterpret_cast<GroupStatistics*>(scratch.sums);
  sum_over_groups(
      a, [&](unsigned c) { return make_float2(deviation[c], square[c]); },
      [&](unsigned group, float2 sums) {
        const float mean = sums.x / channels, var = variance(sums.y / channels, mean);
        found[group] = finish_group(a, place, group, shift[group * a.group.value], mean, var, writes);
      });
  __syncthreads();
  for (unsigned c = threadIdx.x; c < a.width; c += kThreads) {
    const GroupStatistics own = found[quotient(c, a.group)];
    set_affine(a, scratch, c, own.mean, own.rest, own.rstd, scratch.of(a, kScale)[c], scratch.of(a, kBias)[c]);
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

__device__ inline void load_held(const NormColumns& a, const Place& place, const Element* x, uint64 policy,
                                 Item (&held)[kHeld]) {
#pragma unroll
  for (int u = 0; u < kHeld; ++u) held[u] = u < place.items ? load_item(x + place.item(a, u), policy) : zero_item();
}

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
    const unsigned row_of_scale = place.sample / a.samples * a.channels + place.channel;
#if SUMS
#if STORES || REREADS
    if (problem == first_problem) prefetch(a, part, place, x, kHeld < kept ? kHeld : 0, kHeld < kept ? kHeld + 8 : 8);
#else
    load_held(a, place, x, once, held);
#endif
    float shift[kSums];
    find_shift(a, place, x, shift);
    if (part.lane == 0 && part.column < part.columns)
#pragma unroll
      for (int j = 0; j < kSums; ++j) scratch.of(a, kShift)[place.own + j] = shift[j];
    Moments moments;
#if STORES
    for (unsigned i = kHeld; i < kept; i += kUnroll) {
      Item batch[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) batch[u] = load_item(x + place.item(a, min(i + u, kept - 1)), once);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (i + u < kept) {
          moments.add(batch[u], shift);
          stored[(i + u - kHeld) * kThreads] = batch[u];
        }
    }
#endif
#if REREADS
    for (unsigned i = kHeld + a.stored; i < place.items; i += kUnroll) {
      Item batch[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) batch[u] = load_item(x + place.item(a, min(i + u, place.items - 1)), again);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (i + u < place.items) moments.add(batch[u], shift);
    }
#endif
#if STORES || REREADS
    load_held(a, place, x, once, held);
#endif
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
      if (u < place.items) moments.add(held[u], shift);

    const bool writes = exchange.team.rank == 0;
    const auto between = [&] {
      for (unsigned c = threadIdx.x; c < a.width; c += kThreads) {
        const bool exists = RESULT && place.channel + c < a.channels;
        scratch.of(a, kScale)[c] = exists ? a.arrays.scale[row_of_scale + c] : 0.f;
        scratch.of(a, kBias)[c] = exists ? a.arrays.bias[row_of_scale + c] : 0.f;
      }
#if RESULT && RESIDUAL
      prefetch(a, part, place, residual, 0, kHeld);
#else
      if (problem + a.teams >= a.problems) return;
      const Place next(a, part, problem + a.teams);
      prefetch(a, part, next, x, next.items > kHeld ? kHeld : 0, next.items > kHeld ? min(kept, kHeld + 18) : kHeld);
#endif
    };
    exchange.sum(problem, part, place, moments.first, moments.second, scratch, between,
                 [&](unsigned c, float total, float total_of_squares) {
                   finish_channel(a, place, scratch, c, total, total_of_squares, writes);
                 });
    if (a.group.value > 1) finish_groups(a, place, scratch, writes);
#else
    for (unsigned c = threadIdx.x; c < a.width; c += kThreads) {
      if (place.channel + c >= a.channels) continue;
      const unsigned index = place.sample * a.groups + quotient(place.channel + c, a.group);
      const float mean = CENTERED ? a.arrays.given_mean[index] : 0.f;
      const float rest = a.arrays.given_mean_low == nullptr ? 0.f : a.arrays.given_mean_low[index];
      set_affine(a, scratch, c, mean, rest, a.arrays.given_rstd[index], a.arrays.scale[row_of_scale + c],
                 a.arrays.bias[row_of_scale + c]);
    }
    __syncthreads();
#endif

#if RESULT
    Affine affine;
    if (place.exists) {
      scratch.load(a, kMean, place, affine.mean);
      scratch.load(a, kSlope, place, affine.slope);
      scratch.load(a, kOffset, place, affine.offset);
    }
    const Item none = zero_item();
    constexpr int kPart = 4;
    const uint64 policy = SUMS && place.items > kHeld + a.stored ? once : again;  // of stores
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
          store_item(y + place.item(a, u + v), affine.of(held[u + v < kHeld ? u + v : 0], added[v]), policy);
    }
    const unsigned reread = kHeld + a.stored;
#else
    const unsigned reread = 0;
#endif
#if REREADS
    for (unsigned r = place.items; r > reread; r -= min(r - reread, static_cast<unsigned>(kUnroll))) {
      Item batch[kUnroll], added[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const unsigned at = place.item(a, r > reread + u ? r - 1 - u : reread);
        batch[u] = load_item(x + at, once);
        added[u] = RESIDUAL ? load_item(residual + at, once) : none;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (r > reread + u) store_item(y + place.item(a, r - 1 - u), affine.of(batch[u], added[u]), policy);
    }
#endif
#if SUMS && STORES
    for (unsigned i = kHeld; i < kept; i += kPart) {
      Item added[kPart];
#pragma unroll
      for (int u = 0; u < kPart; ++u)
        added[u] = RESIDUAL ? load_item(residual + place.item(a, min(i + u, kept - 1)), once) : none;
#pragma unroll
      for (int u = 0; u < kPart; ++u)
        if (i + u < kept)
          store_item(y + place.item(a, i + u), affine.of(stored[(i + u - kHeld) * kThreads], added[u]), policy);
    }
#endif
#endif
    __syncthreads();
  }
#if SUMS
  exchange.end();
#endif
}
