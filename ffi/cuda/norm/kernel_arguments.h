// The arguments of the normalization kernels. Both the host compiler and NVRTC compile this file.
#pragma once

#ifndef __CUDACC_RTC__
#include "cuda/runtime/divisor.h"
#endif

namespace jaxgrad {

// The arrays of a pass; null where the pass has no such array. x, residual, y and their gradients are [S, O, C, I];
// scale and bias [K, C]; statistics [S, groups].
struct NormArrays {
  const void *x, *residual, *y, *dy;
  void *result, *dresidual;  // y in the forward pass, dx in the backward pass
  const float *scale, *bias;
  const float *given_mean, *given_mean_low, *given_rstd;
  float *mean, *mean_low, *var, *rstd;
  const float *dmean, *dvar;
  float *dscale, *dbias;
};

// How teams of blocks share the problems of columns.cuh.
struct NormColumns {
  NormArrays arrays;
  float* partials;            // [problems, blocks of a team, width, 2]: sums of the blocks
  float* sums;                // [S, C, 2]: sums of the samples of which dscale and dbias are made
  unsigned long long* flags;  // see team.cuh: [teams, blocks of a team + 1], then [problems]
  unsigned long long nonce;
  unsigned rows;              // of a sample
  unsigned channels, groups;  // C
  Divisor group;              // channels of a group
  unsigned width;             // channels of a problem
  unsigned chunks;            // problems of a sample
  unsigned problems;
  unsigned teams, blocks;   // blocks of a team
  unsigned samples;         // of a row of scale
  unsigned stored;          // items of a thread in shared memory
  unsigned floats_of_sums;  // in shared memory
  unsigned stride;          // elements from a row to the next, channels last
  Divisor inner;            // items of a run of one channel, channels first
  float count;              // elements of a channel of a sample
  float epsilon;
};

// How blocks share the rows of rows.cuh.
struct NormRows {
  NormArrays arrays;
  float* partials;            // [calls, blocks, width, 2]
  unsigned long long* flags;  // see team.cuh: [calls, blocks + 1]
  unsigned long long nonce;
  unsigned calls;   // rows of scale
  unsigned rows;    // of a call
  unsigned blocks;  // of a call
  unsigned width;   // elements of a row
  float epsilon;
};

enum { kNormChannelValues = 8 };  // floats of each channel of a problem in shared memory

}  // namespace jaxgrad
