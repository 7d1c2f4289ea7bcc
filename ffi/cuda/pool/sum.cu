// Sums over windows, and their input gradient.
extern "C" __global__ void __launch_bounds__(kPoolThreads)
    sum_pool_forward(const Pack<Element>* __restrict__ x, Pack<Element>* __restrict__ y, PoolArguments a) {
  if (thread_index() >= a.vectors) return;
  Wide sums[VECTOR] = {};
  for_elements(
      a, place_of(thread_index(), a, a.y),
      [&](int, unsigned index) {
        const Pack<Element> values = x[index];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sums[v] += widen(values.values[v]);
      },
      [] {});
  store_sums(sums, y[thread_index()]);
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    sum_pool_input_gradient(const Pack<Element>* __restrict__ dy, Pack<Element>* __restrict__ dx, PoolArguments a) {
  if (thread_index() >= a.vectors) return;
  Wide sums[VECTOR] = {};
  for_windows(a, place_of(thread_index(), a, a.x), [&](int, unsigned index) {
    const Pack<Element> gradients = dy[index];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sums[v] += widen(gradients.values[v]);
  });
  store_sums(sums, dx[thread_index()]);
}
