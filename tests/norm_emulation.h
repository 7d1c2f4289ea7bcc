/* Emulates ffi/cuda/norm/instructions.cuh and the intrinsic functions that the kernels of the norms call, after
   kernel_emulation.h. Blocks do not wait for each other: they run one after the other. */
typedef unsigned long long uint64;

static uint64 read_once() { return 0; }
static uint64 read_again() { return 0; }

template <int BYTES, int WORDS>
static void load_words(const void* from, uint64, unsigned (&words)[WORDS]) {
  const char* const at = static_cast<const char*>(from);
  bool inside = false;
  for (const auto& array : arrays) inside = inside || (at >= array.first && at + BYTES <= array.second);
  if (!inside) fail("a load from outside of the arrays");
  if (uintptr_t(at) % BYTES != 0) fail("a misaligned load");
  words[0] = 0;
  memcpy(words, at, BYTES);
}

template <int BYTES, int WORDS>
static void store_words(void* to, uint64, const unsigned (&words)[WORDS]) {
  struct Bytes {
    unsigned char bytes[BYTES];
  } value;
  memcpy(&value, words, BYTES);
  store_if(true, to, value);
}

static void prefetch_line(const void* from) {
  const char* const at = static_cast<const char*>(from);
  bool inside = false;
  for (const auto& array : arrays) inside = inside || (at >= array.first && at < array.second);
  if (!inside) fail("a prefetch from outside of the arrays");
}

static unsigned narrow_pair(float low, float high) {
  Half halves[2];
  narrow(low, &halves[0]);
  narrow(high, &halves[1]);
  return halves[0] | unsigned(halves[1]) << 16;
}

static void set_flag(uint64* flag, uint64 value) { *flag = value; }
static uint64 get_flag(const uint64* flag) { return *flag; }
static unsigned count(void* number) { return (*static_cast<unsigned*>(number))++; }
static void fence_of_gpu() {}
static void stop() { fail("a block waits for another"); }

static float2 make_float2(float x, float y) { return {x, y}; }
template <class Value>
static Value __ldcg(const Value* from) {
  return *from;
}
template <class Value>
static void __stcg(Value* to, const Value& value) {
  *to = value;
}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::isinf;
