// The recurrence of the GRU, forward, by single blocks. The terms of the products are the units of the state.

struct Weights {
  float at[kWords][kUnitsOfThread][3][4];

  __device__ void load(const GruArguments& p, int problem) {
    const int H = hidden_of(p);
    const T* const r = static_cast<const T*>(p.r) + static_cast<long long>(problem) * 3 * H * H;
#pragma unroll
    for (int word = 0; word < kWords; ++word)
#pragma unroll
      for (int i = 0; i < kUnitsOfThread; ++i)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int unit = first_unit_of_thread() + i, term = (word * kSlices + slice_of_thread()) * 4 + k;
            at[word][i][gate][k] = unit < H && term < H ? widen(r[(gate * H + unit) * H + term]) : 0.f;
          }
  }
};

// Products of some gates with states, for all units: the sums of a gate are [kRows, kSumsStride].
template <int FIRST, int GATES>
__device__ inline void multiply(const Weights& weights, const float* states, float* sums) {
  float parts[kUnitsOfThread * kRows * GATES] = {};
#pragma unroll
  for (int word = 0; word < kWords; ++word)
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float4 state = reinterpret_cast<const float4*>(states + row * kPadded)[word * kSlices + slice_of_thread()];
      const float terms[4] = {state.x, state.y, state.z, state.w};
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < kUnitsOfThread; ++i)
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate)
            parts[(i * kRows + row) * GATES + gate] += weights.at[word][i][FIRST + gate][k] * terms[k];
    }
  add_slices<GATES>(parts, [&](int unit, int row) {
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate) sums[((FIRST + gate) * kRows + row) * kSumsStride + unit] = parts[gate];
  });
}

__device__ inline void multiply_steps(const GruArguments& p, const Place& place, const float* states, float* sums) {
  Weights weights;
  weights.load(p, place.problem);
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    wait_at<kOperandsReady, kThreads>();
    multiply<0, LINEAR ? 3 : 2>(weights, states, sums);
    arrive_at<kSumsReady, kThreads>();
#if !LINEAR
    wait_at<kOperandsReady, kThreads>();  // r * h
    multiply<2, 1>(weights, states, sums);
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
  Inputs ahead[kLoadsAhead];
#pragma unroll
  for (Inputs& inputs : ahead) inputs = load();

#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    const Inputs inputs = ahead[0];
#pragma unroll
    for (int i = 1; i < kLoadsAhead; ++i) ahead[i - 1] = ahead[i];
    ahead[kLoadsAhead - 1] = load();
    Gates gates;
    wait_at<kSumsReady, kThreads>();
    gates.set_z_and_r(rows.with_input(inputs, 0, sum_of(0)), rows.with_input(inputs, 1, sum_of(1)), p.clip);
#if LINEAR
    gates.recurrent = sum_of(2) + rows.recurrent_bias;
    const float product = gates.r * gates.recurrent;
#else
    operand = rows.gated_state(0, gates);
    arrive_at<kOperandsReady, kThreads>();
    wait_at<kSumsReady, kThreads>();
    const float product = sum_of(2);
#endif
    rows.finish(0, gates, rows.with_input(inputs, 2, product));
    rows.reset(0, inputs.reset_next != 0);
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
  if (threadIdx.x < kMultiplying) {
    if constexpr (kFillsRegisters) take_registers<kGruRegistersToMultiply>();
    multiply_steps(p, place, states, sums);
  } else {
    if constexpr (kFillsRegisters) give_registers<kGruRegistersOfOthers>();
    compute_gates(p, place, states, sums);
  }
}
