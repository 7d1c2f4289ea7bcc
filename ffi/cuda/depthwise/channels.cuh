// Loads and stores of neighboring channels of one pixel.

__device__ inline float first_of(unsigned pair, Half) {
#if ELEMENT_IS_BFLOAT16
  return __uint_as_float(pair << 16);
#else
  return widen(static_cast<Half>(pair));
#endif
}
__device__ inline float second_of(unsigned pair, Half) {
#if ELEMENT_IS_BFLOAT16
  return __uint_as_float(pair & 0xffff0000u);
#else
  return widen(static_cast<Half>(pair >> 16));
#endif
}
__device__ inline unsigned pack(float first, float second) {
  Half low, high;
  narrow(first, &low);
  narrow(second, &high);
  return static_cast<unsigned>(high) << 16 | low;
}

template <int WORDS>
struct alignas(4 * WORDS) Words {
  unsigned at[WORDS];
};

template <int COUNT>
__device__ inline void load_channels(float (&values)[COUNT], const float* from) {
  const auto words = *reinterpret_cast<const Words<COUNT>*>(from);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = __uint_as_float(words.at[i]);
}

template <int COUNT>
__device__ inline void load_channels(float (&values)[COUNT], const Half* from) {
  if constexpr (COUNT == 1) {
    values[0] = widen(*from);
  } else {
    const auto words = *reinterpret_cast<const Words<COUNT / 2>*>(from);
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      values[2 * i] = first_of(words.at[i], Half());
      values[2 * i + 1] = second_of(words.at[i], Half());
    }
  }
}

template <int COUNT>
__device__ inline void store_channels(float* to, const float (&values)[COUNT], bool valid) {
  unsigned words[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) words[i] = __float_as_uint(values[i]);
  store_if(valid, to, words);
}

template <int COUNT>
__device__ inline void store_channels(Half* to, const float (&values)[COUNT], bool valid) {
  if constexpr (COUNT == 1) {
    Half narrowed;
    narrow(values[0], &narrowed);
    store_if(valid, to, narrowed);
  } else {
    unsigned words[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) words[i] = pack(values[2 * i], values[2 * i + 1]);
    store_if(valid, to, words);
  }
}
