// Weight gradients of independent problems of few multiplications, by a kernel of jaxgrad. Per-example gradients have
// one such problem for each image. oneDNN takes longer to start on any problem than its sums take.
#pragma once

#include <memory>

#include "cpu/conv/op.h"

namespace jaxgrad {

bool is_small_weight_gradient(const ConvKey& key);

std::shared_ptr<const ConvPlan> make_small_plan(const ConvKey& key);

// One matrix product, dw[row, column] = sum over positions of windows[row, position] dy[position, column]. A row is an
// element of the window of one input feature, a column an output feature. After the rows of dw, a row of ones gives the
// bias gradient.
template <class S>
struct SmallWeightGradient {
  int64_t x_elements, rows, positions, columns;
  // [rows / kBlock][positions][kBlock], each rounded up to whole blocks: where the elements of the windows are in
  // `extended`, which is {0, 1} followed by x.
  const int32_t* windows;
  const int32_t *dy_positions, *dw_rows;  // where they begin in their arrays
  int64_t dy_column, dw_column;           // the distances of two columns
  const S *x, *dy;
  S *dw, *db;                        // db: null if it is not needed
  float *extended, *packed, *panel;  // workspace: 2 + x_elements, as many elements as `windows`, [positions][kPanel]

  static constexpr int64_t kPanel = 48;  // the columns of the widest panel in gemm.h
};

template <class S>
void small_weight_gradient(const SmallWeightGradient<S>& call);

}  // namespace jaxgrad
