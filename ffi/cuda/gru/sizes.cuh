// Shared by the forward and the backward kernel. The host defines:
//   T          the element type: float, or Half with ELEMENT_IS_BFLOAT16
//   MODE       a GruMode, as a number
//   HIDDEN     kPadded, the hidden units rounded up to 128, 256 or 512
//   ROW_TILES  tiles of 8 rows that a cluster computes
//   LINEAR     linear_before_reset
using namespace jaxgrad;
typedef unsigned uint32;

constexpr int kPadded = HIDDEN, kUnits = kGruUnits, kBlocks = kPadded / kUnits, kThreads = kGruThreads;
constexpr int kTile = kGruTile, kRows = ROW_TILES * kTile, kStride = kGruStride;
constexpr int kPlanes = gru_planes(MODE);        // of an operand: kGruSplit has a high and a low part
constexpr int kBytes = gru_element_bytes(MODE);  // of an element of a plane

