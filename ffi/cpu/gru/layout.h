// How the GRU's scratch memory is laid out. One description gives both its size, asked for while a program is lowered,
// and its pointers, so the two cannot disagree. Nothing here depends on the instruction set or the number of threads.
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

  // Steps whose input product is formed at once: enough rows to use each column of the weights many times, but, with
  // the packed weights, no more than one [T, B, 3H] array where that leaves enough of them.
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
  T* bias;        // [D, 4H]: what joins the input product of z, r, n, and Rbh where it stands alone
  T* inputs;      // [D, B] rows of a chunk of x, blocked
  T* pre;         // [D, B] rows of a chunk of pre-activations, [steps, rows, 3H]
  T* h;           // [D, B] rows of the state, blocked
  T* recurrent;   // [D, B] rows of r * h, blocked, or of h Rh' + Rbh
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
        dreset_h(arena.take<T>(s.linear_before_reset ? 0 : s.D * s.B * H)),
        db(arena.take<T>(s.D * s.saved_gates() * H)),
        dw(arena.take<T>(sums_in_scratch ? s.D * 3 * s.H * s.I : 0)),
        dr(arena.take<T>(sums_in_scratch ? s.D * 3 * s.H * s.H : 0)) {}

  // Whole blocks of rows, an odd number of them: then the blocks of columns, which stand that far apart, do not all
  // fall into the same few sets of the first-level cache.
  static int64_t odd_blocks(int64_t rows) { return ((rows + kBlock - 1) / kBlock | 1) * kBlock; }

  // Steps whose gate gradients are kept before they go into the weight gradients: about a megabyte of them, and, with
  // the packed weights, no more than one [T, B, 3H] array where that leaves enough rows for a fast product.
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
  T* dreset_h;    // [D, B, H], without linear_before_reset
  T* db;          // [D, G H]
  T* dw;          // [D, 3H, I] and [D, 3H, H] of the call's own sizes: sums of weight gradients whose arrays are
  T* dr;          // of a 16-bit type
};

}  // namespace jaxgrad
