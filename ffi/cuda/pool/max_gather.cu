// The gradient of maxima of windows that overlap: max_pool_select writes for each window the number of the selected
// element, and max_pool_gather sums the gradients of the windows that have selected an element of x. So x is read once,
// and no sum depends on the order of threads.
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
  for_windows(a, place, [&](unsigned index, bool exists, const Taps& numbers) {
    const Pack<Tap> selected = exists ? taps[index] : Pack<Tap>{};
    const Pack<Element> gradients = exists ? dy[index] : zeros;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int tap = numbers.of(e);
      if (tap < 0) continue;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sums[e][v] += selected.values[v] == tap ? widen(gradients.values[v]) : Wide(0);
    }
  });
  store_own(a, place, sums, dx);
}
