// The elements of x that windows select. The host defines TAP, the type of their numbers;
// the largest one stands for padding.
typedef TAP Tap;

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
  for_elements(a, place, x, filled(-infinity()), [&](int window, int tap, const Pack<Element>& values, unsigned index) {
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
