// The recurrence of the GRU, backward. The blocks of a cluster own hidden units as in cluster_forward.cu. A step
// multiplies the gradients of a block's own gates by its own recurrent weights: one part of the gradient of every unit
// of the state before. Each block sends the parts to the owners of the units, and sums those that it receives.
constexpr int kTilesOfWarp = kPadded / 128;         // tiles of 16 units whose parts a warp computes
constexpr int kWordsOfGate = kUnits * kBytes / 64;  // 16-byte words of 32 gradients that one lane reads
constexpr int kGateBytes = kUnits * kBytes;
constexpr int kRowBytes = gru_backward_row_bytes(MODE);  // without bank conflicts
constexpr int kPlaneBytes = kTile * kRowBytes;
constexpr int kOperandBytes = kPlanes * kPlaneBytes;  // of the products of one tile
constexpr int kPartBytes = kTile * kUnits * 4;        // of the sums for one block, from one block
constexpr int kTileBytes = kBlocks * kPartBytes;

// Shared memory: barriers, operands (two buffers), parts of sums (two buffers; four, if there are two products a step).
constexpr int kExchanges = gru_backward_exchanges(LINEAR);
constexpr int kBarriers = kExchanges;
constexpr int kOperands = gru_aligned(kBarriers * 8);
constexpr int kSums = kOperands + 2 * kOperandBytes;
static_assert(kRows == kTile && kSums + kExchanges * kTileBytes == gru_backward_shared_bytes(MODE, kPadded, LINEAR),
              "");

struct Weights {  // transposed: the rows are the units of the state before, the terms the gates of the block
  uint32 at[kTilesOfWarp][3][kWordsOfGate][2][kPlanes][4];
};

__device__ inline void load_weights(Weights& weights, const GruArguments& p, const Place& place, int warp, int g,
                                    int c) {
  const int H = hidden_of(p);
  const T* const r = static_cast<const T*>(p.r) + static_cast<long long>(place.problem) * 3 * H * H;
#pragma unroll
  for (int tile = 0; tile < kTilesOfWarp; ++tile)
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
      for (int word = 0; word < kWordsOfGate; ++word)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int unit = (warp * kTilesOfWarp + tile) * 16 + g + row * 8;
          const int term = place.rank * kUnits + (word * 4 + c) * kWordTerms;
          const WordWeights loaded(r + (gate * H + term) * H + unit, H, unit < H ? H - term : 0);
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              weights.at[tile][gate][word][i / 2][plane][row + i % 2 * 2] = loaded.at[plane][i];
        }
}

// Products of the gradients of some gates with the weights; every warp sends its sums to the owners of its units.
template <int FIRST, int GATES>
__device__ inline void send_products(const Weights& weights, unsigned operands, const unsigned (&to)[kTilesOfWarp],
                                     const unsigned (&barriers)[kTilesOfWarp], unsigned offset, unsigned barrier,
                                     int g) {
  Products<MODE == 2 ? 3 : 2> sums[kTilesOfWarp];
#pragma unroll
  for (int gate = FIRST; gate < FIRST + GATES; ++gate)
#pragma unroll
    for (int word = 0; word < kWordsOfGate; ++word) {
      uint4 words[kPlanes];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
        words[plane] = load_word(operands + plane * kPlaneBytes + gate * kGateBytes + word * 64);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        uint32 b[kPlanes][2];
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) {
          b[plane][0] = q == 0 ? words[plane].x : words[plane].z;
          b[plane][1] = q == 0 ? words[plane].y : words[plane].w;
        }
#pragma unroll
        for (int tile = 0; tile < kTilesOfWarp; ++tile) sums[tile].add(weights.at[tile][gate][word][q], b, q);
      }
    }
  // A lane has sums of units g and g + 8 for rows 2 c and 2 c + 1. Four lanes with neighboring g transpose theirs: each
  // then has four neighboring units of one row.
  constexpr unsigned all = ~0u;
#pragma unroll
  for (int tile = 0; tile < kTilesOfWarp; ++tile) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = sums[tile].sum(j);
    const bool odd = g & 1, upper = g & 2;
    const float a = __shfl_xor_sync(all, odd ? v[0] : v[1], 4), b = __shfl_xor_sync(all, odd ? v[2] : v[3], 4);
    // Of lanes g and g ^ 1: pairs (low, high) of element 0 or 1, and of element 2 or 3.
    const float first_low = odd ? a : v[0], first_high = odd ? v[1] : a;
    const float second_low = odd ? b : v[2], second_high = odd ? v[3] : b;
    const float low = __shfl_xor_sync(all, upper ? first_low : second_low, 8);
    const float high = __shfl_xor_sync(all, upper ? first_high : second_high, 8);
    const uint4 word = upper ? make_uint4(__float_as_uint(low), __float_as_uint(high), __float_as_uint(second_low),
                                          __float_as_uint(second_high))
                             : make_uint4(__float_as_uint(first_low), __float_as_uint(first_high), __float_as_uint(low),
                                          __float_as_uint(high));
    store_to(to[tile] + offset, barriers[tile] + barrier, word);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kClusterResident)
    gru_backward(const __grid_constant__ GruArguments p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const Place place(p, blockIdx.x / kBlocks, block_in_cluster());
  const unsigned shared = shared_address(shared_memory());
  for (int i = threadIdx.x; i < kBarriers; i += kThreads) init_barrier(shared + 8 * i);
  fence_barriers();
  __syncthreads();
  for (int i = threadIdx.x; i < kBarriers; i += kThreads) announce(shared + 8 * i, kTileBytes);
  cluster_barrier();

  Weights weights;
  load_weights(weights, p, place, warp, g, c);
  // Where the sums of this lane go: in the block that owns the units, from this block, the row, the four units.
  unsigned to[kTilesOfWarp], barriers[kTilesOfWarp];
#pragma unroll
  for (int tile = 0; tile < kTilesOfWarp; ++tile) {
    const int first = (warp * kTilesOfWarp + tile) * 16;
    const unsigned there = address_in(shared, first / kUnits);
    const int row = 2 * c + (g & 1), unit = first % kUnits + (g & 2 ? 8 : 0) + (g & 4);
    to[tile] = there + kSums + place.rank * kPartBytes + (row * kUnits + unit) * 4;
    barriers[tile] = kept(there);
  }

  BackwardRows rows(p, place, place.rank * kUnits + lane, place.first_row + warp);
  Saved next = rows.load(0);
  rows.move_loads();

  const unsigned operand_to = kept(shared + kOperands + warp * kRowBytes + lane * kBytes);
  const unsigned operands_from = kept(shared + kOperands + g * kRowBytes + 16 * c);
  const unsigned sums_from = kept(shared + kSums + (warp * kUnits + lane) * 4);
  const unsigned announces = kept(threadIdx.x == 0);
  int operand = 0;  // the buffer of operands
  bool was_valid = false, was_reset = false;
  const auto offset_of = [](int exchange) { return exchange * kTileBytes; };
  const auto barrier_of = [](int exchange) { return exchange * 8; };
  const auto receive = [&](int exchange, unsigned parity) {
    wait_for_phase(shared + barrier_of(exchange), parity);
    float sums[2];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float part = load_float(sums_from + offset_of(exchange) + block * kPartBytes);
      sums[block % 2] = block < 2 ? part : sums[block % 2] + part;
    }
    return sums[0] + sums[1];
  };
  // After all threads have waited for the phase: one opens the next.
  const auto reopen = [&](int exchange) {
    if (announces != 0) announce(shared + barrier_of(exchange), kTileBytes);
  };

#pragma unroll 2
  for (int done = 0; done < p.steps; ++done) {
    const int buffer = done & 1;
    const Factors f = rows.factors_of(0, next);
    if (done + 1 < p.steps) next = rows.load(0);
    if (done > 0) rows.finish(0, receive(buffer ^ 1, (done - 1) >> 1 & 1), was_valid, was_reset);
    const float out = rows.dh[0] + f.dy;
    const float dz = f.valid ? out * f.z_factor : 0.f, dn = f.valid ? out * f.n_factor : 0.f;
    rows.dh[0] = f.valid ? out * f.z : out;
    was_valid = f.valid;
    was_reset = f.is_reset;
    const unsigned operands = operand_to + operand * kOperandBytes;
    store_operand<kPlaneBytes>(operands, dz);
#if LINEAR
    const float dr = f.valid ? out * f.r_factor : 0.f;
    store_operand<kPlaneBytes>(operands + kGateBytes, dr);
    store_operand<kPlaneBytes>(operands + 2 * kGateBytes, dn * f.r);
#else
    store_operand<kPlaneBytes>(operands + 2 * kGateBytes, dn);
    __syncthreads();
    if (done > 0) reopen(buffer ^ 1);
    send_products<2, 1>(weights, operands_from + operand * kOperandBytes, to, barriers, offset_of(2 + buffer),
                        barrier_of(2 + buffer), g);
    const float dproduct = receive(2 + buffer, done >> 1 & 1);  // of r * h
    const float dr = f.valid ? dproduct * f.r_factor : 0.f;
    store_operand<kPlaneBytes>(operands + kGateBytes, dr);
    if (f.valid) rows.dh[0] += dproduct * f.r;
#endif
    __syncthreads();
#if LINEAR
    if (done > 0) reopen(buffer ^ 1);
    constexpr int kLastGates = 3;
#else
    reopen(2 + buffer);
    constexpr int kLastGates = 2;
#endif
    send_products<0, kLastGates>(weights, operands_from + operand * kOperandBytes, to, barriers, offset_of(buffer),
                                 barrier_of(buffer), g);
    operand ^= 1;
    rows.store(0, dz, dr, dn, f.r);
    rows.move_loads();
    rows.move_results();
  }
  const int last = p.steps - 1;
  rows.finish(0, receive(last & 1, last >> 1 & 1), was_valid, was_reset);
  rows.store_last();
  cluster_barrier();
}
