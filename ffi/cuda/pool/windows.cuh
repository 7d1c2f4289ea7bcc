// The elements and windows that the pooling kernels visit.
//
// The host defines ELEMENT, the type of the arrays; WIDE, that of the arithmetic; VECTOR, the channels of a thread; the
// windows, SIZE_0 to SIZE_2, STRIDE_0 to STRIDE_2 and DILATION_0 to DILATION_2; and what a thread computes:
//   ROWS: windows along axis 1, which share the rows of x that they read.
//   OWN_0 to OWN_2: elements of x, as many as the stride or 1. The block of elements is in the same windows.
//   UNROLLED: whether the loops over elements and windows are unrolled.
using namespace jaxgrad;

typedef ELEMENT Element;
typedef WIDE Wide;

constexpr int kOwn = OWN_0 * OWN_1 * OWN_2;
constexpr int kRowStep = ROWS > 1 ? 1 : DILATION_1;  // several rows need windows without dilation
constexpr int kRows = (ROWS - 1) * STRIDE_1 + SIZE_1;

// The windows that a block of elements can be in along an axis.
__device__ constexpr int windows_of(int size, int stride, int dilation) {
  return ((size - 1) * dilation + stride) / stride;
}
constexpr int kWindows0 = windows_of(SIZE_0, STRIDE_0, DILATION_0);
constexpr int kWindows1 = windows_of(SIZE_1, STRIDE_1, DILATION_1);
constexpr int kWindows2 = windows_of(SIZE_2, STRIDE_2, DILATION_2);

// Factors of `#pragma unroll`, which expands no macro.
constexpr int kUnroll0 = UNROLLED ? SIZE_0 : 1, kUnroll1 = UNROLLED ? kRows : 1, kUnroll2 = UNROLLED ? SIZE_2 : 1;
constexpr int kUnrollWindows0 = UNROLLED ? kWindows0 : 1, kUnrollWindows1 = UNROLLED ? kWindows1 : 1;
constexpr int kUnrollWindows2 = UNROLLED ? kWindows2 : 1;

template <class T>
struct alignas(sizeof(T) * VECTOR) Pack {
  T values[VECTOR];
};

__device__ inline Wide infinity() { return __uint_as_float(0x7f800000u); }

__device__ inline Pack<Element> filled(Wide value) {
  Pack<Element> result;
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) narrow(value, &result.values[v]);
  return result;
}

__device__ inline Pack<Element> narrowed(const Wide (&values)[VECTOR]) {
  Pack<Element> result;
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) narrow(values[v], &result.values[v]);
  return result;
}

__device__ inline unsigned thread_index() { return blockIdx.x * kPoolThreads + threadIdx.x; }

// The block of windows or elements that a thread computes.
struct Place {
  unsigned block[3], channel, outer;
};

__device__ inline unsigned divide(unsigned& number, const Divisor& by) {  // keeps the quotient, returns the remainder
  const unsigned found = quotient(number, by);
  const unsigned rest = number - found * by.value;
  number = found;
  return rest;
}

__device__ inline Place place_of(const PoolArguments& a) {
  unsigned index = thread_index();
  Place place;
  place.channel = divide(index, a.channels);
  for (int axis = 2; axis >= 0; --axis) place.block[axis] = divide(index, a.blocks[axis]);
  place.outer = index;
  return place;
}

// The index of a vector in an array with these spatial sizes.
__device__ inline unsigned index_of(const PoolArguments& a, const unsigned (&sizes)[3], const Place& place, unsigned i,
                                    unsigned j, unsigned k) {
  return (((place.outer * sizes[0] + i) * sizes[1] + j) * sizes[2] + k) * a.channels.value + place.channel;
}

// Calls element(window, tap, values, index) for the elements of a thread's windows, in row-major order for each window.
// `tap` is the number of the element in its window and `index` that of its vector; -1 and `padding` outside of x.
template <class OnElement>
__device__ inline void for_elements(const PoolArguments& a, const Place& place, const Pack<Element>* __restrict__ x,
                                    const Pack<Element>& padding, OnElement element) {
  const int first_0 = static_cast<int>(place.block[0]) * STRIDE_0 - a.padding[0];
  const int first_1 = static_cast<int>(place.block[1]) * ROWS * STRIDE_1 - a.padding[1];
  const int first_2 = static_cast<int>(place.block[2]) * STRIDE_2 - a.padding[2];
#pragma unroll kUnroll0
  for (int i = 0; i < SIZE_0; ++i)
#pragma unroll kUnroll1
    for (int j = 0; j < kRows; ++j) {
      const unsigned at_0 = first_0 + i * DILATION_0, at_1 = first_1 + j * kRowStep;
      const bool row_is_inside = at_0 < a.x[0] && at_1 < a.x[1];
#pragma unroll kUnroll2
      for (int k = 0; k < SIZE_2; ++k) {
        const unsigned at_2 = first_2 + k * DILATION_2;
        const bool is_inside = row_is_inside && at_2 < a.x[2];
        const unsigned index = index_of(a, a.x, place, at_0, at_1, at_2);
        const Pack<Element> values = is_inside ? x[index] : padding;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          const int tap_1 = j - row * STRIDE_1;
          if (tap_1 >= 0 && tap_1 < SIZE_1)
            element(row, is_inside ? (i * SIZE_1 + tap_1) * SIZE_2 + k : -1, values, index);
        }
      }
    }
}

// Calls store(window, index of its vector in y) for a thread's windows.
template <class Store>
__device__ inline void for_own_windows(const PoolArguments& a, const Place& place, Store store) {
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const unsigned at_1 = place.block[1] * ROWS + row;
    if (at_1 < a.y[1]) store(row, index_of(a, a.y, place, place.block[0], at_1, place.block[2]));
  }
}

// The elements of a thread along one axis.
struct OwnElements {
  int first;     // in x
  int window;    // the last one that may have them
  int distance;  // of the first element from the first one of that window
};

__device__ inline OwnElements own_elements(unsigned block, int padding, int own, int stride) {
  if (own == stride) return {static_cast<int>(block) * stride - padding, static_cast<int>(block), 0};
  const int place = block + padding;
  return {static_cast<int>(block), place / stride, place % stride};
}

// The number along an axis of the element of a window at a distance from its first one; SIZE or more if there is none.
__device__ inline unsigned tap_at(int distance, int size, int dilation) {
  return distance % dilation == 0 ? distance / dilation : size;
}

// The numbers of a thread's elements in a window.
struct Taps {
  int distances[3];  // of the first element from the first one of the window

  __device__ inline int of(int e) const {  // -1 if the window does not have the element
    const unsigned tap_0 = tap_at(distances[0] + e / (OWN_1 * OWN_2), SIZE_0, DILATION_0);
    const unsigned tap_1 = tap_at(distances[1] + e / OWN_2 % OWN_1, SIZE_1, DILATION_1);
    const unsigned tap_2 = tap_at(distances[2] + e % OWN_2, SIZE_2, DILATION_2);
    const bool has = tap_0 < SIZE_0 && tap_1 < SIZE_1 && tap_2 < SIZE_2;
    return has ? static_cast<int>((tap_0 * SIZE_1 + tap_1) * SIZE_2 + tap_2) : -1;
  }
};

// Calls window(index of its vector in y, whether it exists, Taps) for the windows that a thread's elements may be in,
// in row-major order.
template <class OnWindow>
__device__ inline void for_windows(const PoolArguments& a, const Place& place, OnWindow window) {
  const OwnElements own_0 = own_elements(place.block[0], a.padding[0], OWN_0, STRIDE_0);
  const OwnElements own_1 = own_elements(place.block[1], a.padding[1], OWN_1, STRIDE_1);
  const OwnElements own_2 = own_elements(place.block[2], a.padding[2], OWN_2, STRIDE_2);
#pragma unroll kUnrollWindows0
  for (int i = kWindows0 - 1; i >= 0; --i)
#pragma unroll kUnrollWindows1
    for (int j = kWindows1 - 1; j >= 0; --j)
#pragma unroll kUnrollWindows2
      for (int k = kWindows2 - 1; k >= 0; --k) {
        const unsigned at_0 = own_0.window - i, at_1 = own_1.window - j, at_2 = own_2.window - k;
        const bool exists = at_0 < a.y[0] && at_1 < a.y[1] && at_2 < a.y[2];
        window(index_of(a, a.y, place, at_0, at_1, at_2), exists,
               Taps{{own_0.distance + i * STRIDE_0, own_1.distance + j * STRIDE_1, own_2.distance + k * STRIDE_2}});
      }
}

// Writes the sums of a thread's elements.
__device__ inline void store_own(const PoolArguments& a, const Place& place, const Wide (&sums)[kOwn][VECTOR],
                                 Pack<Element>* __restrict__ dx) {
  const int first_0 = own_elements(place.block[0], a.padding[0], OWN_0, STRIDE_0).first;
  const int first_1 = own_elements(place.block[1], a.padding[1], OWN_1, STRIDE_1).first;
  const int first_2 = own_elements(place.block[2], a.padding[2], OWN_2, STRIDE_2).first;
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    const unsigned at_0 = first_0 + e / (OWN_1 * OWN_2), at_1 = first_1 + e / OWN_2 % OWN_1, at_2 = first_2 + e % OWN_2;
    if (at_0 < a.x[0] && at_1 < a.x[1] && at_2 < a.x[2])
      dx[index_of(a, a.x, place, at_0, at_1, at_2)] = narrowed(sums[e]);
  }
}
