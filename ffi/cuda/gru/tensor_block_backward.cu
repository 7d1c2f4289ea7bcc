// The recurrence of the GRU, backward, by single blocks on tensor cores. The operands of the products are the gradients
// of the gates.

extern "C" __global__ void __launch_bounds__(kThreads, kResident) gru_backward(const __grid_constant__ GruArguments p) {
  const Place place(p, blockIdx.x, 0);
  const unsigned shared = shared_address(shared_memory());
  const Weights weights(p, place, shared);
  const Items items(shared);
  BackwardRows rows(p, place, unit_of_thread(), place.first_row + row_of_thread());
  Saved next[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) next[i] = rows.load(i);
  Resets resets(p, place, rows.t, rows.towards);
  unsigned char next_flag = resets.load();
  rows.move_loads();
  uint32 were_valid = 0, were_reset = 0;  // of the step before: bit i, and as Resets shares them
  const auto finish = [&](int first) {
    float sums[1][kAtOnce];
    items.load_sums(first, 0, sums);
#pragma unroll
    for (int i = first; i < first + kAtOnce; ++i) rows.add_products(i, sums[0][i - first], were_valid >> i & 1);
    if (were_reset != 0) {
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i)
        if (Resets::is_set(were_reset, i) && (were_valid >> i & 1) != 0) rows.end_at_reset(i);
    }
  };

#pragma unroll 1
  for (int done = 0; done < p.steps; ++done) {
    const uint32 are_reset = Resets::shared(next_flag);
    if (are_reset != 0) {
#pragma unroll
      for (int i = 0; i < kItems; ++i)
        if (Resets::is_set(are_reset, i)) next[i].before = rows.reset_state(i);
    }
    resets.move();
    if (done + 1 < p.steps) next_flag = resets.load();
#if !LINEAR
    float outs[kItems];
#pragma unroll
    for (int first = 0; first < kItems; first += kAtOnce) {
      if (done > 0) finish(first);
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) {
        const Factors f = rows.factors_of(i, next[i]);
        outs[i] = rows.dh[i] + f.dy;
        items.store(i, f.valid ? outs[i] * f.n_factor : 0.f, 2);
      }
    }
    __syncthreads();
    multiply<2, 1>(weights, shared);
    __syncthreads();
#endif
#pragma unroll
    for (int first = 0; first < kItems; first += kAtOnce) {
#if LINEAR
      if (done > 0) finish(first);
#else
      float sums[1][kAtOnce];
      items.load_sums(first, 0, sums);
#endif
      float dz[kAtOnce], dr[kAtOnce], dn[kAtOnce], r[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = first + k;
        const Factors f = rows.factors_of(i, next[i]);
#if LINEAR
        const float out = rows.dh[i] + f.dy;
        dr[k] = f.valid ? out * f.r_factor : 0.f;
#else
        const float out = outs[i], dproduct = sums[0][k];  // of r * h
        dr[k] = f.valid ? dproduct * f.r_factor : 0.f;
#endif
        dz[k] = f.valid ? out * f.z_factor : 0.f;
        dn[k] = f.valid ? out * f.n_factor : 0.f;
        r[k] = f.r;
        rows.dh[i] = f.valid ? out * f.z : out;
#if !LINEAR
        if (f.valid) rows.dh[i] += dproduct * f.r;
#endif
        const uint32 bit = 1u << i;
        were_valid = f.valid ? were_valid | bit : were_valid & ~bit;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        items.store(first + k, dz[k], 0);
        items.store(first + k, dr[k], 1);
        if (LINEAR) items.store(first + k, dn[k] * r[k], 2);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (done + 1 < p.steps) next[first + k] = rows.load(first + k);
        rows.store(first + k, dz[k], dr[k], dn[k], r[k]);
      }
    }
    were_reset = are_reset;
    rows.move_loads();
    rows.move_results();
    __syncthreads();
    multiply<0, LINEAR ? 3 : 2>(weights, shared);
    __syncthreads();
  }
#pragma unroll
  for (int first = 0; first < kItems; first += kAtOnce) finish(first);
  rows.store_last();
}
