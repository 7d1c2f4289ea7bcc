// Maxima of windows, and their derivatives.
//
// The gradient takes two kernels: max_pool_select writes for each window the number of the selected element, and
// max_pool_gather sums the gradients of the windows that have selected an element of x. So x is read once, and no sum
// depends on the order of threads. The host defines TAP, the type of the numbers.
typedef TAP Tap;

constexpr Tap kNone = static_cast<Tap>(~0u);  // padding is selected

// Selects as XLA does: the first element, unless a later one is larger or one of the two is NaN. Padding is -infinity.
// take(v, tap, index) replaces the selection of lane v.
template <class Take>
__device__ inline void select(const PoolArguments& a, const Place& window, const Pack<Element>* x, Take take) {
  Wide found[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) found[v] = __uint_as_float(0x7fc00000u);  // NaN, which the first element replaces
  const Wide low = __uint_as_float(0xff800000u);
  for_elements(
      a, window,
      [&](int tap, unsigned index) {
        const Pack<Element> values = x[index];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          const Wide value = widen(values.values[v]);
          if (found[v] >= value) continue;
          found[v] = value;
          take(v, static_cast<Tap>(tap), index);
        }
      },
      [&] {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          if (found[v] >= low) continue;
          found[v] = low;
          take(v, kNone, 0u);
        }
      });
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_forward(const Pack<Element>* __restrict__ x, Pack<Element>* __restrict__ y, PoolArguments a) {
  if (thread_index() >= a.vectors) return;
  const Place window = place_of(thread_index(), a, a.y);
  Wide found[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) found[v] = __uint_as_float(0xff800000u);
  for_elements(
      a, window,
      [&](int, unsigned index) {
        const Pack<Element> values = x[index];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          const Wide value = widen(values.values[v]);
          if (value > found[v] || value != value) found[v] = value;  // NaN stays
          if (value == 0 && found[v] == 0) found[v] += value;        // +0 is larger than -0
        }
      },
      [] {});
  store_sums(found, y[thread_index()]);
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_select(const Pack<Element>* __restrict__ x, Pack<Tap>* __restrict__ selected, PoolArguments a) {
  if (thread_index() >= a.vectors) return;
  Pack<Tap> taps;
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) taps.values[v] = kNone;
  select(a, place_of(thread_index(), a, a.y), x, [&](int v, Tap tap, unsigned) { taps.values[v] = tap; });
  selected[thread_index()] = taps;
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_gather(const Pack<Tap>* __restrict__ selected, const Pack<Element>* __restrict__ dy,
                    Pack<Element>* __restrict__ dx, PoolArguments a) {
  if (thread_index() >= a.vectors) return;
  Wide sums[VECTOR] = {};
  for_windows(a, place_of(thread_index(), a, a.x), [&](int tap, unsigned index) {
    const Pack<Tap> taps = selected[index];
    const Pack<Element> gradients = dy[index];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sums[v] += taps.values[v] == tap ? widen(gradients.values[v]) : Wide(0);
  });
  store_sums(sums, dx[thread_index()]);
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_tangent(const Pack<Element>* __restrict__ x, const Pack<Element>* __restrict__ dx,
                     Pack<Element>* __restrict__ dy, PoolArguments a) {
  if (thread_index() >= a.vectors) return;
  unsigned from[VECTOR];
  Pack<Element> result;
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) from[v] = ~0u;
  select(a, place_of(thread_index(), a, a.y), x,
         [&](int v, Tap tap, unsigned index) { from[v] = tap == kNone ? ~0u : index; });
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    if (from[v] == ~0u) {
      narrow(Wide(0), &result.values[v]);
    } else {
      result.values[v] = dx[from[v]].values[v];
    }
  }
  dy[thread_index()] = result;
}
