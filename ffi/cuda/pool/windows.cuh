// The elements and windows that the pooling kernels visit.
//
// The host defines ELEMENT, the type of the arrays; WIDE, that of the arithmetic; VECTOR, the elements of a vector; and
// the windows: SIZE_0 to SIZE_2, STRIDE_0 to STRIDE_2, DILATION_0 to DILATION_2, and UNROLLED, how many elements of a
// row of a window are unrolled.
using namespace jaxgrad;

typedef ELEMENT Element;
typedef WIDE Wide;
constexpr int kUnrolled = UNROLLED;  // the pragma expands no macro

template <class T>
struct alignas(sizeof(T) * VECTOR) Pack {
  T values[VECTOR];
};

// A vector of an array with these spatial sizes.
struct Place {
  unsigned at[3], channel, outer;
};

__device__ inline Place place_of(unsigned index, const PoolArguments& a, const unsigned (&sizes)[3]) {
  Place place;
  place.channel = index % a.channels;
  index /= a.channels;
  for (int axis = 2; axis >= 0; --axis) {
    place.at[axis] = index % sizes[axis];
    index /= sizes[axis];
  }
  place.outer = index;
  return place;
}

__device__ inline unsigned index_of(const PoolArguments& a, const unsigned (&sizes)[3], const Place& place, unsigned i,
                                    unsigned j, unsigned k) {
  return (((place.outer * sizes[0] + i) * sizes[1] + j) * sizes[2] + k) * a.channels + place.channel;
}

// Calls element(tap, index of its vector) for the elements of a window, and padding() for those outside of x, in
// row-major order.
template <class OnElement, class OnPadding>
__device__ inline void for_elements(const PoolArguments& a, const Place& window, OnElement element, OnPadding padding) {
  const int first[] = {static_cast<int>(window.at[0]) * STRIDE_0 - a.padding[0],
                       static_cast<int>(window.at[1]) * STRIDE_1 - a.padding[1],
                       static_cast<int>(window.at[2]) * STRIDE_2 - a.padding[2]};
  for (int i = 0; i < SIZE_0; ++i)
    for (int j = 0; j < SIZE_1; ++j) {
      const unsigned at_0 = first[0] + i * DILATION_0, at_1 = first[1] + j * DILATION_1;
      const bool row_is_inside = at_0 < a.x[0] && at_1 < a.x[1];
#pragma unroll kUnrolled
      for (int k = 0; k < SIZE_2; ++k) {
        const unsigned at_2 = first[2] + k * DILATION_2;
        if (row_is_inside && at_2 < a.x[2]) {
          element((i * SIZE_1 + j) * SIZE_2 + k, index_of(a, a.x, window, at_0, at_1, at_2));
        } else {
          padding();
        }
      }
    }
}

// Sets `window` to the window along an axis of which an element is tap k. Returns false if there is none.
__device__ inline bool is_in_window(int element, int padding, int tap, int stride, int dilation, unsigned windows,
                                    unsigned& window) {
  const int distance = element + padding - tap * dilation;
  window = static_cast<unsigned>(distance) / stride;
  return distance >= 0 && distance % stride == 0 && window < windows;
}

// Calls body(tap, index of the window's vector in y) for the windows that an element of x is in, in row-major order.
template <class Body>
__device__ inline void for_windows(const PoolArguments& a, const Place& element, Body body) {
  for (int i = SIZE_0 - 1; i >= 0; --i) {
    unsigned o0, o1, o2;
    if (!is_in_window(element.at[0], a.padding[0], i, STRIDE_0, DILATION_0, a.y[0], o0)) continue;
    for (int j = SIZE_1 - 1; j >= 0; --j) {
      if (!is_in_window(element.at[1], a.padding[1], j, STRIDE_1, DILATION_1, a.y[1], o1)) continue;
#pragma unroll kUnrolled
      for (int k = SIZE_2 - 1; k >= 0; --k)
        if (is_in_window(element.at[2], a.padding[2], k, STRIDE_2, DILATION_2, a.y[2], o2))
          body((i * SIZE_1 + j) * SIZE_2 + k, index_of(a, a.y, element, o0, o1, o2));
    }
  }
}

__device__ inline unsigned thread_index() { return blockIdx.x * kPoolThreads + threadIdx.x; }

__device__ inline void store_sums(const Wide (&sums)[VECTOR], Pack<Element>& to) {
  Pack<Element> result;
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) narrow(sums[v], &result.values[v]);
  to = result;
}
