#include "cuda/norm/op.h"

#include <atomic>
#include <functional>
#include <random>
#include <string>
#include <utility>

#include "cuda/norm/instructions_source.h"
#include "cuda/runtime/device_caches.h"
#include "cuda/runtime/device_source.h"
#include "cuda/runtime/module.h"
#include "cuda/runtime/no_plan.h"
#include "cuda/runtime/nvrtc.h"

namespace jaxgrad {
namespace {

constexpr size_t kPlanCapacity = 1024, kKernelCapacity = 128;  // of a device
constexpr int kMinArchitecture = 80;                           // hints of caching

// A number for the flags of one call; see team.cuh. Each is far from those of other calls.
uint64_t draw_nonce() {
  static std::atomic<uint64_t> state{(uint64_t{std::random_device{}()} << 32) | std::random_device{}()};
  uint64_t bits = state.fetch_add(0x9e3779b97f4a7c15u);  // SplitMix64
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

template <class Arguments>
void place(Arguments& arguments, const NormProgram& program, const NormArrays& arrays, double epsilon,
           char* workspace) {
  arguments.arrays = arrays;
  arguments.epsilon = static_cast<float>(epsilon);
  arguments.partials = reinterpret_cast<float*>(workspace + program.partials);
  arguments.flags = reinterpret_cast<unsigned long long*>(workspace + program.flags);
  arguments.nonce = draw_nonce();
}

struct KeyHash {
  size_t operator()(const NormKey::Values& values) const {
    uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a of the numbers
    for (const int64_t value : values) hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3u;
    return static_cast<size_t>(hash);
  }
};

}  // namespace

class NormKernel {
 public:
  NormKernel(const NormProgram& program, int device)
      : module_(nvrtc::compile(program.definitions + kDeviceSource + kNormInstructionsSource + program.source,
                               driver::architecture(device))),
        function_(module_.function(program.kernel, program.shared_bytes)) {
    const int64_t resident = driver::resident_blocks(function_, program.threads, program.shared_bytes);
    blocks_at_once_ = resident * driver::attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  }

  CUfunction function() const { return function_; }
  int64_t blocks_at_once() const { return blocks_at_once_; }  // on the device

 private:
  driver::Module module_;
  CUfunction function_;
  int64_t blocks_at_once_;
};

NormGpu norm_gpu(int device) {
  if (driver::architecture(device) < kMinArchitecture)
    throw NoPlan("the normalization kernels require a GPU of compute capability 8.0 or later");
  return {driver::attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
          driver::attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)};
}

std::shared_ptr<const NormPlan> norm_plan(const NormKey& key, int device) {
  static auto& plans = *new DeviceCaches<NormKey::Values, NormPlan, KeyHash>(kPlanCapacity);
  static auto& kernels = *new DeviceCaches<std::string, NormKernel, std::hash<std::string>>(kKernelCapacity);
  return plans.of(device).get(key.values(), [&] {
    const driver::RelaxedCapture relaxed;
    const NormProgram program = norm_program(key, norm_gpu(device));
    const std::string name = program.definitions + program.kernel + std::to_string(program.shared_bytes);
    auto kernel = kernels.of(device).get(name, [&] { return std::make_shared<const NormKernel>(program, device); });
    if (program.cooperative && kernel->blocks_at_once() < program.blocks)
      throw NoPlan("the GPU runs " + std::to_string(kernel->blocks_at_once()) +
                   " blocks of a normalization kernel at once, and " + std::to_string(program.blocks) +
                   " exchange their sums");
    return std::make_shared<const NormPlan>(NormPlan{program, std::move(kernel)});
  });
}

void norm(CUstream stream, const NormPlan& plan, const NormArrays& arrays, double epsilon, void* workspace) {
  const NormProgram& program = plan.program;
  if (program.blocks == 0) return;
  NormColumns columns = program.columns;
  NormRows rows = program.rows;
  char* const bytes = static_cast<char*>(workspace);
  if (program.has_columns) {
    place(columns, program, arrays, epsilon, bytes);
    columns.sums = reinterpret_cast<float*>(bytes + program.sums);
  } else {
    place(rows, program, arrays, epsilon, bytes);
  }
  CUlaunchAttribute cooperative{};
  cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  cooperative.value.cooperative = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(program.blocks);
  config.blockDimX = static_cast<unsigned>(program.threads);
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(program.shared_bytes);
  config.hStream = stream;
  config.attrs = &cooperative;
  config.numAttrs = program.cooperative ? 1 : 0;
  void* parameters[] = {program.has_columns ? static_cast<void*>(&columns) : &rows};
  JAXGRAD_DRIVER(driver::api().cuLaunchKernelEx(&config, plan.kernel->function(), parameters, nullptr));
}

}  // namespace jaxgrad
