// The threads that oneDNN works with. Its build brings OpenMP, which gives every thread that enters a parallel region a
// team of workers of its own. XLA calls from many threads: on a large machine there would be as many teams as threads,
// each as large as the machine. So small work enters no parallel region, and few threads enter any.
#pragma once

#include <functional>

namespace jaxgrad::onednn {

// How many threads a large call has: OMP_NUM_THREADS, or as many as the process may run at once.
int team_size();

// While it lives, oneDNN plans and runs with `threads` threads what this thread asks of it.
class ThreadCount {
 public:
  explicit ThreadCount(int threads);
  ~ThreadCount();
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  const int before_;
};

// Runs `work` with a whole team, one caller after the other: two teams at once would wait for each other's cores at
// every barrier. The calling thread leads a team of its own while all teams together are small; otherwise one thread,
// kept for this, leads. Handing over costs more than a small team does. What `work` throws is thrown here.
void run_with_team(const std::function<void()>& work);

}  // namespace jaxgrad::onednn
