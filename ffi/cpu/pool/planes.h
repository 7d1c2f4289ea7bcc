// Copies between planes, the runs of elements of kPlanes parts, and vectors with one element of each: [n, kPlanes].
#pragma once

#include "cpu/pool/parts.h"
#include "cpu/runtime/transpose.h"

namespace jaxgrad::JAXGRAD_ISA {

struct Planes {
  int64_t offsets[kPlanes];  // of the first elements of the planes
  Range present[kPlanes];    // the elements of each plane that exist
  int64_t n;

  // Calls body(first plane, first element, whether all of the square exists) for squares of kLanes elements.
  template <class T, class Body>
  JAXGRAD_INLINE void for_squares(Body body) const {
    constexpr int kL = kLanes<T>;
    for (int first = 0; first < kPlanes; first += kL) {
      Range common{0, n};
      for (int i = 0; i < kL; ++i) common = intersection(common, present[first + i]);
      for (int64_t begin = 0; begin < n; begin += kL) {
        const int64_t p = max_of(0, min_of(begin, n - kL));  // the last square overlaps the one before
        body(first, p, p >= common.begin && p + kL <= common.end);
      }
    }
  }
};

// Elements that do not exist are `other`.
template <class S>
void read_planes(const Planes& planes, const S* from, Compute<S> other, Compute<S>* to) {
  using T = Compute<S>;
  constexpr int kL = kLanes<T>;
  planes.for_squares<T>([&](int first, int64_t p, bool is_whole) {
    Vector<T> square[kL];
    if (is_whole) {
#pragma GCC unroll 16
      for (int i = 0; i < kL; ++i) square[i] = load(from + planes.offsets[first + i] + p);
    } else {
      for (int i = 0; i < kL; ++i) {
        const Range present = planes.present[first + i], inside = intersection({p, p + kL}, present);
        const S* const plane = from + planes.offsets[first + i];
        square[i] = splat(other);
        if (inside.size() == kL)
          square[i] = load(plane + p);
        else
          for (int64_t e = inside.begin; e < inside.end; ++e) square[i][e - p] = load(plane + e, 1)[0];
      }
    }
    transpose<T>(square);
#pragma GCC unroll 16
    for (int i = 0; i < kL; ++i)
      if (p + i < planes.n) store(to + (p + i) * kPlanes + first, square[i]);
  });
}

template <class S>
void write_planes(const Planes& planes, const Compute<S>* from, S* to) {
  using T = Compute<S>;
  constexpr int kL = kLanes<T>;
  planes.for_squares<T>([&](int first, int64_t p, bool is_whole) {
    Vector<T> square[kL];
#pragma GCC unroll 16
    for (int i = 0; i < kL; ++i) square[i] = p + i < planes.n ? load(from + (p + i) * kPlanes + first) : Vector<T>{};
    transpose<T>(square);
    if (is_whole) {
#pragma GCC unroll 16
      for (int i = 0; i < kL; ++i) store(to + planes.offsets[first + i] + p, square[i]);
      return;
    }
    for (int i = 0; i < kL; ++i) {
      S elements[kL];
      store(elements, square[i]);
      const Range inside = intersection({p, p + kL}, planes.present[first + i]);
      if (inside.size() > 0)
        __builtin_memcpy(to + planes.offsets[first + i] + inside.begin, elements + (inside.begin - p),
                         inside.size() * sizeof(S));
    }
  });
}

}  // namespace jaxgrad::JAXGRAD_ISA
