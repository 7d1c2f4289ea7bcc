// The sum of each window, divided by DIVISOR.
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
