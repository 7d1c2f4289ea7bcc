#include "cpu/gru/op.h"

#include <algorithm>

#include "common/checked_int.h"
#include "cpu/gru/layout.h"
#include "cpu/runtime/isa.h"
#include "cpu/runtime/serial_parallel.h"

namespace jaxgrad {

// Defined in kernels.cc, once per instruction set.
#define JAXGRAD_DECLARE(isa)                           \
  namespace isa {                                      \
  template <class S>                                   \
  void gru_forward(const GruForward<S>&, Parallel&);   \
  template <class S>                                   \
  void gru_backward(const GruBackward<S>&, Parallel&); \
  }
JAXGRAD_FOR_EACH_ISA(JAXGRAD_DECLARE)

namespace {

// With fewer multiplications, waking another thread costs more than it saves.
constexpr double kMinParallelWork = 1e5;

// The groups that run at once, at most: each has its own workspace.
constexpr int64_t kMaxGroupsAtOnce = 64;

int64_t groups_at_once(const GruShape& s) { return std::min(s.groups, kMaxGroupsAtOnce); }

double work_of_group(const GruShape& s) { return static_cast<double>(s.D) * s.T * s.B * 3 * s.H * (s.I + s.H); }

template <class T>
int64_t backward_bytes(const GruShape& shape, bool sums_in_scratch) {
  Arena arena(nullptr);
  GruBackwardScratch<T>(shape, sums_in_scratch, arena);
  return arena.bytes();
}

template <class T>
int64_t forward_bytes(const GruShape& shape) {
  Arena arena(nullptr);
  GruForwardScratch<T>(shape, arena);
  return arena.bytes();
}

template <class S>
int64_t workspace_of_group(const GruForward<S>& call) {
  return sizeof(S) == sizeof(double) ? forward_bytes<double>(call.shape) : forward_bytes<float>(call.shape);
}
template <class S>
int64_t workspace_of_group(const GruBackward<S>& call) {
  return sizeof(S) == sizeof(double) ? backward_bytes<double>(call.shape, false)
                                     : backward_bytes<float>(call.shape, sizeof(S) < 4);
}

// Advances a pointer to one group's part of an array; null stays null.
template <class T>
void advance(T*& array, int64_t elements) {
  if (array != nullptr) array += elements;
}

template <class S>
GruForward<S> group_of(GruForward<S> call, int64_t group) {
  const auto& [T, B, I, H, D, linear, groups, shares_weights, batch_major] = call.shape;
  advance(call.x, group * T * B * I);
  advance(call.w, group * D * 3 * H * I);
  advance(call.r, group * D * 3 * H * H);
  advance(call.b, group * D * 6 * H);
  advance(call.lens, group * B);
  advance(call.reset, group * T * B);
  for (const S** state : {&call.initial_h, &call.reset_h}) advance(*state, group * D * B * H);
  advance(call.y, group * T * D * B * H);
  advance(call.y_h, group * D * B * H);
  advance(call.gates, group * T * D * B * H * call.shape.saved_gates());
  return call;
}

template <class S>
GruBackward<S> group_of(GruBackward<S> call, int64_t group) {
  const auto& [T, B, I, H, D, linear, groups, shares_weights, batch_major] = call.shape;
  advance(call.x, group * T * B * I);
  if (!shares_weights) {
    advance(call.w, group * D * 3 * H * I);
    advance(call.r, group * D * 3 * H * H);
  }
  advance(call.lens, group * B);
  advance(call.reset, group * T * B);
  for (const S** state : {&call.initial_h, &call.reset_h, &call.dy_h}) advance(*state, group * D * B * H);
  for (const S** states : {&call.y, &call.dy}) advance(*states, group * T * D * B * H);
  advance(call.gates, group * T * D * B * H * call.shape.saved_gates());
  advance(call.dx, group * T * B * I);
  advance(call.dw, group * D * 3 * H * I);
  advance(call.dr, group * D * 3 * H * H);
  advance(call.db, group * D * 6 * H);
  for (S** state : {&call.dh0, &call.dreset_h}) advance(*state, group * D * B * H);
  return call;
}

template <class S>
void run_group(const GruForward<S>& call, Parallel& parallel) {
  JAXGRAD_RETURN_FOR_ISA(gru_forward(call, parallel))
}

template <class S>
void run_group(const GruBackward<S>& call, Parallel& parallel) {
  JAXGRAD_RETURN_FOR_ISA(gru_backward(call, parallel))
}

// Some of the groups of a call, one after the other on one thread.
template <class Call>
struct Share {
  const Call& call;
  int64_t shares, workspace_bytes;

  static void run(void* context, int64_t task) {
    const Share& share = *static_cast<const Share*>(context);
    SerialParallel serial;
    for (int64_t group = task; group < share.call.shape.groups; group += share.shares) {
      Call one = group_of(share.call, group);
      one.workspace = share.call.workspace + task * share.workspace_bytes;
      run_group(one, serial);
    }
  }
};

template <class Call>
void run_groups(const Call& call, Parallel& parallel) {
  const GruShape& s = call.shape;
  SerialParallel serial;
  const double work = work_of_group(s);
  const bool splits_groups = work >= kMinParallelWork && s.groups < parallel.threads();
  if (s.groups == 1 || splits_groups) {
    Parallel& threads = work >= kMinParallelWork ? parallel : serial;
    for (int64_t group = 0; group < s.groups; ++group) run_group(group_of(call, group), threads);
    return;
  }
  Parallel& threads = static_cast<double>(s.groups) * work >= kMinParallelWork ? parallel : serial;
  Share<Call> share{call, std::min(threads.threads(), groups_at_once(s)), workspace_of_group(call)};
  threads.run(share.shares, &share, Share<Call>::run);
}

}  // namespace

bool gru_sizes_fit(const GruShape& s) {
  // An upper bound of all products of sizes: more bytes than any array or part of the workspace has.
  const CheckedInt hidden = CheckedInt(s.H) + kPad, both = hidden + s.I + kPad;
  const CheckedInt rows = (CheckedInt(s.T) + 1) * (CheckedInt(s.B) + kPad);
  const bool valid = s.T >= 0 && s.B >= 0 && s.I > 0 && s.H > 0 && s.D > 0 && s.groups > 0;
  return valid && !(rows * s.groups * s.D * 6 * hidden * both * 8).overflowed();
}

int64_t gru_forward_workspace(const GruShape& shape, int64_t storage_bytes) {
  const int64_t bytes = storage_bytes == sizeof(double) ? forward_bytes<double>(shape) : forward_bytes<float>(shape);
  return groups_at_once(shape) * bytes;
}

int64_t gru_backward_workspace(const GruShape& shape, int64_t storage_bytes) {
  const int64_t bytes = storage_bytes == sizeof(double) ? backward_bytes<double>(shape, false)
                                                        : backward_bytes<float>(shape, storage_bytes < 4);
  return groups_at_once(shape) * bytes;
}

template <class S>
void gru_forward(const GruForward<S>& call, Parallel& parallel) {
  run_groups(call, parallel);
}

template <class S>
void gru_backward(const GruBackward<S>& call, Parallel& parallel) {
  run_groups(call, parallel);
}

#define JAXGRAD_INSTANTIATE(S)                                   \
  template void gru_forward<S>(const GruForward<S>&, Parallel&); \
  template void gru_backward<S>(const GruBackward<S>&, Parallel&);
JAXGRAD_INSTANTIATE(float)
JAXGRAD_INSTANTIATE(double)
JAXGRAD_INSTANTIATE(BFloat16)
JAXGRAD_INSTANTIATE(Float16)

}  // namespace jaxgrad
