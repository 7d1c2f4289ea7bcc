// The GRU backward pass. It processes chunks of time steps, from the last step to the first.
//
// In each chunk, every task first computes the recurrence of its own rows of the batch, back through the steps, and
// stores the gradients of the pre-activations ("dgates") of the whole chunk. Then the products of dgates with the
// inputs, the states and the input weights give the gradients of W, R and x. The threads share the columns of these
// products.
#pragma once

#include "cpu/gru/backward_context.h"
#include "cpu/gru/backward_products.h"
#include "cpu/gru/backward_rows.h"
#include "cpu/gru/packing.h"
#include "cpu/gru/row_split.h"
#include "cpu/runtime/gemm.h"
#include "cpu/runtime/parallel_for.h"

namespace jaxgrad::JAXGRAD_ISA {

template <class S>
class BackwardPass {
  using Context = BackwardContext<S>;
  using T = Compute<S>;

 public:
  explicit BackwardPass(const GruBackward<S>& call)
      : context_(call),
        call_(context_.call),
        shape_(context_.shape),
        scratch_(context_.scratch),
        padded_(context_.padded) {}

  void run(Parallel& parallel) {
    pack_weights(parallel);
    initialize();
    for (int64_t step = 0; step < shape_.T && shape_.B > 0; step += scratch_.steps) {
      const int64_t left = shape_.T - step;
      run_chunk(parallel, step, left < scratch_.steps ? left : scratch_.steps);
    }
    write_results();
  }

 private:
  void pack_weights(Parallel& parallel) {
    const int64_t H = shape_.H;
    const Panels<T> w(call_.dx == nullptr ? 0 : scratch_.I), r(padded_);
    const int64_t per_direction = w.count + 2 * r.count;
    parallel_for(parallel, shape_.D * per_direction, [&](int64_t task) {
      const int64_t d = task / per_direction;
      int64_t panel = task % per_direction;
      auto pack = [&](const S* source, int64_t gates, int64_t N, const Panels<T>& panels, T* to) {
        const int64_t column = panels.column(panel);
        pack_gates(source, gates, H, padded_, N, column, panels.vectors(panel), to + column * gates * padded_);
      };
      if (panel < w.count) return pack(call_.w + d * 3 * H * shape_.I, 3, shape_.I, w, context_.packed_w(d));
      panel -= w.count;
      if (panel < r.count) return pack(call_.r + d * 3 * H * H, 2, H, r, context_.packed_zr(d));
      panel -= r.count;
      pack(call_.r + d * 3 * H * H + 2 * H * H, 1, H, r, context_.packed_n(d));
    });
  }

  void initialize() {
    const int64_t H = shape_.H;
    for (int64_t row = 0; row < shape_.D * shape_.B; ++row)
      for (int64_t j = 0; j < padded_; j += kLanes<T>) {
        const bool given = call_.dy_h != nullptr && j < H;
        const int real = H - j < kLanes<T> ? static_cast<int>(H - j) : kLanes<T>;
        store(scratch_.dh + row * padded_ + j, given ? load(call_.dy_h + row * H + j, real) : Vector<T>{});
      }
    clear(scratch_.db, shape_.D * shape_.saved_gates() * padded_);
    // The steps write whole vectors. The padding of a gate beyond these vectors must be zero, since it is summed too.
    for (int64_t gate = 0; gate < shape_.D * shape_.saved_gates(); ++gate)
      for (int64_t j = round_up(H, kLanes<T>); j < padded_; j += kLanes<T>)
        for (int64_t row = 0; row < scratch_.rows; ++row)
          store_blocked(context_.dgates(0, gate), scratch_.rows, row, j, Vector<T>{});
    if (call_.dreset_h != nullptr) clear(context_.sum_of_dreset_h(0), shape_.D * shape_.B * H);
    if (shape_.T == 0 || shape_.B == 0) {  // no chunk will initialize the sums
      if (call_.dw != nullptr) clear(context_.sum_of_dw(0), shape_.D * 3 * H * shape_.I);
      if (call_.dr != nullptr) clear(context_.sum_of_dr(0), shape_.D * 3 * H * H);
    }
    // Both directions add to the same rows of dx.
    if (call_.dx != nullptr && shape_.D == 2) clear(call_.dx, shape_.T * shape_.B * shape_.I);
  }

  template <class E>
  static void clear(E* p, int64_t n) {
    __builtin_memset(p, 0, static_cast<size_t>(n) * sizeof(E));
  }

  void run_chunk(Parallel& parallel, int64_t step, int64_t steps) {
    const RowSplit split(shape_.D, shape_.B, parallel.threads());
    parallel_for(parallel, split.tasks, [&](int64_t task) {
      BackwardRows<S>(context_, split[task], context_.chunk(split[task].direction, step, steps)).run();
    });
    BackwardProducts<S> products(context_, step, steps, parallel.threads());
    parallel_for(parallel, products.tasks(), [&](int64_t task) { products.run(task); });
    if (shape_.D == 2 && call_.dx != nullptr)
      parallel_for(parallel, products.dx_tasks(), [&](int64_t task) { products.run_dx(task, 1); });
  }

  void write_results() {
    const int64_t H = shape_.H;
    if (call_.dh0 != nullptr)
      for (int64_t row = 0; row < shape_.D * shape_.B; ++row) copy(scratch_.dh + row * padded_, H, call_.dh0 + row * H);
    if (call_.db != nullptr)
      for (int64_t d = 0; d < shape_.D; ++d)
        for (int64_t gate = 0; gate < 3; ++gate) {
          const bool separate = gate == kN && shape_.linear_before_reset;
          copy(context_.db(d) + gate * padded_, H, call_.db + (d * 6 + gate) * H);
          copy(context_.db(d) + (separate ? int64_t{kRN} : gate) * padded_, H, call_.db + (d * 6 + 3 + gate) * H);
        }
    if constexpr (Context::kSumsInScratch) {
      if (call_.dw != nullptr) copy(scratch_.dw, shape_.D * 3 * H * shape_.I, call_.dw);
      if (call_.dr != nullptr) copy(scratch_.dr, shape_.D * 3 * H * H, call_.dr);
      if (call_.dreset_h != nullptr) copy(scratch_.dreset_h, shape_.D * shape_.B * H, call_.dreset_h);
    }
  }

  static void copy(const T* from, int64_t n, S* to) {
    for_vectors<T>(n, [&](int64_t j, auto lanes) { store(to + j, load(from + j, lanes), lanes); });
  }

  const Context context_;
  const GruBackward<S>& call_;
  const GruShape& shape_;
  const GruBackwardScratch<T>& scratch_;
  const int64_t padded_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
