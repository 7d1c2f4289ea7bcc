// The recurrence of the GRU backward pass.
#pragma once

#include "cpu/gru/backward_context.h"
#include "cpu/gru/row_split.h"
#include "cpu/runtime/gemm.h"

namespace jaxgrad::JAXGRAD_ISA {

// The task of one range of rows: computes dh and dgates, back through the steps of a chunk.
template <class S>
class BackwardRows {
  using T = Compute<S>;

 public:
  BackwardRows(const BackwardContext<S>& context, RowRange range, Chunk chunk)
      : context_(context),
        call_(context.call),
        shape_(context.shape),
        chunk_(chunk),
        begin_(range.begin),
        rows_(range.end - range.begin),
        padded_(context.padded),
        dh_(context.dh(chunk.d) + begin_ * padded_),
        drh_(context.drh(chunk.d) + begin_ * padded_) {}

  void run() {
    const bool forward_in_time = call_.options.reversed(chunk_.d);
    for (int64_t s = 0; s < chunk_.steps; ++s) {
      const int64_t t = chunk_.first + (forward_in_time ? s : chunk_.steps - 1 - s);
      if (shape_.linear_before_reset) {
        step_reset_after(t);
      } else {
        step_reset_before(t);
      }
      if (call_.reset != nullptr) stop_at_resets(t);
    }
  }

 private:
  // The first row of this task at time t in the arrays of the chunk.
  int64_t first_row(int64_t t) const { return (t - chunk_.first) * shape_.B + begin_; }
  T* dgates(int64_t gate) const { return context_.dgates(chunk_.d, gate); }
  void save(DGate gate, int64_t row, int64_t j, Vector<T> v) const {
    store_blocked(dgates(gate), context_.scratch.rows, row, j, v);
  }

  template <class Lanes>
  JAXGRAD_INLINE static Vector<T> load_state(const S* h, int64_t j, Lanes lanes) {
    return h == nullptr ? Vector<T>{} : load(h + j, lanes);
  }

  // to += dgates R, where dgates are the K columns from `gate` on.
  void add_product(int64_t t, DGate gate, int64_t K, const T* weights, T* to) const {
    const int64_t width = padded_;
    multiply(rows_, K, dgates(gate) + first_row(t) * kBlock, context_.scratch.rows, weights, padded_,
             [=](int64_t row, int64_t column, Vector<T> v) {
               if (!context_.within(t, begin_ + row)) return;  // 0 * NaN must not be added
               T* p = to + row * width + column;
               store(p, load(p) + v);
             });
  }

  // Computes dn, dz and dh = z dh, then calls body(row, j, lanes, saved, dn), which depends on linear_before_reset.
  template <class Body>
  JAXGRAD_INLINE void backward_update(int64_t t, Body body) const {
    const int64_t H = shape_.H;
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t row = first_row(t) + i;
      if (!context_.within(t, begin_ + i)) {
        clear_row(row);
        continue;
      }
      T* dh = dh_ + i * padded_;
      const S* saved = context_.saved_gates(t, chunk_.d, begin_ + i);
      const S* h_before = context_.state_before(t, chunk_.d, begin_ + i);
      const S* dy = call_.dy == nullptr ? nullptr : call_.dy + shape_.state_at(t, chunk_.d, begin_ + i) * H;
      for_vectors<T>(H, [&](int64_t j, auto lanes) {
        Vector<T> z, z_slope, n, n_slope;
        context_.gates.template decode<Sigmoid>(load(saved + j, lanes), z, z_slope);
        context_.gates.template decode<Tanh>(load(saved + 2 * H + j, lanes), n, n_slope);
        const Vector<T> h = load_state(h_before, j, lanes);
        const Vector<T> out = load(dh + j) + load_state(dy, j, lanes);
        const Vector<T> dn = zero_tail<T>(out * (1 - z) * n_slope, lanes);
        save(kZ, row, j, zero_tail<T>(out * (h - n) * z_slope, lanes));
        save(kN, row, j, dn);
        store(dh + j, out * z);
        body(row, j, lanes, saved, dn);
      });
    }
  }

  void clear_row(int64_t row) const {
    for (int64_t gate = 0; gate < shape_.saved_gates(); ++gate)
      for (int64_t j = 0; j < padded_; j += kLanes<T>) save(static_cast<DGate>(gate), row, j, Vector<T>{});
  }

  void step_reset_before(int64_t t) const {
    const int64_t H = shape_.H;
    backward_update(t, [](auto...) {});
    T* product = drh_;
    const int64_t width = padded_;
    multiply(rows_, padded_, dgates(kN) + first_row(t) * kBlock, context_.scratch.rows, context_.packed_n(chunk_.d),
             padded_, [=](int64_t row, int64_t column, Vector<T> v) { store(product + row * width + column, v); });
    for (int64_t i = 0; i < rows_; ++i) {
      if (!context_.within(t, begin_ + i)) continue;
      T* dh = dh_ + i * padded_;
      const S* saved = context_.saved_gates(t, chunk_.d, begin_ + i);
      const S* h_before = context_.state_before(t, chunk_.d, begin_ + i);
      for_vectors<T>(H, [&](int64_t j, auto lanes) {
        Vector<T> r, slope;
        context_.gates.template decode<Sigmoid>(load(saved + H + j, lanes), r, slope);
        const Vector<T> drh = load(product + i * width + j);
        save(kR, first_row(t) + i, j, zero_tail<T>(drh * load_state(h_before, j, lanes) * slope, lanes));
        store(dh + j, load(dh + j) + drh * r);
      });
    }
    add_product(t, kZ, 2 * padded_, context_.packed_zr(chunk_.d), dh_);
  }

  void step_reset_after(int64_t t) const {
    const int64_t H = shape_.H;
    backward_update(t, [&](int64_t row, int64_t j, auto lanes, const S* saved, Vector<T> dn) {
      Vector<T> r, slope;
      context_.gates.template decode<Sigmoid>(load(saved + H + j, lanes), r, slope);
      save(kR, row, j, zero_tail<T>(dn * load(saved + 3 * H + j, lanes) * slope, lanes));
      save(kRN, row, j, zero_tail<T>(dn * r, lanes));
    });
    add_product(t, kZ, 2 * padded_, context_.packed_zr(chunk_.d), dh_);
    add_product(t, kRN, padded_, context_.packed_n(chunk_.d), dh_);
  }

  // dh is that of the states which entered step t. No gradient reaches the states that a reset replaced.
  void stop_at_resets(int64_t t) const {
    for (int64_t i = 0; i < rows_; ++i) {
      if (!context_.resets(t, begin_ + i) || !context_.within(t, begin_ + i)) continue;
      T* dh = dh_ + i * padded_;
      if (call_.dreset_h != nullptr) {
        T* sum = context_.sum_of_dreset_h(chunk_.d) + (begin_ + i) * shape_.H;
        for_vectors<T>(shape_.H,
                       [&](int64_t j, auto lanes) { store(sum + j, load(sum + j, lanes) + load(dh + j), lanes); });
      }
      for (int64_t j = 0; j < padded_; j += kLanes<T>) store(dh + j, Vector<T>{});
    }
  }

  const BackwardContext<S>& context_;
  const GruBackward<S>& call_;
  const GruShape& shape_;
  const Chunk chunk_;
  const int64_t begin_, rows_, padded_;
  T *dh_, *drh_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
