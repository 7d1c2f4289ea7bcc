// What is known of plans beyond one device and, by a directory with one small file for each key, beyond one process.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

namespace jaxgrad {

// Any number of threads and processes may share a directory. A file is written beside its place and then moved there,
// so that a reader finds it whole or not at all; one that is cut off, damaged or of another key counts as none, and is
// written again. Nothing here throws: without its directory a process works as well, and slower.
class PlanStore {
 public:
  struct Info {
    int64_t hits, misses;
    std::string problem;  // why something could not be written; empty while all could
  };

  // The directory from now on, made when it is first written to; an empty path for none.
  void use(const std::string& directory);
  // What is kept for `key`, a line of text: by this process, else in the directory.
  std::optional<std::string> find(const std::string& key);
  void keep(const std::string& key, const std::string& value);
  Info info();

 private:
  std::optional<std::string> find_file(const std::string& directory, const std::string& key);
  void keep_file(const std::string& directory, const std::string& key, const std::string& value);

  std::mutex mutex_;  // guards what follows; no file is read or written under it
  std::unordered_map<std::string, std::string> kept_;
  std::string directory_, problem_;
  int64_t hits_ = 0, misses_ = 0;
};

PlanStore& plan_store();  // the process's own

}  // namespace jaxgrad
