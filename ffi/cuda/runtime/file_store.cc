#include "cuda/runtime/file_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

namespace jaxgrad {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMagic = "jaxgrad plan 1 ";  // includes the version of the file format
constexpr off_t kMaxFileSize = 16 << 20;           // bytes; a compiled kernel has some hundred thousand

// FNV-1a, 64 bits, as 16 hexadecimal digits. Unlike std::hash, it is the same on every machine.
std::string digest(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3u;
  std::string digits;
  for (int shift = 60; shift >= 0; shift -= 4) digits += "0123456789abcdef"[hash >> shift & 15];
  return digits;
}

fs::path path_of(const std::string& directory, const std::string& key, const char* suffix) {
  return fs::path(directory) / (digest(key) + suffix);
}

std::string contents(const std::string& key, const std::string& value) {
  const std::string body = key + "\n" + value + "\n";
  return kMagic + digest(body) + "\n" + body;
}

class File {
 public:
  // Never waits, as it would for the other end of a pipe, and follows no link.
  File(const fs::path& path, int flags)
      : descriptor_(open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666)) {}
  ~File() { close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }

  // The text of a regular file; empty if there is none.
  std::string read_all() const {
    struct stat status{};
    if (!is_open() || fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size > kMaxFileSize)
      return "";
    std::string text(static_cast<size_t>(status.st_size), '\0');
    size_t done = 0;
    while (done < text.size()) {
      const ssize_t count = ::read(descriptor_, text.data() + done, text.size() - done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      done += static_cast<size_t>(count);
    }
    text.resize(done);
    return text;
  }

  // Writes the text and closes the file. Returns an error of errno or 0.
  int write_all(const std::string& text) {
    for (size_t done = 0; done < text.size();) {
      const ssize_t count = ::write(descriptor_, text.data() + done, text.size() - done);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return errno;
      done += static_cast<size_t>(count);
    }
    return close() == 0 ? 0 : errno;  // some file systems report a full disk only now
  }

 private:
  int close() {
    const int open = descriptor_;
    descriptor_ = -1;
    return open < 0 ? 0 : ::close(open);
  }

  int descriptor_;
};

// The name of a temporary file: that of the final one, a dot and digits. Process ids are not unique: machines may share
// a directory.
fs::path temporary_of(const fs::path& path) {
  std::random_device random;
  return path.string() + "." + std::to_string(random()) + std::to_string(random());
}

bool is_temporary(const std::string& name, const char* suffix) {
  const size_t dot = name.rfind('.');
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  return dot != std::string::npos && dot + 1 < name.size() && fs::path(name.substr(0, dot)).extension() == suffix &&
         std::all_of(name.begin() + static_cast<ptrdiff_t>(dot) + 1, name.end(), is_digit);
}

// Removes temporary files that are much older than `written`, a file that was written just now. Both times are those of
// the file system, whose clock may differ from this machine's. Other processes may remove the same files.
void remove_old_temporaries(const std::string& directory, const fs::path& written) {
  std::error_code error;
  const auto now = fs::last_write_time(written, error);
  if (error) return;
  const std::string suffix = written.extension().string();
  const auto limit = now - std::chrono::seconds(FileStore::kTemporarySeconds);
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    if (!is_temporary(entry->path().filename().string(), suffix.c_str())) continue;
    std::error_code gone;
    if (fs::is_regular_file(entry->symlink_status(gone)) && entry->last_write_time(gone) < limit && !gone)
      fs::remove(entry->path(), gone);
  }
}

// Writes a file in one step: it has the new text or, after an error, the old. Returns the error.
std::error_code replace_file(const fs::path& path, const std::string& text) {
  const fs::path temporary = temporary_of(path);
  File file(temporary, O_WRONLY | O_CREAT | O_EXCL);
  std::error_code error;
  if (!file.is_open()) return {errno, std::generic_category()};
  error.assign(file.write_all(text), std::generic_category());
  if (!error) fs::rename(temporary, path, error);
  std::error_code ignored;
  if (error) fs::remove(temporary, ignored);
  return error;
}

}  // namespace

void FileStore::use_directory(const std::string& directory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  directory_ = directory;
  error_.clear();
  cleaned_ = false;
}

std::optional<std::string> FileStore::read(const std::string& key) {
  const std::string folder = directory();
  if (folder.empty()) return std::nullopt;
  const std::string text = File(path_of(folder, key, suffix_), O_RDONLY).read_all();
  const std::string header = kMagic + digest("") + "\n" + key + "\n";  // as long as with the digest of the value
  std::optional<std::string> value;
  if (text.size() > header.size()) {
    const std::string found = text.substr(header.size(), text.size() - header.size() - 1);
    if (contents(key, found) == text) value = found;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ++(value ? hits_ : misses_);
  return value;
}

void FileStore::write(const std::string& key, const std::string& value) {
  const std::string folder = directory();
  if (folder.empty()) return;
  std::error_code error;
  fs::create_directories(folder, error);
  const fs::path path = path_of(folder, key, suffix_);
  if (!error) error = replace_file(path, contents(key, value));
  bool cleans = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error) {
      error_ = error.message();
    } else {
      cleans = !std::exchange(cleaned_, true);
    }
  }
  if (cleans) remove_old_temporaries(folder, path);
}

FileStore::Info FileStore::info() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {hits_, misses_, error_};
}

std::string FileStore::directory() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return directory_;
}

}  // namespace jaxgrad
