// The recurrence of the GRU, backward, by single blocks. A warp multiplies for a few units of the state before: its
// lanes divide the terms, the gradients of all gates, and each has the weights of all units of the warp.

constexpr int kUnitsOfWarp = kPadded / (kMultiplying / 32), kTermsOfGate = kPadded / 32;  // of a lane
constexpr int kWidth = kTermsOfGate % 2 == 0 ? 2 : 1;  // terms that a lane loads at once
constexpr int kSets = kUnitsOfWarp * kRows;            // of sums of a thread
static_assert(kMultiplying / 32 * kUnitsOfWarp == kPadded && kSets <= 32, "");

// The term of a gate that a lane has: in words of kWidth neighbors.
__device__ inline int term_of(int lane, int i) { return (i / kWidth * 32 + lane) * kWidth + i % kWidth; }

struct Weights {  // transposed
  float at[3][kTermsOfGate][kUnitsOfWarp];

  __device__ void load(const GruArguments& p, int problem, int first_unit, int lane) {
    const int H = p.hidden;
    const T* const r = static_cast<const T*>(p.r) + static_cast<long long>(problem) * 3 * H * H;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
      for (int i = 0; i < kTermsOfGate; ++i)
#pragma unroll
        for (int j = 0; j < kUnitsOfWarp; ++j) {
          const int unit = first_unit + j, term = term_of(lane, i);
          at[gate][i][j] = unit < H && term < H ? widen(r[(gate * H + term) * H + unit]) : 0.f;
        }
  }
};

// The terms of a gate that a lane has, of one row.
struct Terms {
  float at[kTermsOfGate];

  __device__ Terms(const float* operands, int lane) {
#pragma unroll
    for (int i = 0; i < kTermsOfGate; i += kWidth) {
      if constexpr (kWidth == 2) {
        const float2 word = *reinterpret_cast<const float2*>(operands + term_of(lane, i));
        at[i] = word.x, at[i + 1] = word.y;
      } else {
        at[i] = operands[term_of(lane, i)];
      }
    }
  }
};

// Products of the gradients of some gates, [kRows, 3, kPadded], for all units: sums are [kRows, kSumsStride].
template <int FIRST, int GATES>
__device__ inline void multiply(const Weights& weights, const float* operands, float* sums, int first_unit, int lane) {
  float parts[kSets] = {};
#pragma unroll
  for (int gate = FIRST; gate < FIRST + GATES; ++gate)
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const Terms terms(operands + (row * 3 + gate) * kPadded, lane);
#pragma unroll
      for (int i = 0; i < kTermsOfGate; ++i)
#pragma unroll
        for (int j = 0; j < kUnitsOfWarp; ++j) parts[j * kRows + row] += weights.at[gate][i][j] * terms.at[i];
    }
  add_over_lanes<16, kSets, 1>(parts);
  const int set = lane / (32 / kSets);  // lanes with the same number have the same sums
  if (lane % (32 / kSets) == 0) sums[set % kRows * kSumsStride + first_unit + set / kRows] = parts[0];
}

__device__ inline void multiply_steps(const GruArguments& p, const Place& place, const float* operands, float* sums) {
  const int lane = threadIdx.x % 32, first_unit = threadIdx.x / 32 * kUnitsOfWarp;
  Weights weights;
  weights.load(p, place.problem, first_unit, lane);
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
#if !LINEAR
    wait_at<kOperandsReady, kThreads>();
    multiply<2, 1>(weights, operands, sums, first_unit, lane);
    arrive_at<kSumsReady, kThreads>();
#endif
    wait_at<kOperandsReady, kThreads>();
    multiply<0, LINEAR ? 3 : 2>(weights, operands, sums, first_unit, lane);
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
  Saved next = load(), after_next = load();  // loads take longer than a step

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
    factors = rows.factors_of(0, next);
    next = after_next;
    after_next = load();
    wait_at<kSumsReady, kThreads>();
    rows.finish(0, own_sum, f.valid, f.is_reset);
  }
  rows.store_last();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) gru_backward(const __grid_constant__ GruArguments p) {
  const Place place(p, blockIdx.x, 0);
  float* const operands = reinterpret_cast<float*>(shared_memory());
  float* const sums = operands + kRows * 3 * kPadded;
  if (threadIdx.x < kMultiplying)
    multiply_steps(p, place, operands, sums);
  else
    compute_gradients(p, place, operands, sums);
}
