// The shape of a problem of the norm family.
#pragma once

#include <cstdint>

namespace jaxgrad {

// x as [S, O, C, I], dense and row-major: S samples of C channels. G groups of C / G neighboring channels share their
// statistics, which are taken over the O * (C / G) * I elements of a group in one sample. K calls of S / K samples each
// have a scale and a bias of their own.
struct NormShape {
  int64_t S = 0, O = 0, C = 0, I = 0, G = 0, K = 1;

  int64_t elements() const { return S * sample_elements(); }
  int64_t sample_elements() const { return O * C * I; }
  int64_t group_channels() const { return C / G; }
  int64_t group_elements() const { return O * group_channels() * I; }
  int64_t call_samples() const { return S / K; }
};

// The values are those of the attribute `activation` of the handlers. kGelu is the approximation by tanh.
enum class Activation : int64_t { kNone, kRelu, kSilu, kGelu };

}  // namespace jaxgrad
