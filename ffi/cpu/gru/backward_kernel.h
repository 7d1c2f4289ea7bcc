// The backward pass, a chunk of time steps after the other, from the last step to the first.
//
// In a chunk, first each task carries its own rows of the batch back through the steps, and leaves the gradients of the
// pre-activations ("dgates") of the whole chunk behind. Then those are multiplied with the inputs, with the states and
// with the input weights: the gradients of W, R and x are large products, whose columns the threads share.
#pragma once

#include "cpu/gru/gates.h"
#include "cpu/gru/layout.h"
#include "cpu/gru/op.h"
#include "cpu/gru/packing.h"
#include "cpu/gru/row_split.h"
#include "cpu/runtime/gemm.h"
#include "cpu/runtime/parallel_for.h"

namespace jaxgrad::JAXGRAD_ISA {

// dgates holds the gates in this order; the fourth is r * dn, with linear_before_reset only.
enum DGate : int64_t { kZ = 0, kR = 1, kN = 2, kRN = 3 };

template <class S>
class BackwardPass {
  using T = Compute<S>;
  static constexpr bool kSumsInScratch = sizeof(S) != sizeof(T);

 public:
  explicit BackwardPass(const GruBackward<S>& call)
      : call_(call),
        shape_(call.shape),
        gates_(call.options.clip),
        arena_(call.workspace),
        scratch_(shape_, kSumsInScratch, arena_),
        padded_(scratch_.H) {}

  void run(Parallel& parallel) {
    pack_weights(parallel);
    start();
    for (int64_t step = 0; step < shape_.T && shape_.B > 0; step += scratch_.steps) {
      const int64_t left = shape_.T - step;
      run_chunk(parallel, step, left < scratch_.steps ? left : scratch_.steps);
    }
    finish();
  }

 private:
  // A chunk of steps of one direction: times [first, first + steps), in memory order.
  struct Chunk {
    int64_t d, first, steps;
    bool is_first;  // of its direction: sums begin here
  };

  Chunk chunk(int64_t d, int64_t step, int64_t steps) const {
    return {d, call_.options.reversed(d) ? step : shape_.T - step - steps, steps, step == 0};
  }
  int64_t rows(const Chunk& c) const { return c.steps * shape_.B; }

  T* packed_w(int64_t d) const { return scratch_.w + d * 3 * padded_ * scratch_.I; }
  T* packed_zr(int64_t d) const { return scratch_.r + d * 3 * padded_ * padded_; }
  T* packed_n(int64_t d) const { return packed_zr(d) + 2 * padded_ * padded_; }
  T* dgates(int64_t d, int64_t gate) const {
    return scratch_.dgates + (d * shape_.saved_gates() + gate) * padded_ * scratch_.rows;
  }
  T* dh(int64_t d) const { return scratch_.dh + d * shape_.B * padded_; }
  T* dreset_h(int64_t d) const { return scratch_.dreset_h + d * shape_.B * padded_; }
  T* db(int64_t d) const { return scratch_.db + d * shape_.saved_gates() * padded_; }

  const S* saved_gates(int64_t t, int64_t d, int64_t row) const {
    return call_.gates + ((t * shape_.D + d) * shape_.B + row) * shape_.saved_gates() * shape_.H;
  }
  bool within(int64_t t, int64_t row) const { return call_.lens == nullptr || t < call_.lens[row]; }

  // The state that step t began with; null: zeros.
  const S* state_before(int64_t t, int64_t d, int64_t row) const {
    const int64_t before = call_.options.reversed(d) ? t + 1 : t - 1;
    if (before >= 0 && before < shape_.T && within(before, row))
      return call_.y + ((before * shape_.D + d) * shape_.B + row) * shape_.H;
    return call_.initial_h == nullptr ? nullptr : call_.initial_h + (d * shape_.B + row) * shape_.H;
  }

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
      if (panel < w.count) return pack(call_.w + d * 3 * H * shape_.I, 3, shape_.I, w, packed_w(d));
      panel -= w.count;
      if (panel < r.count) return pack(call_.r + d * 3 * H * H, 2, H, r, packed_zr(d));
      panel -= r.count;
      pack(call_.r + d * 3 * H * H + 2 * H * H, 1, H, r, packed_n(d));
    });
  }

  void start() {
    const int64_t H = shape_.H;
    for (int64_t row = 0; row < shape_.D * shape_.B; ++row)
      for (int64_t j = 0; j < padded_; j += kLanes<T>) {
        const bool given = call_.dy_h != nullptr && j < H;
        const int real = H - j < kLanes<T> ? static_cast<int>(H - j) : kLanes<T>;
        store(scratch_.dh + row * padded_ + j, given ? load(call_.dy_h + row * H + j, real) : Vector<T>{});
      }
    clear(scratch_.db, shape_.D * shape_.saved_gates() * padded_);
    // The steps write whole vectors; what pads a gate beyond them must be zero too, for it is summed over.
    for (int64_t gate = 0; gate < shape_.D * shape_.saved_gates(); ++gate)
      for (int64_t j = round_up(H, kLanes<T>); j < padded_; j += kLanes<T>)
        for (int64_t row = 0; row < scratch_.rows; ++row)
          store_blocked(dgates(0, gate), scratch_.rows, row, j, Vector<T>{});
    if (shape_.T == 0 || shape_.B == 0) {  // no chunk will begin the sums
      if (call_.dw != nullptr) clear(sum_of_dw(0), shape_.D * 3 * H * shape_.I);
      if (call_.dr != nullptr) clear(sum_of_dr(0), shape_.D * 3 * H * H);
    }
    // Two directions add to the same rows of dx.
    if (call_.dx != nullptr && shape_.D == 2) clear(call_.dx, shape_.T * shape_.B * shape_.I);
  }

  template <class E>
  static void clear(E* p, int64_t n) {
    __builtin_memset(p, 0, static_cast<size_t>(n) * sizeof(E));
  }

  void run_chunk(Parallel& parallel, int64_t step, int64_t steps) {
    const RowSplit split(shape_.D, shape_.B, parallel.threads());
    parallel_for(parallel, split.tasks,
                 [&](int64_t task) { Rows(*this, split[task], chunk(split[task].direction, step, steps)).run(); });
    Products products(*this, step, steps, parallel.threads());
    parallel_for(parallel, products.tasks(), [&](int64_t task) { products.run(task); });
    if (shape_.D == 2 && call_.dx != nullptr)
      parallel_for(parallel, products.dx_tasks(), [&](int64_t task) { products.run_dx(task, 1); });
  }

  void finish() {
    const int64_t H = shape_.H;
    if (call_.dh0 != nullptr)
      for (int64_t row = 0; row < shape_.D * shape_.B; ++row) copy(scratch_.dh + row * padded_, H, call_.dh0 + row * H);
    if (call_.db != nullptr)
      for (int64_t d = 0; d < shape_.D; ++d)
        for (int64_t gate = 0; gate < 3; ++gate) {
          const bool apart = gate == kN && shape_.linear_before_reset;
          copy(db(d) + gate * padded_, H, call_.db + (d * 6 + gate) * H);
          copy(db(d) + (apart ? int64_t{kRN} : gate) * padded_, H, call_.db + (d * 6 + 3 + gate) * H);
        }
    if constexpr (kSumsInScratch) {
      if (call_.dw != nullptr) copy(scratch_.dw, shape_.D * 3 * H * shape_.I, call_.dw);
      if (call_.dr != nullptr) copy(scratch_.dr, shape_.D * 3 * H * H, call_.dr);
    }
  }

  static void copy(const T* from, int64_t n, S* to) {
    for_vectors<T>(n, [&](int64_t j, auto lanes) { store(to + j, load(from + j, lanes), lanes); });
  }

  // Where the sums over chunks are kept: in the result itself, unless it is of a 16-bit type.
  T* sum_of_dw(int64_t d) const { return sum(call_.dw, scratch_.dw) + d * 3 * shape_.H * shape_.I; }
  T* sum_of_dr(int64_t d) const { return sum(call_.dr, scratch_.dr) + d * 3 * shape_.H * shape_.H; }
  static T* sum(S* result, T* scratch) {
    if constexpr (kSumsInScratch) {
      return scratch;
    } else {
      return result;
    }
  }

  // The recurrence of one task: dh of its rows, back through the steps of a chunk.
  class Rows {
   public:
    Rows(const BackwardPass& pass, RowRange range, Chunk chunk)
        : pass_(pass),
          call_(pass.call_),
          shape_(pass.shape_),
          chunk_(chunk),
          begin_(range.begin),
          rows_(range.end - range.begin),
          padded_(pass.padded_),
          dh_(pass.dh(chunk.d) + begin_ * padded_),
          dreset_h_(pass.dreset_h(chunk.d) + begin_ * padded_) {}

    void run() {
      const bool forward_in_time = call_.options.reversed(chunk_.d);
      for (int64_t s = 0; s < chunk_.steps; ++s) {
        const int64_t t = chunk_.first + (forward_in_time ? s : chunk_.steps - 1 - s);
        if (shape_.linear_before_reset) {
          step_reset_after(t);
        } else {
          step_reset_before(t);
        }
      }
    }

   private:
    // The row of the chunk's arrays at which this task's rows of time t begin.
    int64_t first_row(int64_t t) const { return (t - chunk_.first) * shape_.B + begin_; }
    T* dgates(int64_t gate) const { return pass_.dgates(chunk_.d, gate); }
    void save(DGate gate, int64_t row, int64_t j, Vector<T> v) const {
      store_blocked(dgates(gate), pass_.scratch_.rows, row, j, v);
    }

    template <class Lanes>
    JAXGRAD_INLINE static Vector<T> load_state(const S* h, int64_t j, Lanes lanes) {
      return h == nullptr ? Vector<T>{} : load(h + j, lanes);
    }

    // to[row, j] += dgate[row] R, with dgate the gates from `gate` on, K columns.
    void add_product(int64_t t, DGate gate, int64_t K, const T* weights, T* to) const {
      const int64_t width = padded_;
      multiply(rows_, K, dgates(gate) + first_row(t) * kBlock, pass_.scratch_.rows, weights, padded_,
               [=](int64_t row, int64_t column, Vector<T> v) {
                 if (!pass_.within(t, begin_ + row)) return;  // not even 0 * NaN is added there
                 if (!pass_.within(t, begin_ + row)) return;  // not even 0 * NaN is added there
                 T* p = to + row * width + column;
                 store(p, load(p) + v);
               });
    }

    // dn and dz, and dh = z dh. body(i, row, j, lanes, saved, h, dn): what the two modes do apart.
    template <class Body>
    JAXGRAD_INLINE void through_update(int64_t t, Body body) const {
      const int64_t H = shape_.H;
      for (int64_t i = 0; i < rows_; ++i) {
        const int64_t row = first_row(t) + i;
        if (!pass_.within(t, begin_ + i)) {
          clear_row(row);
          continue;
        }
        T* dh = dh_ + i * padded_;
        const S* saved = pass_.saved_gates(t, chunk_.d, begin_ + i);
        const S* h_before = pass_.state_before(t, chunk_.d, begin_ + i);
        const S* dy =
            call_.dy == nullptr ? nullptr : call_.dy + ((t * shape_.D + chunk_.d) * shape_.B + begin_ + i) * H;
        for_vectors<T>(H, [&](int64_t j, auto lanes) {
          Vector<T> z, z_slope, n, n_slope;
          pass_.gates_.template decode<Sigmoid>(load(saved + j, lanes), z, z_slope);
          pass_.gates_.template decode<Tanh>(load(saved + 2 * H + j, lanes), n, n_slope);
          const Vector<T> h = load_state(h_before, j, lanes);
          const Vector<T> out = load(dh + j) + load_state(dy, j, lanes);
          const Vector<T> dn = keep<T>(out * (1 - z) * n_slope, lanes);
          save(kZ, row, j, keep<T>(out * (h - n) * z_slope, lanes));
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
      through_update(t, [](auto...) {});
      T* product = dreset_h_;
      const int64_t width = padded_;
      multiply(rows_, padded_, dgates(kN) + first_row(t) * kBlock, pass_.scratch_.rows, pass_.packed_n(chunk_.d),
               padded_, [=](int64_t row, int64_t column, Vector<T> v) { store(product + row * width + column, v); });
      for (int64_t i = 0; i < rows_; ++i) {
        if (!pass_.within(t, begin_ + i)) continue;
        T* dh = dh_ + i * padded_;
        const S* saved = pass_.saved_gates(t, chunk_.d, begin_ + i);
        const S* h_before = pass_.state_before(t, chunk_.d, begin_ + i);
        for_vectors<T>(H, [&](int64_t j, auto lanes) {
          Vector<T> r, slope;
          pass_.gates_.template decode<Sigmoid>(load(saved + H + j, lanes), r, slope);
          const Vector<T> drh = load(product + i * width + j);
          save(kR, first_row(t) + i, j, keep<T>(drh * load_state(h_before, j, lanes) * slope, lanes));
          store(dh + j, load(dh + j) + drh * r);
        });
      }
      add_product(t, kZ, 2 * padded_, pass_.packed_zr(chunk_.d), dh_);
    }

    void step_reset_after(int64_t t) const {
      const int64_t H = shape_.H;
      through_update(t, [&](int64_t row, int64_t j, auto lanes, const S* saved, Vector<T> dn) {
        Vector<T> r, slope;
        pass_.gates_.template decode<Sigmoid>(load(saved + H + j, lanes), r, slope);
        save(kR, row, j, keep<T>(dn * load(saved + 3 * H + j, lanes) * slope, lanes));
        save(kRN, row, j, keep<T>(dn * r, lanes));
      });
      add_product(t, kZ, 2 * padded_, pass_.packed_zr(chunk_.d), dh_);
      add_product(t, kRN, padded_, pass_.packed_n(chunk_.d), dh_);
    }

    const BackwardPass& pass_;
    const GruBackward<S>& call_;
    const GruShape& shape_;
    const Chunk chunk_;
    const int64_t begin_, rows_, padded_;
    T *dh_, *dreset_h_;
  };

  // The large products of a chunk: dW += dgates' x, dR += dgates' h, db += column sums, dx = dgates W.
  class Products {
   public:
    Products(const BackwardPass& pass, int64_t step, int64_t steps, int64_t threads)
        : pass_(pass), call_(pass.call_), shape_(pass.shape_), padded_(pass.padded_) {
      for (int64_t d = 0; d < shape_.D; ++d) {
        chunks_[d] = pass.chunk(d, step, steps);
        clear_padding(chunks_[d]);
      }
      const bool after = shape_.linear_before_reset;
      if (call_.dw != nullptr) add({Operand::kInput, kZ, 3, 0});
      if (call_.dr != nullptr) {
        add({Operand::kState, kZ, 2, 0});
        add({after ? Operand::kState : Operand::kResetState, after ? kRN : kN, 1, 2});
      }
      // With many threads each gate of a panel is a task of its own.
      by_gate_ = count_tasks() < 2 * threads;
    }

    int64_t tasks() const { return count_tasks() + (call_.db == nullptr ? 0 : shape_.D) + dx_tasks(); }
    int64_t dx_tasks() const {
      return call_.dx == nullptr ? 0 : (pass_.rows(chunks_[0]) + kInputRows - 1) / kInputRows;
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

    // Rows of dx of one direction.
    void run_dx(int64_t task, int64_t d) const {
      const Chunk& c = chunks_[d];
      const int64_t first = task * kInputRows, left = pass_.rows(c) - first, I = shape_.I;
      S* dx = call_.dx + (c.first * shape_.B + first) * I;
      const bool add = shape_.D == 2;
      multiply(left < kInputRows ? left : kInputRows, 3 * padded_, pass_.dgates(d, kZ) + first * kBlock,
               pass_.scratch_.rows, pass_.packed_w(d), pass_.scratch_.I, [=](int64_t row, int64_t column, Vector<T> v) {
                 if (column >= I) return;
                 if (call_.lens != nullptr) {  // past a row's length dx is zero, not 0 * NaN
                   const int64_t at = first + row;
                   if (!pass_.within(c.first + at / shape_.B, at % shape_.B)) v = Vector<T>{};
                 }
                 S* p = dx + row * I + column;
                 if (I - column >= kLanes<T>) {
                   store(p, add ? load(p) + v : v);
                 } else {
                   const int lanes = static_cast<int>(I - column);
                   store(p, add ? load(p, lanes) + v : v, lanes);
                 }
               });
    }

   private:
    static constexpr int64_t kInputRows = 64;   // rows of dx in a task
    static constexpr int64_t kPanelRows = 256;  // rows of a panel of x or h: what stays in the first-level cache

    enum class Operand { kInput, kState, kResetState };

    // rows [gate, gate + gates) of dgates' times an operand, which go to rows [row, ...) of dW or dR, in gates.
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

    // The rows that pad the chunk to whole blocks count in sums over rows.
    void clear_padding(const Chunk& c) const {
      const int64_t real = pass_.rows(c), padded = round_up(real, kBlock);
      for (int64_t row = real; row < padded; ++row)
        for (int64_t gate = 0; gate < shape_.saved_gates(); ++gate)
          for (int64_t j = 0; j < padded_; j += kLanes<T>)
            store_blocked(pass_.dgates(c.d, gate), pass_.scratch_.rows, row, j, Vector<T>{});
    }

    // One panel of columns of the operand against the gates [gate, gate + gates) of the product.
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
      const int64_t H = shape_.H, N = columns(product), all = pass_.rows(c), block = pass_.scratch_.rows * kBlock;
      T* out = product.operand == Operand::kInput ? pass_.sum_of_dw(d) : pass_.sum_of_dr(d);
      alignas(64) T panel[kPanelRows * kVectors * kLanes<T>];
      for (int64_t first = 0; first < all; first += kPanelRows) {
        const int64_t real = all - first < kPanelRows ? all - first : kPanelRows, K = round_up(real, kBlock);
        for (int64_t k = 0; k < K; ++k)
          pack_operand<kVectors>(c, product.operand, first + k, all, column, panel + k * kVectors * kLanes<T>);
        const bool begins = c.is_first && first == 0;
        for (int64_t g = gate; g < gate + gates; ++g) {
          const T* a = pass_.dgates(d, product.gate + g) + first * kBlock;
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

    // Row k of the chunk of x, of h or of r * h. Padding is zero whatever x holds there: 0 * NaN must not reach a sum.
    template <int kVectors>
    JAXGRAD_INLINE void pack_operand(const Chunk& c, Operand operand, int64_t k, int64_t all, int64_t column,
                                     T* to) const {
      const int64_t t = c.first + k / shape_.B, row = k % shape_.B;
      const S* source = nullptr;
      if (k < all && pass_.within(t, row))
        source =
            operand == Operand::kInput ? call_.x + (t * shape_.B + row) * shape_.I : pass_.state_before(t, c.d, row);
      pack_row(source, operand == Operand::kInput ? shape_.I : shape_.H, column, kVectors, to);
      if (operand != Operand::kResetState || source == nullptr) return;
      const S* reset = pass_.saved_gates(t, c.d, row) + shape_.H;
      for (int v = 0; v < kVectors; ++v) {
        const int64_t j = column + v * kLanes<T>, left = shape_.H - j;
        Vector<T> r, slope;
        const Vector<T> saved = left >= kLanes<T> ? load(reset + j) : load(reset + j, static_cast<int>(left));
        pass_.gates_.template decode<Sigmoid>(saved, r, slope);
        store(to + v * kLanes<T>, load(to + v * kLanes<T>) * r);
      }
    }

    void add_bias_gradient(int64_t d) const {
      const int64_t rows = round_up(pass_.rows(chunks_[d]), kBlock), blocks = shape_.saved_gates() * padded_ / kBlock;
      for (int64_t block = 0; block < blocks; ++block) {
        const T* from = pass_.dgates(d, kZ) + block * pass_.scratch_.rows * kBlock;
        Vector<T> sums[kBlock] = {};  // one cache line or more at a time
        constexpr int64_t kSpan = kBlock * kLanes<T>;
        for (int64_t at = 0; at < rows * kBlock; at += kSpan)
          for (int v = 0; v < kBlock; ++v)
            if (at + v * kLanes<T> < rows * kBlock) sums[v] += load(from + at + v * kLanes<T>);
        for (int v = 0; v < kBlock; ++v)
          for (int lane = 0; lane < kLanes<T>; ++lane)
            pass_.db(d)[block * kBlock + (v * kLanes<T> + lane) % kBlock] += sums[v][lane];
      }
    }

    const BackwardPass& pass_;
    const GruBackward<S>& call_;
    const GruShape& shape_;
    const int64_t padded_;
    Chunk chunks_[2];
    Product product_[3];
    int products_ = 0;
    bool by_gate_ = false;
  };

  const GruBackward<S>& call_;
  const GruShape shape_;
  const Gates<T> gates_;
  Arena arena_;
  const GruBackwardScratch<T> scratch_;
  const int64_t padded_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
