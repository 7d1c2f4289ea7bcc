// The forward pass of a depthwise convolution, or its input gradient with GRADIENT, along three spatial axes:
//   forward:  out[n, o, c] = sum over k of in[n, o S - padding + k D, c] * w[k, c]
//   gradient: out[n, i, c] = sum over o and k with i = o S - padding + k D of in[n, o, c] * w[k, c].
// The host defines the names in capitals. K0 to K2 are the window, S0 to S2 the strides, D0 to D2 the dilation; a
// gradient has D = 1 along an axis with S > 1. A block computes CC channels of items: boxes of TN images, `length`
// elements along axis 0, PATCHES x R along axis 1 and STRIPS x COLUMNS along axis 2. It walks along axis 0 and holds
// the rows of the next STAGES - 1 stages, of ROWS steps each, in flight. A thread has V channels of R x COLUMNS
// elements. Each row that it loads meets all taps at once: the sums of the results that the row belongs to are kept in
// registers and move up by one after each step. With dilation, elements that are D apart form a convolution of their
// own (a residue class).
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The number of elements that `count` neighboring results of an axis depend on.
__device__ constexpr int inputs(int count, int window, int stride) {
  return GRADIENT ? ceil_div(window, stride) + (count - 1) / stride : (count - 1) * stride + window;
}
// The tap with which element `in` of these enters result `out`; outside of the window if there is none.
__device__ constexpr int tap(int out, int in, int window, int stride) {
  return GRADIENT ? out + stride * (ceil_div(window, stride) - 1 - in) : in - out * stride;
}

constexpr int PHASES = GRADIENT ? S0 : 1;   // results along axis 0 per step
constexpr int ROWS_IN = GRADIENT ? 1 : S0;  // rows of the input per step
constexpr int DEPTH = ceil_div(K0, S0);     // steps from the first row of a result to its last
constexpr int IN1 = inputs(PATCHES * R, K1, S1), IN2 = inputs(STRIPS * COLUMNS, K2, S2);  // of a row of the block
constexpr int OWN1 = inputs(R, K1, S1), OWN2 = inputs(COLUMNS, K2, S2);                   // of a thread
constexpr int LANES = CC / V, THREADS = TN * PATCHES * STRIPS * LANES;
constexpr int ROW = TN * IN1 * IN2 * CC;  // elements
constexpr int STAGE = ROWS * ROWS_IN * ROW;
constexpr int RING_BYTES = ceil_div(STAGES * STAGE * static_cast<int>(sizeof(T)), 16) * 16;
constexpr int COPIES = ceil_div(ROW / VECTOR, THREADS);
constexpr int TAPS = K0 * K1 * K2;

// Where the first result of a tile and the first element that it depends on are.
struct Origin {
  int in, out;
};

template <int K, int S, int D>
__device__ inline Origin origin(int first, int residue, int padding) {
  if (GRADIENT && S > 1) {
    const int out = first - padding % S;
    return {(out + padding) / S - ceil_div(K, S) + 1, out};
  }
  if (GRADIENT) return {D * (first - K + 1) + residue + padding, D * first + residue};
  return {D * S * first + S * residue - padding, D * first + residue};
}

struct Item {
  int image;
  Origin axis0, axis1, axis2;
};

__device__ inline Item item_at(int index, const DepthwiseArguments& p) {
  const int class2 = index % D2, tile2 = index / D2 % p.tiles[2];
  index /= D2 * p.tiles[2];
  const int class1 = index % D1, tile1 = index / D1 % p.tiles[1];
  index /= D1 * p.tiles[1];
  const int class0 = index % D0, tile0 = index / D0 % p.tiles[0];
  index /= D0 * p.tiles[0];
  return {index * TN, origin<K0, S0, D0>(tile0 * p.length * PHASES, class0, p.padding[0]),
          origin<K1, S1, D1>(tile1 * PATCHES * R, class1, p.padding[1]),
          origin<K2, S2, D2>(tile2 * STRIPS * COLUMNS, class2, p.padding[2])};
}

// Copies the rows of one item after the other to shared memory.
struct Copier {
  const T* images;  // of the item
  int item, stage, row, plane;
  int offsets[COPIES];  // of the elements of a row that this thread copies; -VECTOR outside of the array

  __device__ inline void aim(const T* in, const DepthwiseArguments& p) {
    const Item at = item_at(item, p);
    plane = p.in[1] * p.in[2] * p.channels;
    images = in + static_cast<long long>(at.image) * p.in[0] * plane;
    row = at.axis0.in;
#pragma unroll
    for (int copy = 0; copy < COPIES; ++copy) {
      const int index = copy * THREADS + threadIdx.x, pixel = index / (CC / VECTOR);
      const int channel = blockIdx.x * CC + index % (CC / VECTOR) * VECTOR;
      const int i2 = at.axis2.in + pixel % IN2 * D2, i1 = at.axis1.in + pixel / IN2 % IN1 * D1;
      const int image = pixel / (IN2 * IN1);
      const bool valid = static_cast<unsigned>(i2) < static_cast<unsigned>(p.in[2]) &&
                         static_cast<unsigned>(i1) < static_cast<unsigned>(p.in[1]) && image < TN &&
                         at.image + image < p.images && channel < p.channels;
      offsets[copy] = valid ? image * p.in[0] * plane + (i1 * p.in[2] + i2) * p.channels + channel : -VECTOR;
    }
  }

  __device__ inline void copy_stage(T* to, const T* in, const DepthwiseArguments& p) {
#pragma unroll
    for (int i = 0; i < ROWS * ROWS_IN; ++i, row += D0) {
      const bool inside = static_cast<unsigned>(row) < static_cast<unsigned>(p.in[0]);
      const T* const from = images + static_cast<long long>(row) * plane;
#pragma unroll
      for (int copy = 0; copy < COPIES; ++copy) {
        const int index = copy * THREADS + threadIdx.x;
        if (ROW / VECTOR % THREADS != 0 && copy == COPIES - 1 && index >= ROW / VECTOR) break;
        copy_async<VECTOR * sizeof(T)>(to + i * ROW + index * VECTOR, from + offsets[copy],
                                       inside && offsets[copy] >= 0);
      }
    }
    if (++stage == p.stages) {
      stage = 0;
      item += gridDim.y;
      if (item < p.items) aim(in, p);
    }
  }
};

// The weights of a thread's channels.
struct Weights {
#if WEIGHTS_SHARED
  static constexpr int PITCH = ceil_div(K2, 4) / 2 * 8 + 4;  // floats; an odd multiple of 16 bytes, for the banks
  const float* own;
  __device__ inline void load_row(float (&row)[K2][V], int k0, int k1) const {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k2 = 0; k2 < K2; k2 += 4) {
        const float4 four = *reinterpret_cast<const float4*>(own + ((k0 * K1 + k1) * CC + v) * PITCH + k2);
        row[k2][v] = four.x;
        if (k2 + 1 < K2) row[k2 + 1][v] = four.y;
        if (k2 + 2 < K2) row[k2 + 2][v] = four.z;
        if (k2 + 3 < K2) row[k2 + 3][v] = four.w;
      }
  }
#else
  float own[K0][K1][K2][V];
  __device__ inline void load_row(float (&row)[K2][V], int k0, int k1) const {
#pragma unroll
    for (int k2 = 0; k2 < K2; ++k2)
#pragma unroll
      for (int v = 0; v < V; ++v) row[k2][v] = own[k0][k1][k2][v];
  }
#endif
};

struct Sums {
  float at[DEPTH][PHASES][R][COLUMNS][V];

  // `bias` starts the sums of the newest result.
  __device__ inline void move_up(const float (&bias)[V]) {
#pragma unroll
    for (int a = DEPTH - 1; a >= 0; --a)
#pragma unroll
      for (int p = 0; p < PHASES; ++p)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int s = 0; s < COLUMNS; ++s)
#pragma unroll
            for (int v = 0; v < V; ++v) at[a][p][r][s][v] = a > 0 ? at[a > 0 ? a - 1 : 0][p][r][s][v] : bias[v];
  }

  // Adds the products of row q of a step. All register indices are compile-time constants.
  __device__ inline void add_row(const T* row, const Weights& weights, int q) {
#pragma unroll
    for (int i1 = 0; i1 < OWN1; ++i1) {
      float values[OWN2][V];
#pragma unroll
      for (int i2 = 0; i2 < OWN2; ++i2) load_channels(values[i2], row + (i1 * IN2 + i2) * CC);
#pragma unroll
      for (int a = DEPTH - 1; a >= 0; --a)
#pragma unroll
        for (int p = 0; p < PHASES; ++p) {
          const int k0 = GRADIENT ? S0 * (DEPTH - 1 - a) + p : a * S0 + q;
          if (k0 >= K0) continue;
#pragma unroll
          for (int r = 0; r < R; ++r) {
            const int k1 = tap(r, i1, K1, S1);
            if (k1 < 0 || k1 >= K1) continue;
            float of_row[K2][V];
            weights.load_row(of_row, k0, k1);
#pragma unroll
            for (int i2 = 0; i2 < OWN2; ++i2)
#pragma unroll
              for (int s = 0; s < COLUMNS; ++s) {
                const int k2 = tap(s, i2, K2, S2);
                if (k2 < 0 || k2 >= K2) continue;
#pragma unroll
                for (int v = 0; v < V; ++v) at[a][p][r][s][v] += of_row[k2][v] * values[i2][v];
              }
          }
        }
    }
  }
};

// The place of a thread in a tile.
struct Place {
  int image, patch, strip, channel;
};

__device__ inline Place place_of(int thread) {
  const int rest = thread / LANES;
  return {rest / (STRIPS * PATCHES), rest / STRIPS % PATCHES, rest % STRIPS, thread % LANES * V};
}

// Writes the results of one step.
__device__ inline void store(const Sums& sums, T* out, const Item& item, const Place& place, int step,
                             const DepthwiseArguments& p) {
  const int first2 = item.axis2.out + place.strip * COLUMNS * D2, channel = blockIdx.x * CC + place.channel;
  const bool owned = item.image + place.image < p.images && channel < p.channels;
#pragma unroll
  for (int phase = 0; phase < PHASES; ++phase) {
    const int i0 = item.axis0.out + (PHASES > 1 ? step * PHASES + phase : step * D0);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int i1 = item.axis1.out + (place.patch * R + r) * D1;
      const bool inside = owned && static_cast<unsigned>(i0) < static_cast<unsigned>(p.out[0]) &&
                          static_cast<unsigned>(i1) < static_cast<unsigned>(p.out[1]);
      const unsigned end2 = inside ? p.out[2] : 0;
      const long long row = (static_cast<long long>(item.image + place.image) * p.out[0] + i0) * p.out[1] + i1;
      T* to = out + (row * p.out[2] + first2) * p.channels + channel;
#pragma unroll
      for (int s = 0; s < COLUMNS; ++s, to += D2 * p.channels) {
        float values[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          values[v] = sums.at[DEPTH - 1][phase][r][s][v];
          if (RELU) values[v] = values[v] < 0 ? 0.f : values[v];  // keeps NaN
        }
        store_channels(to, values, static_cast<unsigned>(first2 + s * D2) < end2);
      }
    }
  }
}

// w: [K0, K1, K2, C], or [C, K0, K1, K2] with TAPS_LAST.
__device__ inline float weight_at(const T* w, int tap, int channel, int channels) {
  return channel < channels ? widen(w[TAPS_LAST ? channel * TAPS + tap : tap * channels + channel]) : 0.f;
}

// The walk of a block along axis 0 of its items.
struct Walk {
  const DepthwiseArguments& p;
  const T* in;
  T* out;
  T* ring;
  const Place place;
  Item item;
  int own;        // element of a row of the ring that the thread starts with
  int stage = 0;  // of the item
  int slot = 0;   // of the ring
  Copier copier;
  Weights weights;
  float bias[V];
  Sums sums;

  // Whether any row of the stage is a row of the input.
  __device__ inline bool has_rows() const {
    const int row = item.axis0.in + stage * (ROWS * ROWS_IN * D0);
    return row + (ROWS * ROWS_IN - 1) * D0 >= 0 && row < p.in[0];
  }

  template <bool HAS_ROWS>
  __device__ inline void run_stage() {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // all threads see the stage, and no thread uses the previous one
    if (copier.item < p.items) copier.copy_stage(ring + (slot == 0 ? STAGES - 1 : slot - 1) * STAGE, in, p);
    commit_copies();
    const T* const rows = ring + slot * STAGE + own;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      sums.move_up(bias);
      if constexpr (HAS_ROWS) {
#pragma unroll
        for (int q = 0; q < ROWS_IN; ++q) sums.add_row(rows + (i * ROWS_IN + q) * ROW, weights, q);
      }
      const int step = stage * ROWS + i - (DEPTH - 1);
      if (step >= 0 && step < p.length) store(sums, out, item, place, step, p);
    }
    ++stage;
  }

  // Two loops, so that the sums of the loop that adds stay in the same registers.
  __device__ inline void run_item() {
    stage = 0;
    while (stage < p.stages) {
#pragma unroll 1
      while (stage < p.stages && has_rows()) run_stage<true>();
#pragma unroll 1
      while (stage < p.stages && !has_rows()) run_stage<false>();
    }
  }
};

// The grid is (chunks of CC channels, blocks that share the items). bias: [C] or null.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_convolution(const T* __restrict__ in, const T* __restrict__ w, const T* __restrict__ bias,
                          T* __restrict__ out, const DepthwiseArguments p) {
  Walk walk{p, in, out, reinterpret_cast<T*>(shared_memory()), place_of(threadIdx.x)};
  const Place& place = walk.place;
  const int first = blockIdx.x * CC, patch = place.patch * R, strip = place.strip * COLUMNS;
  walk.own =
      ((place.image * IN1 + (GRADIENT ? patch / S1 : patch * S1)) * IN2 + (GRADIENT ? strip / S2 : strip * S2)) * CC +
      place.channel;

  Copier& copier = walk.copier;
  copier.item = blockIdx.y, copier.stage = 0;
  if (copier.item < p.items) copier.aim(in, p);
#pragma unroll 1
  for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
    if (copier.item < p.items) copier.copy_stage(walk.ring + ahead * STAGE, in, p);
    commit_copies();
  }

#if WEIGHTS_SHARED
  float* const all = reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(walk.ring) + RING_BYTES);
  for (int index = threadIdx.x; index < TAPS * CC; index += THREADS) {
    const int channel = index % CC, tap = index / CC;
    all[(tap / K2 * CC + channel) * Weights::PITCH + tap % K2] = weight_at(w, tap, first + channel, p.channels);
  }
  walk.weights.own = all + place.channel * Weights::PITCH;  // visible after the first barrier
#else
#pragma unroll
  for (int k0 = 0; k0 < K0; ++k0)
#pragma unroll
    for (int k1 = 0; k1 < K1; ++k1)
#pragma unroll
      for (int k2 = 0; k2 < K2; ++k2)
#pragma unroll
        for (int v = 0; v < V; ++v)
          walk.weights.own[k0][k1][k2][v] =
              weight_at(w, (k0 * K1 + k1) * K2 + k2, first + place.channel + v, p.channels);
#endif
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int channel = first + place.channel + v;
    walk.bias[v] = bias != nullptr && channel < p.channels ? widen(bias[channel]) : 0.f;
  }
#pragma unroll
  for (int a = 0; a < DEPTH; ++a) walk.sums.move_up(walk.bias);  // initialized; no result reads these

#pragma unroll 1
  for (int index = blockIdx.y; index < p.items; index += gridDim.y) {
    walk.item = item_at(index, p);
    walk.run_item();
  }
}
