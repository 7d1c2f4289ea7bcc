#include "cuda/runtime/device_caches.h"

#include <utility>

namespace jaxgrad {
namespace {

struct Registered {
  std::mutex mutex;
  std::vector<std::function<void()>> clear;
};

Registered& registered() {
  static auto& caches = *new Registered;
  return caches;
}

}  // namespace

void clear_with_device_caches(std::function<void()> clear) {
  const std::lock_guard<std::mutex> lock(registered().mutex);
  registered().clear.push_back(std::move(clear));
}

void clear_device_caches() {
  std::vector<std::function<void()>> caches;
  {
    const std::lock_guard<std::mutex> lock(registered().mutex);
    caches = registered().clear;
  }
  for (const auto& clear : caches) clear();
}

}  // namespace jaxgrad
