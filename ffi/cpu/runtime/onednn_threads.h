// The threads that oneDNN runs on.
//
// A library with OpenMP gives every thread that enters a parallel region a team of workers of its own. XLA
// calls from many threads; on a large machine there would be as many teams as threads, each as large as the machine. So
// small problems run on one thread without a parallel region, and few threads lead teams.
#pragma once

#include <functional>

namespace jaxgrad::onednn {

// The number of threads of a large call: OMP_NUM_THREADS, or the number of processors available to the process. With
// TBB the latter, and 1 with a sequential build.
int team_size();

// Sets the number of threads that oneDNN uses for calls from the current thread; restores it when destroyed. Only for
// OpenMP: the callers of TBB share one pool of threads, and each call takes those that are idle.
class ThreadCount {
 public:
  explicit ThreadCount(int threads);
  ~ThreadCount();
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_ = 0;  // 0 without OpenMP
};

// Runs `work` with a whole team. Callers take turns, since two teams at once would wait for each other's cores at every
// barrier. While all teams together are small, the calling thread leads a team of its own, because handing work to
// another thread costs more than a small team does. Otherwise one dedicated thread leads. Rethrows what `work` throws.
void run_with_team(const std::function<void()>& work);

}  // namespace jaxgrad::onednn
