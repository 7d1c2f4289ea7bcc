// The kernel of small_plan.h. This file is compiled once per instruction set; JAXGRAD_ISA names the namespace.
#include "cpu/conv/small_plan.h"
#include "cpu/runtime/gemm.h"

namespace jaxgrad::JAXGRAD_ISA {
namespace {

JAXGRAD_INLINE float to_float(float value) { return value; }
using jaxgrad::JAXGRAD_ISA::to_float;

// Packs columns [column, column + kVectors * lanes) of dy and multiplies them with all rows.
template <class S, int kVectors>
void multiply_columns(const SmallWeightGradient<S>& c, int64_t column) {
  constexpr int64_t kWidth = kVectors * kLanes<float>;
  static_assert(kWidth <= SmallWeightGradient<S>::kPanel);
  const int64_t padded = round_up(c.positions, kBlock);
  for (int64_t p = 0; p < padded; ++p) {
    float* const to = c.panel + p * kWidth;
    const S* const from = p < c.positions ? c.dy + c.dy_positions[p] : nullptr;
    if (from == nullptr || c.dy_column == 1) {
      pack_row(from, c.columns, column, kVectors, to);
    } else {
      for (int64_t j = 0; j < kWidth; ++j)
        to[j] = column + j < c.columns ? to_float(from[(column + j) * c.dy_column]) : 0.0f;
    }
  }
  const auto write = [&c](int64_t row, int64_t at, Vector<float> v) {
    if (row >= c.rows || at >= c.columns) return;
    const bool is_bias = c.db != nullptr && row == c.rows - 1;
    S* const to = is_bias ? c.db : c.dw + c.dw_rows[row];
    const int64_t step = is_bias ? 1 : c.dw_column, left = c.columns - at;
    if (step == 1 && left >= kLanes<float>) return store(to + at, v);
    const int lanes = static_cast<int>(left < kLanes<float> ? left : kLanes<float>);
    if (step == 1) return store(to + at, v, lanes);
    for (int lane = 0; lane < lanes; ++lane) store(to + (at + lane) * step, splat<float>(v[lane]), 1);
  };
  for (int64_t first = 0; first < c.rows; first += kTileRows) {
    const float* const rows = c.packed + first / kBlock * (padded * kBlock) + first % kBlock;
    tile<float, kTileRows, kVectors, true>(padded, rows, 0, c.panel, first, column, write);
  }
}

}  // namespace

template <class S>
void small_weight_gradient(const SmallWeightGradient<S>& c) {
  c.extended[0] = 0;
  c.extended[1] = 1;
  for_vectors<float>(c.x_elements,
                     [&](int64_t j, auto lanes) { store(c.extended + 2 + j, load(c.x + j, lanes), lanes); });
  const int64_t elements = round_up(c.rows, kBlock) * round_up(c.positions, kBlock);
  for (int64_t i = 0; i < elements; ++i) c.packed[i] = c.extended[c.windows[i]];
  const Panels<float> panels(round_up(c.columns, kLanes<float>));
  for (int64_t p = 0; p < panels.count; ++p) {
    switch (panels.vectors(p)) {
      case 1:
        multiply_columns<S, 1>(c, panels.column(p));
        break;
      case 2:
        multiply_columns<S, 2>(c, panels.column(p));
        break;
      default:
        multiply_columns<S, 3>(c, panels.column(p));
    }
  }
}

template void small_weight_gradient<float>(const SmallWeightGradient<float>&);
template void small_weight_gradient<BFloat16>(const SmallWeightGradient<BFloat16>&);

}  // namespace jaxgrad::JAXGRAD_ISA
