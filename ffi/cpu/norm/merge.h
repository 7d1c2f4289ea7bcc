// Merges the sums of the blocks of a sample into sums of channels and of groups, in double and in the order of the
// blocks.
#pragma once

#include "cpu/norm/layout.h"

namespace jaxgrad::JAXGRAD_ISA {

// Sets totals[s][c] to the sum over all blocks and all columns of channel c.
template <class T>
void merge_sums(const NormLayout& layout, const NormScratch<T>& scratch, int kinds) {
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
      layout.for_channel_columns(c, [&](int64_t j) { total += scratch.totals[s][j]; });
      scratch.totals[s][c] = total;
    }
}

// The mean of each group is pivot + offset, where the pivot is the mean of its first column in the first block. If the
// mean is large, the offset is small and has no rounding error of the size of the mean's.
template <class T>
void merge_means(const NormLayout& layout, const NormScratch<T>& scratch, double* __restrict pivots,
                 double* __restrict offsets) {
  const double n = static_cast<double>(layout.shape.group_elements());
  for (int64_t g = 0; g < layout.shape.G; ++g) {
    const double pivot = static_cast<double>(scratch.sums[0][layout.first_column(g)]);
    layout.for_group_columns(g, [&](int64_t j) { pivots[j] = pivot; });
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
  for (int64_t g = 0; g < layout.shape.G; ++g) {
    double total = 0;
    layout.for_group_columns(g, [&](int64_t j) { total += offsets[j]; });
    layout.for_group_columns(g, [&](int64_t j) { offsets[j] = total / n; });
  }
}

// The sum of squared deviations from the mean of the group, from the sums of squared deviations from the means of the
// blocks: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983).
template <class T>
void merge_squares(const NormLayout& layout, const NormScratch<T>& scratch, const double* __restrict pivots,
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
double plain_mean(const NormLayout& layout, const NormScratch<T>& scratch, int64_t index) {
  double total = 0;
  for (int64_t block = 0; block < layout.blocks; ++block) {
    const T* means = scratch.sums[0] + block * layout.stride;
    const double count = static_cast<double>(layout.count(block));
    layout.for_group_columns(index, [&](int64_t j) {
      if (j < layout.block_columns(block)) total += count * static_cast<double>(means[j]);
    });
  }
  return total / static_cast<double>(layout.shape.group_elements());
}

// Writes the statistics of group `index` of all samples, where `squares` is the sum of the squared deviations from mean
// + low.
template <class Q, class T = Compute<Q>>
JAXGRAD_INLINE void write_statistics(const NormStatistics<Q>& call, int64_t index, double n, T mean, T low,
                                     double squares) {
  const double var = squares < 0 ? 0 : squares / n;
  if (call.mean != nullptr) {
    call.mean[index] = mean;
    call.mean_low[index] = low;
  }
  call.var[index] = static_cast<T>(var);
  call.rstd[index] = static_cast<T>(1 / __builtin_sqrt(var + call.epsilon));
}

// The statistics of a sample from sums of squares, around zero.
template <class Q, class T = Compute<Q>>
void merge_squares_around_zero(const NormStatistics<Q>& call, const NormLayout& layout, const NormScratch<T>& scratch,
                               int64_t sample) {
  merge_sums(layout, scratch, 1);
  const int64_t channels = layout.shape.group_channels();
  for (int64_t g = 0; g < layout.shape.G; ++g) {
    double total = 0;
    for (int64_t c = g * channels; c < (g + 1) * channels; ++c) total += scratch.totals[0][c];
    write_statistics(call, sample * layout.shape.G + g, static_cast<double>(layout.shape.group_elements()), T(0), T(0),
                     total);
  }
}

// The statistics of a sample from the sums of its blocks: the rounded mean m, the sum of x - m, which corrects the
// rounding of m, and the sum of (x - m)^2.
template <class Q, class T = Compute<Q>>
void merge_moments(const NormStatistics<Q>& call, const NormLayout& layout, const NormScratch<T>& scratch,
                   int64_t sample) {
  if (call.mean == nullptr) return merge_squares_around_zero(call, layout, scratch, sample);
  double *pivots = scratch.totals[0], *offsets = scratch.totals[1], *squares = scratch.totals[2];
  merge_means(layout, scratch, pivots, offsets);
  merge_squares(layout, scratch, pivots, offsets, squares);
  for (int64_t g = 0; g < layout.shape.G; ++g) {
    double total = 0;
    layout.for_group_columns(g, [&](int64_t j) { total += squares[j]; });
    const double pivot = pivots[layout.first_column(g)], offset = offsets[layout.first_column(g)], sum = pivot + offset;
    const double part = sum - pivot,
                 error = (pivot - (sum - part)) + (offset - part);  // rounding error of the sum (Knuth)
    T mean = static_cast<T>(sum), low = static_cast<T>((sum - static_cast<double>(mean)) + error);
    if (low != low || low - low != 0) {
      mean = static_cast<T>(plain_mean(layout, scratch, g));
      low = 0;
    }
    write_statistics(call, sample * layout.shape.G + g, static_cast<double>(layout.shape.group_elements()), mean, low,
                     total);
  }
}

}  // namespace jaxgrad::JAXGRAD_ISA
