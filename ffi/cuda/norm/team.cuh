// A team: blocks that run at once and exchange sums through global memory.
//
// A block announces a round by a flag, and waits for the flags of all blocks of its team. The flags are in temporary
// memory of XLA, which holds anything at the start of a call, so a flag is a number of 64 bits that no other memory
// holds: the nonce of the call, which the host draws, plus the round. A CUDA graph launches the same nonce again and
// again: at the end of a launch, the last block of the team that has read the flags clears them.

// Bounds a wait, so that a fault ends in an error instead of a hang. A load takes about a microsecond.
constexpr unsigned kMaxLoads = 1u << 25;

// Waits until *flag is one of the `values` numbers from `value` on. A barrier of the block has to follow.
__device__ inline void wait_for_flag(const uint64* flag, uint64 value, uint64 values) {
  for (unsigned loads = 0; get_flag(flag) - value >= values;)
    if (++loads == kMaxLoads) stop();
  fence_of_gpu();
}

struct Team {
  uint64* flags;  // one for each block, and a count
  uint64 nonce;
  unsigned rank, blocks, rounds;

  // All threads call each function. Before the first round.
  __device__ void begin() const {
    if (rank == 0 && threadIdx.x == 0) flags[blocks] = 0;
  }

  // Blocks that wait for the round see all that this block wrote before.
  __device__ void announce(unsigned round) const {
    __syncthreads();
    if (threadIdx.x == 0) set_flag(flags + rank, nonce + round);
  }
  __device__ void wait(unsigned round) const {
    for (unsigned i = threadIdx.x; i < blocks; i += THREADS) wait_for_flag(flags + i, nonce + round, rounds - round);
    __syncthreads();
  }

  // After the last round, by the `waiting` blocks of the team that have waited for it.
  __device__ void end(unsigned waiting) const {
    if (threadIdx.x != 0) return;
    if (count(flags + blocks) + 1 < waiting) return;
    for (unsigned i = 0; i < blocks; ++i) flags[i] = 0;
  }
};
