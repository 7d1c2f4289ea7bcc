// Sums over windows, and their input gradient, both divided by DIVISOR.
extern "C" __global__ void __launch_bounds__(kPoolThreads)
    sum_pool_forward(const Pack<Element>* __restrict__ x, Pack<Element>* __restrict__ y, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  Wide sums[ROWS][VECTOR] = {};
  for_elements(a, place, x, filled(0), [&](int window, int, const Pack<Element>& values, unsigned) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sums[window][v] += widen(values.values[v]);
  });
  for_own_windows(a, place, [&](int window, unsigned index) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sums[window][v] /= Wide(DIVISOR);
    y[index] = narrowed(sums[window]);
  });
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    sum_pool_input_gradient(const Pack<Element>* __restrict__ dy, Pack<Element>* __restrict__ dx, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  Wide sums[kOwn][VECTOR] = {};
  const Pack<Element> zeros = filled(0);
  for_windows(a, place, [&](unsigned index, bool exists, auto taps) {
    const Pack<Element> gradients = exists ? dy[index] : zeros;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      if (taps(e) < 0) continue;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sums[e][v] += widen(gradients.values[v]);
    }
  });
#pragma unroll
  for (int e = 0; e < kOwn; ++e)
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sums[e][v] /= Wide(DIVISOR);
  store_own(a, place, sums, dx);
}
