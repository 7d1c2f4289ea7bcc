#include "cpu/runtime/onednn_threads.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "cpu/runtime/onednn.h"

namespace jaxgrad::onednn {
namespace {

constexpr int kMostWorkers = 16;  // of the teams that calling threads lead

std::mutex one_caller;

// Whether this thread leads a team of its own. Read and written under `one_caller`, but for the end of a thread, when
// OpenMP ends its workers too.
class Leadership {
 public:
  ~Leadership() {
    if (!held_) return;
    const std::lock_guard<std::mutex> lock(one_caller);
    --leaders_;
  }

  bool take() {
    if (!held_ && (leaders_ + 1) * (team_size() - 1) <= kMostWorkers) {
      held_ = true;
      ++leaders_;
    }
    return held_;
  }

 private:
  inline static int leaders_ = 0;
  bool held_ = false;
};

thread_local Leadership leadership;

// The thread that leads for all who may not.
class Leader {
 public:
  // Lives as long as the process: at exit, other threads may still be inside a call.
  static Leader& instance() {
    static Leader* const leader = new Leader;
    return *leader;
  }

  void run(const std::function<void()>& work) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = &work;
    called_.notify_one();
    done_.wait(lock, [this] { return work_ == nullptr; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  Leader() {
    std::thread([this] { serve(); }).detach();
  }

  void serve() {
    const ThreadCount all(team_size());
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      called_.wait(lock, [this] { return work_ != nullptr; });
      try {
        (*work_)();
      } catch (...) {
        error_ = std::current_exception();
      }
      work_ = nullptr;
      done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable called_, done_;
  const std::function<void()>* work_ = nullptr;
  std::exception_ptr error_;
};

}  // namespace

int team_size() {
  static const int size = api().omp_get_max_threads();
  return size;
}

ThreadCount::ThreadCount(int threads) : before_(api().omp_get_max_threads()) { api().omp_set_num_threads(threads); }

ThreadCount::~ThreadCount() { api().omp_set_num_threads(before_); }

void run_with_team(const std::function<void()>& work) {
  const std::lock_guard<std::mutex> turn(one_caller);
  if (!leadership.take()) return Leader::instance().run(work);
  const ThreadCount all(team_size());
  work();
}

}  // namespace jaxgrad::onednn
