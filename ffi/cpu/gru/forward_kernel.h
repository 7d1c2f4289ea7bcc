// The GRU forward pass. Each task computes all time steps of its own rows of the batch, so no step waits for another
// thread. The input projections of a chunk of steps are one product; then the recurrence runs over these steps.
#pragma once

#include "cpu/gru/gates.h"
#include "cpu/gru/layout.h"
#include "cpu/gru/op.h"
#include "cpu/gru/packing.h"
#include "cpu/gru/row_split.h"
#include "cpu/runtime/gemm.h"
#include "cpu/runtime/parallel_for.h"

namespace jaxgrad::JAXGRAD_ISA {

template <class S>
class ForwardPass {
  using T = Compute<S>;

 public:
  explicit ForwardPass(const GruForward<S>& call)
      : call_(call), shape_(call.shape), gates_(call.options.clip), arena_(call.workspace), scratch_(shape_, arena_) {}

  void run(Parallel& parallel) {
    pack_weights(parallel);
    const RowSplit split(shape_.D, shape_.B, parallel.threads());
    parallel_for(parallel, split.tasks, [&](int64_t task) { Rows(*this, split[task]).run(); });
  }

 private:
  int64_t input_K() const { return round_up(shape_.I, kBlock); }
  int64_t state_K() const { return round_up(shape_.H, kBlock); }
  T* packed_w(int64_t d) const { return scratch_.w + d * 3 * scratch_.H * input_K(); }
  T* packed_zr(int64_t d) const { return scratch_.r + d * 3 * scratch_.H * state_K(); }
  T* packed_n(int64_t d) const { return packed_zr(d) + 2 * scratch_.H * state_K(); }
  T* bias(int64_t d) const { return scratch_.bias + d * 4 * scratch_.H; }

  void pack_weights(Parallel& parallel) {
    const int64_t H = shape_.H, padded = scratch_.H;
    const Panels<T> w(3 * padded), zr(2 * padded), n(padded);
    const int64_t per_direction = w.count + zr.count + n.count + 1;
    auto pack = [&](const S* source, int64_t K, const Panels<T>& panels, int64_t panel, T* to) {
      const int64_t column = panels.column(panel);
      pack_transposed(source, K, H, padded, column, panels.vectors(panel), to + column * round_up(K, kBlock));
    };
    parallel_for(parallel, shape_.D * per_direction, [&](int64_t task) {
      const int64_t d = task / per_direction;
      int64_t panel = task % per_direction;
      const S* r = call_.r + d * 3 * H * H;
      if (panel < w.count) return pack(call_.w + d * 3 * H * shape_.I, shape_.I, w, panel, packed_w(d));
      panel -= w.count;
      if (panel < zr.count) return pack(r, H, zr, panel, packed_zr(d));
      panel -= zr.count;
      if (panel < n.count) return pack(r + 2 * H * H, H, n, panel, packed_n(d));
      add_biases(d);
    });
  }

  // Wb + Rb for z, r and n. With linear_before_reset, the Rb of n is separate: the reset gate multiplies it.
  void add_biases(int64_t d) {
    const int64_t H = shape_.H, padded = scratch_.H;
    T* out = bias(d);
    for (int64_t j = 0; j < 4 * padded; ++j) out[j] = 0;
    if (call_.b == nullptr) return;
    const S* wb = call_.b + d * 6 * H;
    const S* rb = wb + 3 * H;
    for (int64_t gate = 0; gate < 3; ++gate)
      for_vectors<T>(H, [&](int64_t j, auto lanes) {
        const Vector<T> of_w = load(wb + gate * H + j, lanes), of_r = load(rb + gate * H + j, lanes);
        const bool separate = gate == 2 && shape_.linear_before_reset;
        store(out + gate * padded + j, separate ? of_w : of_w + of_r);
        if (separate) store(out + 3 * padded + j, of_r);
      });
  }

  // The task of one range of rows.
  class Rows {
   public:
    Rows(const ForwardPass& pass, RowRange range)
        : pass_(pass),
          call_(pass.call_),
          shape_(pass.shape_),
          gates_(pass.gates_),
          d_(range.direction),
          begin_(range.begin),
          rows_(range.end - range.begin),
          padded_(pass.scratch_.H) {
      const auto& s = pass.scratch_;
      const int64_t first = d_ * shape_.B + begin_;
      inputs_ = s.inputs + first * s.steps * s.I;
      pre_ = s.pre + first * s.steps * 3 * padded_;
      h_ = s.h + first * padded_;
      recurrent_ = s.recurrent + first * padded_;
    }

    void run() {
      initialize();
      for (int64_t step = 0; step < shape_.T; step += pass_.scratch_.steps) {
        const int64_t left = shape_.T - step, steps = left < pass_.scratch_.steps ? left : pass_.scratch_.steps;
        project_inputs(step, steps);
        for (int64_t s = 0; s < steps; ++s) {
          const int64_t t = time(step + s);
          T* pre = pre_ + s * rows_ * 3 * padded_;
          if (call_.reset != nullptr) reset_states(t);
          if (shape_.linear_before_reset) {
            advance_reset_after(t, pre);
          } else {
            advance_reset_before(t, pre);
          }
        }
      }
      for (int64_t i = 0; i < rows_; ++i)
        for_vectors<T>(shape_.H, [&](int64_t j, auto lanes) {
          store(call_.y_h + (d_ * shape_.B + begin_ + i) * shape_.H + j, load_blocked(h_, rows_, i, j), lanes);
        });
    }

   private:
    int64_t time(int64_t step) const { return call_.options.reversed(d_) ? shape_.T - 1 - step : step; }
    bool within(int64_t t, int64_t i) const { return call_.lens == nullptr || t < call_.lens[begin_ + i]; }

    void initialize() {
      for (int64_t n = 0; n < rows_ * padded_; ++n) h_[n] = recurrent_[n] = 0;
      if (call_.initial_h == nullptr) return;
      for (int64_t i = 0; i < rows_; ++i) set_state(i, call_.initial_h);
    }

    // Copies the state of row i from [D, B, H], or sets it to zero if `states` is null.
    void set_state(int64_t i, const S* states) {
      const S* from = states == nullptr ? nullptr : states + (d_ * shape_.B + begin_ + i) * shape_.H;
      for_vectors<T>(shape_.H, [&](int64_t j, auto lanes) {
        store_blocked(h_, rows_, i, j, from == nullptr ? Vector<T>{} : load(from + j, lanes));
      });
    }

    // Replaces the states before step t where `reset` says so. Beyond the length of a row, a reset has no effect.
    void reset_states(int64_t t) {
      const uint8_t* reset = call_.reset + t * shape_.B + begin_;
      for (int64_t i = 0; i < rows_; ++i)
        if (reset[i] != 0 && within(t, i)) set_state(i, call_.reset_h);
    }

    // pre = x W^T + bias for `steps` steps.
    void project_inputs(int64_t step, int64_t steps) {
      const int64_t I = shape_.I, rows = steps * rows_;
      for (int64_t s = 0; s < steps; ++s)
        for (int64_t i = 0; i < rows_; ++i) {
          const S* x = call_.x + shape_.input_at(time(step + s), begin_ + i) * I;
          for_vectors<T>(
              I, [&](int64_t j, auto lanes) { store_blocked(inputs_, rows, s * rows_ + i, j, load(x + j, lanes)); });
          for (int64_t j = round_up(I, kLanes<T>); j < pass_.input_K(); j += kLanes<T>)
            store_blocked(inputs_, rows, s * rows_ + i, j, Vector<T>{});
        }
      const T* bias = pass_.bias(d_);
      T* pre = pre_;
      const int64_t width = 3 * padded_;
      multiply(rows, pass_.input_K(), inputs_, rows, pass_.packed_w(d_), width,
               [=](int64_t row, int64_t column, Vector<T> v) {
                 store(pre + row * width + column, v + load(bias + column));
               });
    }

    // to += state R^T
    void add_recurrent_product(const T* state, const T* weights, int64_t columns, T* to, int64_t width) {
      multiply(rows_, pass_.state_K(), state, rows_, weights, columns, [=](int64_t row, int64_t column, Vector<T> v) {
        T* p = to + row * width + column;
        store(p, load(p) + v);
      });
    }

    void advance_reset_before(int64_t t, T* pre) {
      const int64_t H = shape_.H, width = 3 * padded_;
      add_recurrent_product(h_, pass_.packed_zr(d_), 2 * padded_, pre, width);
      for (int64_t i = 0; i < rows_; ++i) {
        T* p = pre + i * width;
        S* saved = saved_gates(t, i);
        for_vectors<T>(H, [&](int64_t j, auto lanes) {
          const Vector<T> z_before = load(p + j), r_before = load(p + padded_ + j);
          const Vector<T> z = gates_.template apply<Sigmoid>(z_before), r = gates_.template apply<Sigmoid>(r_before);
          store(p + j, z);
          store_blocked(recurrent_, rows_, i, j, zero_tail<T>(r * load_blocked(h_, rows_, i, j), lanes));
          if (saved == nullptr) return;
          store(saved + j, gates_.encode(z, z_before), lanes);
          store(saved + H + j, gates_.encode(r, r_before), lanes);
        });
      }
      add_recurrent_product(recurrent_, pass_.packed_n(d_), padded_, pre + 2 * padded_, width);
      for (int64_t i = 0; i < rows_; ++i) {
        if (!within(t, i)) {
          skip(t, i);
          continue;
        }
        const T* p = pre + i * width;
        S* saved = saved_gates(t, i);
        S* y = output(t, i);
        for_vectors<T>(H, [&](int64_t j, auto lanes) {
          const Vector<T> n_before = load(p + 2 * padded_ + j);
          const Vector<T> n = gates_.template apply<Tanh>(n_before);
          update_state(i, j, load(p + j), n, y, lanes);
          if (saved != nullptr) store(saved + 2 * H + j, gates_.encode(n, n_before), lanes);
        });
      }
    }

    void advance_reset_after(int64_t t, T* pre) {
      const int64_t H = shape_.H, width = 3 * padded_;
      add_recurrent_product(h_, pass_.packed_zr(d_), 2 * padded_, pre, width);
      const T* bias = pass_.bias(d_) + 3 * padded_;
      T* recurrent = recurrent_;
      const int64_t recurrent_width = padded_;
      multiply(rows_, pass_.state_K(), h_, rows_, pass_.packed_n(d_), padded_,
               [=](int64_t row, int64_t column, Vector<T> v) {
                 store(recurrent + row * recurrent_width + column, v + load(bias + column));
               });
      for (int64_t i = 0; i < rows_; ++i) {
        if (!within(t, i)) {
          skip(t, i);
          continue;
        }
        const T* p = pre + i * width;
        const T* q = recurrent_ + i * padded_;
        S* saved = saved_gates(t, i);
        S* y = output(t, i);
        for_vectors<T>(H, [&](int64_t j, auto lanes) {
          const Vector<T> z_before = load(p + j), r_before = load(p + padded_ + j), product = load(q + j);
          const Vector<T> z = gates_.template apply<Sigmoid>(z_before), r = gates_.template apply<Sigmoid>(r_before);
          const Vector<T> n_before = load(p + 2 * padded_ + j) + r * product;
          const Vector<T> n = gates_.template apply<Tanh>(n_before);
          update_state(i, j, z, n, y, lanes);
          if (saved == nullptr) return;
          store(saved + j, gates_.encode(z, z_before), lanes);
          store(saved + H + j, gates_.encode(r, r_before), lanes);
          store(saved + 2 * H + j, gates_.encode(n, n_before), lanes);
          store(saved + 3 * H + j, product, lanes);
        });
      }
    }

    template <class Lanes>
    JAXGRAD_INLINE void update_state(int64_t i, int64_t j, Vector<T> z, Vector<T> n, S* y, Lanes lanes) {
      const Vector<T> h = (1 - z) * n + z * load_blocked(h_, rows_, i, j);
      store_blocked(h_, rows_, i, j, zero_tail<T>(h, lanes));
      store(y + j, h, lanes);
    }

    // Beyond the length of a row, its state does not change and its output and saved gates are zero.
    void skip(int64_t t, int64_t i) {
      S* y = output(t, i);
      S* saved = saved_gates(t, i);
      for (int64_t j = 0; j < shape_.H; ++j) y[j] = S{};
      if (saved == nullptr) return;
      for (int64_t j = 0; j < shape_.saved_gates() * shape_.H; ++j) saved[j] = S{};
    }

    S* output(int64_t t, int64_t i) const { return call_.y + shape_.state_at(t, d_, begin_ + i) * shape_.H; }
    S* saved_gates(int64_t t, int64_t i) const {
      if (call_.gates == nullptr) return nullptr;
      return call_.gates + ((t * shape_.D + d_) * shape_.B + begin_ + i) * shape_.saved_gates() * shape_.H;
    }

    const ForwardPass& pass_;
    const GruForward<S>& call_;
    const GruShape& shape_;
    const Gates<T>& gates_;
    const int64_t d_, begin_, rows_, padded_;
    T *inputs_, *pre_, *h_, *recurrent_;
  };

  const GruForward<S>& call_;
  const GruShape shape_;
  const Gates<T> gates_;
  Arena arena_;
  const GruForwardScratch<T> scratch_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
