// A bounded cache for each device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "common/lru_cache.h"

namespace jaxgrad {

// Drops from all caches of this kind what nothing else uses. A call that is running, and a CUDA graph, keep what they
// use in its cache. Waits for the GPUs: not to be called where a GPU may be waiting for this thread.
void clear_device_caches();

// Makes clear_device_caches() call `clear` too, after those of older caches: plans go before their kernels.
void clear_with_device_caches(std::function<void()> clear);

// Entries of one device do not evict those of another. Unloading a kernel waits until its GPU is idle, and that GPU may
// be waiting for a GPU on which this thread has yet to launch. Create it with `new` and never destroy it: at exit, the
// driver may be unloaded first.
template <class Key, class Value, class KeyHash>
class DeviceCaches {
 public:
  using Cache = LruCache<Key, Value, KeyHash>;

  // capacity: of each device. keeps: whether clear_device_caches() keeps a value.
  explicit DeviceCaches(
      size_t capacity, std::function<bool(const Value&)> keeps = [](const Value&) { return false; })
      : capacity_(capacity), keeps_(std::move(keeps)) {
    clear_with_device_caches([this] { clear(); });
  }

  Cache& of(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return caches_.try_emplace(device, capacity_).first->second;
  }

  // The sums over all devices that have a cache.
  CacheInfo info() {
    CacheInfo sum{0, 0, 0, static_cast<int64_t>(capacity_)};
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, cache] : caches_) {
      const CacheInfo own = cache.info();
      sum.hits += own.hits;
      sum.misses += own.misses;
      sum.size += own.size;
    }
    sum.capacity *= std::max<int64_t>(1, static_cast<int64_t>(caches_.size()));
    return sum;
  }

 private:
  void clear() {
    std::vector<Cache*> found;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [device, cache] : caches_) found.push_back(&cache);
    }
    for (Cache* cache : found) cache->clear_unused(keeps_);
  }

  const size_t capacity_;
  const std::function<bool(const Value&)> keeps_;
  std::mutex mutex_;
  std::map<int, Cache> caches_;
};

}  // namespace jaxgrad
