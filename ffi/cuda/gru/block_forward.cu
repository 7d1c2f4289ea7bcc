// The recurrence of the GRU, forward, by single blocks. A thread has the weights of a few units for one eighth of the
// terms.

constexpr int kSlices = 8, kUnitsOfThread = kPadded * kSlices / kMultiplying;
constexpr int kSets = kUnitsOfThread * kRows;  // of sums of a thread
constexpr int kWords = kPadded / kSlices / 4;  // of four terms, for a thread: every eighth of the state
static_assert(kPadded % (4 * kSlices) == 0 && kMultiplying / kSlices * kUnitsOfThread == kPadded && kSets <= kSlices,
              "");

struct Weights {
  float at[kWords][kUnitsOfThread][3][4];

  __device__ void load(const GruArguments& p, int problem, int first_unit, int slice) {
    const int H = p.hidden;
    const T* const r = static_cast<const T*>(p.r) + static_cast<long long>(problem) * 3 * H * H;
#pragma unroll
    for (int word = 0; word < kWords; ++word)
#pragma unroll
      for (int i = 0; i < kUnitsOfThread; ++i)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int unit = first_unit + i, term = (word * kSlices + slice) * 4 + k;
            at[word][i][gate][k] = unit < H && term < H ? widen(r[(gate * H + unit) * H + term]) : 0.f;
          }
  }
};

// Products of some gates with states, for all units: the sums of a gate are [kRows, kSumsStride].
template <int FIRST, int GATES>
__device__ inline void multiply(const Weights& weights, const float* states, float* sums, int first_unit, int slice) {
  float parts[kUnitsOfThread * kRows * GATES] = {};
#pragma unroll
  for (int word = 0; word < kWords; ++word)
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float4 state = reinterpret_cast<const float4*>(states + row * kPadded)[word * kSlices + slice];
      const float terms[4] = {state.x, state.y, state.z, state.w};
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < kUnitsOfThread; ++i)
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate)
            parts[(i * kRows + row) * GATES + gate] += weights.at[word][i][FIRST + gate][k] * terms[k];
    }
  add_over_lanes<kSlices / 2, kSets, GATES>(parts);
  if (slice % (kSlices / kSets) != 0) return;  // another lane has the same sums
  const int set = slice / (kSlices / kSets), unit = first_unit + set / kRows, row = set % kRows;
#pragma unroll
  for (int gate = 0; gate < GATES; ++gate) sums[((FIRST + gate) * kRows + row) * kSumsStride + unit] = parts[gate];
}

__device__ inline void multiply_steps(const GruArguments& p, const Place& place, const float* states, float* sums) {
  const int slice = threadIdx.x % kSlices;
  const int first_unit = threadIdx.x / kSlices * kUnitsOfThread;
  Weights weights;
  weights.load(p, place.problem, first_unit, slice);
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    wait_at<kOperandsReady, kThreads>();
    multiply<0, LINEAR ? 3 : 2>(weights, states, sums, first_unit, slice);
    arrive_at<kSumsReady, kThreads>();
#if !LINEAR
    wait_at<kOperandsReady, kThreads>();  // r * h
    multiply<2, 1>(weights, states, sums, first_unit, slice);
    arrive_at<kSumsReady, kThreads>();
#endif
  }
}

__device__ inline void compute_gates(const GruArguments& p, const Place& place, float* states, const float* sums) {
  ForwardRows rows(p, place, unit_in_block(), place.first_row + row_in_block());
  float& operand = states[row_in_block() * kPadded + unit_in_block()];
  const float* const own_sums = sums + row_in_block() * kSumsStride + unit_in_block();
  const auto sum_of = [&](int gate) { return own_sums[gate * kRows * kSumsStride]; };
  operand = rows.state[0];
  arrive_at<kOperandsReady, kThreads>();
  const auto load = [&] {
    const Inputs inputs = rows.load_inputs(0);
    rows.move_inputs();
    return inputs;
  };
  Inputs next = load(), after_next = load();  // loads take longer than a step

#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    const Inputs inputs = next;
    next = after_next;
    after_next = load();
    Gates gates;
    wait_at<kSumsReady, kThreads>();
    gates.set_z_and_r(rows.input(inputs, 0) + sum_of(0), rows.input(inputs, 1) + sum_of(1), p.clip);
#if LINEAR
    gates.recurrent = sum_of(2) + rows.recurrent_bias;
    const float product = gates.r * gates.recurrent;
#else
    operand = rows.gated_state(0, gates);
    arrive_at<kOperandsReady, kThreads>();
    wait_at<kSumsReady, kThreads>();
    const float product = sum_of(2);
#endif
    rows.finish(0, gates, rows.input(inputs, 2) + product, inputs.reset_next);
    if (step + 1 < p.steps) {
      operand = rows.state[0];
      arrive_at<kOperandsReady, kThreads>();
    }
    rows.store(0, gates);
    rows.move_results();
  }
  rows.store_last();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) gru_forward(const __grid_constant__ GruArguments p) {
  const Place place(p, blockIdx.x, 0);
  float* const states = reinterpret_cast<float*>(shared_memory());  // or r * h
  float* const sums = states + kRows * kPadded;
  if (threadIdx.x < kMultiplying)
    multiply_steps(p, place, states, sums);
  else
    compute_gates(p, place, states, sums);
}
