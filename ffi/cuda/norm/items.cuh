// An item is VECTOR neighboring elements, which a thread loads and stores at a time: at most 16 bytes.
//
// The host defines ELEMENT, the type of the arrays; VECTOR; and of a block, THREADS and BLOCKS, how many a
// multiprocessor runs at least. The other definitions choose the call: see the kernels.

using namespace jaxgrad;

typedef ELEMENT Element;

constexpr int kVector = VECTOR;
constexpr int kItemBytes = kVector * static_cast<int>(sizeof(Element));
constexpr int kWords = kItemBytes < 4 ? 1 : kItemBytes / 4;

struct alignas(4 * kWords) Item {
  unsigned words[kWords];
};

__device__ inline Item load_item(const Element* from, uint64 policy) {
  Item item;
  load_words<kItemBytes>(from, policy, item.words);
  return item;
}

__device__ inline void store_item(Element* to, const Item& item, uint64 policy) {
  store_words<kItemBytes>(to, policy, item.words);
}

__device__ inline Item zero_item() {
  Item item;
#pragma unroll
  for (int w = 0; w < kWords; ++w) item.words[w] = 0;
  return item;
}

__device__ inline void unpack(const Item& item, float (&values)[kVector]) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if constexpr (sizeof(Element) == 4) {
      values[j] = __uint_as_float(item.words[j % kWords]);
    } else {
#if ELEMENT_IS_BFLOAT16
      const unsigned word = item.words[j / 2 % kWords];
      values[j] = __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
#else
      values[j] = widen(static_cast<Half>(item.words[j / 2 % kWords] >> (j % 2 * 16)));
#endif
    }
  }
}

__device__ inline Item packed(const float (&values)[kVector]) {
  Item item;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if constexpr (sizeof(Element) == 4) {
      item.words[w] = __float_as_uint(values[w % kVector]);
    } else {
      constexpr bool is_pair = kVector > 1;
      const float low = values[2 * w % kVector], high = is_pair ? values[(2 * w + 1) % kVector] : 0.f;
      item.words[w] = narrow_pair(low, high);
    }
  }
  return item;
}

// The median of each element of three items.
__device__ inline Item median(const Item& a, const Item& b, const Item& c) {
  float first[kVector], second[kVector], third[kVector];
  unpack(a, first);
  unpack(b, second);
  unpack(c, third);
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    first[j] = fmaxf(fminf(first[j], second[j]), fminf(fmaxf(first[j], second[j]), third[j]));
  return packed(first);
}

__device__ inline bool is_finite(float value) { return fabsf(value) <= 3.402823466e38f; }
