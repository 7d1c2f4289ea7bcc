// The elementwise part of the backward pass.

// What a step needs of a unit of a row. Not converted yet, so that nothing waits for the loads.
struct Saved {
  T gates[kSaved], before, dy;  // `before`: the state before the step, unless the row was reset
  unsigned char reset;          // 0 with kSharesResets: class Resets has it
  bool valid;
};

// The gradients of the pre-activations of a unit of a row in a step are these factors times the gradient of its new
// state; where the reset gate is applied before the product, `r_factor` is that of the gradient of r * h.
struct Factors {
  float dy, z, r, n_factor, z_factor, r_factor;
  bool valid, is_reset;
};

// The rows of a thread, with one unit each. Addresses are those of the first row; they move from step to step, back:
// `t`, `step` and what is loaded with move_loads(), the results with move_results().
struct BackwardRows {
  const GruArguments& p;
  const bool has_unit;
  const int first_row, towards;  // towards the step before: 1 or -1
  const int y_stride;            // of a step; of other arrays, a multiple
  const long long state_at;      // in an array [problems, B, H]
  int t, step;
  float dh[kItems];
  int length[kItems];                      // with LENGTHS
  const T *gates_from, *y_from, *dy_from;  // y of the step before
  const unsigned char* reset_from;
  T *dgates_to, *recurrent_dgates_to;
  // The arrays that are prefetched: the saved gates, y, dy and the flags of reset rows.
  static constexpr int kY = kSaved, kDy = kSaved + 1, kResets = kSaved + 2, kArrays = kSaved + 2 + (RESETS != 0);
  static constexpr int kPrefetches = (kArrays * kItems + kUnits - 1) / kUnits;
  const void* prefetch_from[kPrefetches] = {};

  __device__ BackwardRows(const GruArguments& arguments, const Place& place, int unit, int row)
      : p(arguments),
        has_unit(FILLED || unit < arguments.hidden),
        first_row(row),
        towards(place.reversed ? 1 : -1),
        y_stride(towards * p.directions * p.rows * hidden()),
        state_at((static_cast<long long>(place.problem) * p.rows + row) * hidden() + unit),
        t(place.time(arguments, arguments.steps - 1)),
        step(arguments.steps - 1) {
    const long long H = hidden(), D = p.directions, B = p.rows;
    const long long last_step = static_cast<long long>(place.group) * p.steps + t;
    const long long row_at = ((last_step * D + place.direction) * B + row) * H;
    const T* const saved = static_cast<const T*>(p.gates) + kSaved * row_at;
    const T *const y = static_cast<const T*>(p.y) + row_at + y_stride, *const dy = static_cast<const T*>(p.dy) + row_at;
    gates_from = saved + unit;
    y_from = y + unit;
    dy_from = dy + unit;
    reset_from = p.reset + last_step * B + row;
    const long long dgates_at = ((last_step * B + row) * D + place.direction) * 3 * H + unit;
    dgates_to = static_cast<T*>(p.dgates) + dgates_at;
    recurrent_dgates_to = static_cast<T*>(p.recurrent_dgates) + dgates_at;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#if LENGTHS
      length[i] = has(i) ? p.lengths[static_cast<long long>(place.group) * B + row + i * kItemRows] : 0;
#endif
      dh[i] = has(i) && p.dy_h != nullptr ? element(p.dy_h, state_of(i)) : 0.f;
      if (has(i) && p.dreset_h != nullptr) p.dreset_h[state_of(i)] = 0;
    }

    // The first threads of a row prefetch one array of one row each.
    const int index = index_in_block();
#pragma unroll
    for (int j = 0; j < kPrefetches; ++j) {
      const int array = array_of(j), prefetched = (index + j * kUnits) / kArrays * kItemRows;
      if (prefetched >= kItems * kItemRows || row + prefetched >= p.rows || unit - index >= H) continue;
      if (array == kDy && p.dy == nullptr) continue;
      const long long element_at = prefetched * (array < kSaved ? kSaved : 1) * H + unit - index;
      if (array == kResets)
        prefetch_from[j] = reset_from + prefetched;
      else
        prefetch_from[j] = (array < kSaved ? saved + array * H : array == kY ? y : dy) + element_at;
      for (int s = 0; s < kAhead; ++s) prefetch_and_move(j, s + (array == kY) < p.steps);
    }
  }

  __device__ static int index_in_block() { return threadIdx.x % kUnits; }  // of the unit
  __device__ static int array_of(int prefetch) { return (index_in_block() + prefetch * kUnits) % kArrays; }
  __device__ void prefetch_and_move(int j, bool is_step) {
    if (is_step) prefetch(prefetch_from[j]);
    const int array = array_of(j);
    const long long bytes_of_step = static_cast<long long>(array < kSaved ? kSaved : 1) * y_stride * sizeof(T);
    prefetch_from[j] =
        static_cast<const char*>(prefetch_from[j]) + (array == kResets ? towards * p.rows : bytes_of_step);
  }
  __device__ int hidden() const { return hidden_of(p); }
  __device__ bool in_batch(int i) const { return first_row + i * kItemRows < p.rows; }
  __device__ bool has(int i) const { return in_batch(i) && has_unit; }
  __device__ long long state_of(int i) const { return state_at + static_cast<long long>(i * kItemRows) * hidden(); }

  // Whether a row has a step at a time: padding has none, and stays zero.
  __device__ bool is_valid(int i, int time) const { return LENGTHS ? time < length[i] : has(i); }

  __device__ T reset_state(int i) const {
    if (RESETS != kGruResetsToGiven || !has_unit) return static_cast<T>(0);
    return static_cast<const T*>(p.reset_h)[state_of(i)];
  }

  // Starts to load what the step needs.
  __device__ Saved load(int i) const {
    Saved saved;
    saved.valid = is_valid(i, t);
    const bool loads = saved.valid;
    const int offset = i * kItemRows * hidden();
#pragma unroll
    for (int gate = 0; gate < kSaved; ++gate)
      saved.gates[gate] = loads ? gates_from[kSaved * offset + gate * hidden()] : static_cast<T>(0);
    saved.dy = loads && p.dy != nullptr ? dy_from[offset] : static_cast<T>(0);
    saved.reset = RESETS && !kSharesResets && saved.valid ? reset_from[i * kItemRows] : static_cast<unsigned char>(0);
    const bool from_y = step > 0 && is_valid(i, t + towards);
    const T* const before = from_y ? y_from + offset : static_cast<const T*>(p.initial_h) + state_of(i);
    saved.before = loads && (from_y || p.initial_h != nullptr) ? *before : static_cast<T>(0);
    return saved;
  }

  __device__ Factors factors_of(int i, const Saved& now) const {
    float before = widen(RESETS && now.reset != 0 ? reset_state(i) : now.before);
    float z = widen(now.gates[0]), r = widen(now.gates[1]), n = widen(now.gates[2]);
    float z_slope = z * (1 - z), r_slope = r * (1 - r), n_slope = 1 - n * n;
    if (CLIP) {  // a gate of +2 or -2: its pre-activation was clipped
      const auto restore = [&](float& gate, float& slope, bool is_tanh) {
        if (!(fabsf(gate) > 1.5f)) return;
        const float bound = gate > 0 ? p.clip : -p.clip;
        gate = is_tanh ? hyperbolic_tangent(bound) : sigmoid(bound);
        slope = 0;
      };
      restore(z, z_slope, false);
      restore(r, r_slope, false);
      restore(n, n_slope, true);
    }
    Factors f;
    f.dy = widen(now.dy);
    f.z = z;
    f.r = r;
    f.n_factor = (1 - z) * n_slope;
    f.z_factor = (before - n) * z_slope;
    f.r_factor = LINEAR ? f.n_factor * widen(now.gates[kSaved - 1]) * r_slope : before * r_slope;
    f.valid = now.valid;
    f.is_reset = RESETS && now.reset != 0;
    return f;
  }

  // Adds the products of the step: then dh is the gradient of the state before it. Past the length of a row the sum is
  // zero, or NaN if a weight is not finite.
  __device__ void add_products(int i, float sum, bool valid) {
    if (valid) dh[i] += sum;
  }
  // Then, where the row was reset: the gradient of the state goes to that of reset_h.
  __device__ void end_at_reset(int i) {
    if (RESETS == kGruResetsToGiven && p.dreset_h != nullptr) p.dreset_h[state_of(i)] += dh[i];
    dh[i] = 0;
  }
  __device__ void finish(int i, float sum, bool valid, bool is_reset) {
    add_products(i, sum, valid);
    if (is_reset) end_at_reset(i);
  }

  __device__ void store(int i, float dz, float dr, float dn, float r) {
    if (!has(i)) return;
    const int offset = i * kItemRows * p.directions * 3 * hidden();
    store(dgates_to + offset, dz, dr, dn);
    if (LINEAR && p.recurrent_dgates != nullptr) store(recurrent_dgates_to + offset, dz, dr, dn * r);
  }
  __device__ void store(T* to, float dz, float dr, float dn) const {
    narrow(dz, to);
    narrow(dr, to + hidden());
    narrow(dn, to + 2 * hidden());
  }

  __device__ void move_loads() {
#pragma unroll
    for (int j = 0; j < kPrefetches; ++j) {
      if (prefetch_from[j] == nullptr) continue;
      prefetch_and_move(j, step > kAhead);  // not at the first step, before which there is no y
    }
    --step;
    t += towards;
    gates_from += static_cast<long long>(kSaved) * y_stride;
    y_from += y_stride;
    dy_from += y_stride;
    reset_from += towards * p.rows;
  }
  __device__ void move_results() {
    dgates_to += 3LL * y_stride;
    recurrent_dgates_to += 3LL * y_stride;
  }

  __device__ void store_last() {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (has(i) && p.dh0 != nullptr) p.dh0[state_of(i)] = dh[i];
  }
};
