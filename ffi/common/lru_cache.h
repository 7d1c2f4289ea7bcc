// A bounded cache of plans, which any number of threads may share; the one unused for longest leaves first.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace jaxgrad {

struct PlanCacheInfo {
  int64_t hits, misses, size, capacity;
};

template <class Key, class Plan, class KeyHash>
class PlanCache {
 public:
  using Shared = std::shared_ptr<const Plan>;

  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  // The plan of `key`; build() makes it where there is none.
  template <class Build>
  Shared get(const Key& key, Build build) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (auto found = index_.find(key); found != index_.end()) {
        ++hits_;
        order_.splice(order_.begin(), order_, found->second);
        return found->second->second;
      }
      ++misses_;
    }
    // Built outside the lock: another thread may build the same plan, and then one of the two is dropped.
    Shared plan = build();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(key); found != index_.end()) return found->second->second;
    insert(key, plan);
    return plan;
  }

  // Puts `plan` in the place of whatever is kept for `key`.
  void put(const Key& key, Shared plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(key); found != index_.end()) {
      found->second->second = std::move(plan);
    } else {
      insert(key, std::move(plan));
    }
  }

  // Keeps `plan` for `key` where nothing is kept yet.
  void add(const Key& key, Shared plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (index_.find(key) == index_.end()) insert(key, std::move(plan));
  }

  PlanCacheInfo info() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {hits_, misses_, static_cast<int64_t>(order_.size()), static_cast<int64_t>(capacity_)};
  }

 private:
  void insert(const Key& key, Shared plan) {
    order_.emplace_front(key, std::move(plan));
    index_.emplace(key, order_.begin());
    if (order_.size() > capacity_) {
      index_.erase(order_.back().first);
      order_.pop_back();
    }
  }

  using Entry = std::pair<Key, Shared>;
  const size_t capacity_;
  std::mutex mutex_;
  std::list<Entry> order_;
  std::unordered_map<Key, typename std::list<Entry>::iterator, KeyHash> index_;
  int64_t hits_ = 0, misses_ = 0;
};

}  // namespace jaxgrad
