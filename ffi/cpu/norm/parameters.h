// The parameters of the columns that an operation reads:
//
//   mean()                 x - mean() is the deviation
//   affine(deviation)      scale (x - mean) rstd + bias. Both passes use this function and get identical results.
//   slope()                the derivative of that with respect to x
//   tilt(), level()        the input gradient is g slope() + deviation tilt() + level()
#pragma once

#include "cpu/runtime/simd.h"

namespace jaxgrad::JAXGRAD_ISA {

// For operations that need none.
struct NoParameters {
  struct Params {};
  template <class Lanes>
  JAXGRAD_INLINE Params at(int64_t, Lanes) const {
    return {};
  }
  JAXGRAD_INLINE Params of(int64_t) const { return {}; }
};

enum Parameter { kMean, kSlope, kShift, kTilt, kLevel, kParameters };

// The first N parameters, from arrays that have one element per column, padded to whole vectors.
template <class T, int N>
struct ColumnParameters {
  struct Params {
    Vector<T> value[N];

    JAXGRAD_INLINE Vector<T> mean() const { return value[kMean]; }
    JAXGRAD_INLINE Vector<T> affine(Vector<T> deviation) const { return deviation * value[kSlope] + value[kShift]; }
    JAXGRAD_INLINE Vector<T> slope() const { return value[kSlope]; }
    JAXGRAD_INLINE Vector<T> tilt() const { return value[kTilt]; }
    JAXGRAD_INLINE Vector<T> level() const { return value[kLevel]; }
  };

  template <class Lanes>
  JAXGRAD_INLINE Params at(int64_t j, Lanes) const {
    Params params;
    for (int n = 0; n < N; ++n) params.value[n] = load(arrays[n] + j);
    return params;
  }
  JAXGRAD_INLINE Params of(int64_t c) const {
    Params params;
    for (int n = 0; n < N; ++n) params.value[n] = splat(arrays[n][c]);
    return params;
  }

  const T* const* arrays;
};

// The mean that the elements of a row share.
template <class T>
struct RowMean {
  JAXGRAD_INLINE Vector<T> mean() const { return value; }
  Vector<T> value;
};

// The parameters of a row whose elements share the statistics.
template <class T>
struct RowParameters {
  struct Params {
    Vector<T> row_mean, rstd, offset, scale, bias, row_tilt, row_level;
    T *dscale, *dbias;  // the sums of these columns, or null

    JAXGRAD_INLINE Vector<T> mean() const { return row_mean; }
    JAXGRAD_INLINE Vector<T> normalized(Vector<T> deviation) const { return deviation * rstd + offset; }
    JAXGRAD_INLINE Vector<T> affine(Vector<T> deviation) const { return normalized(deviation) * scale + bias; }
    JAXGRAD_INLINE Vector<T> slope() const { return scale * rstd; }
    JAXGRAD_INLINE Vector<T> tilt() const { return row_tilt; }
    JAXGRAD_INLINE Vector<T> level() const { return row_level; }
  };

  template <class Lanes>
  JAXGRAD_INLINE Params at(int64_t j, Lanes lanes) const {
    Params params = of_row(load(scale + j, lanes), bias == nullptr ? Vector<T>{} : load(bias + j, lanes));
    if (dscale != nullptr) params.dscale = dscale + j, params.dbias = dbias + j;
    return params;
  }
  JAXGRAD_INLINE Params of(int64_t c) const {
    return of_row(splat(scale[c]), bias == nullptr ? Vector<T>{} : splat(bias[c]));
  }

  T mean, rstd, offset;  // offset: -mean_low rstd
  T tilt, level;
  const T *scale, *bias;  // bias may be null
  T *dscale, *dbias;      // sums over rows, or null

 private:
  JAXGRAD_INLINE Params of_row(Vector<T> column_scale, Vector<T> column_bias) const {
    return {splat(mean), splat(rstd),  splat(offset), column_scale, column_bias,
            splat(tilt), splat(level), nullptr,       nullptr};
  }
};

}  // namespace jaxgrad::JAXGRAD_ISA
