// The recurrence of the GRU, forward. A cluster of kBlocks blocks computes a tile of 8 rows of a problem. Each block
// owns 32 hidden units: its rows of the recurrent weights stay in registers, as operands of tensor core products, for
// all steps. Every step a block sends the new states of its units to the shared memory of all blocks of the cluster.

constexpr int kQuarter = kPadded / 4;           // of the terms of a product: those of two warps
constexpr int kWords = kQuarter * kBytes / 64;  // 16-byte words of a quarter of a row that one lane reads
constexpr int kRowBytes = gru_forward_row_bytes(MODE, kPadded);  // without bank conflicts
constexpr int kPlaneBytes = kRows * kRowBytes;
constexpr int kStateBytes = kPlanes * kPlaneBytes;
constexpr int kWordsOfRow = kUnits * kBytes / 16;          // words that a block sends for each row and plane
constexpr int kSends = (kWordsOfRow * kBlocks + 31) / 32;  // by each lane
constexpr int kStride = kGruStride;
constexpr int kPartBytes = 4 * 3 * kTile * kStride * 4;  // sums of the quarters, for three gates

// Shared memory: barriers, the states (two buffers, and one for r * h), partial sums (two buffers).
constexpr int kExchanges = gru_forward_exchanges(LINEAR);
constexpr int kBarriers = kExchanges * 4;
constexpr int kStates = gru_aligned(kBarriers * 8);
constexpr int kParts = kStates + kExchanges * kStateBytes;
static_assert(kRows == kTile && kParts + 2 * kPartBytes == gru_forward_shared_bytes(MODE, kPadded, LINEAR), "");

// The words of h (or r * h) in one quarter for the row of a lane: operands b of two products each.
struct Words {
  uint4 at[kPlanes][kWords];
};

struct Weights {
  uint32 at[kWords][3][2][kPlanes][4];
};

__device__ inline void load_weights(Weights& weights, const GruArguments& p, const Place& place, int quarter, int half,
                                    int g, int c) {
  const int H = hidden_of(p);
  const T* const r = static_cast<const T*>(p.r) + static_cast<long long>(place.problem) * 3 * H * H;
#pragma unroll
  for (int word = 0; word < kWords; ++word)
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int unit = place.rank * kUnits + half * 16 + g + row * 8;
        const int term = quarter * kQuarter + (word * 4 + c) * kWordTerms;
        const WordWeights loaded(r + (gate * H + unit) * H + term, 1, unit < H ? H - term : 0);
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
          for (int i = 0; i < 4; ++i) weights.at[word][gate][i / 2][plane][row + i % 2 * 2] = loaded.at[plane][i];
      }
}

// Products of some gates with the words, of the terms of one quarter; into the partial sums.
template <int FIRST, int GATES>
__device__ inline void add_products(const Weights& weights, const Words& words, unsigned parts) {
  Products<MODE == 2 ? 3 : 2> sums[GATES];
#pragma unroll
  for (int word = 0; word < kWords; ++word)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32 b[kPlanes][2];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const uint4& w = words.at[plane][word];
        b[plane][0] = q == 0 ? w.x : w.z;
        b[plane][1] = q == 0 ? w.y : w.w;
      }
#pragma unroll
      for (int gate = 0; gate < GATES; ++gate) sums[gate].add(weights.at[word][FIRST + gate][q], b, q);
    }
#pragma unroll
  for (int gate = 0; gate < GATES; ++gate)
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // element j: unit g or g + 8, row 2 c or 2 c + 1
      const unsigned place = ((FIRST + gate) * kTile + (j & 1)) * kStride + (j >> 1) * 8;
      store_float(parts + 4 * place, sums[gate].sum(j));
    }
}

// The exchange of one array of states between the blocks of a cluster.
struct Exchange {
  unsigned to[kSends], barriers[kSends];  // of each send: where the word goes, in buffer 0, and its barrier
  bool sends[kSends];
  int word;  // of the row, that this lane sends

  __device__ Exchange(unsigned shared, const Place& place, int row, int lane) : word(kept(lane % kWordsOfRow)) {
    const int quarter = place.rank * kUnits / kQuarter;
#pragma unroll
    for (int i = 0; i < kSends; ++i) {
      const int block = (i * 32 + lane) / kWordsOfRow;
      sends[i] = block < kBlocks;
      const unsigned there = address_in(shared, (block + place.rank) % kBlocks);
      to[i] = kept(there + kStates + row * kRowBytes + place.rank * kUnits * kBytes + word * 16);
      barriers[i] = kept(there + 8 * quarter);
    }
  }

  // Sends the states of a row: lane i has that of unit i.
  __device__ void send(float state, int buffer) const {
    constexpr unsigned all = ~0u;
#if MODE == 1
    const uint32 own = as_tf32(state);
    const uint4 value = make_uint4(__shfl_sync(all, own, 4 * word), __shfl_sync(all, own, 4 * word + 1),
                                   __shfl_sync(all, own, 4 * word + 2), __shfl_sync(all, own, 4 * word + 3));
    const uint4 values[1] = {value};
#else
    const float next = __shfl_down_sync(all, state, 1);
    const OperandPair pair(state, next);
    uint4 values[kPlanes];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32 own = pair.at[plane];
      values[plane] = make_uint4(__shfl_sync(all, own, 8 * word), __shfl_sync(all, own, 8 * word + 2),
                                 __shfl_sync(all, own, 8 * word + 4), __shfl_sync(all, own, 8 * word + 6));
    }
#endif
    const unsigned offset = buffer * kStateBytes, barrier = buffer * 32;
#pragma unroll
    for (int i = 0; i < kSends; ++i)
      if (sends[i]) {
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
          store_to(to[i] + offset + plane * kPlaneBytes, barriers[i] + barrier, values[plane]);
      }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kClusterResident)
    gru_forward(const __grid_constant__ GruArguments p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const int quarter = warp % 4, half = warp / 4;  // of the products: the terms, and the units of the block
  const Place place(p, blockIdx.x / kBlocks, block_in_cluster());
  const unsigned shared = shared_address(shared_memory());
  constexpr unsigned bytes_of_quarter = kTile * kQuarter * kBytes * kPlanes;
  for (int i = threadIdx.x; i < kBarriers; i += kThreads) init_barrier(shared + 8 * i);
  fence_barriers();
  __syncthreads();
  for (int i = threadIdx.x; i < kBarriers; i += kThreads) announce(shared + 8 * i, bytes_of_quarter);
  cluster_barrier();

  Weights weights;
  load_weights(weights, p, place, quarter, half, g, c);
  const Exchange exchange(shared, place, warp, lane);
  // In the elementwise part a thread has one unit (its lane) of one row (its warp).
  ForwardRows rows(p, place, place.rank * kUnits + lane, place.first_row + warp);
  exchange.send(rows.state[0], 0);
  Inputs next = rows.load_inputs(0);
  rows.move_inputs();

  const unsigned barrier_at = kept(shared + 8 * quarter);
  const unsigned words_at = kept(shared + kStates + g * kRowBytes + quarter * kQuarter * kBytes + 16 * c);
  const unsigned parts_to = kept(shared + kParts + 4 * ((quarter * 3 * kTile + 2 * c) * kStride + half * 16 + g));
  const unsigned parts_from = kept(shared + kParts + 4 * (warp * kStride + lane));
  int part = 0;  // the buffer of partial sums
  const unsigned announces = kept(half == 0 && lane == 0);
  const auto receive = [&](int buffer, unsigned parity) {
    const unsigned barrier = barrier_at + buffer * 32;
    wait_for_phase(barrier, parity);
    Words words;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
      for (int word = 0; word < kWords; ++word)
        words.at[plane][word] = load_word(words_at + buffer * kStateBytes + plane * kPlaneBytes + word * 64);
    if (announces != 0) announce(barrier, bytes_of_quarter);
    return words;
  };
  const auto sum_of = [&](int gate) {
    float sums[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      sums[k] = load_float(parts_from + part * kPartBytes + 4 * (k * 3 + gate) * kTile * kStride);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };

#pragma unroll 2
  for (int step = 0; step < p.steps; ++step) {
    const int buffer = step & 1;
    const unsigned parity = step >> 1 & 1;
    const Inputs inputs = next;
    next = rows.load_inputs(0);
    add_products<0, LINEAR ? 3 : 2>(weights, receive(buffer, parity), parts_to + part * kPartBytes);
    __syncthreads();
    Gates gates;
    gates.set_z_and_r(rows.with_input(inputs, 0, sum_of(0)), rows.with_input(inputs, 1, sum_of(1)), p.clip);
#if LINEAR
    gates.recurrent = sum_of(2) + rows.recurrent_bias;
    const float product = gates.r * gates.recurrent;
#else
    exchange.send(rows.gated_state(0, gates), 2);
    part ^= 1;
    add_products<2, 1>(weights, receive(2, step & 1), parts_to + part * kPartBytes);
    __syncthreads();
    const float product = sum_of(2);
#endif
    part ^= 1;
    rows.finish(0, gates, rows.with_input(inputs, 2, product));
    rows.reset(0, inputs.reset_next != 0);
    if (step + 1 < p.steps) exchange.send(rows.state[0], buffer ^ 1);
    rows.store(0, gates);
    rows.move_inputs();
    rows.move_results();
  }
  rows.store_last();
  cluster_barrier();  // no block may end while others still send to it
}
