#include "cuda/depthwise/layout.h"

namespace jaxgrad {

bool is_channels_last(const ConvOperand& operand, int spatial) {
  int64_t stride = 1;
  if (operand.strides[1] != 1) return false;
  stride *= operand.sizes[1];
  for (int axis = spatial + 1; axis >= 2; --axis) {
    if (operand.strides[axis] != stride) return false;
    stride *= operand.sizes[axis];
  }
  return operand.strides[0] == stride;
}

bool has_tap_order(const ConvOperand& w, int spatial, bool taps_last) {
  int64_t stride = taps_last ? 1 : w.sizes[0];
  for (int axis = spatial + 1; axis >= 2; --axis) {
    if (w.sizes[axis] > 1 && w.strides[axis] != stride) return false;
    stride *= w.sizes[axis];
  }
  return w.sizes[0] == 1 || w.strides[0] == (taps_last ? stride : 1);
}

}  // namespace jaxgrad
