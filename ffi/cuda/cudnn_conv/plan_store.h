// Stores the results of the exhaustive search and the verdicts on engines: for all devices of a kind in one process
// and, if a directory is set, for other processes.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "common/lru_cache.h"
#include "cuda/runtime/file_store.h"

namespace jaxgrad {

class PlanStore {
 public:
  static constexpr size_t kCapacity = 4096;  // values in memory; those used last

  // suffix: of the names of this store's files.
  explicit PlanStore(const char* suffix) : files_(suffix) {}

  void use_directory(const std::string& directory);
  // The value of `key`, from memory or from the directory.
  std::optional<std::string> find(const std::string& key);
  void put(const std::string& key, const std::string& value);
  FileStore::Info info() { return files_.info(); }

 private:
  LruCache<std::string, std::string, std::hash<std::string>> values_{kCapacity};
  FileStore files_;
};

// The stores of this process, which have one directory.
PlanStore& plan_store();   // results of the exhaustive search
PlanStore& check_store();  // verdicts on engines

}  // namespace jaxgrad
