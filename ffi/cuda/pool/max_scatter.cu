// The gradient of maxima of windows that do not overlap: a thread selects the element of its window, and writes the
// elements that are in no other one.
extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_scatter(const Pack<Element>* __restrict__ x, const Pack<Element>* __restrict__ dy,
                     Pack<Element>* __restrict__ dx, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  Wide sums[kOwn][VECTOR] = {};
  const Pack<Element> zeros = filled(0);
  for_windows(a, place, [&](unsigned index, bool exists, const Taps& numbers) {
    const Pack<Element> gradients = exists ? dy[index] : zeros;
    const Selected selected = select(a, place, x);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int tap = numbers.of(e);
      if (tap < 0) continue;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sums[e][v] += selected.taps[0][v] == tap ? widen(gradients.values[v]) : Wide(0);
    }
  });
  store_own(a, place, sums, dx);
}
