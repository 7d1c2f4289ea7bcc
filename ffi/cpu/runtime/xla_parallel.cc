#include "cpu/runtime/xla_parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <thread>

namespace jaxgrad {
namespace {

struct Loop {
  Loop(int64_t tasks, void* context, Parallel::Body body) : tasks(tasks), context(context), body(body) {}

  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      // An exception may leave neither a thread of the pool nor this loop: the other threads still use its context.
      try {
        body(context, i);
      } catch (...) {
        if (!failed.test_and_set()) error = std::current_exception();
      }
      done.fetch_add(1, std::memory_order_release);
    }
  }

  const int64_t tasks;
  void* const context;
  const Parallel::Body body;
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int64_t> done{0};
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error;  // the first one
};

// A hint to the processor: this thread waits in a loop.
void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

XlaParallel::XlaParallel(xla::ffi::ThreadPool& pool)
    : pool_(pool), threads_(std::max<int64_t>(1, pool.num_threads())) {}

void XlaParallel::run(int64_t tasks, void* context, Body body) {
  const int64_t helpers = std::min(threads_, tasks) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < tasks; ++i) body(context, i);
    return;
  }
  // Shared ownership: the pool may start a helper after the loop has ended. Such a helper finds no task left.
  auto loop = std::make_shared<Loop>(tasks, context, body);
  try {
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([loop] { loop->work(); });
  } catch (const std::bad_alloc&) {  // fewer helpers: this thread runs the tasks that none of them claims
  }
  loop->work();
  for (int spins = 0; loop->done.load(std::memory_order_acquire) < tasks; ++spins) {
    if (spins < 10000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (loop->error) std::rethrow_exception(loop->error);
}

}  // namespace jaxgrad
