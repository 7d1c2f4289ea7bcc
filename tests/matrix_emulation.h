/* Emulates ffi/cuda/runtime/matrix.cuh, after kernel_emulation.h: products of matrices by all threads of a warp. */
#include <array>

/* What each thread of the block gives the others of its warp. */
static std::vector<std::array<unsigned, 8>> given(1024);

static unsigned lane_of_thread() { return threadIdx.x % 32; }
static const std::array<unsigned, 8>& given_by(unsigned lane) { return given[threadIdx.x / 32 * 32 + lane]; }

/* Gives values to the warp and takes `result()` of what all threads gave. */
template <class Result>
static auto exchanged(const std::array<unsigned, 8>& values, Result result) {
  given[threadIdx.x] = values;
  __syncwarp();
  const auto found = result();
  __syncwarp();
  return found;
}

static unsigned char* in_shared(unsigned address, size_t bytes) {
  if (address % bytes != 0 || address + bytes > shared_size) fail("a wrong address in shared memory");
  return shared_bytes.data() + address;
}
static Half half_at(unsigned address) {
  Half half;
  memcpy(&half, in_shared(address, 2), 2);
  return half;
}

static unsigned shared_address(const void* shared) {
  return unsigned(static_cast<const unsigned char*>(shared) - shared_bytes.data());
}
static unsigned load_shared(unsigned address) {
  unsigned word;
  memcpy(&word, in_shared(address, 4), 4);
  return word;
}
static void store_shared(unsigned address, unsigned word) { memcpy(in_shared(address, 4), &word, 4); }

template <int COUNT, bool TRANSPOSED>
static void load(unsigned* to, unsigned row) {
  if (row % 16 != 0) fail("a misaligned row of a matrix");
  const auto found = exchanged({row}, [] {
    std::array<unsigned, 4> words{};
    for (unsigned i = 0; i < COUNT; ++i) {
      const unsigned across = lane_of_thread() / 4, along = lane_of_thread() % 4 * 2;
      const auto element = [&](unsigned r, unsigned c) { return unsigned(half_at(given_by(8 * i + r)[0] + 2 * c)); };
      words[i] = TRANSPOSED ? element(along + 1, across) << 16 | element(along, across)
                            : element(across, along + 1) << 16 | element(across, along);
    }
    return words;
  });
  for (int i = 0; i < COUNT; ++i) to[i] = found[i];
}
template <int COUNT>
static void load_matrices(unsigned* to, unsigned row) {
  load<COUNT, false>(to, row);
}
static void load_transposed(unsigned (&to)[4], unsigned row) { load<4, true>(to, row); }

static void store_transposed(unsigned column, unsigned first, unsigned second) {
  exchanged({first, second}, [&] {
    const unsigned matrix = lane_of_thread() / 8, at = lane_of_thread() % 8;
    for (unsigned r = 0; r < 8 && matrix < 2; ++r) {
      const Half half = Half(given_by(4 * r + at / 2)[matrix] >> 16 * (at % 2));
      memcpy(in_shared(column + 2 * r, 2), &half, 2);
    }
    return 0;
  });
}

/* Of 8 * TERMS terms. */
template <unsigned TERMS>
static void add_products(float (&sums)[4], const std::array<unsigned, 8>& operands) {
  const auto found = exchanged(operands, [&] {
    std::array<float, 4> added{};
    for (unsigned j = 0; j < 4; ++j) {
      const unsigned row = lane_of_thread() / 4, column = lane_of_thread() % 4 * 2 + j % 2;
      for (unsigned k = 0; k < 8 * TERMS; ++k) {
        const unsigned a = given_by(row * 4 + k % 8 / 2)[j / 2 + k / 8 * 2];
        const unsigned b = given_by(column * 4 + k % 8 / 2)[4 + k / 8];
        added[j] += widen(Half(a >> 16 * (k % 2))) * widen(Half(b >> 16 * (k % 2)));
      }
    }
    return added;
  });
  for (int j = 0; j < 4; ++j) sums[j] += found[j];
}
static void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned b) {
  add_products<1>(sums, {a0, a1, 0, 0, b});
}
static void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                         unsigned b1) {
  add_products<2>(sums, {a0, a1, a2, a3, b0, b1});
}

static unsigned larger_halves(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
static unsigned of_neighbor(unsigned value) {
  return exchanged({value}, [] { return given_by(lane_of_thread() ^ 1)[0]; });
}
static bool any_thread(bool value) {
  static bool any;
  __syncthreads();
  any = false;
  __syncthreads();
  any = any || value;
  __syncthreads();
  return any;
}
