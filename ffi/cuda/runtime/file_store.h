// Values that processes keep for each other in a directory, in one small file per key.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace jaxgrad {

// Several threads and processes may share a directory. A file is written under a temporary name and then renamed, so a
// reader finds a complete file or none. A file that is truncated, damaged or has another key is ignored and replaced,
// and so is what is no regular file. The first write of a process to a directory removes temporary files of processes
// that were killed. Without a directory, and where it cannot be used, there are no values.
class FileStore {
 public:
  struct Info {
    int64_t hits, misses;
    std::string error;  // of the last write that failed; empty if none failed
  };

  static constexpr int64_t kTemporarySeconds = 60 * 60;  // a temporary file of this age is nobody's

  // suffix: of the names of this store's files, such as ".plan".
  explicit FileStore(const char* suffix) : suffix_(suffix) {}

  // Sets the directory, which is created at the first write. An empty path disables files.
  void use_directory(const std::string& directory);
  std::string directory();
  std::optional<std::string> read(const std::string& key);
  void write(const std::string& key, const std::string& value);
  Info info();

 private:
  const char* const suffix_;
  std::mutex mutex_;  // guards the members below; not held during file operations
  std::string directory_, error_;
  bool cleaned_ = false;
  int64_t hits_ = 0, misses_ = 0;
};

}  // namespace jaxgrad
