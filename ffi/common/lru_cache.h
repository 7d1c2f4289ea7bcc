// A bounded, thread-safe cache of shared immutable values. The least recently used entry is evicted first.
#pragma once

#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace jaxgrad {

struct CacheInfo {
  int64_t hits, misses, size, capacity;
};

template <class Key, class Value, class KeyHash>
class LruCache {
 public:
  using Shared = std::shared_ptr<const Value>;

  explicit LruCache(size_t capacity) : capacity_(capacity) {}

  // Returns the value of `key`; on a miss, build() makes it.
  template <class Build>
  Shared get(const Key& key, Build build) {
    if (Shared found = find(key)) return found;
    count_miss();
    // The lock is not held while building. If two threads build the same value, the first one inserted stays.
    Shared value = build(), evicted;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(key); found != index_.end()) return found->second->second;
    evicted = insert(key, value);
    return value;
  }

  // Returns the value of `key`, or null.
  Shared find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    ++hits_;
    entries_.splice(entries_.begin(), entries_, found->second);
    return found->second->second;
  }

  // Inserts or replaces the value of `key`.
  void put(const Key& key, Shared value) {
    Shared evicted;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(key); found != index_.end()) {
      found->second->second.swap(value);
    } else {
      evicted = insert(key, std::move(value));
    }
  }

  // Inserts the value unless `key` has one already.
  void add(const Key& key, Shared value) {
    Shared evicted;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (index_.find(key) == index_.end()) evicted = insert(key, std::move(value));
  }

  void clear() {
    std::list<Entry> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    index_.clear();
    dropped.swap(entries_);
  }

  // Drops the values that only this cache holds, less those for which keeps() is true. To drop others would free
  // nothing, and a new call would build them again.
  template <class Keeps>
  void clear_unused(Keeps keeps) {
    std::list<Entry> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unordered_map<const Value*, long> held;  // a value may have several keys
    for (const auto& [key, value] : entries_) ++held[value.get()];
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const auto next = std::next(entry);
      const Shared& value = entry->second;
      if (value.use_count() == held[value.get()] && !keeps(*value)) {
        index_.erase(entry->first);
        dropped.splice(dropped.begin(), entries_, entry);
      }
      entry = next;
    }
  }

  CacheInfo info() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {hits_, misses_, static_cast<int64_t>(entries_.size()), static_cast<int64_t>(capacity_)};
  }

 private:
  using Entry = std::pair<Key, Shared>;

  void count_miss() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++misses_;
  }

  // Returns the evicted value, if any. The caller destroys it after it has released the lock: to destroy a GPU plan may
  // take as long as the GPU is busy.
  Shared insert(const Key& key, Shared value) {
    entries_.emplace_front(key, std::move(value));
    index_.emplace(key, entries_.begin());
    if (entries_.size() <= capacity_) return nullptr;
    Shared evicted = std::move(entries_.back().second);
    index_.erase(entries_.back().first);
    entries_.pop_back();
    return evicted;
  }

  const size_t capacity_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<Key, typename std::list<Entry>::iterator, KeyHash> index_;
  int64_t hits_ = 0, misses_ = 0;
};

}  // namespace jaxgrad
