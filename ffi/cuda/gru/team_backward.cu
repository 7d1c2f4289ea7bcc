// The recurrence of the GRU, backward, by teams of blocks. A team computes kRows rows of a problem in all steps, then
// other rows. Each block owns kUnits hidden units. In every step it publishes the gradients of their gates, and
// multiplies those of all units by its columns of the recurrent weights.
extern "C" __global__ void __launch_bounds__(kThreads, 1) gru_backward(const __grid_constant__ GruArguments p) {
  Block block(p, shared_address(shared_memory()));
  const int teams = gridDim.x / kBlocks;
  int problem = -1;  // whose weights are loaded
#pragma unroll 1
  for (int item = block.team; item < p.problems * p.tiles; item += teams) {
    const Place place(p, item, block.rank);
    if (place.problem != problem) block.weights.load(p, place, block.warp, block.lane);
    problem = place.problem;
    BackwardRows rows(p, place, block.unit, place.first_row + block.tile * kTile + block.row);
    Factors factors[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) factors[i] = rows.factors_of(i, rows.load(i));

#pragma unroll 1
    for (int step = p.steps - 1; step >= 0; --step) {
      float dz[kItems], dn[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const Factors& f = factors[i];
        const float out = rows.dh[i] + f.dy;
        dz[i] = f.valid ? out * f.z_factor : 0.f;
        dn[i] = f.valid ? out * f.n_factor : 0.f;
        rows.dh[i] = f.valid ? out * f.z : out;
        block.publish(dz[i], block.published, 0, i);
#if LINEAR
        const float dr = f.valid ? out * f.r_factor : 0.f;
        block.publish(dr, block.published, 1, i);
        block.publish(dn[i] * f.r, block.published, 2, i);
        rows.store(i, dz[i], dr, dn[i], f.r);
#else
        block.publish(dn[i], block.published, 2, i);
#endif
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i)
#pragma unroll
        for (int region = 0; region < kRegions; ++region)
          if (LINEAR || region != 1) block.mark(block.published, region, i);
#if !LINEAR
      block.load_ahead<2, 0>(block.published, 0);
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        block.multiply_batch<2, 1, 0>(batch);
        if (batch + 1 < BATCHES) block.load_ahead<2, 0>(block.published, batch + 1);
        __syncthreads();
        float sums[1][kItemsOfBatch];
        block.add_up<0>(sums, batch, 0);
#pragma unroll
        for (int i = batch * kItemsOfBatch; i < (batch + 1) * kItemsOfBatch; ++i) {
          const Factors& f = factors[i];
          const float dproduct = sums[0][i - batch * kItemsOfBatch];  // of r * h
          const float dr = f.valid ? dproduct * f.r_factor : 0.f;
          block.publish(dr, block.published, 1, i);
          block.mark(block.published, 1, i);
          if (f.valid) rows.dh[i] += dproduct * f.r;
          rows.store(i, dz[i], dr, dn[i], f.r);
        }
      }
#endif
      rows.move_loads();
      rows.move_results();
      Saved saved[kItems];
      if (step > 0) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) saved[i] = rows.load(i);
      }
      block.load_ahead<0, 0>(block.published, 0);
#pragma unroll
      for (int batch = 0; batch < BATCHES; ++batch) {
        block.multiply_batch<0, LINEAR ? 3 : 2, 0>(batch);
        if (batch + 1 < BATCHES) block.load_ahead<0, 0>(block.published, batch + 1);
        __syncthreads();
        float sums[1][kItemsOfBatch];
        block.add_up<0>(sums, batch, LINEAR ? 0 : 1);
#pragma unroll
        for (int i = batch * kItemsOfBatch; i < (batch + 1) * kItemsOfBatch; ++i)
          rows.finish(i, sums[0][i - batch * kItemsOfBatch], factors[i].valid, factors[i].is_reset);
      }
      if (step > 0) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) factors[i] = rows.factors_of(i, saved[i]);
      }
      block.advance();
    }
    rows.store_last();
  }
  block.end();
}
