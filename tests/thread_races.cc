// Runs the CPU ops on a thread pool that ThreadSanitizer sees, from several threads at once. .ci/sanitize builds it,
// and .ci/aarch64, which compares the sums at the end of the lines with those of another architecture.
//
//   thread_races PATH_OF_ONEDNN     runs every op; exits with 1 if a result is wrong
//   thread_races --without-onednn   runs jaxgrad's own kernels
//   thread_races --race             a loop with a data race, which ThreadSanitizer must report
//
// jaxlib is built without ThreadSanitizer, which therefore does not see that XLA's thread pool hands over its tasks,
// and reports races that are none. The threads of this pool are std::thread: here every report is a race. oneDNN's
// kernels are not instrumented; jaxgrad's code that gives them threads is.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/conv/op.h"
#include "cpu/depthwise/problem.h"
#include "cpu/gru/op.h"
#include "cpu/norm/op.h"
#include "cpu/pool/op.h"
#include "cpu/runtime/isa.h"
#include "cpu/runtime/onednn.h"
#include "cpu/runtime/onednn_threads.h"
#include "cpu/runtime/serial_parallel.h"
#include "cpu/runtime/xla_parallel.h"

namespace jaxgrad {
namespace {

constexpr int kPoolThreads = 4;
constexpr int kCallers = 3;
constexpr int kOnednnCallers = 8;  // more than may lead a team of oneDNN threads, so that some use the dedicated leader
constexpr int kCalls = 2;          // of each caller

thread_local bool in_pool = false;
std::atomic<int64_t> helped{0};  // tasks that ran on threads of the pool

// A thread pool with the interface of XLA's.
class Pool {
 public:
  Pool() {
    api_.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      reinterpret_cast<Pool*>(args->ctx)->schedule([task = args->task, data = args->data] { task(data); });
      return nullptr;
    };
    api_.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = kPoolThreads;
      return nullptr;
    };
    for (int i = 0; i < kPoolThreads; ++i) threads_.emplace_back([this] { serve(); });
  }
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    called_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // The pool as a handler receives it.
  xla::ffi::ThreadPool handle() {
    auto* const context = reinterpret_cast<XLA_FFI_ExecutionContext*>(this);
    return *xla::ffi::CtxDecoding<xla::ffi::ThreadPool>::Decode(&api_, context, diagnostics_);
  }

 private:
  void schedule(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    called_.notify_one();
  }
  void serve() {
    in_pool = true;
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      called_.wait(lock, [this] { return stopped_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  XLA_FFI_Api api_{};
  xla::ffi::DiagnosticEngine diagnostics_;
  std::mutex mutex_;
  std::condition_variable called_;
  std::deque<std::function<void()>> tasks_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

// The loop of the handlers, which also counts the tasks that the pool takes from the calling threads.
class CountingParallel final : public Parallel {
 public:
  explicit CountingParallel(xla::ffi::ThreadPool pool) : pool_(pool), loop_(pool_) {}

  int64_t threads() const override { return loop_.threads(); }
  void run(int64_t tasks, void* context, Body body) override {
    struct Task {
      void* context;
      Body body;
    } task{context, body};
    loop_.run(tasks, &task, [](void* all, int64_t i) {
      if (in_pool) helped.fetch_add(1, std::memory_order_relaxed);  // orders no other access, as TSan knows
      static_cast<Task*>(all)->body(static_cast<Task*>(all)->context, i);
    });
  }

 private:
  xla::ffi::ThreadPool pool_;
  XlaParallel loop_;
};

template <class T>
T narrowed(float value) {
  return static_cast<T>(value);
}
template <>
BFloat16 narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return {static_cast<uint16_t>(bits >> 16)};
}

double widened(double value) { return value; }
double widened(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return static_cast<double>(wide);
}

using Values = std::vector<double>;

// Makes the operands of one call, and collects its results.
class Arrays {
 public:
  template <class T>
  std::vector<T> random(int64_t elements, float low, float high) {
    std::vector<T> values(elements);
    for (T& value : values) value = narrowed<T>(std::uniform_real_distribution<float>(low, high)(generator_));
    return values;
  }
  template <class T>
  void add(const std::vector<T>& result) {
    for (const T& value : result) results.push_back(widened(value));
  }

  Values results;

 private:
  std::mt19937 generator_{1};
};

// Forward and backward pass. B is odd, so that the tasks have unequal numbers of rows.
template <class S, bool kLinearBeforeReset, bool kBatchMajor = false>
Values gru(Parallel& parallel) {
  GruShape s{5, 37, 19, 33, 2, kLinearBeforeReset};
  s.batch_major = kBatchMajor;
  const GruOptions options{GruDirection::kBidirectional, 0.8};
  Arrays arrays;
  const auto x = arrays.random<S>(s.T * s.B * s.I, -1, 1), w = arrays.random<S>(s.D * 3 * s.H * s.I, -0.3f, 0.3f),
             r = arrays.random<S>(s.D * 3 * s.H * s.H, -0.3f, 0.3f), b = arrays.random<S>(s.D * 6 * s.H, -0.3f, 0.3f),
             h0 = arrays.random<S>(s.D * s.B * s.H, -1, 1), dy = arrays.random<S>(s.T * s.D * s.B * s.H, -1, 1),
             dy_h = arrays.random<S>(s.D * s.B * s.H, -1, 1), reset_h = arrays.random<S>(s.D * s.B * s.H, -1, 1);
  std::vector<int32_t> lengths(s.B);
  for (int64_t i = 0; i < s.B; ++i) lengths[i] = static_cast<int32_t>(i % (s.T + 1));
  std::vector<uint8_t> reset(s.T * s.B);
  for (size_t i = 0; i < reset.size(); ++i) reset[i] = i % 3 == 0;
  std::vector<S> y(dy.size()), y_h(dy_h.size()), gates(s.T * s.D * s.B * s.saved_gates() * s.H), dx(x.size()),
      dw(w.size()), dr(r.size()), db(b.size()), dh0(h0.size()), dreset_h(reset_h.size());
  std::vector<std::byte> forward(gru_forward_workspace(s, sizeof(S))), backward(gru_backward_workspace(s, sizeof(S)));
  gru_forward(GruForward<S>{s, options, x.data(), w.data(), r.data(), b.data(), lengths.data(), h0.data(), reset.data(),
                            reset_h.data(), y.data(), y_h.data(), gates.data(), forward.data()},
              parallel);
  gru_backward(GruBackward<S>{s,
                              options,
                              x.data(),
                              w.data(),
                              r.data(),
                              lengths.data(),
                              h0.data(),
                              reset.data(),
                              reset_h.data(),
                              y.data(),
                              gates.data(),
                              dy.data(),
                              dy_h.data(),
                              dx.data(),
                              dw.data(),
                              dr.data(),
                              db.data(),
                              dh0.data(),
                              dreset_h.data(),
                              backward.data()},
               parallel);
  for (const auto* result : {&y, &y_h, &dx, &dw, &dr, &db, &dh0, &dreset_h}) arrays.add(*result);
  return arrays.results;
}

// Statistics and normalization with an activation and a residual, together and one after the other, and gradients, with
// the statistics of x and with frozen ones.
template <class Q>
Values norm(const NormShape& s, Activation activation, Parallel& parallel) {
  using T = Compute<Q>;
  Arrays arrays;
  const auto x = arrays.random<Q>(s.elements(), -2, 3), residual = arrays.random<Q>(s.elements(), -1, 1),
             dy = arrays.random<Q>(s.elements(), -1, 1);
  const auto scale = arrays.random<T>(s.K * s.C, 0.5f, 1.5f), bias = arrays.random<T>(s.K * s.C, -1, 1);
  const int64_t groups = s.S * s.G;
  std::vector<T> mean(groups), mean_low(groups), var(groups), rstd(groups), dscale(s.K * s.C), dbias(s.K * s.C);
  std::vector<Q> y(x.size()), dx(x.size()), dresidual(x.size());
  std::vector<std::byte> workspace(norm_workspace(s, sizeof(Q)));
  const NormStatistics<Q> statistics{1e-3, x.data(), mean.data(), mean_low.data(), var.data(), rstd.data()};
  const NormNormalize<Q> normalize{activation,      x.data(),    scale.data(),    bias.data(), mean.data(),
                                   mean_low.data(), rstd.data(), residual.data(), y.data()};
  const auto forward = [&](const NormStatistics<Q>* first, const NormNormalize<Q>* second) {
    norm_forward(s, first, second, workspace.data(), parallel);
  };
  forward(&statistics, &normalize);
  arrays.add(y);
  forward(&statistics, nullptr);
  forward(nullptr, &normalize);
  for (const auto* result : {&mean, &var, &rstd}) arrays.add(*result);
  arrays.add(y);
  for (const bool frozen : {false, true}) {
    const NormBackward<Q> backward{frozen ? Activation::kNone : activation,
                                   frozen,
                                   x.data(),
                                   scale.data(),
                                   bias.data(),
                                   mean.data(),
                                   frozen ? nullptr : mean_low.data(),
                                   rstd.data(),
                                   !frozen && activation == Activation::kRelu ? y.data() : nullptr,
                                   frozen ? nullptr : residual.data(),
                                   dy.data(),
                                   nullptr,
                                   nullptr,
                                   dx.data(),
                                   dscale.data(),
                                   dbias.data(),
                                   frozen ? nullptr : dresidual.data()};
    norm_backward(s, backward, workspace.data(), parallel);
    for (const auto* result : {&dx, &dresidual}) arrays.add(*result);
    for (const auto* result : {&dscale, &dbias}) arrays.add(*result);
  }
  return arrays.results;
}

// All three passes of num_problems convolutions: workers for small problems and for the parts of a large batch, a team
// of threads for one large problem of few images.
template <class S>
Values conv(int64_t num_problems, int64_t batch, int64_t size, Parallel& parallel) {
  const int64_t N = batch, in = 24, out = 40, n = num_problems;
  const ConvArguments arguments{{n, N, size, size + 1, in},
                                {n, 3, 2, in, out},
                                {n, N, size - 2, size, out},
                                {0, 3, 1, 2},
                                {3, 2, 0, 1},
                                {0, 3, 1, 2},
                                {1, 1},
                                {0, 0, 0, 0},
                                {1, 1},
                                1};
  Arrays arrays;
  auto x = arrays.random<S>(n * N * size * (size + 1) * in, -1, 1),
       w = arrays.random<S>(n * 3 * 2 * in * out, -0.2f, 0.2f),
       y = arrays.random<S>(n * N * (size - 2) * size * out, -1, 1), bias = arrays.random<S>(n * out, -1, 1);
  const auto run = [&](ConvPass pass, bool has_bias, std::vector<S>& first, std::vector<S>& second,
                       std::vector<S>& result) {
    std::string error;
    const ConvType type = sizeof(S) == 2 ? ConvType::kBFloat16 : ConvType::kFloat32;
    const ConvSchedule schedule = make_conv_schedule(pass, type, has_bias, arguments, error);
    if (!error.empty()) throw std::runtime_error(error);
    const auto plan = conv_plan(schedule.key);
    std::vector<std::byte> workspace(conv_workspace(*plan, schedule));
    const auto array = [&](std::vector<S>& values) {
      return ConvArray<std::byte>{reinterpret_cast<std::byte*>(values.data()),
                                  static_cast<int64_t>(values.size() * sizeof(S)) / schedule.num_problems};
    };
    const auto operand = [&](std::vector<S>& values) {
      const auto found = array(values);
      return ConvArray<const std::byte>{found.data, found.bytes};
    };
    const ConvArray<std::byte> no_bias{nullptr, 0};
    run_conv(*plan, schedule, {operand(first), operand(second), has_bias ? array(bias) : no_bias, array(result)},
             workspace.data(), parallel);
    arrays.add(result);
  };
  run(ConvPass::kForward, true, x, w, y);
  std::vector<S> dx(x.size()), dw(w.size());
  run(ConvPass::kInputGradient, false, y, w, dx);
  run(ConvPass::kWeightGradient, true, x, y, dw);
  arrays.add(bias);  // the bias gradient
  return arrays.results;
}

// All three passes of two depthwise convolutions, channels last or first. The number of channels is odd.
template <class S>
Values depthwise(bool channels_last, Parallel& parallel) {
  const int64_t n = 2, N = 3, H = 21, W = 19, C = 37;
  ConvArguments arguments{{n, N, H, W, C}, {n, 3, 5, 1, C}, {n, N, 11, W, C}, {0, 3, 1, 2}, {3, 2, 0, 1},
                          {0, 3, 1, 2},    {2, 1},          {1, 1, 2, 2},     {1, 1},       C};
  if (!channels_last) {
    arguments.x = {n, N, C, H, W};
    arguments.y = {n, N, C, 11, W};
    arguments.lhs_spec = arguments.out_spec = {0, 1, 2, 3};
  }
  Arrays arrays;
  const auto x = arrays.random<S>(n * N * H * W * C, -1, 1), w = arrays.random<S>(n * 15 * C, -1, 1),
             bias = arrays.random<S>(n * C, -1, 1);
  std::vector<S> y(n * N * 11 * W * C), dx(x.size()), dw(w.size()), db(bias.size());
  std::string error;
  const DepthwiseProblem p = make_depthwise_problem(ConvPass::kForward, arguments, kPoolThreads, error);
  if (!error.empty()) throw std::runtime_error(error);
  const auto array = [](const auto& steps, auto* data) {
    const auto& [none, problem, batch, channel, spatial] = steps;
    using T = std::remove_pointer_t<decltype(data)>;
    return DepthwiseActivations<T>{data, problem, batch, channel, {spatial[0], spatial[1], spatial[2]}};
  };
  const auto weights = [&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    return DepthwiseWeights<T>{data, p.w.problem, p.w.channel, {p.w.spatial[0], p.w.spatial[1], p.w.spatial[2]}};
  };
  std::vector<std::byte> workspace;
  const auto prepare = [&](ConvPass pass) {
    workspace.resize(depthwise_workspace(pass, p.shape, p.copies(), kPoolThreads));
    return static_cast<int64_t>(workspace.size());
  };
  int64_t bytes = prepare(ConvPass::kForward);
  depthwise_forward(DepthwiseForward<S>{p.shape, array(p.x, x.data()), weights(w.data()), bias.data(), true,
                                        array(p.y, y.data()), workspace.data(), bytes},
                    parallel);
  bytes = prepare(ConvPass::kInputGradient);
  depthwise_input_gradient(DepthwiseInputGradient<S>{p.shape, array(p.y, static_cast<const S*>(y.data())),
                                                     weights(w.data()), array(p.x, dx.data()), workspace.data(), bytes},
                           parallel);
  bytes = prepare(ConvPass::kWeightGradient);
  depthwise_weight_gradient(
      DepthwiseWeightGradient<S>{p.shape, array(p.x, x.data()), array(p.y, static_cast<const S*>(y.data())),
                                 weights(dw.data()), db.data(), workspace.data(), bytes},
      parallel);
  for (const auto* result : {&y, &dx, &dw, &db}) arrays.add(*result);
  return arrays.results;
}

// All passes of pooling, channels last or first. Windows overlap, and reach across the parts of several threads.
template <class S>
Values pools(bool channels_last, Parallel& parallel) {
  const int64_t N = 3, C = 37, H = 38, W = 19;
  const PoolShape shape{channels_last ? N : N * C,
                        channels_last ? C : 1,
                        {1, H, W},
                        {1, 5, 3},
                        {1, 18, W},
                        {1, 2, 1},
                        {1, 1, 1},
                        {0, 1, 1}};
  Arrays arrays;
  const auto x = arrays.random<S>(N * H * W * C, -1, 1), dx = arrays.random<S>(N * H * W * C, -1, 1),
             dy = arrays.random<S>(N * 18 * W * C, -1, 1);
  for (int64_t i = 0; i < kPoolPasses; ++i) {
    const auto pass = static_cast<PoolPass>(i);
    std::vector<S> result(returns_dx(pass) ? x.size() : dy.size());
    const int64_t bytes = pool_workspace(pass, shape, sizeof(S), kPoolThreads);
    std::vector<std::byte> workspace(bytes);
    const std::vector<S>& second = returns_dx(pass) ? dy : dx;
    pool(PoolCall<S>{pass, shape, x.data(), second.data(), result.data(), workspace.data(), bytes}, parallel);
    arrays.add(result);
  }
  return arrays.results;
}

// An error in a team of threads reaches the caller.
Values error_in_a_team(Parallel&) {
  try {
    onednn::run_with_team([] { throw std::runtime_error("expected"); });
  } catch (const std::runtime_error& error) {
    return {error.what() == std::string("expected") ? 1.0 : 0.0};
  }
  return {0.0};
}

Values values_with_a_race(Parallel& parallel) {
  double last = 0;
  parallel.run(20, &last, [](void* context, int64_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for the pool to take tasks
    *static_cast<double*>(context) = 1;
  });
  return {last};
}

enum class Threads { kPool, kTeam };

struct Op {
  const char* name;
  Threads threads;  // which run it: the pool's, or a team of oneDNN's
  std::function<Values(Parallel&)> run;
  int callers = kCallers;
};

// Runs the op in all callers at once. The results must be those of one thread, but for the order of sums.
bool check(const Op& op, Pool& pool) {
  helped = 0;
  std::vector<Values> found(op.callers * kCalls);
  {
    std::vector<std::thread> callers;
    for (int i = 0; i < op.callers; ++i)
      callers.emplace_back([&, i] {
        CountingParallel parallel(pool.handle());
        for (int j = 0; j < kCalls; ++j) found[i * kCalls + j] = op.run(parallel);
      });
    for (std::thread& caller : callers) caller.join();
  }
  SerialParallel serial;
  const int64_t on_pool = helped;
  bool right = on_pool > 0 || op.threads == Threads::kTeam;
  const Values expected = op.run(serial);
  double largest = 0, sum = 0;
  for (const double value : expected) {
    largest = std::max(largest, std::abs(value));
    sum += std::abs(value);
  }
  for (const Values& values : found) {
    bool same = values.size() == expected.size() && largest > 0;
    for (size_t i = 0; same && i < expected.size(); ++i) same = std::abs(values[i] - expected[i]) <= 1e-2 * largest;
    right = right && same;
  }
  std::printf("%-7s %s, %lld tasks on the pool, sum of magnitudes: %.9g\n", right ? "ok" : "WRONG", op.name,
              static_cast<long long>(on_pool), sum);
  return right;
}

// Whether oneDNN has bfloat16 convolutions for this CPU. oneDNN 3.2 has none without AVX-512: there jaxgrad's handler
// converts the operands (ffi/cpu/conv/call.cc).
bool has_bfloat16_convolutions() {
  SerialParallel serial;
  try {
    conv<BFloat16>(1, 3, 20, serial);
  } catch (const onednn::Error& error) {
    if (error.status != dnnl_unimplemented) throw;
    return false;
  }
  return true;
}

int run(const std::string& argument) {
  Pool pool;
  if (argument == "--race") return check({"a loop with a race", Threads::kPool, values_with_a_race}, pool) ? 0 : 1;
  const bool has_onednn = argument != "--without-onednn";
  if (has_onednn) {
    onednn::load(argument);
    std::printf("oneDNN %s with teams of %d threads, ", onednn::version().c_str(), onednn::team_size());
  }
  std::printf("%s\n", isa_name());
  // Just large enough for several threads.
  const NormShape batch_columns{1, 540, 130, 1, 130, 1}, batch_runs{1, 5, 15, 900, 15, 1};
  const NormShape sample_columns{3, 470, 48, 1, 12, 1}, samples_of_calls{18, 20, 48, 4, 12, 3};
  const NormShape rows{140, 1, 500, 1, 1, 2}, rows_of_runs{6, 1, 24, 480, 12, 3};
  std::vector<Op> ops = {
      {"gru, float32", Threads::kPool, gru<float, false>},
      {"gru, float32, linear_before_reset", Threads::kPool, gru<float, true>},
      {"gru, float32, batch-major", Threads::kPool, gru<float, true, true>},
      {"gru, float64", Threads::kPool, gru<double, false>},
      {"gru, bfloat16", Threads::kPool, gru<BFloat16, true>},
      {"norm, float32, a batch, channels last", Threads::kPool,
       [=](Parallel& p) { return norm<float>(batch_columns, Activation::kRelu, p); }},
      {"norm, float64, a batch, channels first", Threads::kPool,
       [=](Parallel& p) { return norm<double>(batch_runs, Activation::kRelu, p); }},
      {"norm, bfloat16, a batch, channels first", Threads::kPool,
       [=](Parallel& p) { return norm<BFloat16>(batch_runs, Activation::kSilu, p); }},
      {"norm, float32, few samples", Threads::kPool,
       [=](Parallel& p) { return norm<float>(sample_columns, Activation::kGelu, p); }},
      {"norm, bfloat16, samples of several calls", Threads::kPool,
       [=](Parallel& p) { return norm<BFloat16>(samples_of_calls, Activation::kRelu, p); }},
      {"norm, float32, rows", Threads::kPool, [=](Parallel& p) { return norm<float>(rows, Activation::kSilu, p); }},
      {"norm, bfloat16, rows of runs", Threads::kPool,
       [=](Parallel& p) { return norm<BFloat16>(rows_of_runs, Activation::kNone, p); }},
      {"depthwise, float32, channels last", Threads::kPool, [](Parallel& p) { return depthwise<float>(true, p); }},
      {"depthwise, bfloat16, channels first", Threads::kPool,
       [](Parallel& p) { return depthwise<BFloat16>(false, p); }},
      {"pool, float32, channels last", Threads::kPool, [](Parallel& p) { return pools<float>(true, p); }},
      {"pool, bfloat16, channels first", Threads::kPool, [](Parallel& p) { return pools<BFloat16>(false, p); }},
  };
  std::vector<Op> onednn_ops = {
      {"conv, float32, nine problems", Threads::kPool, [](Parallel& p) { return conv<float>(9, 3, 9, p); }},
      {"conv, float32, one large problem", Threads::kTeam, [](Parallel& p) { return conv<float>(1, 3, 20, p); }},
      {"conv, float32, parts of a batch", Threads::kPool, [](Parallel& p) { return conv<float>(1, 14, 13, p); }},
      {"an error in a team", Threads::kTeam, error_in_a_team},
  };
  if (has_onednn && has_bfloat16_convolutions())
    onednn_ops.push_back(
        {"conv, bfloat16, one large problem", Threads::kTeam, [](Parallel& p) { return conv<BFloat16>(1, 3, 20, p); }});
  for (Op& op : onednn_ops) op.callers = kOnednnCallers;
  if (has_onednn) ops.insert(ops.end(), onednn_ops.begin(), onednn_ops.end());
  bool right = true;
  for (const Op& op : ops) right = check(op, pool) && right;
  return right ? 0 : 1;
}

}  // namespace
}  // namespace jaxgrad

int main(int count, char** arguments) {
  if (count != 2) return 2;
  return jaxgrad::run(arguments[1]);
}
