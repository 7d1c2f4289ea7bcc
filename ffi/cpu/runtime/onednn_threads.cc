#include "cpu/runtime/onednn_threads.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "cpu/runtime/onednn.h"

namespace jaxgrad::onednn {
namespace {

constexpr int kMaxWorkers = 16;  // in all teams that are led by calling threads

std::mutex team_mutex;  // held by the caller whose team runs

// Whether this thread leads a team of its own. OpenMP ends the workers of a team together with the leading thread.
// Accessed under `team_mutex`.
class Leadership {
 public:
  ~Leadership() {
    if (!held_) return;
    const std::lock_guard<std::mutex> lock(team_mutex);
    --leaders_;
  }

  // Tries to make this thread a leader; call with `team_mutex` held.
  bool acquire() {
    if (!held_ && (leaders_ + 1) * (team_size() - 1) <= kMaxWorkers) {
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

// A thread that leads a team on behalf of callers that lead none.
class DedicatedLeader {
 public:
  // Never destroyed: at exit, other threads may still be inside a call.
  static DedicatedLeader& instance() {
    static DedicatedLeader* const leader = new DedicatedLeader;
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
  DedicatedLeader() {
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
  static const int size = [] {
    switch (loaded().threads) {
      case ThreadRuntime::kOpenMP:
        return api().omp_get_max_threads();
      case ThreadRuntime::kTbb:
        return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
      default:
        return 1;
    }
  }();
  return size;
}

ThreadCount::ThreadCount(int threads) {
  if (api().omp_get_max_threads == nullptr) return;
  before_ = api().omp_get_max_threads();
  api().omp_set_num_threads(threads);
}

ThreadCount::~ThreadCount() {
  if (before_ > 0) api().omp_set_num_threads(before_);
}

void run_with_team(const std::function<void()>& work) {
  const std::lock_guard<std::mutex> turn(team_mutex);
  if (!leadership.acquire()) return DedicatedLeader::instance().run(work);
  const ThreadCount all(team_size());
  work();
}

}  // namespace jaxgrad::onednn
