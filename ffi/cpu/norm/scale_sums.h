// The gradients of scale and bias as sums of parts, which are added in their order.
#pragma once

#include "cpu/runtime/arena.h"
#include "cpu/runtime/parallel_for.h"
#include "cpu/runtime/ranges.h"

namespace jaxgrad::JAXGRAD_ISA {

// Each of K calls has `parts` parts, of `span` neighboring columns for each of C channels.
template <class T>
class ScaleSums {
 public:
  ScaleSums(int64_t K, int64_t parts, int64_t C, int64_t span, Arena& arena)
      : K_(K), parts_(parts), C_(C), span_(span), sums_(arena.take<T>(K * parts * 2 * C * span)) {}

  // [C * span], where `part` counts the parts of all calls.
  T* dscale(int64_t part) const { return sums_ + 2 * part * C_ * span_; }
  T* dbias(int64_t part) const { return dscale(part) + C_ * span_; }

  // dscale, dbias: [K, C] or null
  void finish(T* dscale, T* dbias, Parallel& parallel) const {
    const int64_t chunks = ceil_div(C_, kChunkChannels);
    parallel_for(parallel, K_ * chunks, [&](int64_t task) {
      const int64_t k = task / chunks, begin = task % chunks * kChunkChannels, end = min_of(C_, begin + kChunkChannels);
      if (dscale != nullptr) add_parts(0, k, begin, end, dscale + k * C_);
      if (dbias != nullptr) add_parts(1, k, begin, end, dbias + k * C_);
    });
  }

 private:
  static constexpr int64_t kChunkChannels = 512;

  void add_parts(int64_t which, int64_t k, int64_t begin, int64_t end, T* result) const {
    double totals[kChunkChannels] = {};
    for (int64_t part = k * parts_; part < (k + 1) * parts_; ++part) {
      const T* const sums = this->dscale(part) + which * C_ * span_;
      for (int64_t c = begin; c < end; ++c)
        for (int64_t j = c * span_; j < (c + 1) * span_; ++j) totals[c - begin] += static_cast<double>(sums[j]);
    }
    for (int64_t c = begin; c < end; ++c) result[c] = static_cast<T>(totals[c - begin]);
  }

  const int64_t K_, parts_, C_, span_;
  T* const sums_;
};

}  // namespace jaxgrad::JAXGRAD_ISA
