// Computes single elements of the result of a convolution pass in double precision, one by one: slow, but for every
// size, stride, dilation, padding, layout and number of groups. T is the type of the arrays, and KERNEL appends the
// name of the type to that of a kernel.
using namespace jaxgrad;

typedef long long Axes[5];

__device__ inline long long offset(const ReferenceOperand& operand, const Axes& index) {
  long long sum = 0;
  for (int axis = 0; axis < 5; ++axis) sum += index[axis] * operand.strides[axis];
  return sum;
}

__device__ inline const ReferenceOperand& result_of(const ReferenceProblem& p) {
  return p.pass == 0 ? p.y : p.pass == 1 ? p.x : p.w;
}

// The index of an element from its number in row-major order.
__device__ inline void unravel(long long number, const ReferenceOperand& operand, Axes& index) {
  for (int axis = 4; axis >= 0; --axis) {
    index[axis] = number % operand.sizes[axis];
    number /= operand.sizes[axis];
  }
}

// The number of products that are summed in one element of the result, including those with padding.
__device__ inline long long terms_of(const ReferenceProblem& p) {
  const ReferenceOperand& window = p.pass == 2 ? p.y : p.w;
  const long long first = p.pass == 0 ? p.w.sizes[1] : p.pass == 1 ? p.w.sizes[0] / p.groups : p.y.sizes[0];
  return first * window.sizes[2] * window.sizes[3] * window.sizes[4];
}

// Where the operands of one product of the sum for the element `at` of the result are: in the two arrays that are not
// the result. Returns false if the position lies in the padding. Terms that are neighbors differ in the features, or in
// the position if there are none to sum over.
__device__ inline bool find_term(const ReferenceProblem& p, const Axes& at, long long term, Axes& x, Axes& w, Axes& y) {
  const long long features = p.w.sizes[0] / p.groups;  // output features of a group
  const ReferenceOperand& summed = p.pass == 2 ? p.y : p.w;
  const long long inner = p.pass == 0 ? p.w.sizes[1] : p.pass == 1 ? features : 1;
  const long long feature = term % inner;
  Axes spatial;
  long long rest = term / inner;
  for (int axis = 4; axis >= 2; --axis) {
    spatial[axis] = rest % summed.sizes[axis];
    rest /= summed.sizes[axis];
  }
  if (p.pass == 0) {
    y[0] = x[0] = at[0], y[1] = w[0] = at[1];
    w[1] = feature;
  } else if (p.pass == 1) {
    x[0] = y[0] = at[0], x[1] = at[1];
    w[0] = y[1] = at[1] / p.w.sizes[1] * features + feature;
    w[1] = at[1] % p.w.sizes[1];
  } else {
    w[0] = y[1] = at[0], w[1] = at[1];
    x[0] = y[0] = rest;
  }
  if (p.pass != 1) x[1] = w[0] / features * p.w.sizes[1] + w[1];
  for (int axis = 2; axis < 5; ++axis) {
    const int s = axis - 2;
    w[axis] = p.pass == 2 ? at[axis] : spatial[axis];
    const long long shift = w[axis] * p.rhs_dilation[s] - p.padding_low[s];
    if (p.pass == 1) {
      x[axis] = at[axis];
      const long long start = x[axis] - shift;
      if (start < 0 || start % p.window_strides[s] != 0) return false;
      y[axis] = start / p.window_strides[s];
      if (y[axis] >= p.y.sizes[axis]) return false;
    } else {
      y[axis] = p.pass == 2 ? spatial[axis] : at[axis];
      x[axis] = y[axis] * p.window_strides[s] + shift;
      if (x[axis] < 0 || x[axis] >= p.x.sizes[axis]) return false;
    }
  }
  return true;
}

// Random bits of an element.
__device__ inline unsigned long long mixed(unsigned long long bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

// Random values of both signs with absolute values from 0.5 to 1, which have `digits` bits after the first one: no
// product is small, and sums have a mean of zero.
extern "C" __global__ void __launch_bounds__(kReferenceThreads)
    KERNEL(reference_fill)(T* array, long long count, int digits, unsigned long long seed) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const unsigned long long bits = mixed((static_cast<unsigned long long>(i) + seed) * 0x9e3779b97f4a7c15u);
    const double mantissa = static_cast<double>(bits >> 12 >> (52 - digits));
    const double value = 0.5 + mantissa / static_cast<double>(2ull << digits);
    narrow(bits & 1 ? -value : value, array + i);
  }
}

// For each sample, a number of an element of the result: the parts of the sum of its products, and of the sum of their
// absolute values, [samples, kReferenceParts, 2]. The first part has the bias too, which may be null.
extern "C" __global__ void __launch_bounds__(kReferenceThreads)
    KERNEL(reference_sums)(const T* x, const T* w, const T* y, const T* bias, const long long* samples, double* sums,
                           ReferenceProblem p) {
  __shared__ double partial[2][kReferenceThreads];
  Axes at, at_x, at_w, at_y;
  unravel(samples[blockIdx.x / kReferenceParts], result_of(p), at);
  const unsigned part = blockIdx.x % kReferenceParts;
  double sum = 0, absolute = 0;
  const long long terms = terms_of(p);
  const long long step = static_cast<long long>(kReferenceParts) * blockDim.x;
  for (long long term = static_cast<long long>(part) * blockDim.x + threadIdx.x; term < terms; term += step) {
    if (!find_term(p, at, term, at_x, at_w, at_y)) continue;
    const double first = p.pass == 1 ? widen(y[offset(p.y, at_y)]) : widen(x[offset(p.x, at_x)]);
    const double second = p.pass == 2 ? widen(y[offset(p.y, at_y)]) : widen(w[offset(p.w, at_w)]);
    const double product = first * second;
    sum += product;
    absolute += product < 0 ? -product : product;
  }
  partial[0][threadIdx.x] = sum;
  partial[1][threadIdx.x] = absolute;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned thread = 1; thread < blockDim.x; ++thread) {
    sum += partial[0][thread];
    absolute += partial[1][thread];
  }
  if (bias != nullptr && part == 0) {
    const double value = widen(bias[at[1]]);
    sum += value;
    absolute += value < 0 ? -value : value;
  }
  sums[2 * blockIdx.x] = sum;
  sums[2 * blockIdx.x + 1] = absolute;
}

// Copies the samples out of a result.
extern "C" __global__ void __launch_bounds__(kReferenceThreads)
    KERNEL(reference_gather)(const T* result, const long long* samples, unsigned count, double* values,
                             ReferenceProblem p) {
  for (unsigned sample = blockIdx.x * blockDim.x + threadIdx.x; sample < count; sample += gridDim.x * blockDim.x) {
    Axes at;
    unravel(samples[sample], result_of(p), at);
    values[sample] = widen(result[offset(result_of(p), at)]);
  }
}
