// The tangents of maxima: those of the selected elements.
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
