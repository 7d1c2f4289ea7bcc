#include "cuda/depthwise/gpu.h"

#include "cuda/runtime/driver.h"
#include "cuda/runtime/no_plan.h"

namespace jaxgrad {
namespace {

constexpr int kMinArchitecture = 80;  // asynchronous copies to shared memory

}  // namespace

Gpu gpu_of(int device) {
  CUdevice found = 0;
  JAXGRAD_DRIVER(driver::api().cuDeviceGet(&found, device));
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    JAXGRAD_DRIVER(driver::api().cuDeviceGetAttribute(&value, which, found));
    return value;
  };
  return {10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
              attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
          attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
          attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
          attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)};
}

void check_depthwise_gpu(const Gpu& gpu) {
  if (gpu.architecture < kMinArchitecture)
    throw NoPlan("the depthwise kernels require a GPU of compute capability 8.0 or later");
}

}  // namespace jaxgrad
