#include "cpu/conv/small_plan.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "cpu/runtime/arena.h"
#include "cpu/runtime/gemm_layout.h"
#include "cpu/runtime/isa.h"
#include "cpu/runtime/storage.h"

namespace jaxgrad {

#define JAXGRAD_DECLARE(isa)                                      \
  namespace isa {                                                 \
  template <class S>                                              \
  void small_weight_gradient(const SmallWeightGradient<S>& call); \
  }
JAXGRAD_FOR_EACH_ISA(JAXGRAD_DECLARE)
#undef JAXGRAD_DECLARE

template <class S>
void small_weight_gradient(const SmallWeightGradient<S>& call) {
  JAXGRAD_RETURN_FOR_ISA(small_weight_gradient(call))
}

namespace {

// oneDNN is faster with more of either, by measurement with each instruction set.
constexpr int64_t kMostMultiplications = 1 << 17;
constexpr int64_t kMostElements = 6000;  // of x, and of the packed windows, which are whole blocks

// All coordinates of an array of these sizes, in row-major order.
std::vector<ConvAxes> coordinates(const std::vector<int64_t>& sizes) {
  std::vector<ConvAxes> found(1);
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    std::vector<ConvAxes> longer;
    longer.reserve(found.size() * sizes[axis]);
    for (ConvAxes at : found)
      for (at[axis] = 0; at[axis] < sizes[axis]; ++at[axis]) longer.push_back(at);
    found = std::move(longer);
  }
  return found;
}

int64_t offset(const ConvOperand& operand, int axes, const ConvAxes& at) {
  int64_t found = 0;
  for (int axis = 0; axis < axes; ++axis) found += at[axis] * operand.strides[axis];
  return found;
}

// Whether the elements follow each other in memory, in any order: then all of x is copied at once.
bool is_dense(const ConvOperand& operand, int spatial) {
  int64_t last = 0;
  for (int axis = 0; axis < spatial + 2; ++axis) last += (operand.sizes[axis] - 1) * operand.strides[axis];
  return last + 1 == elements(operand, spatial);
}

class SmallPlan final : public ConvPlan {
 public:
  explicit SmallPlan(const ConvKey& key)
      : type_(key.type),
        x_elements_(elements(key.x, key.spatial)),
        columns_(key.w.sizes[0]),
        dy_column_(key.y.strides[1]),
        dw_column_(key.w.strides[0]) {
    const int axes = key.spatial + 2;
    std::vector<int64_t> sizes(key.y.sizes.begin(), key.y.sizes.begin() + axes);
    sizes[1] = 1;
    const auto positions = coordinates(sizes);
    for (const ConvAxes& at : positions) dy_positions_.push_back(static_cast<int32_t>(offset(key.y, axes, at)));
    // The features of an element of the window follow each other, as they do in x and in w if their layout is usual.
    sizes.assign(key.w.sizes.begin() + 2, key.w.sizes.begin() + axes);
    sizes.push_back(key.w.sizes[1]);
    std::vector<ConvAxes> rows;
    for (const ConvAxes& at : coordinates(sizes)) {
      ConvAxes row{0, at[key.spatial]};
      for (int i = 0; i < key.spatial; ++i) row[i + 2] = at[i];
      rows.push_back(row);
      dw_rows_.push_back(static_cast<int32_t>(offset(key.w, axes, row)));
    }
    rows_ = static_cast<int64_t>(rows.size()) + (key.has_bias ? 1 : 0);
    const int64_t padded = round_up(static_cast<int64_t>(positions.size()), kBlock);
    windows_.assign(round_up(rows_, kBlock) * padded, kZero);
    for (int64_t row = 0; row < rows_; ++row)
      for (size_t p = 0; p < positions.size(); ++p)
        windows_[row / kBlock * (padded * kBlock) + static_cast<int64_t>(p) * kBlock + row % kBlock] =
            row < static_cast<int64_t>(rows.size()) ? element(key, positions[p], rows[row]) : kOne;
  }

  int64_t workspace_bytes() const override {
    Arena arena(nullptr);
    Scratch(*this, arena);
    return arena.bytes();
  }

  std::string implementation() const override { return "jaxgrad, small weight gradient"; }

  void run(const void* x, const void* dy, void* db, void* dw, std::byte* workspace) const override {
    if (type_ == ConvType::kBFloat16)
      run_in<BFloat16>(x, dy, db, dw, workspace);
    else
      run_in<float>(x, dy, db, dw, workspace);
  }

 private:
  static constexpr int32_t kZero = 0, kOne = 1, kFirst = 2;  // in SmallWeightGradient::extended

  struct Scratch {
    Scratch(const SmallPlan& plan, Arena& arena)
        : extended(arena.take<float>(kFirst + plan.x_elements_)),
          packed(arena.take<float>(static_cast<int64_t>(plan.windows_.size()))),
          panel(arena.take<float>(round_up(static_cast<int64_t>(plan.dy_positions_.size()), kBlock) *
                                  SmallWeightGradient<float>::kPanel)) {}

    float *extended, *packed, *panel;
  };

  static int32_t element(const ConvKey& key, const ConvAxes& position, const ConvAxes& row) {
    ConvAxes at{position[0], row[1]};
    for (int i = 0; i < key.spatial; ++i) {
      at[i + 2] = position[i + 2] * key.window_strides[i] + row[i + 2] * key.rhs_dilation[i] - key.padding_low[i];
      if (at[i + 2] < 0 || at[i + 2] >= key.x.sizes[i + 2]) return kZero;
    }
    return static_cast<int32_t>(kFirst + offset(key.x, key.spatial + 2, at));
  }

  template <class S>
  void run_in(const void* x, const void* dy, void* db, void* dw, std::byte* workspace) const {
    Arena arena(workspace);
    const Scratch scratch(*this, arena);
    small_weight_gradient<S>({x_elements_, rows_, static_cast<int64_t>(dy_positions_.size()), columns_, windows_.data(),
                              dy_positions_.data(), dw_rows_.data(), dy_column_, dw_column_, static_cast<const S*>(x),
                              static_cast<const S*>(dy), static_cast<S*>(dw), static_cast<S*>(db), scratch.extended,
                              scratch.packed, scratch.panel});
  }

  const ConvType type_;
  const int64_t x_elements_, columns_, dy_column_, dw_column_;
  int64_t rows_;
  std::vector<int32_t> windows_, dy_positions_, dw_rows_;
};

}  // namespace

bool is_small_weight_gradient(const ConvKey& key) {
  if (key.pass != ConvPass::kWeightGradient || !key.one_of_several || key.groups != 1) return false;
  const int64_t x = elements(key.x, key.spatial), columns = key.w.sizes[0];
  if (x > kMostElements || !is_dense(key.x, key.spatial)) return false;
  const int64_t rows = round_up(elements(key.w, key.spatial) / columns + (key.has_bias ? 1 : 0), kBlock);
  const int64_t positions = round_up(elements(key.y, key.spatial) / columns, kBlock);
  return rows <= kMostElements / positions && columns <= kMostMultiplications / (rows * positions);
}

std::shared_ptr<const ConvPlan> make_small_plan(const ConvKey& key) { return std::make_shared<SmallPlan>(key); }

}  // namespace jaxgrad
