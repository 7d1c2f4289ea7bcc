// The arrays of the GRU backward pass.
#pragma once

#include "cpu/gru/gates.h"
#include "cpu/gru/layout.h"
#include "cpu/gru/op.h"
#include "cpu/runtime/arena.h"

namespace jaxgrad::JAXGRAD_ISA {

// The order of the gates in `dgates`. The fourth is r * dn and exists only with linear_before_reset.
enum DGate : int64_t { kZ = 0, kR = 1, kN = 2, kRN = 3 };

// A chunk of steps of one direction: times [first, first + steps), in memory order.
struct Chunk {
  int64_t d, first, steps;
  bool is_first;  // the first chunk of its direction overwrites the sums, the others add to them
};

// The arrays that all parts of the backward pass use.
template <class S>
struct BackwardContext {
  using T = Compute<S>;
  static constexpr bool kSumsInScratch = sizeof(S) != sizeof(T);

  explicit BackwardContext(const GruBackward<S>& call)
      : call(call),
        shape(call.shape),
        gates(call.options.clip),
        arena(call.workspace),
        scratch(shape, kSumsInScratch, arena),
        padded(scratch.H) {}

  Chunk chunk(int64_t d, int64_t step, int64_t steps) const {
    return {d, call.options.reversed(d) ? step : shape.T - step - steps, steps, step == 0};
  }
  int64_t rows(const Chunk& c) const { return c.steps * shape.B; }

  T* packed_w(int64_t d) const { return scratch.w + d * 3 * padded * scratch.I; }
  T* packed_zr(int64_t d) const { return scratch.r + d * 3 * padded * padded; }
  T* packed_n(int64_t d) const { return packed_zr(d) + 2 * padded * padded; }
  T* dgates(int64_t d, int64_t gate) const {
    return scratch.dgates + (d * shape.saved_gates() + gate) * padded * scratch.rows;
  }
  T* dh(int64_t d) const { return scratch.dh + d * shape.B * padded; }
  T* drh(int64_t d) const { return scratch.drh + d * shape.B * padded; }
  T* db(int64_t d) const { return scratch.db + d * shape.saved_gates() * padded; }

  const S* saved_gates(int64_t t, int64_t d, int64_t row) const {
    return call.gates + ((t * shape.D + d) * shape.B + row) * shape.saved_gates() * shape.H;
  }
  bool within(int64_t t, int64_t row) const { return call.lens == nullptr || t < call.lens[row]; }

  // Whether the state before step t was replaced, for a step within the length of the row.
  bool resets(int64_t t, int64_t row) const { return call.reset != nullptr && call.reset[t * shape.B + row] != 0; }

  // The state before step t, or null for zeros. The step is within the length of the row.
  const S* state_before(int64_t t, int64_t d, int64_t row) const {
    if (resets(t, row)) return call.reset_h == nullptr ? nullptr : call.reset_h + (d * shape.B + row) * shape.H;
    const int64_t before = call.options.reversed(d) ? t + 1 : t - 1;
    if (before >= 0 && before < shape.T && within(before, row))
      return call.y + shape.state_at(before, d, row) * shape.H;
    return call.initial_h == nullptr ? nullptr : call.initial_h + (d * shape.B + row) * shape.H;
  }

  // The sums over steps: the results themselves, or arrays in the workspace if the results have a 16-bit type.
  T* sum_of_dw(int64_t d) const { return sum(call.dw, scratch.dw) + d * 3 * shape.H * shape.I; }
  T* sum_of_dr(int64_t d) const { return sum(call.dr, scratch.dr) + d * 3 * shape.H * shape.H; }
  T* sum_of_dreset_h(int64_t d) const { return sum(call.dreset_h, scratch.dreset_h) + d * shape.B * shape.H; }
  static T* sum(S* result, T* scratch) {
    if constexpr (kSumsInScratch) {
      return scratch;
    } else {
      return result;
    }
  }

  const GruBackward<S>& call;
  const GruShape shape;
  const Gates<T> gates;
  Arena arena;
  const GruBackwardScratch<T> scratch;
  const int64_t padded;  // H, padded
};

}  // namespace jaxgrad::JAXGRAD_ISA
