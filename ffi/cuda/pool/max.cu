// Maxima of windows, and their derivatives.
//
// Where windows do not overlap, one kernel computes the gradient: a thread selects the element of its window and writes
// the elements. Otherwise there are two: max_pool_select writes for each window the number of the selected element, and
// max_pool_gather sums the gradients of the windows that have selected an element of x. So no sum depends on the order
// of threads. The host defines TAP, the type of the numbers.
typedef TAP Tap;

constexpr Tap kNone = static_cast<Tap>(~0u);  // padding is selected

__device__ inline Wide lowest() { return __uint_as_float(0xff800000u); }  // -infinity

// The larger value: NaN if one of them is, and +0 rather than -0.
__device__ inline float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return b != b || b > a ? b : a == 0 && b == 0 ? a + b : a;
#endif
}
__device__ inline double larger(double a, double b) { return b != b || b > a ? b : a == 0 && b == 0 ? a + b : a; }

// The selected elements of a thread's windows, as XLA selects: the first element, unless a later one is larger or one
// of the two is NaN. Padding is -infinity.
struct Selected {
  int taps[ROWS][VECTOR];          // -1 if padding is selected
  unsigned vectors[ROWS][VECTOR];  // which hold the elements
};

__device__ inline Selected select(const PoolArguments& a, const Place& place, const Pack<Element>* __restrict__ x) {
  Selected selected;
  Wide found[ROWS][VECTOR];
#pragma unroll
  for (int window = 0; window < ROWS; ++window)
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      found[window][v] = __uint_as_float(0x7fc00000u);  // NaN, which the first element replaces
      selected.taps[window][v] = -1;
      selected.vectors[window][v] = 0;
    }
  for_elements(a, place, x, filled(lowest()), [&](int window, int tap, const Pack<Element>& values, unsigned index) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      const Wide value = widen(values.values[v]);
      const bool keeps = found[window][v] >= value;
      found[window][v] = keeps ? found[window][v] : value;
      selected.taps[window][v] = keeps ? selected.taps[window][v] : tap;
      selected.vectors[window][v] = keeps ? selected.vectors[window][v] : index;
    }
  });
  return selected;
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_forward(const Pack<Element>* __restrict__ x, Pack<Element>* __restrict__ y, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  Wide found[ROWS][VECTOR];
#pragma unroll
  for (int window = 0; window < ROWS; ++window)
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) found[window][v] = lowest();
  for_elements(a, place, x, filled(lowest()), [&](int window, int, const Pack<Element>& values, unsigned) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) found[window][v] = larger(found[window][v], widen(values.values[v]));
  });
  for_own_windows(a, place, [&](int window, unsigned index) { y[index] = narrowed(found[window]); });
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_select(const Pack<Element>* __restrict__ x, Pack<Tap>* __restrict__ taps, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  const Selected selected = select(a, place, x);
  for_own_windows(a, place, [&](int window, unsigned index) {
    Pack<Tap> result;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) result.values[v] = static_cast<Tap>(selected.taps[window][v]);
    taps[index] = result;
  });
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_gather(const Pack<Tap>* __restrict__ taps, const Pack<Element>* __restrict__ dy,
                    Pack<Element>* __restrict__ dx, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  Wide sums[kOwn][VECTOR] = {};
  const Pack<Element> zeros = filled(0);
  for_windows(a, place, [&](unsigned index, bool exists, auto tap_of) {
    const Pack<Tap> selected = exists ? taps[index] : Pack<Tap>{};
    const Pack<Element> gradients = exists ? dy[index] : zeros;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int tap = tap_of(e);
      if (tap < 0) continue;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sums[e][v] += selected.values[v] == tap ? widen(gradients.values[v]) : Wide(0);
    }
  });
  store_own(a, place, sums, dx);
}

// For windows that do not overlap, with ROWS 1: a block of elements is in one window.
extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_input_gradient(const Pack<Element>* __restrict__ x, const Pack<Element>* __restrict__ dy,
                            Pack<Element>* __restrict__ dx, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  Wide sums[kOwn][VECTOR] = {};
  const Pack<Element> zeros = filled(0);
  for_windows(a, place, [&](unsigned index, bool exists, auto tap_of) {
    const Pack<Element> gradients = exists ? dy[index] : zeros;
    const Selected selected = select(a, place, x);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int tap = tap_of(e);
      if (tap < 0) continue;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sums[e][v] += selected.taps[0][v] == tap ? widen(gradients.values[v]) : Wide(0);
    }
  });
  store_own(a, place, sums, dx);
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_tangent(const Pack<Element>* __restrict__ x, const Pack<Element>* __restrict__ dx,
                     Pack<Element>* __restrict__ dy, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  const Selected selected = select(a, place, x);
  const Element zero = filled(0).values[0];
  for_own_windows(a, place, [&](int window, unsigned index) {
    Pack<Element> result;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v)
      result.values[v] = selected.taps[window][v] < 0 ? zero : dx[selected.vectors[window][v]].values[v];
    dy[index] = result;
  });
}
