// The logistic function of x and of -x, which are 1 in the sum. The relative error of either is about (2 + |x|) 2^-24,
// in every mode: a gate z keeps a state for 1 / (1 - z) steps, and 1 - z is 2^-11.5 for a pre-activation of 8. The
// error of half of tanh.approx, which is faster, is 2^-12, and that of a rounded z 2^-25.
struct Logistic {
  float of, of_negative;

  __device__ explicit Logistic(float x) {
    const float tail = __expf(-fabsf(x)), large = __fdividef(1.f, 1.f + tail), small = tail * large;
    of = x < 0 ? small : large;
    of_negative = x < 0 ? large : small;
  }
};
__device__ inline float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

#if MODE == 0 && ELEMENT_IS_BFLOAT16
// The relative error of 2^-11 is a quarter of that of rounding to bfloat16. In float16 it would be as large as that.
__device__ inline float hyperbolic_tangent(float x) { return approximate_tanh(x); }
#else
__device__ inline float hyperbolic_tangent(float x) {
  // Near zero, 1 - 2 / (1 + exp(2x)) cancels: there a polynomial, whose relative error is 2^-22.5.
  const float square = x * x;
  float small = 0.0157394409f;
  small = small * square - 0.0523025580f;
  small = small * square + 0.133152470f;
  small = small * square - 0.333327681f;
  small = small * square * x + x;
  return fabsf(x) < 0.55f ? small : 1.f - __fdividef(2.f, 1.f + __expf(2.f * x));
}
#endif

// The reset gate scales a product. In bfloat16, an error of 2^-12 is an eighth of that of rounding a gate near 1.
__device__ inline float reset_gate(float x) {
#if MODE == 0 && ELEMENT_IS_BFLOAT16
  return 0.5f * hyperbolic_tangent(0.5f * x) + 0.5f;
#else
  return sigmoid(x);
#endif
}
