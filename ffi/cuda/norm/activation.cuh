// The activation and its derivative. ACTIVATION: 0 none, 1 relu, 2 silu, 3 gelu (by tanh).

__device__ inline float sigmoid(float z) {
  if constexpr (sizeof(Element) == 4) return 1.f / (1.f + expf(-z));
  return __fdividef(1.f, 1.f + __expf(-z));
}

// The argument of tanh in jax.nn.gelu.
constexpr float kGeluSlope = 0.7978845608028654f, kGeluCubic = 0.044715f;

__device__ inline float activated(float z) {
#if ACTIVATION == 1
  return z <= 0.f ? 0.f : z;  // propagates NaN
#elif ACTIVATION == 2
  return z * sigmoid(z);
#elif ACTIVATION == 3
  // (1 + tanh u) / 2 is the sigmoid of 2 u.
  return z * sigmoid(2.f * kGeluSlope * (z + kGeluCubic * z * z * z));
#else
  return z;
#endif
}

// d activated(z) / dz, times dy.
__device__ inline float through_activation(float z, float dy) {
#if ACTIVATION == 1
  return z > 0.f ? dy : 0.f;
#elif ACTIVATION == 2
  const float q = sigmoid(z);
  return dy * (q * (1.f + z * (1.f - q)));
#elif ACTIVATION == 3
  const float q = sigmoid(2.f * kGeluSlope * (z + kGeluCubic * z * z * z));
  return dy * (q + z * q * (1.f - q) * (2.f * kGeluSlope) * (1.f + 3.f * kGeluCubic * z * z));
#else
  return dy;
#endif
}
