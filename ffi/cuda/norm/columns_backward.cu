// The backward pass over columns. With z the argument of the activation, g = dy act'(z) and xhat = (x - mean) rstd:
// dbias and dscale are the sums of g and g xhat, and, over the n elements of a group,
//   dx = rstd (g scale - sum(g scale) / n - xhat sum(g scale xhat) / n) + dmean / n + 2 dvar (x - mean) / n
// FROZEN: the statistics do not depend on x, dx = rstd g scale. RESULT: writes dx. THIRD: the array by which z is
// known, where x is not enough: 1 for y, 2 for the residual. RESIDUAL: writes dresidual = g.

enum ChannelValue { kScaled, kScaledTimes, kRstd, kLow, kScale, kMean, kSlope, kOffset };

constexpr bool kComputesArgument = ACTIVATION != 0 && THIRD != 1;

// The elements of a thread: g from x, dy and the third array, and its sums.
struct Gradient {
  float mean[kSums], slope[kSums], offset[kSums];
  float first[kSums], second[kSums];

  __device__ Item of(const Item& x, const Item& dy, const Item& third, bool adds) {
    float values[kVector], gradients[kVector], thirds[kVector];
    unpack(x, values);
    unpack(dy, gradients);
#if THIRD
    unpack(third, thirds);
#endif
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int c = j % kSums;
      const float deviation = CENTERED ? values[j] - mean[c] : values[j];
      float z = 0.f;
      if (kComputesArgument) z = fmaf(deviation, slope[c], offset[c]);
      if (THIRD == 1) z = thirds[j];
      if (THIRD == 2) z += thirds[j];
      const float g = through_activation(z, gradients[j]);
      if (adds) {
        first[c] += g;
        second[c] = fmaf(g, deviation, second[c]);
      }
      gradients[j] = g;
    }
    return packed(gradients);
  }
};

struct InputGradient {
  float of_gradient[kSums], of_deviation[kSums], constant[kSums];

  __device__ Item of(const Item& x, const Item& g, const float (&mean)[kSums]) const {
    float values[kVector], gradients[kVector];
    unpack(x, values);
    unpack(g, gradients);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int c = j % kSums;
      const float deviation = CENTERED ? values[j] - mean[c] : values[j];
      gradients[j] = FROZEN ? of_gradient[c] * gradients[j]
                            : fmaf(of_gradient[c], gradients[j], fmaf(of_deviation[c], deviation, constant[c]));
    }
    return packed(gradients);
  }
};

// Adds the sums of the samples of a row of scale, after the last sample of it.
__device__ inline void sum_over_samples(const NormColumns& a, const Place& place, unsigned problem,
                                        const Scratch& scratch) {
  uint64* const flags = a.flags + a.teams * (a.blocks + 1);  // of problems
  __syncthreads();
  if (threadIdx.x == 0) set_flag(flags + problem, a.nonce);
  if (place.sample % a.samples != a.samples - 1) return;
  const unsigned first = problem - (a.samples - 1) * a.chunks, call = place.sample / a.samples;
  for (unsigned i = threadIdx.x; i < a.samples; i += kThreads) {
    uint64* const flag = flags + first + i * a.chunks;
    wait_for_flag(flag, a.nonce, 1);
    *flag = 0;
  }
  __syncthreads();
  const float2* const sums =
      reinterpret_cast<const float2*>(a.sums) + static_cast<size_t>(call) * a.samples * a.channels + place.channel;
  const unsigned width = min(a.width, a.channels - place.channel);
  sum_rows(sums, a.samples, a.channels, width, scratch, [&](unsigned c, float gradient, float product) {
    const unsigned index = call * a.channels + place.channel + c;
    if (a.arrays.dbias != nullptr) a.arrays.dbias[index] = gradient;
    if (a.arrays.dscale != nullptr) a.arrays.dscale[index] = product;
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) norm_columns_backward(const NormColumns a) {
  constexpr int kUnroll = 4;
  const Part part(a, blockIdx.x % a.blocks);
  const Scratch scratch(a, 2);
  const unsigned first_problem = blockIdx.x / a.blocks;
  const Element* const x = static_cast<const Element*>(a.arrays.x);
  const Element* const dy = static_cast<const Element*>(a.arrays.dy);
  const Element* const third = static_cast<const Element*>(THIRD == 1 ? a.arrays.y : a.arrays.residual);
  Element* const dx = static_cast<Element*>(a.arrays.result);
  Element* const dresidual = static_cast<Element*>(a.arrays.dresidual);
  Item* const stored = reinterpret_cast<Item*>(shared_memory()) + threadIdx.x;
  const uint64 once = read_once(), again = read_again();
  const bool keeps = RESULT && !FROZEN;
  const unsigned reread = keeps ? kHeld + a.stored : 0;  // the first item that is not kept
#if EXCHANGES
  Exchange exchange(a, first_problem);
#endif

  for (unsigned problem = first_problem; problem < a.problems; problem += a.teams) {
    const Place place(a, part, problem);
    const Item none = zero_item();
    const auto load_third = [&](unsigned i, uint64 policy) {
      return THIRD ? load_item(third + place.item(a, i), policy) : none;
    };
#if RESULT && !FROZEN
    Item held_x[kHeld], held_g[kHeld], held_third[kHeld];
    const auto load_held = [&] {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        held_x[u] = held_g[u] = held_third[u] = none;
        if (u < place.items) {
          held_x[u] = load_item(x + place.item(a, u), once);
          held_g[u] = load_item(dy + place.item(a, u), once);
          held_third[u] = load_third(u, once);
        }
      }
    };
#endif
#if STORES || REREADS
    if (problem == first_problem) {
      const unsigned from = keeps && place.items <= kHeld ? 0 : kHeld;
      prefetch(a, part, place, x, from, from + 8);
      prefetch(a, part, place, dy, from, from + 8);
    }
#else
    load_held();
#endif
    const unsigned row = place.sample / a.samples * a.channels + place.channel;
    const unsigned first_group = place.sample * a.groups + quotient(place.channel, a.group);
    for (unsigned c = threadIdx.x; c < a.width; c += kThreads) {
      if (place.channel + c >= a.channels) continue;
      const unsigned index = first_group + quotient(c, a.group);
      const float rstd = a.arrays.given_rstd[index], scale = a.arrays.scale[row + c];
      const float low = a.arrays.given_mean_low == nullptr ? 0.f : a.arrays.given_mean_low[index];
      scratch.of(a, kRstd)[c] = rstd;
      scratch.of(a, kLow)[c] = low;
      scratch.of(a, kScale)[c] = scale;
      scratch.of(a, kMean)[c] = CENTERED ? a.arrays.given_mean[index] : 0.f;
      if (!kComputesArgument && !FROZEN) continue;
      const float slope = __fmul_rn(scale, rstd), correction = low * slope;
      scratch.of(a, kSlope)[c] = slope;
      if (kComputesArgument)
        scratch.of(a, kOffset)[c] = a.arrays.bias[row + c] - (is_finite(correction) ? correction : 0.f);
    }
    __syncthreads();
    Gradient gradient;
    InputGradient input;
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      gradient.first[j] = gradient.second[j] = gradient.mean[j] = gradient.slope[j] = gradient.offset[j] = 0.f;
      input.of_gradient[j] = 0.f;
    }
    if (place.exists) {
      scratch.load(a, kMean, place, gradient.mean);
      if (kComputesArgument) {
        scratch.load(a, kSlope, place, gradient.slope);
        scratch.load(a, kOffset, place, gradient.offset);
      }
      if (FROZEN) scratch.load(a, kSlope, place, input.of_gradient);
    }
    const uint64 writes = keeps && place.items > reread ? once : again;  // the policy of stores that are not read again
    // Reads g of an item for the sums, and writes the results that do not depend on them.
    const auto read = [&](unsigned i, const Item& values, const Item& gradients, const Item& thirds) {
      const Item g = gradient.of(values, gradients, thirds, true);
      if (RESIDUAL) store_item(dresidual + place.item(a, i), g, i < reread ? writes : again);
      if (FROZEN && RESULT) store_item(dx + place.item(a, i), input.of(values, g, gradient.mean), writes);
      return g;
    };
    const unsigned kept = min(place.items, reread);
    const auto read_items = [&](unsigned from, unsigned to, uint64 policy, bool stores) {
      for (unsigned i = from; i < to; i += kUnroll) {
        Item values[kUnroll], gradients[kUnroll], thirds[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const unsigned at = min(i + u, to - 1);
          values[u] = load_item(x + place.item(a, at), policy);
          gradients[u] = load_item(dy + place.item(a, at), policy);
          thirds[u] = load_third(at, policy);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (i + u < to) {
            const Item g = read(i + u, values[u], gradients[u], thirds[u]);
            if (!stores) continue;
            stored[(i + u - kHeld) * 2 * kThreads] = values[u];
            stored[((i + u - kHeld) * 2 + 1) * kThreads] = g;
          }
      }
    };
#if STORES
    read_items(kHeld, kept, once, true);
#endif
#if REREADS
    read_items(reread, place.items, keeps ? again : once, false);
#endif
#if RESULT && !FROZEN
#if STORES || REREADS
    load_held();
#endif
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
      if (u < place.items) held_g[u] = read(u, held_x[u], held_g[u], held_third[u]);
#endif

#if EXCHANGES
    const float *const rstds = scratch.of(a, kRstd), *const lows = scratch.of(a, kLow),
                       *const scales = scratch.of(a, kScale);
    // Sets the coefficients of dx, in place of those of z, from the sums of a group.
    const float n = a.count * static_cast<float>(a.group.value);
    const auto finish = [&](unsigned c, float sum, float sum_of_products) {
      const unsigned index = first_group + quotient(c, a.group);
      const float rstd = rstds[c];
      float tilt = -rstd * rstd * sum_of_products / n;
      if (a.arrays.dvar != nullptr) tilt += 2.f * a.arrays.dvar[index] / n;
      float level = CENTERED ? -rstd * sum / n - lows[c] * tilt : 0.f;
      if (CENTERED && a.arrays.dmean != nullptr) level += a.arrays.dmean[index] / n;
      scratch.of(a, kOffset)[c] = level;
      scratch.of(a, kSlope)[c] = tilt;
    };
    const auto between = [&] {
      if (!keeps || problem + a.teams >= a.problems) return;
      const Place next(a, part, problem + a.teams);
      const unsigned from = next.items > kHeld ? kHeld : 0, to = next.items > kHeld ? min(kept, kHeld + 9) : kHeld;
      prefetch(a, part, next, x, from, to);
      prefetch(a, part, next, dy, from, to);
    };
    const auto total = [&](unsigned c, float gradients, float times_deviation) {
      const bool exists = place.channel + c < a.channels;
      const float products = exists ? rstds[c] * (times_deviation - lows[c] * gradients) : 0.f;
      if (SUMS && exists && exchange.team.rank == 0) {
        if (a.samples == 1) {
          if (a.arrays.dbias != nullptr) a.arrays.dbias[row + c] = gradients;
          if (a.arrays.dscale != nullptr) a.arrays.dscale[row + c] = products;
        } else {
          const size_t at = static_cast<size_t>(place.sample) * a.channels + place.channel + c;
          __stcg(reinterpret_cast<float2*>(a.sums) + at, make_float2(gradients, products));
        }
      }
      if (!RESULT || FROZEN) return;
      const float scaled = exists ? scales[c] * gradients : 0.f, scaled_times = exists ? scales[c] * products : 0.f;
      if (a.group.value > 1) {
        scratch.of(a, kScaled)[c] = scaled;
        scratch.of(a, kScaledTimes)[c] = scaled_times;
      } else if (exists) {
        finish(c, scaled, scaled_times);
      }
    };
    exchange.sum(problem, part, place, gradient.first, gradient.second, scratch, between, total);

#if RESULT && !FROZEN
    if (a.group.value > 1) {
      float2* const sums = reinterpret_cast<float2*>(scratch.sums);
      sum_over_groups(
          a, [&](unsigned c) { return make_float2(scratch.of(a, kScaled)[c], scratch.of(a, kScaledTimes)[c]); },
          [&](unsigned group, float2 sum) { sums[group] = sum; });
      __syncthreads();
      for (unsigned c = threadIdx.x; c < a.width; c += kThreads) {
        const float2 own = sums[quotient(c, a.group)];
        if (place.channel + c < a.channels) finish(c, own.x, own.y);
      }
      __syncthreads();
    }
    if (place.exists) {
      scratch.load(a, kSlope, place, input.of_deviation);
      scratch.load(a, kOffset, place, input.constant);
#pragma unroll
      for (int j = 0; j < kSums; ++j) input.of_gradient[j] = __fmul_rn(scales[place.own + j], rstds[place.own + j]);
    }
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
      if (u < place.items) store_item(dx + place.item(a, u), input.of(held_x[u], held_g[u], gradient.mean), writes);
#if REREADS
    for (unsigned r = place.items; r > reread; r -= min(r - reread, static_cast<unsigned>(kUnroll))) {
      Item values[kUnroll], gradients[kUnroll], thirds[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const unsigned i = r > reread + u ? r - 1 - u : reread, at = place.item(a, i);
        values[u] = load_item(x + at, once);
        gradients[u] = load_item(RESIDUAL ? dresidual + at : dy + at, once);
        thirds[u] = RESIDUAL ? none : load_third(i, once);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (r > reread + u) {
          const Item g = RESIDUAL ? gradients[u] : gradient.of(values[u], gradients[u], thirds[u], false);
          store_item(dx + place.item(a, r - 1 - u), input.of(values[u], g, gradient.mean), writes);
        }
    }
#endif
#if STORES
#pragma unroll 2
    for (unsigned s = kHeld; s < kept; ++s)
      store_item(dx + place.item(a, s),
                 input.of(stored[(s - kHeld) * 2 * kThreads], stored[((s - kHeld) * 2 + 1) * kThreads], gradient.mean),
                 writes);
#endif
#endif
#if SUMS
    if (a.samples > 1 && exchange.team.rank == 0) sum_over_samples(a, place, problem, scratch);
#endif
#endif
    __syncthreads();
  }
#if EXCHANGES
  exchange.end();
#endif
}
