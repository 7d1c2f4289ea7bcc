// The sums of the gradients of the windows that an element of x is in, divided by DIVISOR.
extern "C" __global__ void __launch_bounds__(kPoolThreads)
    sum_pool_gather(const Pack<Element>* __restrict__ dy, Pack<Element>* __restrict__ dx, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  Wide sums[kOwn][VECTOR] = {};
  const Pack<Element> zeros = filled(0);
  for_windows(a, place, [&](unsigned index, bool exists, const Taps& taps) {
    const Pack<Element> gradients = exists ? dy[index] : zeros;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      if (taps.of(e) < 0) continue;
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
