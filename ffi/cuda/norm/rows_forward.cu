// The forward pass over rows: y = act((x - mean) rstd scale + bias + residual), with the statistics of each row.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) norm_rows_forward(const NormRows a) {
  const Lane lane(a.width);
  const unsigned call = blockIdx.x / a.blocks, block = blockIdx.x % a.blocks;
  const unsigned first = call * a.rows, end = first + a.rows, step = a.blocks * kRows;
  const float n = static_cast<float>(a.width);
  constexpr int kArrays = 1 + RESIDUAL;
  const Element* from[kArrays] = {static_cast<const Element*>(a.arrays.x)};
  if (RESIDUAL) from[kArrays - 1] = static_cast<const Element*>(a.arrays.residual);
  Ring<kArrays> ring;
  unsigned ahead = first + block * kRows + lane.row;
  const auto copy = [&] {
    ring.copy(from, static_cast<size_t>(ahead) * a.width, lane, ahead < end);
    ahead += step;
  };
  for (int stage = 1; stage < STAGES; ++stage) copy();
  const float* const scales = a.arrays.scale + static_cast<size_t>(call) * a.width;
  const float* const biases = a.arrays.bias + static_cast<size_t>(call) * a.width;
  float scale[kItems][kVector], bias[kItems][kVector];
  if (kKeepsColumns) {
    load_columns(scales, lane, scale);
    load_columns(biases, lane, bias);
  }

  unsigned turn = 0;
  for (unsigned start = first + block * kRows; start < end; start += step, ++turn) {
    copy();
    Item items[kArrays][kItems];
    ring.take(items);
    const unsigned row = start + lane.row;
    const bool exists = row < end;
    float values[kItems][kVector];
#pragma unroll
    for (int k = 0; k < kItems; ++k) unpack(items[0][k], values[k]);

    float mean = 0.f, moments[2] = {0.f, 0.f};  // the sums of the deviations and their squares
#if CENTERED
    float sum[1] = {0.f};
#pragma unroll
    for (int k = 0; k < kItems; ++k) sum[0] += sum_of(values[k]);
    sum_over_row(sum, turn);
    mean = sum[0] / n;
#endif
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const float level = lane.exists[k] ? mean : 0.f;
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[k][j] -= level;
      moments[0] += sum_of(values[k]);
      moments[1] += dot(values[k], values[k]);
    }
    sum_over_row(moments, turn);
    const float rest = CENTERED && is_finite(mean) ? moments[0] / n : 0.f;
    const float square = moments[1] / n;
    const float var = CENTERED && is_finite(square) ? fmaxf(square - rest * rest, 0.f) : square;
    const float rstd = rsqrtf(var + a.epsilon), shift = -rest * rstd;
    if (!exists) continue;
    if (lane.lane == 0) {
      if (CENTERED) {
        a.arrays.mean[row] = mean;
        a.arrays.mean_low[row] = rest;
      }
      a.arrays.var[row] = var;
      a.arrays.rstd[row] = rstd;
    }
    if (!kKeepsColumns) {
      load_columns(scales, lane, scale);
      load_columns(biases, lane, bias);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!lane.exists[k]) continue;
      float residual[kVector];
#if RESIDUAL
      unpack(items[1][k], residual);
#endif
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        float z = fmaf(fmaf(values[k][j], rstd, shift), scale[k][j], bias[k][j]);
        if (RESIDUAL) z += residual[j];
        values[k][j] = activated(z);
      }
      store_item(static_cast<Element*>(a.arrays.result) + static_cast<size_t>(row) * a.width + lane.column(k),
                 packed(values[k]), read_again());
    }
  }
}
