// The maximum of each window.
// The larger value: NaN if one of them is, and +0 rather than -0.
__device__ inline double larger(double a, double b) { return b != b || b > a ? b : a == 0 && b == 0 ? a + b : a; }
__device__ inline float larger(float a, float b) {
#ifdef __CUDA_ARCH__
  // Not max.NaN: between conversions from and to float16, it lost NaN in windows of two elements.
  float result;
  asm("{.reg .pred p; .reg .f32 m; setp.nan.f32 p, %1, %2; max.f32 m, %1, %2; selp.f32 %0, 0f7FC00000, m, p;}"
      : "=f"(result)
      : "f"(a), "f"(b));
  return result;
#else
  return static_cast<float>(larger(static_cast<double>(a), static_cast<double>(b)));
#endif
}

extern "C" __global__ void __launch_bounds__(kPoolThreads)
    max_pool_forward(const Pack<Element>* __restrict__ x, Pack<Element>* __restrict__ y, PoolArguments a) {
  if (thread_index() >= a.threads) return;
  const Place place = place_of(a);
  Wide found[ROWS][VECTOR];
#pragma unroll
  for (int window = 0; window < ROWS; ++window)
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) found[window][v] = -infinity();
  for_elements(a, place, x, filled(-infinity()), [&](int window, int, const Pack<Element>& values, unsigned) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) found[window][v] = larger(found[window][v], widen(values.values[v]));
  });
  for_own_windows(a, place, [&](int window, unsigned index) { y[index] = narrowed(found[window]); });
}
