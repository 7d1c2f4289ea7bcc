// The recurrence of the GRU, forward, by single blocks on tensor cores. The operand of the products is the state, or r * h.

extern "C" __global__ void __launch_bounds__(kThreads, 1) gru_forward(const __grid_constant__ GruArguments p) {
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

#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    const auto gates_of = [&](int i) {
      Gates gates;
      gates.set_z_and_r(rows.input(next[i], 0) + items.sum(i, 0), rows.input(next[i], 1) + items.sum(i, 1), p.clip);
      return gates;
    };
    __syncthreads();
    multiply<0, LINEAR ? 3 : 2>(weights, shared);
    __syncthreads();
#if !LINEAR
#pragma unroll
    for (int i = 0; i < kItems; ++i) items.store(i, rows.gated_state(i, gates_of(i)));
    __syncthreads();
    multiply<2, 1>(weights, shared);
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      Gates gates = gates_of(i);  // again, where r * h was the operand: there are no registers to keep them
      gates.recurrent = items.sum(i, 2) + rows.recurrent_bias;
      const float product = LINEAR ? gates.r * gates.recurrent : gates.recurrent;
      rows.finish(i, gates, rows.input(next[i], 2) + product, next[i].reset_next);
      items.store(i, rows.state[i]);
      rows.store(i, gates);
      next[i] = rows.load_inputs(i);
    }
    rows.move_inputs();
    rows.move_results();
  }
  rows.store_last();
}
