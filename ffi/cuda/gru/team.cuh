// The exchange between the blocks of a team, through global memory (the L2 cache).
//
// In a step every block publishes words of 16 bytes. The words of a step are in one slot of a ring, where the host has
// marked all words absent: a reader loads a word until it is there. A memset before each launch does so. With a number
// of the launch in each word it would not need to, but the ring is in temporary memory of XLA, which holds anything at
// the start of a call: old bits could look like words of any launch. Memory is coherent in numbers of 64 bits at most,
// so that each half of a word has a mark: its first 32 bits are a NaN that no conversion yields. Any other value may be
// exchanged. When a block publishes a step, it (or the other of its pair, whose sums it has) has read all words of the
// step before; so all blocks of the team have read those of the step before that one, and it marks its own of them
// absent again.
//
// A reader must not see a word that is older than the mark when its place is used again, kGruSlots steps after. The
// same thread writes a place in all slots, and the same threads read it. The writer marks step s before the
// end of step s + 2. Its next fence is at the end of step s + 1 + kFenceSteps at the latest; the word that it publishes
// after the fence is read in step s + 3 + kFenceSteps at the latest. The next fence of the reader, kFenceSteps after
// that of the writer, is after that read, and at the end of step s + 1 + 2 kFenceSteps at the latest. The two fences
// and the word order the mark before what the reader loads in later steps, the first of which that has its place is s +
// kGruSlots. No fence orders the mark after the reads: a block publishes only what depends on its reads.

constexpr int kRegions = gru_regions(BACKWARD, LINEAR);  // arrays of kPadded values of a row that a step publishes
constexpr int kWarps = kThreads / 32;
constexpr int kWords = kPadded / PAIR / kWarps * kBytes / 64;  // of a row, plane and region that one lane reads
constexpr int kWordsOfTile = kPadded * kBytes / 16 * kTile;    // of one plane and region
constexpr int kTilesOfTeam = BATCHES * ROW_TILES;
constexpr int kWordsOfSlot = kRegions * kPlanes * kTilesOfTeam * kWordsOfTile;
constexpr uint32 kAbsent = ~0u;
constexpr int kFenceSteps = 3;  // between fences
static_assert(2 <= kFenceSteps && 2 + 2 * kFenceSteps <= kGruSlots, "a reader could see an old word");
static_assert(kWordsOfSlot * 16 == gru_slot_bytes(MODE, kPadded, kRows, kRegions), "");

// The offset of the tile of a plane of a region in a slot, in words.
__device__ constexpr int offset_of(int region, int plane, int tile) {
  return ((region * kPlanes + plane) * kTilesOfTeam + tile) * kWordsOfTile;
}

__device__ inline uint4 load_word_of_team(const uint4* from) {
  uint4 word;
  asm volatile(
      "{ .reg .b64 first, second;\n ld.relaxed.gpu.global.v2.b64 {first, second}, [%4];\n"
      " mov.b64 {%0, %1}, first;\n mov.b64 {%2, %3}, second; }"
      : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
      : "l"(from)
      : "memory");
  return word;
}
__device__ inline void store_word_of_team(uint4* to, uint4 word) {
  asm volatile(
      "{ .reg .b64 first, second;\n mov.b64 first, {%1, %2};\n mov.b64 second, {%3, %4};\n"
      " st.relaxed.gpu.global.v2.b64 [%0], {first, second}; }" ::"l"(to),
      "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
      : "memory");
}
__device__ inline bool is_absent(const uint4& word) { return word.x == kAbsent || word.z == kAbsent; }
__device__ inline void fence_of_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ inline void stop() { asm volatile("trap;"); }

// Bounds a wait, so that a fault ends in an error instead of a hang. A load takes about a microsecond.
constexpr unsigned kMaxLoads = 1u << 23;

// The words of 32 neighboring values of a warp: as many lanes publish one each.
constexpr int kWordsOfWarp = 32 * kBytes / 16;

struct Publisher {
  uint4* ring;  // the word of this lane in slot 0, region 0, plane 0, of the first item
  int word;     // of the warp
  bool has_word;

  // The warp has the values of kUnits units from `first_unit` on: of `row`, and with 16 units of `row` + 4.
  __device__ Publisher(uint4* of_team, int first_unit, int tile, int row, int lane)
      : word(static_cast<int>(kept(lane % kWordsOfWarp))), has_word(lane < kWordsOfWarp) {
    constexpr int per_word = 16 / kBytes;
    const int value = word * per_word, unit = first_unit + value % kUnits;
    const int words = unit / per_word;  // before this one, of the row
    ring = kept(of_team + tile * kWordsOfTile + (words / 4 * kTile + row + value / kUnits * 4) * 4 + words % 4);
  }

  // Publishes one value of each lane in a region of a step, of the tile of an item.
  __device__ void publish(float value, unsigned step, int region, int tile) const {
    constexpr unsigned all = ~0u;
    uint4 words[kPlanes];
#if MODE == 1
    const uint32 own = as_tf32(value);
    words[0] = make_uint4(__shfl_sync(all, own, 4 * word), __shfl_sync(all, own, 4 * word + 1),
                          __shfl_sync(all, own, 4 * word + 2), __shfl_sync(all, own, 4 * word + 3));
#else
    const float next = __shfl_down_sync(all, value, 1);
    const OperandPair pair(value, next);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32 own = pair.at[plane];
      words[plane] = make_uint4(__shfl_sync(all, own, 8 * word), __shfl_sync(all, own, 8 * word + 2),
                                __shfl_sync(all, own, 8 * word + 4), __shfl_sync(all, own, 8 * word + 6));
    }
#endif
    if (!has_word) return;
    uint4* const slot = ring + step % kGruSlots * kWordsOfSlot;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      words[plane].x = min(words[plane].x, kAbsent - 1);
      words[plane].z = min(words[plane].z, kAbsent - 1);
      store_word_of_team(slot + offset_of(region, plane, tile), words[plane]);
    }
  }

  // After publish(): marks the words of the step before the last absent.
  __device__ void mark(unsigned step, int region, int tile) const {
    if (!has_word) return;
    uint4* const slot = ring + (step - 2) % kGruSlots * kWordsOfSlot;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      store_word_of_team(slot + offset_of(region, plane, tile), make_uint4(kAbsent, kAbsent, kAbsent, kAbsent));
  }
};
