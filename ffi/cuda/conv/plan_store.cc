#include "cuda/conv/plan_store.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <system_error>

namespace jaxgrad {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMagic = "jaxgrad plan 1 ";  // includes the version of the file format
constexpr uintmax_t kMaxFileSize = 1 << 20;        // bytes; valid files have a few hundred

// FNV-1a, 64 bits, as 16 hexadecimal digits. Unlike std::hash, it is the same on every machine.
std::string digest(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3u;
  std::string digits;
  for (int shift = 60; shift >= 0; shift -= 4) digits += "0123456789abcdef"[hash >> shift & 15];
  return digits;
}

fs::path path_of(const std::string& directory, const std::string& key) {
  return fs::path(directory) / (digest(key) + ".plan");
}

std::string contents(const std::string& key, const std::string& value) {
  const std::string body = key + "\n" + value + "\n";
  return kMagic + digest(body) + "\n" + body;
}

}  // namespace

void PlanStore::use_directory(const std::string& directory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  directory_ = directory;
  values_.clear();  // so that results found again are written to the new directory
  error_.clear();
}

std::optional<std::string> PlanStore::find(const std::string& key) {
  std::string directory;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = values_.find(key); found != values_.end()) return found->second;
    directory = directory_;
  }
  return directory.empty() ? std::nullopt : read_file(directory, key);
}

void PlanStore::put(const std::string& key, const std::string& value) {
  std::string directory;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    directory = directory_;
  }
  if (!directory.empty()) write_file(directory, key, value);
}

std::optional<std::string> PlanStore::read_file(const std::string& directory, const std::string& key) {
  std::optional<std::string> value;
  try {
    const fs::path path = path_of(directory, key);
    std::error_code no_file;
    const uintmax_t size = fs::file_size(path, no_file);
    const std::string header = kMagic + digest("") + "\n" + key + "\n";
    if (!no_file && size > header.size() && size <= kMaxFileSize) {
      std::ifstream file(path, std::ios::binary);
      const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
      if (text.size() > header.size()) {
        const std::string found = text.substr(header.size(), text.size() - header.size() - 1);
        if (contents(key, found) == text) value = found;
      }
    }
  } catch (const std::exception&) {  // an unreadable file counts as missing
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ++(value ? hits_ : misses_);
  return value;
}

void PlanStore::write_file(const std::string& directory, const std::string& key, const std::string& value) {
  fs::path temporary;
  try {
    fs::create_directories(directory);
    const fs::path path = path_of(directory, key);
    std::random_device random;  // process ids are not unique: machines may share a directory
    temporary = path;
    temporary += "." + std::to_string(random()) + std::to_string(random());
    std::ofstream file(temporary, std::ios::binary);
    file << contents(key, value);
    file.close();
    if (!file) throw std::runtime_error(temporary.string() + " cannot be written");
    fs::rename(temporary, path);
  } catch (const std::exception& error) {
    std::error_code ignored;
    if (!temporary.empty()) fs::remove(temporary, ignored);
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = error.what();
  }
}

PlanStore::Info PlanStore::info() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {hits_, misses_, error_};
}

PlanStore& plan_store() {
  static auto& store = *new PlanStore;
  return store;
}

}  // namespace jaxgrad
