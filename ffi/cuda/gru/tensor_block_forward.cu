// The recurrence of the GRU, forward, by single blocks on tensor cores. The operand of the products is the state, or
// (r * h) where the reset gate comes before the product.

extern "C" __global__ void __launch_bounds__(kThreads, kResident) gru_forward(const __grid_constant__ GruArguments p) {
  const Place place(p, blockIdx.x, 0);
  const unsigned shared = shared_address(shared_memory());
  const Weights weights(p, place, shared);
  const Items items(shared);
  ForwardRows rows(p, place, unit_of_thread(), place.first_row + row_of_thread());
  Inputs next[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    items.store(i, rows.state[i]);
    next[i] = rows.load_inputs(i);
  }
  rows.move_inputs();
  Resets resets(p, place, rows.t + rows.towards, rows.towards);
  unsigned char next_flag = p.steps > 1 ? resets.load() : static_cast<unsigned char>(0);

#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    const auto set_z_and_r = [&](int first, Gates(&gates)[kAtOnce]) {
      float sums[2][kAtOnce];
      items.load_sums(first, 0, sums);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const Inputs& inputs = next[first + k];
        gates[k].set_z_and_r(rows.with_input(inputs, 0, sums[0][k]), rows.with_input(inputs, 1, sums[1][k]), p.clip);
      }
    };
    __syncthreads();
    multiply<0, LINEAR ? 3 : 2>(weights, shared);
    __syncthreads();
#if !LINEAR
#pragma unroll
    for (int first = 0; first < kItems; first += kAtOnce) {
      Gates gates[kAtOnce];
      set_z_and_r(first, gates);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) items.store(first + k, rows.gated_state(first + k, gates[k]));
    }
    __syncthreads();
    multiply<2, 1>(weights, shared);
    __syncthreads();
#endif
    const uint32 resets_next = Resets::shared(next_flag);
#pragma unroll
    for (int first = 0; first < kItems; first += kAtOnce) {
      Gates gates[kAtOnce];
      set_z_and_r(first, gates);  // again, where r * h was the operand: there are no registers to keep them
      float sums[1][kAtOnce];
      items.load_sums(first, 2, sums);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        gates[k].recurrent = sums[0][k] + rows.recurrent_bias;
        const float product = LINEAR ? gates[k].r * gates[k].recurrent : gates[k].recurrent;
        rows.finish(first + k, gates[k], rows.with_input(next[first + k], 2, product));
      }
      if (resets_next != 0) {
#pragma unroll
        for (int i = first; i < first + kAtOnce; ++i) rows.reset(i, Resets::is_set(resets_next, i));
      }
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) items.store(i, rows.state[i]);
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) {
        next[i] = rows.load_inputs(i);
        rows.store(i, gates[i - first]);
      }
    }
    rows.move_inputs();
    rows.move_results();
    resets.move();
    next_flag = step + 2 < p.steps ? resets.load() : static_cast<unsigned char>(0);
  }
  rows.store_last();
}
