// The GRU on the CPU: forward and backward pass over whole sequences. No XLA types.
//
// T time steps, B rows, I inputs, H hidden units, D directions, G saved gates: 3 (z, r, n), or 4 with
// linear_before_reset (z, r, n, h Rh^T + Rbh). Arrays are dense and row-major; an absent array is null. If the shape is
// batch-major, x, y and their gradients have the rows before the steps: [B, T, I] and [B, T, D, H].
//
// A call computes several groups: independent GRUs of one shape, as vmap over the weights makes them. Every array has
// the groups as its first axis, which is left out below. In a backward pass the groups may share w and r, as the
// examples of per-example gradients do.
//
// A reset replaces the state of a row before a step. It has nothing to do with the reset gate r.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/runtime/parallel.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {

enum class GruDirection : int64_t { kForward = 0, kReverse = 1, kBidirectional = 2 };

struct GruShape {
  int64_t T, B, I, H, D;
  bool linear_before_reset;
  int64_t groups = 1;
  bool shares_weights = false;
  bool batch_major = false;

  int64_t saved_gates() const { return linear_before_reset ? 4 : 3; }

  // The index of the vector [I] of a row at time t in x and dx, and of the vector [H] in y and dy.
  int64_t input_at(int64_t t, int64_t row) const { return batch_major ? row * T + t : t * B + row; }
  int64_t state_at(int64_t t, int64_t d, int64_t row) const {
    return batch_major ? (row * T + t) * D + d : (t * D + d) * B + row;
  }
};

struct GruOptions {
  GruDirection direction;
  double clip;  // infinity: no clipping

  // Whether direction d runs from the last time step to the first.
  bool reversed(int64_t d) const { return direction == GruDirection::kReverse || d == 1; }
};

// Saved in place of a gate whose pre-activation was clipped: +kClipped or -kClipped, values that no gate takes.
constexpr float kClipped = 2.0f;

template <class S>
struct GruForward {
  GruShape shape;
  GruOptions options;
  const S* x;            // [T, B, I]
  const S* w;            // [D, 3H, I]
  const S* r;            // [D, 3H, H]
  const S* b;            // [D, 6H] or null
  const int32_t* lens;   // [B], each in [0, T], or null
  const S* initial_h;    // [D, B, H] or null
  const uint8_t* reset;  // [T, B], nonzero: the state before the step is replaced; or null
  const S* reset_h;      // [D, B, H], the states that replace others, or null for zeros
  S* y;                  // [T, D, B, H]
  S* y_h;                // [D, B, H]
  S* gates;              // [T, D, B, G H], or null if no backward pass follows
  std::byte* workspace;  // gru_forward_workspace() bytes
};

template <class S>
struct GruBackward {
  GruShape shape;
  GruOptions options;
  const S* x;            // [T, B, I]
  const S* w;            // [D, 3H, I]
  const S* r;            // [D, 3H, H]
  const int32_t* lens;   // [B] or null
  const S* initial_h;    // [D, B, H] or null
  const uint8_t* reset;  // [T, B] or null
  const S* reset_h;      // [D, B, H] or null
  const S* y;            // [T, D, B, H]
  const S* gates;        // [T, D, B, G H]
  const S* dy;           // [T, D, B, H] or null
  const S* dy_h;         // [D, B, H] or null
  S* dx;                 // [T, B, I] or null
  S* dw;                 // [D, 3H, I] or null
  S* dr;                 // [D, 3H, H] or null
  S* db;                 // [D, 6H] or null
  S* dh0;                // [D, B, H] or null
  S* dreset_h;           // [D, B, H] or null
  std::byte* workspace;  // gru_backward_workspace() bytes
};

// Whether I, H, D and the groups are positive and no size of an array or of the workspace overflows. All functions
// below require it.
bool gru_sizes_fit(const GruShape& shape);

// Bytes of workspace, for every instruction set and any number of threads.
int64_t gru_forward_workspace(const GruShape& shape, int64_t storage_bytes);
int64_t gru_backward_workspace(const GruShape& shape, int64_t storage_bytes);

// Runs all groups: several at once, each on one thread, or one after the other, each on all threads.
// S: float, double, BFloat16 or Float16. Arithmetic is in double for double, otherwise in float.
template <class S>
void gru_forward(const GruForward<S>& call, Parallel& parallel);
template <class S>
void gru_backward(const GruBackward<S>& call, Parallel& parallel);

}  // namespace jaxgrad
