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
__device__ inline float hyperbolic_tangent(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
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

// A pre-activation within [-clip, clip]; NaN stays NaN. No bound is an infinite clip.
__device__ inline float bounded(float before, float clip) {
  float within;
  asm("{ .reg .f32 low;\n max.NaN.f32 low, %1, %2;\n min.NaN.f32 %0, low, %3; }"
      : "=f"(within)
      : "f"(before), "f"(-clip), "f"(clip));
  return within;
}

// Two operands of a product of 16-bit numbers, in one register.
__device__ inline uint32 pack(float low, float high) {
  uint32 packed;
#if MODE == 2 || ELEMENT_IS_BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

__device__ inline uint32 as_tf32(float x) {
  uint32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

struct Sums {
  float at[4];
};

// The sums of a tile of 16 x 8: += a b, for 16 (16-bit) or 8 (TF32) terms.
__device__ inline void multiply_add(Sums& sums, const uint32 (&a)[4], uint32 b0, uint32 b1) {
  float (&d)[4] = sums.at;
#if MODE == 1
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#elif MODE == 2 || ELEMENT_IS_BFLOAT16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
