#include "cuda/depthwise/layout.h"

namespace jaxgrad {

bool has_tap_order(const ConvOperand& w, int spatial, bool taps_last) {
  int64_t stride = taps_last ? 1 : w.sizes[0];
  for (int axis = spatial + 1; axis >= 2; --axis) {
    if (w.sizes[axis] > 1 && w.strides[axis] != stride) return false;
    stride *= w.sizes[axis];
  }
  return w.sizes[0] == 1 || w.strides[0] == (taps_last ? stride : 1);
}

}  // namespace jaxgrad
