// Operands and sums of the products of tensor cores.

constexpr int kPlanes = gru_planes(MODE);        // of an operand: kGruSplit has three parts, the largest first
constexpr int kBytes = gru_element_bytes(MODE);  // of an element of a plane

// Two elements of an operand, in one register for each plane. A bfloat16 number is the upper half of a float32 number:
// three have its 24 bits, since each is rounded and the difference is exact.
struct OperandPair {
  uint32 at[kPlanes];

  __device__ OperandPair(float first, float second) {
    at[0] = pack(first, second);
#pragma unroll
    for (int plane = 1; plane < kPlanes; ++plane) {
      first -= __uint_as_float(at[plane - 1] << 16);
      second -= __uint_as_float(at[plane - 1] & 0xffff0000u);
      at[plane] = pack(first, second);
    }
  }
};

// Stores one element of an operand to shared memory, with its planes PLANE_BYTES apart.
template <int PLANE_BYTES>
__device__ inline void store_operand(unsigned address, float value) {
#if MODE == 1
  store_float(address, __uint_as_float(as_tf32(value)));
#else
  const OperandPair pair(value, 0.f);
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
    store_half(address + plane * PLANE_BYTES, static_cast<unsigned short>(pair.at[plane]));
#endif
}

// A sum of products of tensor cores, in N parts, which need not wait for each other. Of the nine products of planes,
// the largest is in the first part, and the next ones are in other parts, where they lose no bits. The three smallest,
// of 2^-26 and less, are dropped.
template <int N>
struct Products {
  Sums at[N] = {};

  // `q`: a number that alternates between calls.
  __device__ void add(const uint32 (&a)[kPlanes][4], const uint32 (&b)[kPlanes][2], int q) {
#if MODE == 2
    static_assert(N == 2 || N == 3, "");
    multiply_add(at[N - 1], a[0], b[2][0], b[2][1]);
    multiply_add(at[N - 1], a[2], b[0][0], b[0][1]);
    multiply_add(at[N - 1], a[1], b[1][0], b[1][1]);
    multiply_add(at[1], a[0], b[1][0], b[1][1]);
    multiply_add(at[1], a[1], b[0][0], b[0][1]);
    multiply_add(at[0], a[0], b[0][0], b[0][1]);
#else
    multiply_add(at[q % N], a[0], b[0][0], b[0][1]);
#endif
  }

  __device__ float sum(int j) const {
    float others = N > 1 ? at[N - 1].at[j] : 0.f;
    if (N > 2) others += at[1].at[j];
#if MODE == 2
    // An operand that is not finite has planes that are NaN: then the first product alone is right.
    if (!(fabsf(at[0].at[j]) <= 3.4028235e38f)) others = 0;
#endif
    return at[0].at[j] + others;
  }
};

// Weights that are multiplied by the word of 16 bytes that a lane has of a row of states or gradients. Register i
// belongs to product i / 2 of the word, and to the first or second half of its terms, i % 2.
constexpr int kWordTerms = 16 / kBytes;
struct WordWeights {
  uint32 at[kPlanes][4];

  // Loads weights that are `stride` apart. Those after the first `count` are zero.
  __device__ WordWeights(const T* from, int stride, int count) {
    float values[kWordTerms];
    constexpr int per_load = 16 / sizeof(T);
    if (stride == 1 && count >= kWordTerms && reinterpret_cast<unsigned long long>(from) % 16 == 0) {
      alignas(16) T loaded[kWordTerms];
#pragma unroll
      for (int k = 0; k < kWordTerms; k += per_load)
        *reinterpret_cast<uint4*>(loaded + k) = *reinterpret_cast<const uint4*>(from + k);
#pragma unroll
      for (int k = 0; k < kWordTerms; ++k) values[k] = widen(loaded[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kWordTerms; ++k) values[k] = k < count ? widen(from[k * stride]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if MODE == 1
      at[0][i] = as_tf32(values[i]);
#else
      const OperandPair pair(values[2 * i], values[2 * i + 1]);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) at[plane][i] = pair.at[plane];
#endif
    }
  }
};
