// An item is VECTOR neighboring elements, which a thread loads and stores at a time: at most 16 bytes.
//
// The host defines ELEMENT, the type of the arrays; VECTOR; and of a block, THREADS and BLOCKS, how many a
// multiprocessor runs at least. The other definitions choose the call: see the kernels.

using namespace jaxgrad;

typedef ELEMENT Element;
typedef unsigned long long uint64;

constexpr int kVector = VECTOR;
constexpr int kItemBytes = kVector * static_cast<int>(sizeof(Element));
constexpr int kWords = kItemBytes < 4 ? 1 : kItemBytes / 4;

struct Item {
  unsigned words[kWords];
};

// Policies of the L2 cache: data that is read once leaves it first.
__device__ inline uint64 read_once() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64 read_again() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline Item load_item(const Element* from, uint64 policy) {
  Item item;
  if constexpr (kItemBytes == 16) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(item.words[0]), "=r"(item.words[kWords > 1 ? 1 : 0]), "=r"(item.words[kWords > 2 ? 2 : 0]),
                   "=r"(item.words[kWords > 3 ? 3 : 0])
                 : "l"(from), "l"(policy));
  } else if constexpr (kItemBytes == 8) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(item.words[0]), "=r"(item.words[kWords > 1 ? 1 : 0])
                 : "l"(from), "l"(policy));
  } else if constexpr (kItemBytes == 4) {
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(item.words[0]) : "l"(from), "l"(policy));
  } else {
    unsigned short half;
    asm volatile("ld.global.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(half) : "l"(from), "l"(policy));
    item.words[0] = half;
  }
  return item;
}

// Stores that leave the L2 cache to what is read again have the policy read_once().
__device__ inline void store_item(Element* to, const Item& item, uint64 policy) {
  if constexpr (kItemBytes == 16) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(item.words[0]),
                 "r"(item.words[kWords > 1 ? 1 : 0]), "r"(item.words[kWords > 2 ? 2 : 0]),
                 "r"(item.words[kWords > 3 ? 3 : 0]), "l"(policy)
                 : "memory");
  } else if constexpr (kItemBytes == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(item.words[0], item.words[kWords > 1 ? 1 : 0]);
  } else if constexpr (kItemBytes == 4) {
    *reinterpret_cast<unsigned*>(to) = item.words[0];
  } else {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(item.words[0]);
  }
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
#if ELEMENT_IS_BFLOAT16
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(item.words[w]) : "f"(high), "f"(low));
#else
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(item.words[w]) : "f"(high), "f"(low));
#endif
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
