// The recurrence of the GRU, forward, by teams of blocks. A team computes kRows rows of a problem in all steps, then
// other rows. Each block owns kUnits hidden units, and publishes their states in every step.
extern "C" __global__ void __launch_bounds__(kThreads, 1) gru_forward(const __grid_constant__ GruArguments p) {
  Block block(p, shared_address(shared_memory()));
  const int teams = gridDim.x / kBlocks;
  int problem = -1;  // whose weights are loaded
#pragma unroll 1
  for (int item = block.team; item < p.problems * p.tiles; item += teams) {
    const Place place(p, item, block.rank);
    if (place.problem != problem) block.weights.load(p, place, block.warp, block.lane);
    problem = place.problem;
    ForwardRows rows(p, place, block.unit, place.first_row + block.tile * kTile + block.row);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      block.publish(rows.state[i], block.published, 0, i);
      block.mark(block.published, 0, i);
    }

#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      Inputs inputs[kItems];
      Gates gates[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) inputs[i] = rows.load_inputs(i);
      rows.move_inputs();
      const auto finish = [&](int i, float product) {
        rows.finish(i, gates[i], rows.with_input(inputs[i], 2, product));
        rows.reset(i, inputs[i].reset_next != 0);
        if (step + 1 < p.steps) block.publish(rows.state[i], block.published + 1, 0, i);
      };
      block.load_ahead<0, 0>(block.published, 0);
#if !LINEAR
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        block.multiply_batch<0, 2, 0>(batch);
        if (batch + 1 < BATCHES) block.load_ahead<0, 0>(block.published, batch + 1);
        __syncthreads();
        float sums[2][kItemsOfBatch];
        block.add_up<0>(sums, batch, 0);
#pragma unroll
        for (int i = batch * kItemsOfBatch; i < (batch + 1) * kItemsOfBatch; ++i) {
          gates[i].set_z_and_r(rows.with_input(inputs[i], 0, sums[0][i % kItemsOfBatch]),
                               rows.with_input(inputs[i], 1, sums[1][i % kItemsOfBatch]), p.clip);
          block.publish(rows.gated_state(i, gates[i]), block.published, 1, i);
          block.mark(block.published, 1, i);
        }
      }
      block.load_ahead<2, 1>(block.published, 0);
#endif
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        const int first = batch * kItemsOfBatch;
#if LINEAR
        block.multiply_batch<0, 3, 0>(batch);
        if (batch + 1 < BATCHES) block.load_ahead<0, 0>(block.published, batch + 1);
        __syncthreads();
        float sums[3][kItemsOfBatch];
        block.add_up<0>(sums, batch, 0);
#pragma unroll
        for (int i = first; i < first + kItemsOfBatch; ++i) {
          gates[i].set_z_and_r(rows.with_input(inputs[i], 0, sums[0][i - first]),
                               rows.with_input(inputs[i], 1, sums[1][i - first]), p.clip);
          gates[i].recurrent = sums[2][i - first] + rows.recurrent_bias;
          finish(i, gates[i].r * gates[i].recurrent);
        }
#else
        block.multiply_batch<2, 1, 1>(batch);
        if (batch + 1 < BATCHES) block.load_ahead<2, 1>(block.published, batch + 1);
        __syncthreads();
        float sums[1][kItemsOfBatch];
        block.add_up<2>(sums, batch, 1);
#pragma unroll
        for (int i = first; i < first + kItemsOfBatch; ++i) finish(i, sums[0][i - first]);
#endif
#pragma unroll
        for (int i = first; i < first + kItemsOfBatch; ++i) {
          if (step + 1 < p.steps) block.mark(block.published + 1, 0, i);
          rows.store(i, gates[i]);
        }
      }
      rows.move_results();
      block.advance();
    }
    rows.store_last();
  }
}
