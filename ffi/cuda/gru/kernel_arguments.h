// The argument of the kernels of the GRU, and the memory that they need. Both the host compiler and NVRTC compile this
// file.
#pragma once

#ifdef __CUDACC__  // NVRTC has no functions of the host
#define JAXGRAD_CONSTEXPR __device__ constexpr
#else
#define JAXGRAD_CONSTEXPR constexpr
#endif

namespace jaxgrad {

// Several problems are independent GRUs of the same sizes: the directions, and the groups that vmap makes of weights.
// Problem p is direction p % directions of group p / directions. The arrays have the type of the op unless stated.
struct GruArguments {
  int steps, rows, hidden, directions, reversed;  // bit d of `reversed`: direction d runs from the last step
  int problems, tiles;                            // parts that the rows of a problem are split into
  float clip;                                     // infinity for no bound
  const float* inputs;                            // [groups, T, B, D, 3, H]: x W'
  const void* r;                                  // [problems, 3H, H]
  const void* bias;                               // [problems, 6H] or null
  const void* initial_h;                          // [problems, B, H] or null
  const int* lengths;                             // [groups, B] or null
  const unsigned char* reset;                     // [groups, T, B] or null
  const void* reset_h;                            // [problems, B, H], with kGruResetsToGiven
  void* y;                                        // [groups, T, D, B, H]
  void* y_h;                                      // [problems, B, H]
  void* gates;                                    // [groups, T, D, B, 3H], with linear_before_reset 4H; or null
  const void *dy, *dy_h;                          // as y and y_h, or null
  void* dgates;            // [groups, T, B, D, 3, H]: the gradients of the pre-activations of z, r and n
  void* recurrent_dgates;  // with linear_before_reset, the same with that of h Rn' + Rbn for n; or null
  float* dh0;              // [problems, B, H]
  float* dreset_h;         // [problems, B, H] or null
  void* exchange;          // gru_slot_bytes() * kGruSlots for each team, all bits set; or null
};

enum {
  kGruUnits = 32,     // hidden units of a block of a cluster
  kGruThreads = 256,  // of a block of a cluster or team
  kGruTile = 8,       // rows of a tile
  kGruStride = 36,    // of rows of 32 units in float32 in shared memory, without bank conflicts
  kGruSlots = 8       // of the ring through which a team exchanges
};

// What rows are reset to. With zero, a kernel has no load of reset_h: what uses its result would also wait for the
// loads of the next step.
enum GruResets { kGruNoResets = 0, kGruResetsToZero = 1, kGruResetsToGiven = 2 };

// How products are computed.
enum GruMode {
  kGruHalf = 0,   // of 16-bit operands, bfloat16 or float16
  kGruTf32 = 1,   // of operands rounded to TF32
  kGruSplit = 2,  // of float32 operands, each the sum of three bfloat16 numbers
};

JAXGRAD_CONSTEXPR int gru_planes(int mode) { return mode == kGruSplit ? 3 : 1; }
JAXGRAD_CONSTEXPR int gru_element_bytes(int mode) { return mode == kGruTf32 ? 4 : 2; }
JAXGRAD_CONSTEXPR int gru_aligned(int bytes) { return (bytes + 127) / 128 * 128; }

// The exchanges of a step: states, and r * h where the reset gate comes before the product; two buffers of each but r *
// h.
JAXGRAD_CONSTEXPR int gru_forward_exchanges(bool linear) { return linear ? 2 : 3; }
JAXGRAD_CONSTEXPR int gru_backward_exchanges(bool linear) { return linear ? 2 : 4; }

JAXGRAD_CONSTEXPR int gru_forward_row_bytes(int mode, int padded) { return padded * gru_element_bytes(mode) + 64; }
JAXGRAD_CONSTEXPR int gru_forward_shared_bytes(int mode, int padded, bool linear) {
  const int exchanges = gru_forward_exchanges(linear);
  const int states = exchanges * gru_planes(mode) * kGruTile * gru_forward_row_bytes(mode, padded);
  return gru_aligned(exchanges * 4 * 8) + states + 2 * 4 * 3 * kGruTile * kGruStride * 4;
}

JAXGRAD_CONSTEXPR int gru_backward_row_bytes(int mode) {
  return 3 * kGruUnits * gru_element_bytes(mode) + (mode == kGruTf32 ? 64 : 0);
}
JAXGRAD_CONSTEXPR int gru_backward_shared_bytes(int mode, int padded, bool linear) {
  const int exchanges = gru_backward_exchanges(linear);
  const int operands = 2 * gru_planes(mode) * kGruTile * gru_backward_row_bytes(mode);
  const int sums = exchanges * (padded / kGruUnits) * kGruTile * kGruUnits * 4;
  return gru_aligned(exchanges * 8) + operands + sums;
}

// The kernels of blocks that have room for all recurrent weights of a problem: block.cuh. Some threads multiply, and
// each of the others has one unit of one row.
JAXGRAD_CONSTEXPR bool gru_block_fills_registers(int padded) { return padded > 96; }  // of a multiprocessor
JAXGRAD_CONSTEXPR int gru_block_multiplying(int padded) { return (gru_block_fills_registers(padded) ? 2 : 4) * padded; }
JAXGRAD_CONSTEXPR int gru_block_threads(int padded, int rows) { return gru_block_multiplying(padded) + rows * padded; }
// With 128 hidden units, the weights are three quarters of the registers of a multiprocessor: the threads that multiply
// take those that the others do not need. If a launch has fewer than all of these registers, they wait for ever.
enum { kGruRegistersToMultiply = 224, kGruRegistersOfOthers = 56 };
JAXGRAD_CONSTEXPR int gru_block_registers(int padded, int rows) {
  return gru_block_multiplying(padded) * kGruRegistersToMultiply + rows * padded * kGruRegistersOfOthers;
}
JAXGRAD_CONSTEXPR int gru_block_sums_stride(int padded) { return padded + 8; }  // of rows, without bank conflicts
JAXGRAD_CONSTEXPR int gru_block_shared_bytes(int padded, int rows, bool is_backward) {
  const int operands = is_backward ? 3 : 1, sums = is_backward ? 1 : 3;
  return 4 * rows * (operands * padded + sums * gru_block_sums_stride(padded));
}

// The kernels of blocks that multiply all hidden units of tiles of rows on tensor cores: tensor_block.cuh. A warp has
// 16 units.
JAXGRAD_CONSTEXPR int gru_tensor_block_threads(int padded) { return 2 * padded; }
// Gates whose weights are in registers; those of the others are in shared memory.
JAXGRAD_CONSTEXPR int gru_tensor_block_kept_gates(int mode, int padded, bool is_backward, bool linear) {
  if (mode != kGruTf32 || padded <= 64) return 3;
  return is_backward && !linear ? 1 : 2;
}
JAXGRAD_CONSTEXPR int gru_tensor_block_row_bytes(int mode, int padded) {  // without bank conflicts
  return padded * gru_element_bytes(mode) | 64;
}
JAXGRAD_CONSTEXPR int gru_tensor_block_stride(int padded) { return padded + 4; }  // of rows of sums, likewise
JAXGRAD_CONSTEXPR int gru_tensor_block_shared_bytes(int mode, int padded, int rows, bool is_backward, bool linear) {
  const int operands = is_backward ? 3 : 1, sums = is_backward ? 1 : 3;
  const int others = 3 - gru_tensor_block_kept_gates(mode, padded, is_backward, linear);
  return operands * rows * gru_tensor_block_row_bytes(mode, padded) +
         sums * rows * gru_tensor_block_stride(padded) * 4 + others * padded * padded * gru_element_bytes(mode);
}

// The kernels for teams of blocks, which exchange through global memory: team.cuh and team_product.cuh.

// Arrays of values of all units that a step exchanges.
JAXGRAD_CONSTEXPR int gru_regions(bool backward, bool linear) { return backward ? 3 : linear ? 1 : 2; }
JAXGRAD_CONSTEXPR int gru_slot_bytes(int mode, int padded, int rows, int regions) {
  return regions * gru_planes(mode) * rows * padded * gru_element_bytes(mode);
}

// The variants of the kernels for teams: hidden units that the blocks have room for, units of a block, tiles of rows
// that are multiplied at once, batches of them that a step computes in turn, and blocks that share products: with 2,
// pairs of blocks multiply half of the terms each, for the units of both.
struct GruTeam {
  int mode;
  bool backward, linear;
  int padded, units, row_tiles, batches, pair;
};
JAXGRAD_CONSTEXPR int gru_items(const GruTeam& team) {  // of a thread
  return team.batches * team.row_tiles * team.units / 32;
}
JAXGRAD_CONSTEXPR int gru_side_gates(const GruTeam& team) { return team.backward ? 1 : 3; }

// Words of 16 bytes that a lane multiplies in a step, for each row; the registers for the weights of a word; the words
// whose weights are in registers, the others being in shared memory; the words that are loaded at once.
JAXGRAD_CONSTEXPR int gru_words(const GruTeam& team) {
  return (team.backward ? 3 : 1) * team.padded / team.pair / 8 * gru_element_bytes(team.mode) / 64;
}
JAXGRAD_CONSTEXPR int gru_registers_of_word(const GruTeam& team) {
  return gru_side_gates(team) * team.pair * team.units / 16 * 2 * 4 * gru_planes(team.mode);
}
JAXGRAD_CONSTEXPR int gru_register_words(const GruTeam& team) {
  const int most = !team.backward || gru_items(team) == 1 ? 96 : gru_items(team) == 2 || team.pair == 2 ? 64 : 48;
  const int room = most / gru_registers_of_word(team);
  return gru_words(team) < room ? gru_words(team) : room;
}
JAXGRAD_CONSTEXPR int gru_words_at_once(const GruTeam& team) {
  const int words = (gru_items(team) > 2 ? 4 : 8) / (team.row_tiles * gru_planes(team.mode));
  return words > 1 ? words : 1;
}
// What a block receives of the other of its pair, in the backward pass: the sums of an item in a step, the exchanges of
// a step, the buffers of each, and the bytes, with the barriers. A block sends the sums of an exchange after it has
// received those of the exchange before, for which the other block has read its own. With one exchange in a step, the
// one before is that of the last step: two buffers.
JAXGRAD_CONSTEXPR int gru_pair_sums(const GruTeam& team) { return team.linear ? 1 : 2; }
JAXGRAD_CONSTEXPR int gru_pair_exchanges(const GruTeam& team) { return gru_pair_sums(team) * team.batches; }
JAXGRAD_CONSTEXPR int gru_pair_buffers(const GruTeam& team) { return gru_pair_exchanges(team) == 1 ? 2 : 1; }
JAXGRAD_CONSTEXPR int gru_pair_bytes(const GruTeam& team) {
  const int barriers = gru_aligned(gru_pair_exchanges(team) * gru_pair_buffers(team) * 8);
  const int sums = gru_pair_buffers(team) * gru_pair_sums(team) * gru_items(team) * kGruThreads * 4;
  return team.pair == 1 ? 0 : barriers + sums;
}
JAXGRAD_CONSTEXPR int gru_team_shared_bytes(const GruTeam& team) {
  const int words = gru_words(team) - gru_register_words(team);
  const int sums = gru_side_gates(team) * team.row_tiles * kGruTile * (team.pair * team.units + 4);
  return 8 * words * gru_registers_of_word(team) * 128 + 2 * 8 * sums * 4 + gru_pair_bytes(team);
}

}  // namespace jaxgrad
