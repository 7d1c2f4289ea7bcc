/* Emulates the parts of CUDA that the kernels of jaxgrad need on the CPU. One host thread runs all threads of a block,
   each on its own stack, and switches to the next at every barrier of the block or of a warp. Copies are checked for
   alignment and bounds. */
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __CUDACC_RTC__ /* the sources are those of a GPU */
#define __global__
#define __grid_constant__
#define __device__
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)

struct Dim {
  unsigned x = 1, y = 1;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

typedef unsigned short Half;  // a bfloat16, or a float16 if ELEMENT_IS_BFLOAT16 is defined as 0 before this file

static double widen(double value) { return value; }
static float widen(float value) { return value; }
static void narrow(double value, double* result) { *result = value; }
static void narrow(float value, float* result) { *result = value; }
#if !defined(ELEMENT_IS_BFLOAT16) || ELEMENT_IS_BFLOAT16
static float widen(Half bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static void narrow(float value, Half* result) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  *result = Half((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
static float widen(Half bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                    : std::ldexp(float(fraction), -24);
  return bits >> 15 ? -size : size;
}
static void narrow(float value, Half* result) {  // of infinities and numbers that are in the range of float16
  if (std::isinf(value)) {
    *result = value < 0 ? 0xfc00 : 0x7c00;
    return;
  }
  int exponent;
  std::frexp(value, &exponent);
  exponent = exponent < -13 ? -13 : exponent;
  const int digits = int(std::nearbyint(std::ldexp(std::fabs(value), 11 - exponent)));  // 2048 carries
  *result = Half((value < 0) << 15 | (digits < 1024 ? digits : (exponent + 13) * 1024 + digits));
}
#endif

static std::vector<unsigned char> shared_bytes;  // and kPast bytes that no kernel may write
static size_t shared_size;
static constexpr size_t kPast = 1024;
static std::vector<std::pair<const char*, const char*>> arrays;  // where a kernel may read

static unsigned char* shared_memory() { return shared_bytes.data(); }

static void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  abort();
}

template <int BYTES>
static void copy_async(void* shared, const void* global, bool valid) {
  const char* from = static_cast<const char*>(global);
  unsigned char* to = static_cast<unsigned char*>(shared);
  bool inside = false;
  for (const auto& array : arrays) inside = inside || (from >= array.first && from + BYTES <= array.second);
  if (valid && !inside) fail("a copy from outside of the arrays");
  if (to < shared_bytes.data() || to + BYTES > shared_bytes.data() + shared_size)
    fail("a copy to outside of shared memory");
  if (uintptr_t(from) % BYTES != 0 || (to - shared_bytes.data()) % BYTES != 0) fail("a misaligned copy");
  valid ? memcpy(to, from, BYTES) : memset(to, 0, BYTES);
}
static std::vector<std::pair<char*, char*>> results;  // where a kernel may write; anywhere if empty

template <class Value>
static void store_if(bool valid, void* to, const Value& value) {
  if (!valid) return;
  char* at = static_cast<char*>(to);
  bool inside = results.empty();
  for (const auto& array : results) inside = inside || (at >= array.first && at + sizeof(value) <= array.second);
  if (!inside) fail("a store to outside of the arrays");
  if (uintptr_t(at) % sizeof(value) != 0) fail("a misaligned store");
  memcpy(at, &value, sizeof(value));
}

static void commit_copies() {}
template <int LEFT>
static void wait_for_copies() {}

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct alignas(16) float4 {
  float x, y, z, w;
};

static float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }

static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

/* The bytes of b and a that the four digits of `selector` name, the lowest first. */
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}

static ucontext_t host;
static std::vector<ucontext_t> threads;
enum State : char { kRuns, kWaitsForWarp, kWaitsForBlock, kIsDone };
static std::vector<State> states;
static void (*body)();

static void leave(State state) {
  states[threadIdx.x] = state;
  swapcontext(&threads[threadIdx.x], &host);
}
static void __syncthreads() { leave(kWaitsForBlock); }
static void __syncwarp() { leave(kWaitsForWarp); }

static void play_thread() {
  body();
  leave(kIsDone);
}

/* Ends the waits in `from` to `to` if all threads there that are not done wait for `state`. */
static bool release(size_t from, size_t to, State state) {
  bool any = false;
  for (size_t t = from; t < to; ++t) {
    if (states[t] != state && states[t] != kIsDone) return false;
    any = any || states[t] == state;
  }
  for (size_t t = from; t < to; ++t)
    if (states[t] == state) states[t] = kRuns;
  return any;
}

/* Runs `kernel` in one block after the other. */
static void launch(unsigned grid_x, unsigned grid_y, unsigned block, size_t bytes, void (*kernel)()) {
  constexpr size_t kStack = 1 << 16;
  body = kernel;
  gridDim = {grid_x, grid_y};
  blockDim = {block, 1};
  std::vector<char> stacks(block * kStack);
  for (unsigned y = 0; y < grid_y; ++y)
    for (unsigned x = 0; x < grid_x; ++x) {
      blockIdx = {x, y};
      shared_size = bytes;
      shared_bytes.assign(bytes + kPast, 0xff);  // not numbers
      threads.assign(block, {});
      states.assign(block, kRuns);
      for (unsigned t = 0; t < block; ++t) {
        getcontext(&threads[t]);
        threads[t].uc_stack.ss_sp = &stacks[t * kStack];
        threads[t].uc_stack.ss_size = kStack;
        makecontext(&threads[t], play_thread, 0);
      }
      for (bool any = true; any;) {
        for (unsigned t = 0; t < block; ++t)
          if (states[t] == kRuns) threadIdx.x = t, swapcontext(&host, &threads[t]);
        any = release(0, block, kWaitsForBlock);
        for (size_t t = 0; t < block; t += 32) any = release(t, std::min<size_t>(t + 32, block), kWaitsForWarp) || any;
      }
      for (const State state : states)
        if (state != kIsDone) fail("threads wait for each other");
      for (size_t i = bytes; i < bytes + kPast; ++i)
        if (shared_bytes[i] != 0xff) fail("a store past the shared memory");
    }
}

#define __expf(x) std::exp(float(x)) /* the name is one of glibc */
static float __fdividef(float x, float y) { return x / y; }
struct float2 {
  float x, y;
};

/* The value of another lane of the warp. */
static float __shfl_xor_sync(unsigned, float value, int bits) {
  static std::vector<float> given(1024);
  given[threadIdx.x] = value;
  __syncwarp();
  const float found = given[threadIdx.x ^ bits];
  __syncwarp();
  return found;
}
