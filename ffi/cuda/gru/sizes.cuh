// Sizes of the kernels. The host defines:
//   T          the element type: float, or Half: a bfloat16 if ELEMENT_IS_BFLOAT16 is 1, otherwise a float16
//   MODE       a GruMode, as a number
//   HIDDEN     the hidden units that the blocks have room for
//   UNITS      hidden units of a block of a cluster or team: 16 or 32; with HIDDEN, a single block multiplies on tensor
//              cores
//   ROW_TILES  tiles of 8 rows that are multiplied at once
//   BATCHES    batches of so many tiles that a step computes in turn
//   PAIR       blocks of a team that share products: 1, or 2 in a cluster
//   BLOCK_ROWS rows of a single block that multiplies in float32; 0 for others
//   FILLED     whether the call has HIDDEN hidden units
//   LINEAR     linear_before_reset
//   LENGTHS    whether rows have lengths
//   RESETS     a GruResets, as a number
//   CLIP       whether pre-activations are clipped
//   BACKWARD   whether the kernel is that of the backward pass
using namespace jaxgrad;
typedef unsigned uint32;

constexpr int kPadded = HIDDEN;
constexpr int kSaved = 3 + LINEAR;  // values that the forward pass saves of a unit in a step

// The elementwise part: each thread has one unit of kItems rows, which are kItemRows apart. The units of a thread and
// of the next ones, kUnits together, are neighbors.
#if BLOCK_ROWS
constexpr int kRows = BLOCK_ROWS, kUnits = 32, kThreads = gru_block_threads(kPadded, kRows);
constexpr int kItemRows = kRows, kItems = 1;
constexpr bool kSharesResets = false;
#else
constexpr int kTile = kGruTile, kRows = BATCHES * ROW_TILES * kTile;
#if UNITS == HIDDEN
constexpr int kUnits = 32, kThreads = gru_tensor_block_threads(kPadded);
constexpr bool kSharesResets = true;  // see Resets
constexpr int kItemRows = kThreads / kPadded, kItems = kRows / kItemRows;
#else
constexpr int kThreads = kGruThreads, kUnits = UNITS, kBlocks = kPadded / kUnits;
constexpr bool kSharesResets = false;
constexpr int kItemRows = kThreads / kUnits, kItems = kRows / kItemRows;
#endif
#endif
