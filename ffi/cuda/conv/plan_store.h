// Stores the results of the exhaustive search and the verdicts on engines: for all devices of a kind in one process
// and, if a directory is set, for other processes, in one small file per key.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "common/lru_cache.h"

namespace jaxgrad {

// Several threads and processes may share a directory. A file is written under a temporary name and then renamed, so a
// reader finds a complete file or none. A file that is truncated, damaged or has another key is ignored and replaced,
// and so is what is no regular file. The first write of a process to a directory removes temporary files of processes
// that were killed. If the directory cannot be used, the search runs again.
class PlanStore {
 public:
  struct Info {
    int64_t hits, misses;
    std::string error;  // of the last write that failed; empty if none failed
  };

  static constexpr size_t kCapacity = 4096;              // values in memory; those used last
  static constexpr int64_t kTemporarySeconds = 60 * 60;  // a temporary file of this age is nobody's

  // suffix: of the names of this store's files, such as ".plan".
  explicit PlanStore(const char* suffix) : suffix_(suffix) {}

  // Sets the directory, which is created at the first write. An empty path disables files.
  void use_directory(const std::string& directory);
  // The value of `key`, from memory or from the directory. Keys and values are lines of text.
  std::optional<std::string> find(const std::string& key);
  void put(const std::string& key, const std::string& value);
  Info info();

 private:
  std::optional<std::string> read_file(const std::string& directory, const std::string& key);
  void write_file(const std::string& directory, const std::string& key, const std::string& value);

  const char* const suffix_;
  LruCache<std::string, std::string, std::hash<std::string>> values_{kCapacity};
  std::mutex mutex_;  // guards the members below; not held during file operations
  std::string directory_, error_;
  bool cleaned_ = false;
  int64_t hits_ = 0, misses_ = 0;
};

// The stores of this process, which have one directory.
PlanStore& plan_store();   // results of the exhaustive search
PlanStore& check_store();  // verdicts on engines

}  // namespace jaxgrad
