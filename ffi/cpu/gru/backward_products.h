// The matrix products of the GRU backward pass.
#pragma once

#include "cpu/gru/backward_context.h"
#include "cpu/gru/packing.h"
#include "cpu/runtime/gemm.h"

namespace jaxgrad::JAXGRAD_ISA {

// The products of a chunk: dW += dgates^T x, dR += dgates^T h, db += column sums of dgates, dx = dgates W.
template <class S>
class BackwardProducts {
  using T = Compute<S>;

 public:
  BackwardProducts(const BackwardContext<S>& context, int64_t step, int64_t steps, int64_t threads)
      : context_(context), call_(context.call), shape_(context.shape), padded_(context.padded) {
    for (int64_t d = 0; d < shape_.D; ++d) {
      chunks_[d] = context.chunk(d, step, steps);
      clear_padding(chunks_[d]);
    }
    const bool after = shape_.linear_before_reset;
    if (call_.dw != nullptr) add({Operand::kInput, kZ, 3, 0});
    if (call_.dr != nullptr) {
      add({Operand::kState, kZ, 2, 0});
      add({after ? Operand::kState : Operand::kGatedState, after ? kRN : kN, 1, 2});
    }
    // If there are many threads, each gate of a panel is a separate task.
    by_gate_ = count_tasks() < 2 * threads;
  }

  int64_t tasks() const { return count_tasks() + (call_.db == nullptr ? 0 : shape_.D) + dx_tasks(); }
  int64_t dx_tasks() const {
    return call_.dx == nullptr ? 0 : (context_.rows(chunks_[0]) + kInputRows - 1) / kInputRows;
  }

  void run(int64_t task) const {
    for (int64_t d = 0; d < shape_.D; ++d)
      for (int p = 0; p < products_; ++p) {
        const Product& product = product_[p];
        const int64_t splits = by_gate_ ? product.gates : 1, here = panels(product).count * splits;
        if (task < here) {
          const int64_t gate = by_gate_ ? task % splits : 0;
          return add_weight_gradient(d, product, task / splits, gate, by_gate_ ? 1 : product.gates);
        }
        task -= here;
      }
    if (call_.db != nullptr) {
      if (task < shape_.D) return add_bias_gradient(task);
      task -= shape_.D;
    }
    run_dx(task, 0);
  }

  // Computes or adds to rows of dx, for one direction.
  void run_dx(int64_t task, int64_t d) const {
    const Chunk& c = chunks_[d];
    const int64_t first = task * kInputRows, left = context_.rows(c) - first, I = shape_.I;
    const bool add = shape_.D == 2;
    multiply(left < kInputRows ? left : kInputRows, 3 * padded_, context_.dgates(d, kZ) + first * kBlock,
             context_.scratch.rows, context_.packed_w(d), context_.scratch.I,
             [=](int64_t row, int64_t column, Vector<T> v) {
               if (column >= I) return;
               int64_t at = c.first * shape_.B + first + row;  // in a time-major dx
               if (shape_.batch_major || call_.lens != nullptr) {
                 const int64_t t = at / shape_.B, of_batch = at % shape_.B;
                 if (!context_.within(t, of_batch)) v = Vector<T>{};  // beyond the length of a row: not 0 * NaN
                 at = shape_.input_at(t, of_batch);
               }
               S* p = call_.dx + at * I + column;
               if (I - column >= kLanes<T>) {
                 store(p, add ? load(p) + v : v);
               } else {
                 const int lanes = static_cast<int>(I - column);
                 store(p, add ? load(p, lanes) + v : v, lanes);
               }
             });
  }

 private:
  static constexpr int64_t kInputRows = 64;   // rows of dx per task
  static constexpr int64_t kPanelRows = 256;  // rows of a panel of x or h; fits the first-level cache

  enum class Operand { kInput, kState, kGatedState };  // x, h, r * h

  // dgates^T, from `gate` on, times an operand: `gates` gates of dW or dR from gate `row` on.
  struct Product {
    Operand operand;
    DGate gate;
    int64_t gates, row;
  };

  void add(Product product) { product_[products_++] = product; }
  int64_t columns(const Product& p) const { return p.operand == Operand::kInput ? shape_.I : shape_.H; }
  Panels<T> panels(const Product& p) const { return Panels<T>(round_up(columns(p), kLanes<T>)); }
  int64_t count_tasks() const {
    int64_t n = 0;
    for (int p = 0; p < products_; ++p) n += panels(product_[p]).count * (by_gate_ ? product_[p].gates : 1);
    return shape_.D * n;
  }

  // Clears the rows that pad the chunk to whole blocks, since sums over rows include them.
  void clear_padding(const Chunk& c) const {
    const int64_t real = context_.rows(c), padded = round_up(real, kBlock);
    for (int64_t row = real; row < padded; ++row)
      for (int64_t gate = 0; gate < shape_.saved_gates(); ++gate)
        for (int64_t j = 0; j < padded_; j += kLanes<T>)
          store_blocked(context_.dgates(c.d, gate), context_.scratch.rows, row, j, Vector<T>{});
  }

  // Multiplies one panel of columns of the operand with the gates [gate, gate + gates) of the product.
  void add_weight_gradient(int64_t d, const Product& product, int64_t panel, int64_t gate, int64_t gates) const {
    const Panels<T> split = panels(product);
    const int64_t column = split.column(panel);
    switch (split.vectors(panel)) {
      case 1:
        return add_weight_panel<1>(d, product, column, gate, gates);
      case 2:
        return add_weight_panel<2>(d, product, column, gate, gates);
      default:
        return add_weight_panel<3>(d, product, column, gate, gates);
    }
  }

  template <int kVectors>
  void add_weight_panel(int64_t d, const Product& product, int64_t column, int64_t gate, int64_t gates) const {
    const Chunk& c = chunks_[d];
    const int64_t H = shape_.H, N = columns(product), all = context_.rows(c), block = context_.scratch.rows * kBlock;
    T* out = product.operand == Operand::kInput ? context_.sum_of_dw(d) : context_.sum_of_dr(d);
    alignas(64) T panel[kPanelRows * kVectors * kLanes<T>];
    for (int64_t first = 0; first < all; first += kPanelRows) {
      const int64_t real = all - first < kPanelRows ? all - first : kPanelRows, K = round_up(real, kBlock);
      for (int64_t k = 0; k < K; ++k)
        pack_operand<kVectors>(c, product.operand, first + k, all, column, panel + k * kVectors * kLanes<T>);
      const bool begins = c.is_first && first == 0;
      for (int64_t g = gate; g < gate + gates; ++g) {
        const T* a = context_.dgates(d, product.gate + g) + first * kBlock;
        T* to = out + (product.row + g) * H * N;
        for (int64_t m = 0; m < H; m += kTileRows)
          tile<T, kTileRows, kVectors, true>(K, a + m / kBlock * block + m % kBlock, 0, panel, m, column,
                                             [=](int64_t row, int64_t at, Vector<T> v) {
                                               if (row >= H || at >= N) return;
                                               T* p = to + row * N + at;
                                               if (N - at >= kLanes<T>) {
                                                 store(p, begins ? v : load(p) + v);
                                               } else {
                                                 const int lanes = static_cast<int>(N - at);
                                                 store(p, begins ? v : load(p, lanes) + v, lanes);
                                               }
                                             });
      }
    }
  }

  // Packs row k of x, h or r * h of the chunk. Padding and steps beyond the length of a row are zeros: 0 * NaN reaches
  // no sum.
  template <int kVectors>
  JAXGRAD_INLINE void pack_operand(const Chunk& c, Operand operand, int64_t k, int64_t all, int64_t column,
                                   T* to) const {
    const int64_t t = c.first + k / shape_.B, row = k % shape_.B;
    const S* source = nullptr;
    if (k < all && context_.within(t, row))
      source = operand == Operand::kInput ? call_.x + shape_.input_at(t, row) * shape_.I
                                          : context_.state_before(t, c.d, row);
    pack_row(source, operand == Operand::kInput ? shape_.I : shape_.H, column, kVectors, to);
    if (operand != Operand::kGatedState || source == nullptr) return;
    const S* reset = context_.saved_gates(t, c.d, row) + shape_.H;
    for (int v = 0; v < kVectors; ++v) {
      const int64_t j = column + v * kLanes<T>, left = shape_.H - j;
      Vector<T> r, slope;
      const Vector<T> saved = left >= kLanes<T> ? load(reset + j) : load(reset + j, static_cast<int>(left));
      context_.gates.template decode<Sigmoid>(saved, r, slope);
      store(to + v * kLanes<T>, load(to + v * kLanes<T>) * r);
    }
  }

  void add_bias_gradient(int64_t d) const {
    const int64_t rows = round_up(context_.rows(chunks_[d]), kBlock), blocks = shape_.saved_gates() * padded_ / kBlock;
    for (int64_t block = 0; block < blocks; ++block) {
      const T* from = context_.dgates(d, kZ) + block * context_.scratch.rows * kBlock;
      Vector<T> sums[kBlock] = {};  // reads at least one cache line at a time
      constexpr int64_t kSpan = kBlock * kLanes<T>;
      for (int64_t at = 0; at < rows * kBlock; at += kSpan)
        for (int v = 0; v < kBlock; ++v)
          if (at + v * kLanes<T> < rows * kBlock) sums[v] += load(from + at + v * kLanes<T>);
      for (int v = 0; v < kBlock; ++v)
        for (int lane = 0; lane < kLanes<T>; ++lane)
          context_.db(d)[block * kBlock + (v * kLanes<T> + lane) % kBlock] += sums[v][lane];
    }
  }

  const BackwardContext<S>& context_;
  const GruBackward<S>& call_;
  const GruShape& shape_;
  const int64_t padded_;
  Chunk chunks_[2];
  Product product_[3];
  int products_ = 0;
  bool by_gate_ = false;
};

}  // namespace jaxgrad::JAXGRAD_ISA
