/* Emulates ffi/cuda/gru/instructions.cuh and the intrinsic functions that the GRU's kernels for single blocks call,
   after kernel_emulation.h and matrix_emulation.h. */
static float approximate_tanh(float x) { return std::tanh(x); }
static float bounded(float before, float clip) {
  return std::isnan(before) ? before : std::min(std::max(before, -clip), clip);
}
static void prefetch(const void* address) {
  const char* from = static_cast<const char*>(address);
  bool inside = false;
  for (const auto& array : arrays) inside = inside || (from >= array.first && from < array.second);
  if (!inside) fail("a prefetch from outside of the arrays");
}

/* Bit i: whether `set` is true in lane i of the warp. */
static unsigned __ballot_sync(unsigned, bool set) {
  return exchanged({set}, [] {
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; ++lane) bits |= given_by(lane)[0] << lane;
    return bits;
  });
}

/* Registers are not emulated. */
template <int>
static void take_registers() {}
template <int>
static void give_registers() {}

/* Barriers where some threads only arrive. */
static std::vector<unsigned> arrivals(16);
template <int BARRIER, int THREADS>
static void arrive_at() {
  ++arrivals[BARRIER];
  __syncwarp();  // lets other threads run: a store that wrongly follows the arrival comes too late for them
}
template <int BARRIER, int THREADS>
static void wait_at() {
  const unsigned all = (arrivals[BARRIER]++ / THREADS + 1) * THREADS;
  for (int turns = 0; arrivals[BARRIER] < all; ++turns) {
    if (turns == 1000) fail("threads wait at a barrier of the block");
    __syncwarp();
  }
}

/* Products of tensor cores. */
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static unsigned as_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  return std::isfinite(x) ? (bits + 0x1000) & ~0x1fffu : bits;
}
static unsigned pack(float low, float high) {
  Half halves[2];
  narrow(low, &halves[0]);
  narrow(high, &halves[1]);
  return unsigned(halves[1]) << 16 | halves[0];
}
struct Sums {
  float at[4];
};
static void multiply_add(Sums& sums, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if MODE == 1
  const auto found = exchanged({a[0], a[1], a[2], a[3], b0, b1}, [] {
    std::array<float, 4> added{};
    for (unsigned j = 0; j < 4; ++j)
      for (unsigned k = 0; k < 8; ++k) {
        const unsigned row = lane_of_thread() / 4, column = lane_of_thread() % 4 * 2 + j % 2;
        const unsigned left = given_by(row * 4 + k % 4)[j / 2 + k / 4 * 2],
                       right = given_by(column * 4 + k % 4)[4 + k / 4];
        added[j] += __uint_as_float(left) * __uint_as_float(right);
      }
    return added;
  });
  for (int j = 0; j < 4; ++j) sums.at[j] += found[j];
#else
  multiply_add(sums.at, a[0], a[1], a[2], a[3], b0, b1);
#endif
}

/* Shared memory by its addresses. */
template <class A>
static A kept(A value) {
  return value;
}
static void store_float(unsigned address, float value) { memcpy(in_shared(address, 4), &value, 4); }
static void store_half(unsigned address, unsigned short value) { memcpy(in_shared(address, 2), &value, 2); }
static float load_float(unsigned address) { return __uint_as_float(load_shared(address)); }
static uint4 load_word(unsigned address) {
  uint4 word;
  memcpy(&word, in_shared(address, 16), 16);
  return word;
}
static void store_word(unsigned address, uint4 word) { memcpy(in_shared(address, 16), &word, 16); }
