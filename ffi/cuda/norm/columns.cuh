// Sums over columns: the layout of the kernels for statistics over the rows of a sample.
//
// Channels last, a row is one element of each channel, and a thread has the channels of one item. Channels first
// (CHANNELS_LAST is 0), a row of a channel is one item of its runs, and a thread has one channel. A problem is `width`
// channels of one sample, whole groups; the teams take the problems in turn. A block of a team has a range of the rows,
// and each thread every `lanes`-th row of it. A thread keeps its first kHeld items in registers, the next `stored` in
// shared memory, and reads the rest again. STORES and REREADS: whether there are such items. In a training step the
// first launch of a kernel after others waits for its instructions, so that small problems have short kernels.

constexpr int kSums = CHANNELS_LAST ? kVector : 1;  // channels of a thread
constexpr int kHeld = HELD;
constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;

// The part of a thread in the problems of its team.
struct Part {
  unsigned columns;              // of threads: channels last, items of a row; channels first, channels
  unsigned column, lane, lanes;  // lane: which of the threads of the column
  unsigned first, rows;          // of the block
  unsigned items;                // of this thread

  __device__ Part(const NormColumns& a, unsigned rank) {
    columns = CHANNELS_LAST ? a.width / kVector : a.width;
    lanes = kThreads / columns;
    column = CHANNELS_LAST ? threadIdx.x % columns : threadIdx.x / lanes;
    lane = CHANNELS_LAST ? threadIdx.x / columns : threadIdx.x % lanes;
    const unsigned each = a.rows / a.blocks, rest = a.rows % a.blocks;
    first = rank * each + min(rank, rest);
    rows = each + (rank < rest);
    items = lane < lanes && column < columns && lane < rows ? (rows - lane - 1) / lanes + 1 : 0;
  }
};

// The elements of a thread in one problem.
struct Place {
  unsigned sample, channel;  // the first of the problem
  unsigned own;              // the first channel of this thread, of the problem
  unsigned items;
  bool exists;  // the problem may have fewer channels than `width`

  __device__ Place(const NormColumns& a, const Part& part, unsigned problem) {
    sample = problem / a.chunks;
    channel = problem % a.chunks * a.width;
    own = part.column * kSums;
    exists = part.items > 0 && channel + own < a.channels;
    items = exists ? part.items : 0;
    base_ = CHANNELS_LAST ? sample * a.rows * a.stride + channel + own
                          : (sample * a.rows * a.channels + (channel + own) * a.inner.value) * kVector;
    row_ = part.first + part.lane;
    lanes_ = part.lanes;
    if (CHANNELS_LAST) {
      begin_ = base_ + row_ * a.stride;
      step_ = lanes_ * a.stride;
    }
  }

  // The offset of a row of the sample, and of an item of the thread.
  __device__ unsigned row(const NormColumns& a, unsigned index) const {
    if (CHANNELS_LAST) return base_ + index * a.stride;
    const unsigned run = quotient(index, a.inner);
    return base_ + (run * a.channels * a.inner.value + (index - run * a.inner.value)) * kVector;
  }
  __device__ unsigned item(const NormColumns& a, unsigned index) const {
    return CHANNELS_LAST ? begin_ + index * step_ : row(a, row_ + index * lanes_);
  }

 private:
  unsigned base_, row_, lanes_, begin_, step_;
};

// Starts moving items [from, to) into the L2 cache.
__device__ inline void prefetch(const NormColumns& a, const Part& part, const Place& place, const Element* x,
                                unsigned from, unsigned to) {
  if ((CHANNELS_LAST ? part.column : part.lane) % (128 / kItemBytes) != 0) return;  // a line has 128 bytes
  for (unsigned i = from; i < min(to, place.items); ++i) prefetch_line(x + place.item(a, i));
}

// The shared memory of a block, behind the stored items: floats.
struct Scratch {
  float* sums;     // pairs of the threads that share a channel, or of the blocks
  float* channel;  // [kChannelValues, width]

  __device__ Scratch(const NormColumns& a, int items_of_row) {
    sums = reinterpret_cast<float*>(shared_memory() +
                                    static_cast<size_t>(a.stored) * items_of_row * kThreads * kWords * 4);
    channel = sums + a.floats_of_sums;
  }
  __device__ float* of(const NormColumns& a, int value) const { return channel + value * a.width; }

  // The values of the channels of a thread.
  __device__ void load(const NormColumns& a, int value, const Place& place, float (&values)[kSums]) const {
    const float* const from = of(a, value) + place.own;
#pragma unroll
    for (int j = 0; j < kSums; ++j) values[j] = from[j];
  }
};

// Stores the sums over the block of both values of each channel: `total(channel, first, second)` gets them, of the
// channels of the problem, from one thread each. Sums have a fixed order.
template <class Total>
__device__ inline void sum_over_block(const NormColumns& a, const Part& part, const Place& place, float (&first)[kSums],
                                      float (&second)[kSums], const Scratch& scratch, Total total) {
  float2* const sums = reinterpret_cast<float2*>(scratch.sums);
  const unsigned neighbors = CHANNELS_LAST ? part.columns : 1;  // distance of lanes of one column
  const unsigned of_warp = CHANNELS_LAST ? 32 / part.columns : part.lanes < 32 ? part.lanes : 32;
  const bool by_shuffles = CHANNELS_LAST ? 32 % part.columns == 0 : part.lanes % 32 == 0 || 32 % part.lanes == 0;
  unsigned rows;  // of partial sums
  if (by_shuffles) {
    for (unsigned distance = neighbors; distance < neighbors * of_warp; distance *= 2)
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        first[j] += __shfl_xor_sync(~0u, first[j], distance);
        second[j] += __shfl_xor_sync(~0u, second[j], distance);
      }
    rows = CHANNELS_LAST ? kWarps : (part.lanes + 31) / 32;
    const unsigned row = CHANNELS_LAST ? threadIdx.x / 32 : part.lane / 32;
    const bool writes = CHANNELS_LAST ? threadIdx.x % 32 < part.columns : part.lane % 32 == 0;
    if (writes && part.column < part.columns)
#pragma unroll
      for (int j = 0; j < kSums; ++j) sums[row * a.width + place.own + j] = make_float2(first[j], second[j]);
  } else {
    rows = part.lanes;
    if (part.column < part.columns && part.lane < part.lanes)
#pragma unroll
      for (int j = 0; j < kSums; ++j) sums[part.lane * a.width + place.own + j] = make_float2(first[j], second[j]);
  }
  __syncthreads();
  for (unsigned c = threadIdx.x; c < a.width; c += kThreads) {
    float2 sum = sums[c];
    for (unsigned row = 1; row < rows; ++row) {
      const float2 other = sums[row * a.width + c];
      sum.x += other.x;
      sum.y += other.y;
    }
    total(c, sum.x, sum.y);
  }
}

// Adds rows of [rows, width] pairs in global memory. `total` as above.
template <class Total>
__device__ inline void sum_rows(const float2* pairs, unsigned rows, unsigned row_stride, unsigned width,
                                const Scratch& scratch, Total total) {
  float2* const sums = reinterpret_cast<float2*>(scratch.sums);
  const unsigned across = min(width, static_cast<unsigned>(kThreads)), parts = kThreads / across;
  const unsigned part = threadIdx.x / across;
  if (part < parts)
    for (unsigned c = threadIdx.x % across; c < width; c += across) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll 16
      for (unsigned row = part; row < rows; row += parts) {
        const float2 other = __ldcg(pairs + static_cast<size_t>(row) * row_stride + c);
        sum.x += other.x;
        sum.y += other.y;
      }
      sums[part * width + c] = sum;
    }
  __syncthreads();
  for (unsigned c = threadIdx.x; c < width; c += kThreads) {
    float2 sum = sums[c];
    for (unsigned row = 1; row < parts; ++row) {
      sum.x += sums[row * width + c].x;
      sum.y += sums[row * width + c].y;
    }
    total(c, sum.x, sum.y);
  }
}

// The exchange of a team.
struct Exchange {
  const NormColumns& a;
  Team team;
  unsigned round = 0;

  __device__ Exchange(const NormColumns& arguments, unsigned first_problem)
      : a(arguments),
        team{a.flags + blockIdx.x / a.blocks * (a.blocks + 1), a.nonce, blockIdx.x % a.blocks, a.blocks,
             (a.problems - first_problem + a.teams - 1) / a.teams} {
    if (a.blocks > 1) team.begin();
  }

  // Sums both values of each channel over the team: `total(channel, first, second)` gets them in every block, from one
  // thread each, before all threads go on. `between` runs while the blocks wait for each other.
  template <class Between, class Total>
  __device__ void sum(unsigned problem, const Part& part, const Place& place, float (&first)[kSums],
                      float (&second)[kSums], const Scratch& scratch, Between between, Total total) {
    float2* const partials = reinterpret_cast<float2*>(a.partials) + static_cast<size_t>(problem) * a.blocks * a.width;
    if (a.blocks == 1) {
      between();
      sum_over_block(a, part, place, first, second, scratch, total);
    } else {
      sum_over_block(a, part, place, first, second, scratch, [&](unsigned c, float one, float other) {
        __stcg(partials + team.rank * a.width + c, make_float2(one, other));
      });
      team.announce(round);
      between();
      team.wait(round);
      sum_rows(partials, a.blocks, a.width, a.width, scratch, total);
    }
    ++round;
    __syncthreads();
  }

  __device__ void end() const {
    if (a.blocks > 1) team.end(a.blocks);
  }
};

// Sums the pairs value(c) over the channels of each group of the problem: `total(group, sums)` gets them from one
// thread each.
template <class Value, class Total>
__device__ inline void sum_over_groups(const NormColumns& a, Value value, Total total) {
  const unsigned groups = quotient(a.width, a.group);
  for (unsigned group = threadIdx.x / 32; group < groups; group += kWarps) {
    float2 sum = make_float2(0.f, 0.f);
    for (unsigned c = threadIdx.x % 32; c < a.group.value; c += 32) {
      const float2 other = value(group * a.group.value + c);
      sum.x += other.x;
      sum.y += other.y;
    }
    for (unsigned distance = 16; distance > 0; distance /= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, distance);
      sum.y += __shfl_xor_sync(~0u, sum.y, distance);
    }
    if (threadIdx.x % 32 == 0) total(group, sum);
  }
}
