// The layout of the GRU workspace. The same constructor computes the size, needed while a call is lowered, and the
// pointers, so the two always agree. The layout depends on neither the instruction set nor the number of threads.
#pragma once

#include <cstdint>

#include "cpu/gru/op.h"
#include "cpu/runtime/arena.h"
#include "cpu/runtime/gemm_layout.h"

namespace jaxgrad {

template <class T>
struct GruForwardScratch {
  GruForwardScratch(const GruShape& s, Arena& arena)
      : H(round_up(s.H, kPad)),
        I(round_up(s.I, kPad)),
        steps(chunk_steps(s)),
        w(arena.take<T>(s.D * 3 * H * I)),
        r(arena.take<T>(s.D * 3 * H * H)),
        bias(arena.take<T>(s.D * 4 * H)),
        inputs(arena.take<T>(s.D * s.B * steps * I)),
        pre(arena.take<T>(s.D * s.B * steps * 3 * H)),
        h(arena.take<T>(s.D * s.B * H)),
        recurrent(arena.take<T>(s.D * s.B * H)) {}

  // The number of steps whose input projection is one product: enough rows to reuse each column of the weights many
  // times. With the packed weights, the rows take no more memory than one [T, B, 3H] array, unless they would be too
  // few.
  static int64_t chunk_steps(const GruShape& s) {
    const int64_t budget = 3 * s.H * (s.T * s.B - (s.H + s.I));
    int64_t rows = budget / (3 * s.H + s.I);
    rows = rows < 16 ? 16 : (rows > 128 ? 128 : rows);
    const int64_t steps = s.B > 0 ? rows / s.B : 1;
    return steps < 1 ? 1 : (steps > s.T ? (s.T > 0 ? s.T : 1) : steps);
  }

  int64_t H, I;   // padded
  int64_t steps;  // in a chunk
  T* w;           // [D] packed [I, 3H]
  T* r;           // [D] packed [H, 2H] of z and r, then packed [H, H] of n
  T* bias;        // [D, 4H]: added to the input projection of z, r and n; then Rbh with linear_before_reset
  T* inputs;      // [D, B] rows of a chunk of x, blocked
  T* pre;         // [D, B] rows of a chunk of pre-activations, [steps, rows, 3H]
  T* h;           // [D, B] rows of the state, blocked
  T* recurrent;   // [D, B] rows of r * h, blocked, or of h Rh^T + Rbh
};

template <class T>
struct GruBackwardScratch {
  GruBackwardScratch(const GruShape& s, bool sums_in_scratch, Arena& arena)
      : H(round_up(s.H, kPad)),
        I(round_up(s.I, kPad)),
        steps(chunk_steps(s)),
        rows(odd_blocks(steps * s.B)),
        w(arena.take<T>(s.D * 3 * H * I)),
        r(arena.take<T>(s.D * 3 * H * H)),
        dgates(arena.take<T>(s.D * s.saved_gates() * H * rows)),
        dh(arena.take<T>(s.D * s.B * H)),
        drh(arena.take<T>(s.linear_before_reset ? 0 : s.D * s.B * H)),
        db(arena.take<T>(s.D * s.saved_gates() * H)),
        dw(arena.take<T>(sums_in_scratch ? s.D * 3 * s.H * s.I : 0)),
        dr(arena.take<T>(sums_in_scratch ? s.D * 3 * s.H * s.H : 0)),
        dreset_h(arena.take<T>(sums_in_scratch ? s.D * s.B * s.H : 0)) {}

  // An odd number of whole blocks of rows. This is the distance between blocks of columns; an even distance would map
  // all of them to the same few sets of the first-level cache.
  static int64_t odd_blocks(int64_t rows) { return ((rows + kBlock - 1) / kBlock | 1) * kBlock; }

  // The number of steps whose gate gradients are stored before the weight gradients are updated: about a megabyte. With
  // the packed weights, they take no more memory than one [T, B, 3H] array, unless the rows would be too few for a fast
  // product.
  static int64_t chunk_steps(const GruShape& s) {
    const int64_t row_bytes = s.saved_gates() * round_up(s.H, kPad) * static_cast<int64_t>(sizeof(T));
    int64_t rows = (int64_t{1} << 20) / row_bytes;
    const int64_t budget = s.T * s.B - (s.H + s.I);
    if (rows > budget) rows = budget;
    if (rows < 64) rows = 64;
    const int64_t steps = s.B > 0 ? rows / s.B : 1;
    return steps < 1 ? 1 : (steps > s.T ? (s.T > 0 ? s.T : 1) : steps);
  }

  int64_t H, I;   // padded
  int64_t steps;  // in a chunk
  int64_t rows;   // in a chunk: steps * B, padded
  T* w;           // [D] packed [3H, I]
  T* r;           // [D] packed [2H, H] of z and r, then packed [H, H] of n
  T* dgates;      // [D] gradients of the pre-activations of a chunk: [rows, G H], blocked
  T* dh;          // [D, B, H]
  T* drh;         // [D, B, H], the gradients of r * h, without linear_before_reset
  T* db;          // [D, G H]
  T* dw;          // [D, 3H, I], [D, 3H, H] and [D, B, H], not padded: float32 sums of the
  T* dr;          // gradients of w, r and reset_h of 16-bit types
  T* dreset_h;
};

}  // namespace jaxgrad
