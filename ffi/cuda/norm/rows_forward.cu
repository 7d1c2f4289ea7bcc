// The forward pass over rows: y = act((x - mean) rstd scale + bias + residual), with the statistics of each row.

extern "C" __global__ void __launch_bounds__(THREADS) norm_rows_forward(const NormRows a) {
  const Lane lane(a.width);
  const unsigned row = blockIdx.x * kRows + lane.row;
  const bool exists = row < a.rows * a.calls;
  const size_t offset = static_cast<size_t>(row) * a.width;
  const uint64 once = read_once();
  Item items[kItems], added[kItems];
  load_row(static_cast<const Element*>(a.arrays.x) + offset, lane, exists, once, items);
#if RESIDUAL
  load_row(static_cast<const Element*>(a.arrays.residual) + offset, lane, exists, once, added);
#endif
  float values[kItems][kVector];
#pragma unroll
  for (int k = 0; k < kItems; ++k) unpack(items[k], values[k]);

  const float n = static_cast<float>(a.width);
  float mean = 0.f, moments[2] = {0.f, 0.f};  // the sums of the deviations and their squares
#if CENTERED
  float sum[1] = {0.f};
#pragma unroll
  for (int k = 0; k < kItems; ++k)
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[0] += values[k][j];
  sum_over_row(sum);
  mean = sum[0] / n;
#endif
#pragma unroll
  for (int k = 0; k < kItems; ++k)
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float deviation = lane.exists[k] ? values[k][j] - mean : 0.f;
      values[k][j] = deviation;
      moments[0] += deviation;
      moments[1] = fmaf(deviation, deviation, moments[1]);
    }
  sum_over_row(moments);
  const float rest = CENTERED && is_finite(mean) ? moments[0] / n : 0.f;
  const float square = moments[1] / n, var = CENTERED && is_finite(square) ? fmaxf(square - rest * rest, 0.f) : square;
  const float rstd = rsqrtf(var + a.epsilon);
  if (exists && lane.lane == 0) {
    if (CENTERED) {
      a.arrays.mean[row] = mean;
      a.arrays.mean_low[row] = rest;
    }
    a.arrays.var[row] = var;
    a.arrays.rstd[row] = rstd;
  }
  if (!exists) return;
  const size_t call = a.calls == 1 ? 0 : static_cast<size_t>(row / a.rows) * a.width;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (!lane.exists[k]) continue;
    float residual[kVector];
#if RESIDUAL
    unpack(added[k], residual);
#endif
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const size_t c = call + lane.column(k) + j;
      float z = fmaf((values[k][j] - rest) * rstd, a.arrays.scale[c], a.arrays.bias[c]);
      if (RESIDUAL) z += residual[j];
      values[k][j] = activated(z);
    }
    store_item(static_cast<Element*>(a.arrays.result) + offset + lane.column(k), packed(values[k]), read_again());
  }
}
