// The products of a block of a team: of its recurrent weights, in registers and shared memory, with what the team has
// published. Each of the 8 warps multiplies an eighth of the terms. The rows of the weights are, forward, the block's
// units for each gate, and the terms are units of the state; backward, the rows are the block's units of the state, and
// the terms are units for each gate. A pair of blocks has the units of both as rows, and each block half of the terms,
// so that it loads half as many words; the blocks then exchange sums.
//
// A word that a lane loads is an operand b of two products of tensor cores, for one row of the batch.

constexpr int kSideGates = BACKWARD ? 1 : 3, kTermGates = BACKWARD ? 3 : 1;
constexpr int kHalves = PAIR * kUnits / 16, kSides = kSideGates * kHalves;  // tiles of 16 rows of the weights
constexpr int kWordsOfLane = kTermGates * kWords;
constexpr int kFragments = kSides * 2 * kPlanes;  // operands a of a word, four registers each
constexpr GruTeam kTeam = {MODE, BACKWARD, LINEAR, kPadded, kUnits, ROW_TILES, BATCHES, PAIR};
constexpr int kRegisterWords = gru_register_words(kTeam);
constexpr int kSharedWords = kWordsOfLane - kRegisterWords;

// Shared memory: weights, partial sums (two buffers), barriers and sums of the pair.
constexpr int kStride = PAIR * kUnits + 4;  // of a row of partial sums, without bank conflicts
constexpr int kGateSums = ROW_TILES * kTile * kStride, kWarpSums = kSideGates * kGateSums;
constexpr int kPartBytes = kWarps * kWarpSums * 4, kFragmentBytes = 32 * 16;
constexpr int kParts = kWarps * kSharedWords * kFragments * kFragmentBytes;
constexpr int kPairBarriers = kParts + 2 * kPartBytes;
[[maybe_unused]] constexpr int kPairExchanges = gru_pair_exchanges(kTeam), kPairBuffers = gru_pair_buffers(kTeam);
[[maybe_unused]] constexpr int kPairSums = kPairBarriers + gru_aligned(kPairExchanges * kPairBuffers * 8);
[[maybe_unused]] constexpr int kPairSumBytes = gru_pair_sums(kTeam) * gru_items(kTeam) * kThreads * 4;  // of a buffer
static_assert(PAIR == 1 || (BACKWARD && kUnits == 16), "no other pairs are faster");
static_assert(kPairBarriers + gru_pair_bytes(kTeam) == gru_team_shared_bytes(kTeam), "");

struct Weights {
  uint32 at[kRegisterWords][kFragments][4];
  unsigned others;  // those of the lane in shared memory

  __device__ explicit Weights(unsigned shared, int warp, int lane)
      : others(kept(shared + warp * kSharedWords * kFragments * kFragmentBytes + lane * 16)) {}

  static constexpr __device__ int fragment(int side, int q, int plane) { return (side * 2 + q) * kPlanes + plane; }

  // Loads the operands of one word.
  __device__ static void load_word_of(uint32 (&to)[kFragments][4], const GruArguments& p, const Place& place, int word,
                                      int warp, int lane) {
    const int g = lane / 4, c = lane % 4;
    const int H = hidden_of(p);
    const T* const r = static_cast<const T*>(p.r) + static_cast<long long>(place.problem) * 3 * H * H;
    const int words = (place.rank % PAIR * kWarps + warp) * kWords + word % kWords;  // before this one, of a row
    const int term = (words * 4 + c) * kWordTerms, first_unit = place.rank / PAIR * (PAIR * kUnits);
#pragma unroll
    for (int side = 0; side < kSides; ++side)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int gate = side / kHalves + word / kWords, unit = first_unit + side % kHalves * 16 + g + row * 8;
        const int at = BACKWARD ? (gate * H + term) * H + unit : (gate * H + unit) * H + term;
        const WordWeights weights(r + at, BACKWARD ? H : 1, unit < H ? H - term : 0);
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
          for (int i = 0; i < 4; ++i) to[fragment(side, i / 2, plane)][row + i % 2 * 2] = weights.at[plane][i];
      }
  }

  __device__ void load(const GruArguments& p, const Place& place, int warp, int lane) {
#pragma unroll
    for (int word = 0; word < kRegisterWords; ++word) load_word_of(at[word], p, place, word, warp, lane);
#pragma unroll 1
    for (int word = 0; word < kSharedWords; ++word) {
      uint32 of_word[kFragments][4];
      load_word_of(of_word, p, place, kRegisterWords + word, warp, lane);
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
        store_word(others + (word * kFragments + f) * kFragmentBytes,
                   make_uint4(of_word[f][0], of_word[f][1], of_word[f][2], of_word[f][3]));
    }
  }

  __device__ void get(uint32 (&a)[4], int word, int f) const {
    if (word < kRegisterWords) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = at[word][f][j];
    } else {
      const uint4 four = load_word(others + ((word - kRegisterWords) * kFragments + f) * kFragmentBytes);
      a[0] = four.x, a[1] = four.y, a[2] = four.z, a[3] = four.w;
    }
  }
};

// The words that are multiplied at once, while as many are on their way: a divisor of those of every product.
__device__ constexpr int words_at_once() {
  const int words = BACKWARD && LINEAR ? kWordsOfLane : kWords;
  int at_once = gru_words_at_once(kTeam);
  while (words % at_once != 0) --at_once;
  return at_once;
}
constexpr int kAtOnce = words_at_once();

// Neighboring words of all tiles of a batch.
struct Words {
  uint4 at[kAtOnce][kPlanes][ROW_TILES];

  __device__ static int offset(int region, int first, int word, int plane, int tile) {
    return offset_of(region + (first + word) / kWords, plane, tile) + (first + word) % kWords * 32;
  }
  __device__ void load(const uint4* from, int region, int first) {
#pragma unroll
    for (int word = 0; word < kAtOnce; ++word)
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile)
          at[word][plane][tile] = load_word_of_team(from + offset(region, first, word, plane, tile));
  }
  // Loads absent words until they are there.
  __device__ void wait(const uint4* from, int region, int first) {
    for (unsigned loads = 0;; ++loads) {
      bool absent = false;
#pragma unroll
      for (int word = 0; word < kAtOnce; ++word)
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
          for (int tile = 0; tile < ROW_TILES; ++tile) absent |= is_absent(at[word][plane][tile]);
      if (!absent) break;
      if (loads == kMaxLoads) stop();
#pragma unroll
      for (int word = 0; word < kAtOnce; ++word)
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
          for (int tile = 0; tile < ROW_TILES; ++tile)
            if (is_absent(at[word][plane][tile]))
              at[word][plane][tile] = load_word_of_team(from + offset(region, first, word, plane, tile));
    }
    __syncwarp();
  }
};

template <int SIDES>
struct AllSums {
  Products<MODE == 2 || SIDES * ROW_TILES <= 4 ? 2 : 1> at[SIDES][ROW_TILES];
};

// Adds the products of words, the first of which is `first`. Inlined, so that the weights stay in registers.
template <int FIRST_SIDE, int SIDES>
__device__ inline void multiply_words(AllSums<SIDES>& sums, const Weights& weights, const Words& words, int first) {
#pragma unroll
  for (int word = 0; word < kAtOnce; ++word)
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32 b[ROW_TILES][kPlanes][2];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
          const uint4& w = words.at[word][plane][tile];
          b[tile][plane][0] = q == 0 ? w.x : w.z;
          b[tile][plane][1] = q == 0 ? w.y : w.w;
        }
#pragma unroll
      for (int side = 0; side < SIDES; ++side) {
        uint32 a[kPlanes][4];
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
          weights.get(a[plane], first + word, Weights::fragment(FIRST_SIDE + side, q, plane));
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) sums.at[side][tile].add(a, b[tile], q);
      }
    }
}

// Multiplies WORDS words of a lane from FIRST on, of the regions from REGION on, by SIDES tiles of rows of the weights,
// as they arrive; writes the sums of the warp to the partial sums. The first words are in `ahead`, or on their way.
template <int FIRST, int WORDS, int FIRST_SIDE, int SIDES, int REGION>
__device__ inline void multiply(const Weights& weights, const Words& ahead, const uint4* from, unsigned parts) {
  constexpr int pieces = WORDS / kAtOnce;
  AllSums<SIDES> sums;
  Words words[2];
  words[0] = ahead;
#pragma unroll
  for (int piece = 0; piece < pieces; ++piece) {
    const int first = FIRST + piece * kAtOnce;
    if (piece + 1 < pieces) words[(piece + 1) & 1].load(from, REGION, first + kAtOnce);
    words[piece & 1].wait(from, REGION, first);
    multiply_words<FIRST_SIDE>(sums, weights, words[piece & 1], first);
  }
#pragma unroll
  for (int side = 0; side < SIDES; ++side)
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // element j: unit g or g + 8, row 2 c or 2 c + 1
        const int gate = (FIRST_SIDE + side) / kHalves, half = (FIRST_SIDE + side) % kHalves;
        const int place = gate * kGateSums + (tile * kTile + (j & 1)) * kStride + half * 16 + (j >> 1) * 8;
        store_float(parts + 4 * place, sums.at[side][tile].sum(j));
      }
}

constexpr int kItemsOfBatch = kItems / BATCHES;

// A block of a team: its weights, its partial sums, and what it publishes and reads.
struct Block {
  const int warp, lane, rank, team;
  const int tile, row, unit;  // of a thread in the elementwise part: the tile and its row of the first item, the unit
  unsigned parts_to, parts_from;
  int part = 0;            // the buffer of partial sums
  unsigned published = 0;  // the step, counted since the kernel began
  const uint4* words_from;
  Weights weights;
  Publisher publisher;
  Words ahead;  // the first words of the next product
#if PAIR > 1
  const unsigned shared, other;  // the shared memory of the block, and of the other of its pair
  static constexpr int kBytesOfExchange = kItemsOfBatch * kThreads * 4;  // that a block receives
#endif

  __device__ Block(const GruArguments& p, unsigned memory)
      : warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        rank(blockIdx.x % kBlocks),
        team(blockIdx.x / kBlocks),
        tile(kUnits == 32 ? 0 : warp / 4),
        row(kUnits == 32 ? warp : warp % 4 + lane / 16 * 4),
        unit(rank * kUnits + lane % kUnits),
        parts_to(kept(memory + kParts + 4 * (warp * kWarpSums + lane % 4 * 2 * kStride + lane / 4))),
        parts_from(kept(memory + kParts + 4 * ((tile * kTile + row) * kStride + rank % PAIR * kUnits + lane % kUnits))),
        words_from(kept(ring_of(p, team) + (rank % PAIR * kWarps + warp) * kWords * 32 + lane)),
        weights(memory, warp, lane),
        publisher(ring_of(p, team), rank * kUnits, tile, kUnits == 32 ? warp : warp % 4, lane)
#if PAIR > 1
        ,
        shared(kept(memory)),
        other(kept(address_in(memory, 1 - rank % PAIR)))
#endif
  {
#if PAIR > 1
    for (int i = threadIdx.x; i < kPairExchanges * kPairBuffers; i += kThreads)
      init_barrier(memory + kPairBarriers + 8 * i);
    fence_barriers();
    __syncthreads();
    for (int i = threadIdx.x; i < kPairExchanges * kPairBuffers; i += kThreads)
      announce(memory + kPairBarriers + 8 * i, kBytesOfExchange);
    cluster_barrier();
#endif
  }

  __device__ static uint4* ring_of(const GruArguments& p, int team) {
    return static_cast<uint4*>(p.exchange) + static_cast<long long>(team) * (kGruSlots * kWordsOfSlot);
  }

  __device__ const uint4* words_of(unsigned step, int batch) const {
    return words_from + step % kGruSlots * kWordsOfSlot + batch * ROW_TILES * kWordsOfTile;
  }
  // Starts to load the first words of multiply_batch() with the same FIRST_GATE and REGION, for a step that need not be
  // published yet.
  template <int FIRST_GATE, int REGION>
  __device__ void load_ahead(unsigned step, int batch) {
    ahead.load(words_of(step, batch), REGION, BACKWARD ? FIRST_GATE * kWords : 0);
  }
  // The products of a batch of rows with what the step published, after load_ahead(): of some gates' rows of the
  // weights, forward, and terms, backward. The sums are complete after __syncthreads().
  template <int FIRST_GATE, int GATES, int REGION>
  __device__ void multiply_batch(int batch) {
    constexpr int first = BACKWARD ? FIRST_GATE * kWords : 0, words = BACKWARD ? GATES * kWords : kWords;
    constexpr int first_side = BACKWARD ? 0 : FIRST_GATE * kHalves, sides = BACKWARD ? kSides : GATES * kHalves;
    part ^= 1;
    multiply<first, words, first_side, sides, REGION>(weights, ahead, words_of(published, batch),
                                                      parts_to + part * kPartBytes);
  }
  // A sum of an item, of the warps of this block. `units_away`: from the own units to those of the other of the pair.
  __device__ float sum_of_warps(int gate, int item, int units_away = 0) const {
    const unsigned from = parts_from + part * kPartBytes + 4 * units_away;
    float sums[4];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float of_warp = load_float(from + 4 * (warp * kWarpSums + gate * kGateSums + item * kItemRows * kStride));
      sums[warp % 4] = warp < 4 ? of_warp : sums[warp % 4] + of_warp;
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // The sums of the items of a batch, once all threads have written their partial sums. `product`: of the step.
  template <int FIRST_GATE, int GATES>
  __device__ void add_up(float (&sums)[GATES][kItemsOfBatch], int batch, int product) const {
#if PAIR > 1
    static_assert(GATES == 1, "");
    const int buffer = published % kPairBuffers;
    const unsigned barrier = kPairBarriers + ((product * BATCHES + batch) * kPairBuffers + buffer) * 8;
    const auto place = [&](int i) {
      const int item = (batch * gru_pair_sums(kTeam) + product) * kItemsOfBatch + i;
      return kPairSums + buffer * kPairSumBytes + (item * kThreads + threadIdx.x) * 4;
    };
    const int units_away = rank % PAIR == 0 ? kUnits : -kUnits;
#pragma unroll
    for (int i = 0; i < kItemsOfBatch; ++i)
      store_float_to(other + place(i), other + barrier, sum_of_warps(FIRST_GATE, i, units_away));
#endif
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate)
#pragma unroll
      for (int i = 0; i < kItemsOfBatch; ++i) sums[gate][i] = sum_of_warps(FIRST_GATE + gate, i);
#if PAIR > 1
    wait_for_phase(shared + barrier, published / kPairBuffers & 1);
    if (threadIdx.x == 0) announce(shared + barrier, kBytesOfExchange);
#pragma unroll
    for (int i = 0; i < kItemsOfBatch; ++i) sums[0][i] += load_float(shared + place(i));
#endif
  }
  __device__ void publish(float value, unsigned step, int region, int item) const {
    publisher.publish(value, step, region, item * (kItemRows / kTile));
  }
  __device__ void mark(unsigned step, int region, int item) const {
    publisher.mark(step, region, item * (kItemRows / kTile));
  }
  __device__ void advance() {
    if (++published % kFenceSteps == 0) fence_of_gpu();
  }
  // No block may end while the other of its pair still sends to it.
  __device__ void end() const {
#if PAIR > 1
    cluster_barrier();
#endif
  }
};
