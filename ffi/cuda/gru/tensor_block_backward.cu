// The recurrence of the GRU, backward, by single blocks on tensor cores. The operands of the products are the gradients of
// the gates.

extern "C" __global__ void __launch_bounds__(kThreads, 1) gru_backward(const __grid_constant__ GruArguments p) {
  const Place place(p, blockIdx.x, 0);
  const unsigned shared = shared_address(shared_memory());
  const Weights weights(p, place, shared);
  const Items items(shared);
  BackwardRows rows(p, place, unit_of_thread(), place.first_row + row_of_thread());
  Saved next[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) next[i] = rows.load(i);
  rows.move_loads();
  uint32 were_valid = 0, were_reset = 0;  // of the step before, bit i
  const auto finish = [&](int i) { rows.finish(i, items.sum(i), were_valid >> i & 1, were_reset >> i & 1); };

#pragma unroll 1
  for (int done = 0; done < p.steps; ++done) {
#if !LINEAR
    float outs[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (done > 0) finish(i);
      const Factors f = rows.factors_of(i, next[i]);
      outs[i] = rows.dh[i] + f.dy;
      items.store(i, f.valid ? outs[i] * f.n_factor : 0.f, 2);
    }
    __syncthreads();
    multiply<2, 1>(weights, shared);
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#if LINEAR
      if (done > 0) finish(i);
#endif
      const Factors f = rows.factors_of(i, next[i]);
#if LINEAR
      const float out = rows.dh[i] + f.dy;
      const float dr = f.valid ? out * f.r_factor : 0.f;
#else
      const float out = outs[i], dproduct = items.sum(i);  // of r * h
      const float dr = f.valid ? dproduct * f.r_factor : 0.f;
#endif
      const float dz = f.valid ? out * f.z_factor : 0.f, dn = f.valid ? out * f.n_factor : 0.f;
      rows.dh[i] = f.valid ? out * f.z : out;
      items.store(i, dz, 0);
      items.store(i, dr, 1);
#if LINEAR
      items.store(i, dn * f.r, 2);
#else
      if (f.valid) rows.dh[i] += dproduct * f.r;
#endif
      const uint32 bit = 1u << i;
      were_valid = f.valid ? were_valid | bit : were_valid & ~bit;
      were_reset = f.is_reset ? were_reset | bit : were_reset & ~bit;
      rows.store(i, dz, dr, dn, f.r);
      if (done + 1 < p.steps) next[i] = rows.load(i);
    }
    rows.move_loads();
    rows.move_results();
    __syncthreads();
    multiply<0, LINEAR ? 3 : 2>(weights, shared);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) finish(i);
  rows.store_last();
}
