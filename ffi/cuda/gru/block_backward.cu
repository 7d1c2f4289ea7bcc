// The recurrence of the GRU, backward, by single blocks. The terms of the products are the gradients of all gates.

struct Weights {  // transposed
  float at[3][kWords][kUnitsOfThread][4];

  __device__ void load(const GruArguments& p, int problem) {
    const int H = hidden_of(p);
    const T* const r = static_cast<const T*>(p.r) + static_cast<long long>(problem) * 3 * H * H;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
      for (int word = 0; word < kWords; ++word)
#pragma unroll
        for (int i = 0; i < kUnitsOfThread; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int unit = first_unit_of_thread() + i, term = (word * kSlices + slice_of_thread()) * 4 + k;
            at[gate][word][i][k] = unit < H && term < H ? widen(r[(gate * H + term) * H + unit]) : 0.f;
          }
  }
};

// Products of the gradients of some gates, [kRows, 3, kPadded], for all units: sums are [kRows, kSumsStride].
template <int FIRST, int GATES>
__device__ inline void multiply(const Weights& weights, const float* operands, float* sums) {
  float parts[kSets] = {};
#pragma unroll
  for (int gate = FIRST; gate < FIRST + GATES; ++gate)
#pragma unroll
    for (int word = 0; word < kWords; ++word)
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float* const operand = operands + (row * 3 + gate) * kPadded;
        const float4 gradient = reinterpret_cast<const float4*>(operand)[word * kSlices + slice_of_thread()];
        const float terms[4] = {gradient.x, gradient.y, gradient.z, gradient.w};
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int i = 0; i < kUnitsOfThread; ++i) parts[i * kRows + row] += weights.at[gate][word][i][k] * terms[k];
      }
  add_slices<1>(parts, [&](int unit, int row) { sums[row * kSumsStride + unit] = parts[0]; });
}

__device__ inline void multiply_steps(const GruArguments& p, const Place& place, const float* operands, float* sums) {
  Weights weights;
  weights.load(p, place.problem);
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
#if !LINEAR
    wait_at<kOperandsReady, kThreads>();
    multiply<2, 1>(weights, operands, sums);
    arrive_at<kSumsReady, kThreads>();
#endif
    wait_at<kOperandsReady, kThreads>();
    multiply<0, LINEAR ? 3 : 2>(weights, operands, sums);
    arrive_at<kSumsReady, kThreads>();
  }
}

__device__ inline void compute_gradients(const GruArguments& p, const Place& place, float* operands,
                                         const float* sums) {
  BackwardRows rows(p, place, unit_in_block(), place.first_row + row_in_block());
  float* const own_operands = operands + row_in_block() * 3 * kPadded + unit_in_block();
  const float& own_sum = sums[row_in_block() * kSumsStride + unit_in_block()];
  const auto load = [&] {
    Saved saved{};
    if (rows.step >= 0) saved = rows.load(0);
    rows.move_loads();
    return saved;
  };
  Factors factors = rows.factors_of(0, load());
  Saved ahead[kLoadsAhead];
#pragma unroll
  for (Saved& saved : ahead) saved = load();

#pragma unroll 1
  for (int done = 0; done < p.steps; ++done) {
    const Factors f = factors;
    const float out = rows.dh[0] + f.dy;
    const float dz = f.valid ? out * f.z_factor : 0.f, dn = f.valid ? out * f.n_factor : 0.f;
    rows.dh[0] = f.valid ? out * f.z : out;
    own_operands[0] = dz;
#if LINEAR
    const float dr = f.valid ? out * f.r_factor : 0.f;
    own_operands[kPadded] = dr;
    own_operands[2 * kPadded] = dn * f.r;
#else
    own_operands[2 * kPadded] = dn;
    arrive_at<kOperandsReady, kThreads>();
    wait_at<kSumsReady, kThreads>();
    const float dproduct = own_sum;  // of r * h
    const float dr = f.valid ? dproduct * f.r_factor : 0.f;
    own_operands[kPadded] = dr;
    if (f.valid) rows.dh[0] += dproduct * f.r;
#endif
    arrive_at<kOperandsReady, kThreads>();
    rows.store(0, dz, dr, dn, f.r);
    rows.move_results();
    factors = rows.factors_of(0, ahead[0]);
#pragma unroll
    for (int i = 1; i < kLoadsAhead; ++i) ahead[i - 1] = ahead[i];
    ahead[kLoadsAhead - 1] = load();
    wait_at<kSumsReady, kThreads>();
    rows.finish(0, own_sum, f.valid, f.is_reset);
  }
  rows.store_last();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) gru_backward(const __grid_constant__ GruArguments p) {
  const Place place(p, blockIdx.x, 0);
  float* const operands = reinterpret_cast<float*>(shared_memory());
  float* const sums = operands + kRows * 3 * kPadded;
  if (threadIdx.x < kMultiplying) {
    if constexpr (kFillsRegisters) take_registers<kGruRegistersToMultiply>();
    multiply_steps(p, place, operands, sums);
  } else {
    if constexpr (kFillsRegisters) give_registers<kGruRegistersOfOthers>();
    compute_gradients(p, place, operands, sums);
  }
}
