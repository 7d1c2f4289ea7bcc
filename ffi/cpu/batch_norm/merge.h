// Merges the sums of blocks into sums of channels, in double and in the order of the blocks.
#pragma once

#include "cpu/batch_norm/layout.h"

namespace jaxgrad::JAXGRAD_ISA {

// Sets totals[s][c] to the sum over all blocks and all columns of channel c.
template <class T>
void merge_sums(const BatchNormLayout& layout, const BatchNormScratch<T>& scratch, int kinds) {
  for (int s = 0; s < kinds; ++s) {
    double* __restrict total = scratch.totals[s];
    for (int64_t j = 0; j < layout.width; ++j) total[j] = 0;
    for (int64_t block = 0; block < layout.blocks; ++block) {
      const T* __restrict sums = scratch.sums[s] + block * layout.stride;
      const int64_t columns = layout.block_columns(block);
      for (int64_t j = 0; j < columns; ++j) total[j] += static_cast<double>(sums[j]);
    }
  }
  if (layout.repeat * layout.span == 1) return;
  // In place: the sum of channel c is stored in column c, which belongs to no later channel.
  for (int s = 0; s < kinds; ++s)
    for (int64_t c = 0; c < layout.shape.C; ++c) {
      double total = 0;
      layout.for_columns(c, [&](int64_t j) { total += scratch.totals[s][j]; });
      scratch.totals[s][c] = total;
    }
}

// The mean of each channel is pivot + offset, where the pivot is the mean of its first block. If the mean is large, the
// offset is small and has no rounding error of the size of the mean's.
template <class T>
void merge_means(const BatchNormLayout& layout, const BatchNormScratch<T>& scratch, double* __restrict pivots,
                 double* __restrict offsets) {
  const double n = static_cast<double>(layout.channel_count());
  for (int64_t c = 0; c < layout.shape.C; ++c) {
    const double pivot = static_cast<double>(scratch.sums[0][c * layout.span]);
    layout.for_columns(c, [&](int64_t j) { pivots[j] = pivot; });
  }
  for (int64_t j = 0; j < layout.width; ++j) offsets[j] = 0;
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const T* __restrict means = scratch.sums[0] + block * layout.stride;
    const T* __restrict rests = scratch.sums[1] + block * layout.stride;
    const double count = static_cast<double>(layout.count(block));
    const int64_t columns = layout.block_columns(block);
    for (int64_t j = 0; j < columns; ++j)
      offsets[j] += count * (static_cast<double>(means[j]) - pivots[j]) + static_cast<double>(rests[j]);
  }
  for (int64_t c = 0; c < layout.shape.C; ++c) {
    double total = 0;
    layout.for_columns(c, [&](int64_t j) { total += offsets[j]; });
    layout.for_columns(c, [&](int64_t j) { offsets[j] = total / n; });
  }
}

// The sum of squared deviations from the mean of the channel, from the sums of squared deviations from the means of the
// blocks: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983).
template <class T>
void merge_squares(const BatchNormLayout& layout, const BatchNormScratch<T>& scratch, const double* __restrict pivots,
                   const double* __restrict offsets, double* __restrict squares) {
  for (int64_t j = 0; j < layout.width; ++j) squares[j] = 0;
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const T* __restrict means = scratch.sums[0] + block * layout.stride;
    const T* __restrict rests = scratch.sums[1] + block * layout.stride;
    const T* __restrict sums = scratch.sums[2] + block * layout.stride;
    const double count = static_cast<double>(layout.count(block));
    const int64_t columns = layout.block_columns(block);
    for (int64_t j = 0; j < columns; ++j) {
      const double rest = static_cast<double>(rests[j]) / count;
      const double distance = static_cast<double>(means[j]) - pivots[j] + rest - offsets[j];
      squares[j] += static_cast<double>(sums[j]) + count * (distance * distance - rest * rest);
    }
  }
}

// The mean if x has infinities: the plain sum of x gives an infinity or NaN.
template <class T>
double plain_mean(const BatchNormLayout& layout, const BatchNormScratch<T>& scratch, int64_t channel) {
  double total = 0;
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const T* means = scratch.sums[0] + block * layout.stride;
    const double count = static_cast<double>(layout.count(block));
    layout.for_columns(channel, [&](int64_t j) {
      if (j < layout.block_columns(block)) total += count * static_cast<double>(means[j]);
    });
  }
  return total / static_cast<double>(layout.channel_count());
}

// The sums of a block are its rounded mean m, the sum of x - m, which corrects the rounding of m, and the sum of
// (x - m)^2.
template <class S, class T = Compute<S>>
void merge_moments(const BatchNormStatistics<S>& call, const BatchNormLayout& layout,
                   const BatchNormScratch<T>& scratch) {
  double *pivots = scratch.totals[0], *offsets = scratch.totals[1], *squares = scratch.totals[2];
  merge_means(layout, scratch, pivots, offsets);
  merge_squares(layout, scratch, pivots, offsets, squares);
  const double n = static_cast<double>(layout.channel_count());
  for (int64_t c = 0; c < layout.shape.C; ++c) {
    const int64_t column = c * layout.span;
    double total = 0;
    layout.for_columns(c, [&](int64_t j) { total += squares[j]; });
    const double pivot = pivots[column], offset = offsets[column], sum = pivot + offset;
    const double part = sum - pivot,
                 error = (pivot - (sum - part)) + (offset - part);  // rounding error of the sum (Knuth)
    T mean = static_cast<T>(sum), low = static_cast<T>((sum - static_cast<double>(mean)) + error);
    if (low != low || low - low != 0) {
      mean = static_cast<T>(plain_mean(layout, scratch, c));
      low = 0;
    }
    const double var = total < 0 ? 0 : total / n;
    call.mean[c] = mean;
    call.mean_low[c] = low;
    call.var[c] = static_cast<T>(var);
    call.rstd[c] = static_cast<T>(1 / __builtin_sqrt(var + call.epsilon));
  }
}

}  // namespace jaxgrad::JAXGRAD_ISA
