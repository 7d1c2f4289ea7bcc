// Copies between arrays in any layout and boxes of float32 with one vector of channels at each position.
#pragma once

#include "cpu/depthwise/axes.h"
#include "cpu/runtime/simd.h"
#include "cpu/runtime/transpose.h"

namespace jaxgrad::JAXGRAD_ISA {

// Calls body(element of `data`, position in the box, positions) for the rows of a box. Rows that follow each other
// without a gap are one row.
template <class S, class Body>
JAXGRAD_INLINE void for_box_rows(S* data, const int64_t (&steps)[kDepthwiseAxes], const Box& box, Body body) {
  int64_t sizes[] = {box.axes[0].size(), box.axes[1].size(), box.axes[2].size()};
  S* const first = data + box.axes[0].begin * steps[0] + box.axes[1].begin * steps[1] + box.axes[2].begin * steps[2];
  const bool joins_rows = sizes[1] == 1 || steps[1] == sizes[2] * steps[2];
  if (joins_rows) sizes[2] *= sizes[1], sizes[1] = 1;
  if (joins_rows && steps[0] == sizes[2] * steps[2]) sizes[2] *= sizes[0], sizes[0] = 1;
  for (int64_t i = 0; i < sizes[0]; ++i)
    for (int64_t j = 0; j < sizes[1]; ++j)
      body(first + i * steps[0] + j * steps[1], (i * sizes[1] + j) * sizes[2], sizes[2]);
}

// The steps of a box of vectors, and the element of the array's position 0 in it.
struct BoxSteps {
  explicit BoxSteps(const Box& box) {
    steps[2] = kLanes<float>;
    steps[1] = box.axes[2].size() * steps[2];
    steps[0] = box.axes[1].size() * steps[1];
    origin = 0;
    for (int i = 0; i < kDepthwiseAxes; ++i) origin += box.axes[i].begin * steps[i];
  }

  int64_t steps[kDepthwiseAxes], origin;
};

// box[position, lane] = data[lane * channel_step, position]; zero in lanes without a channel. The channels or the last
// spatial axis have step 1.
template <class S>
void read_box(const S* data, int64_t channel_step, const int64_t (&steps)[kDepthwiseAxes], const Box& box, int lanes,
              float* to) {
  constexpr int n = kLanes<float>;
  for_box_rows(data, steps, box, [&](const S* row, int64_t at, int64_t positions) {
    float* const out = to + at * n;
    if (channel_step == 1) {
      for (int64_t p = 0; p < positions; ++p) store(out + p * n, load(row + p * steps[2], lanes));
      return;
    }
    for_vectors<float>(positions, [&](int64_t p, auto present) {
      Vector<float> square[n];
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) square[i] = i < lanes ? load(row + i * channel_step + p, present) : Vector<float>{};
      transpose<float>(square);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i)
        if (i < present) store(out + (p + i) * n, square[i]);
    });
  });
}

// The inverse of read_box().
template <class S>
void write_box(const float* from, int64_t channel_step, const int64_t (&steps)[kDepthwiseAxes], const Box& box,
               int lanes, S* data) {
  constexpr int n = kLanes<float>;
  for_box_rows(data, steps, box, [&](S* row, int64_t at, int64_t positions) {
    const float* const in = from + at * n;
    if (channel_step == 1) {
      for (int64_t p = 0; p < positions; ++p) store(row + p * steps[2], load(in + p * n), lanes);
      return;
    }
    for_vectors<float>(positions, [&](int64_t p, auto present) {
      Vector<float> square[n];
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) square[i] = i < present ? load(in + (p + i) * n) : Vector<float>{};
      transpose<float>(square);
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i)
        if (i < lanes) store(row + i * channel_step + p, square[i], present);
    });
  });
}

}  // namespace jaxgrad::JAXGRAD_ISA
