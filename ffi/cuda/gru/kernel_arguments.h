// The argument of the kernels of the GRU, and their shared memory. Both the host compiler and NVRTC compile this file.
#pragma once

namespace jaxgrad {

// Several problems are independent GRUs of the same sizes: the directions, and the groups that vmap makes of weights.
// Problem p is direction p % directions of group p / directions. The arrays have the type of the op unless stated.
struct GruArguments {
  int steps, rows, hidden, directions, reversed;  // bit d of `reversed`: direction d runs from the last step
  int tiles;                                      // clusters for the rows of one problem
  float clip;                                     // infinity for no bound
  const float* inputs;         // [groups, T, B, D, 3, H]: x W' and the biases that no reset gate multiplies
  const void* r;               // [problems, 3H, H]
  const void* recurrent_bias;  // [problems, H]: Rbn where the reset gate multiplies it; or null
  const void* initial_h;       // [problems, B, H] or null
  const int* lengths;          // [groups, B] or null
  const unsigned char* reset;  // [groups, T, B] or null
  const void* reset_h;         // [problems, B, H] or null
  void* y;                     // [groups, T, D, B, H]
  void* y_h;                   // [problems, B, H]
  void* gates;                 // [groups, T, D, B, 3H], with linear_before_reset 4H; or null
  const void *dy, *dy_h;       // as y and y_h, or null
  void* dgates;                // [groups, T, B, D, 3, H]: the gradients of the pre-activations of z, r and n
  float* dh0;                  // [problems, B, H]
  float* dreset_h;             // [problems, B, H] or null
};

enum {
  kGruUnits = 32,     // hidden units of a block
  kGruThreads = 256,  // of a block
  kGruTile = 8,       // rows of a tile
  kGruStride = 36     // of rows of 32 units in float32 in shared memory, without bank conflicts
};

// How products are computed.
enum GruMode {
  kGruHalf = 0,   // of 16-bit operands
  kGruTf32 = 1,   // of operands rounded to TF32
  kGruSplit = 2,  // of float32 operands, as three products of bfloat16
};

constexpr int gru_planes(int mode) { return mode == kGruSplit ? 2 : 1; }
constexpr int gru_element_bytes(int mode) { return mode == kGruTf32 ? 4 : 2; }
constexpr int gru_aligned(int bytes) { return (bytes + 127) / 128 * 128; }

// The exchanges of a step: states, and r * h where the reset gate comes before the product; two buffers of each but r *
// h.
constexpr int gru_forward_exchanges(bool linear) { return linear ? 2 : 3; }
constexpr int gru_backward_exchanges(bool linear) { return linear ? 2 : 4; }

constexpr int gru_forward_row_bytes(int mode, int padded) { return padded * gru_element_bytes(mode) + 64; }
constexpr int gru_forward_shared_bytes(int mode, int padded, int row_tiles, bool linear) {
  const int exchanges = gru_forward_exchanges(linear), rows = row_tiles * kGruTile;
  const int states = exchanges * gru_planes(mode) * rows * gru_forward_row_bytes(mode, padded);
  return gru_aligned(exchanges * row_tiles * 4 * 8) + states + 2 * 4 * 3 * kGruTile * kGruStride * 4;
}

constexpr int gru_backward_row_bytes(int mode) {
  return 3 * kGruUnits * gru_element_bytes(mode) + (mode == kGruTf32 ? 64 : 0);
}
constexpr int gru_backward_shared_bytes(int mode, int padded, int row_tiles, bool linear) {
  const int exchanges = gru_backward_exchanges(linear);
  const int operands = 2 * gru_planes(mode) * kGruTile * gru_backward_row_bytes(mode);
  const int sums = exchanges * row_tiles * (padded / kGruUnits) * kGruTile * kGruUnits * 4;
  return gru_aligned(exchanges * row_tiles * 8) + operands + sums;
}

}  // namespace jaxgrad
