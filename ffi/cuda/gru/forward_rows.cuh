// The elementwise part of the forward pass.

// The inputs of a unit of a row in a step, and whether the row is reset before the next one: with kSharesResets, class
// Resets says that. Not compared yet, so that nothing waits for the loads.
struct Inputs {
  float of_gate[3];
  unsigned char reset_next;
};

// The gates of a unit of a row in a step, and their pre-activations.
struct Gates {
  float z_before, r_before, n_before, z, without_z, r, n, recurrent, h;  // `without_z`: 1 - z
  bool valid;

  __device__ void set_z_and_r(float z_sum, float r_sum, float clip) {
    z_before = z_sum;
    r_before = r_sum;
    const Logistic logistic(within(z_sum, clip));
    z = logistic.of;
    without_z = logistic.of_negative;
    r = reset_gate(within(r_sum, clip));
  }
};

// The rows of a thread, with one unit each. Addresses are those of the first row; they move from step to step: those of
// the inputs with move_inputs(), those of the results with move_results().
struct ForwardRows {
  const GruArguments& p;
  const bool has_unit;
  const int first_row, towards;  // towards the next step: 1 or -1
  const int y_stride;            // of a step; of other arrays, a multiple
  const long long state_at;      // in an array [problems, B, H]
  int t, input_step = 0;         // the time of the results, the step of the inputs
  float state[kItems];
  float biases[3] = {}, recurrent_bias = 0;  // of z, r and n; Rbn where the reset gate multiplies it
  int length[kItems];                        // with LENGTHS
  const float* inputs_from;
  const unsigned char* reset_from;
  const void* prefetch_from = nullptr;
  bool prefetches_inputs = true;  // or the flags of reset rows
  T *y_to, *gates_to;

  __device__ ForwardRows(const GruArguments& arguments, const Place& place, int unit, int row)
      : p(arguments),
        has_unit(FILLED || unit < arguments.hidden),
        first_row(row),
        towards(place.reversed ? -1 : 1),
        y_stride(towards * p.directions * p.rows * hidden()),
        state_at((static_cast<long long>(place.problem) * p.rows + row) * hidden() + unit),
        t(place.time(arguments, 0)) {
    const long long H = hidden(), D = p.directions, B = p.rows;
    const long long first_step = static_cast<long long>(place.group) * p.steps + t;
    const long long step_row = (first_step * D + place.direction) * B + row;
    const float* const inputs = p.inputs + ((first_step * B + row) * D + place.direction) * 3 * H;
    inputs_from = inputs + unit;
    reset_from = p.reset + first_step * B + row;
    y_to = static_cast<T*>(p.y) + step_row * H + unit;
    gates_to = static_cast<T*>(p.gates) + step_row * kSaved * H + unit;
    if (p.bias != nullptr && has_unit) {
      const auto of = [&](int i) {
        return element(p.bias, (static_cast<long long>(place.problem) * 6 + i) * H + unit);
      };
      biases[0] = of(0) + of(3);
      biases[1] = of(1) + of(4);
      biases[2] = LINEAR ? of(2) : of(2) + of(5);
      if (LINEAR) recurrent_bias = of(5);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#if LENGTHS
      length[i] = has(i) ? p.lengths[static_cast<long long>(place.group) * B + row + i * kItemRows] : 0;
#endif
      state[i] = has(i) && p.initial_h != nullptr ? element(p.initial_h, state_of(i)) : 0.f;
      if (reset_of(i) != 0 && is_valid(i, t)) state[i] = reset_state(i);
    }

    // The first threads of a row prefetch the inputs of one gate, or the flag of a reset, of one row each.
    constexpr int kArrays = 3 + (RESETS != 0);
    static_assert(kArrays * kItems <= kUnits, "");
    const int index = unit % kUnits, array = index % kArrays, prefetched = index / kArrays * kItemRows;
    if (index < kArrays * kItems && row + prefetched < p.rows && unit - index < H) {
      prefetches_inputs = array < 3;
      if (prefetches_inputs)
        prefetch_from = inputs + prefetched * D * 3 * H + array * H + unit - index;
      else
        prefetch_from = reset_from + prefetched;
      for (int s = 0; s < kAhead && s < p.steps; ++s) prefetch_and_move(true);
    }
    reset_from += towards * B;
  }

  __device__ int hidden() const { return hidden_of(p); }
  __device__ bool in_batch(int i) const { return first_row + i * kItemRows < p.rows; }
  __device__ bool has(int i) const { return in_batch(i) && has_unit; }
  __device__ long long state_of(int i) const { return state_at + static_cast<long long>(i * kItemRows) * hidden(); }
  // Whether a row has a step at a time: padding has none, and stays zero.
  __device__ bool is_valid(int i, int time) const { return LENGTHS ? time < length[i] : has(i); }
  __device__ unsigned char reset_of(int i) const {
    return RESETS && in_batch(i) ? reset_from[i * kItemRows] : static_cast<unsigned char>(0);
  }
  __device__ float reset_state(int i) const {
    return RESETS == kGruResetsToGiven && has_unit ? element(p.reset_h, state_of(i)) : 0.f;
  }

  __device__ void prefetch_and_move(bool is_step) {
    if (is_step) prefetch(prefetch_from);
    const long long bytes = prefetches_inputs ? 3LL * y_stride * sizeof(float) : towards * p.rows;
    prefetch_from = static_cast<const char*>(prefetch_from) + bytes;
  }

  // Starts to load the inputs of step `input_step`.
  __device__ Inputs load_inputs(int i) const {
    const float* const from = inputs_from + i * kItemRows * p.directions * 3 * hidden();
    Inputs inputs;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
      inputs.of_gate[gate] = has(i) && input_step < p.steps ? from[gate * hidden()] : 0.f;
    inputs.reset_next = 0;
    if (!kSharesResets && input_step + 1 < p.steps) inputs.reset_next = reset_of(i);
    return inputs;
  }
  // A product with the input of a gate, which is added last: its load may still be in flight.
  __device__ float with_input(const Inputs& inputs, int gate, float product) const {
    return product + biases[gate] + inputs.of_gate[gate];
  }
  __device__ void move_inputs() {
    if (prefetch_from != nullptr) prefetch_and_move(input_step + kAhead < p.steps);
    ++input_step;
    inputs_from += 3LL * y_stride;
    reset_from += towards * p.rows;
  }

  // r h, which blocks exchange. The padding stays zero: its gates may be NaN, where a state is not finite.
  __device__ float gated_state(int i, const Gates& gates) const { return has_unit ? gates.r * state[i] : 0.f; }

  // The state of a row after the step.
  __device__ void finish(int i, Gates& gates, float n_sum) {
    gates.n_before = n_sum;
    gates.n = hyperbolic_tangent(within(n_sum, p.clip));
    // Between n and the state, whatever the error of the gate. An infinite state stays infinite.
    const float between = state[i] + gates.without_z * (gates.n - state[i]);
    const bool is_infinite = fabsf(state[i]) > 3.4028235e38f;
    gates.h = is_infinite ? gates.without_z * gates.n + gates.z * state[i] : between;
    gates.valid = is_valid(i, t);
    if (gates.valid) state[i] = gates.h;
  }
  // What resets it then.
  __device__ void reset(int i, bool reset_next) {
    if (RESETS && reset_next && is_valid(i, t + towards)) state[i] = reset_state(i);
  }

  // Zeros past the length of a row, where the inputs may be NaN.
  __device__ void store(int i, const Gates& gates) {
    if (!has(i)) return;
    const int offset = i * kItemRows * hidden();
    narrow(gates.valid ? gates.h : 0.f, y_to + offset);
    if (p.gates == nullptr) return;
    float z = gates.z, r = gates.r, n = gates.n;
    if (CLIP) {
      z = marked(z, gates.z_before, p.clip);
      r = marked(r, gates.r_before, p.clip);
      n = marked(n, gates.n_before, p.clip);
    }
    T* const to = gates_to + kSaved * offset;
    narrow(gates.valid ? z : 0.f, to);
    narrow(gates.valid ? r : 0.f, to + hidden());
    narrow(gates.valid ? n : 0.f, to + 2 * hidden());
    if (LINEAR) narrow(gates.valid ? gates.recurrent : 0.f, to + 3 * hidden());
  }
  __device__ void store_last() {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (has(i)) narrow(state[i], static_cast<T*>(p.y_h) + state_of(i));
  }

  __device__ void move_results() {
    t += towards;
    y_to += y_stride;
    gates_to += static_cast<long long>(kSaved) * y_stride;
  }
};
