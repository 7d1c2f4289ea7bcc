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

constexpr const char* kMagic = "jaxgrad plan 1 ";  // the number is that of the file's format
constexpr uintmax_t kLargest = 1 << 20;            // bytes; what is written here has a few hundred

// FNV-1a, 64 bits, which is the same on every machine; as 16 digits.
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

void PlanStore::use(const std::string& directory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  directory_ = directory;
  kept_.clear();  // so that what is asked for again is kept there too
  problem_.clear();
}

std::optional<std::string> PlanStore::find(const std::string& key) {
  std::string directory;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto kept = kept_.find(key); kept != kept_.end()) return kept->second;
    directory = directory_;
  }
  return directory.empty() ? std::nullopt : find_file(directory, key);
}

void PlanStore::keep(const std::string& key, const std::string& value) {
  std::string directory;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_[key] = value;
    directory = directory_;
  }
  if (!directory.empty()) keep_file(directory, key, value);
}

std::optional<std::string> PlanStore::find_file(const std::string& directory, const std::string& key) {
  std::optional<std::string> value;
  try {
    const fs::path path = path_of(directory, key);
    std::error_code none;
    const uintmax_t size = fs::file_size(path, none);
    const std::string before = kMagic + digest("") + "\n" + key + "\n";
    if (!none && size > before.size() && size <= kLargest) {
      std::ifstream file(path, std::ios::binary);
      const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
      if (text.size() > before.size()) {
        const std::string found = text.substr(before.size(), text.size() - before.size() - 1);
        if (contents(key, found) == text) value = found;
      }
    }
  } catch (const std::exception&) {  // what cannot be read is not there
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ++(value ? hits_ : misses_);
  return value;
}

void PlanStore::keep_file(const std::string& directory, const std::string& key, const std::string& value) {
  fs::path beside;
  try {
    fs::create_directories(directory);
    const fs::path path = path_of(directory, key);
    std::random_device random;  // and not the process's number: a directory may be shared by machines
    beside = path;
    beside += "." + std::to_string(random()) + std::to_string(random());
    std::ofstream file(beside, std::ios::binary);
    file << contents(key, value);
    file.close();
    if (!file) throw std::runtime_error(beside.string() + " cannot be written");
    fs::rename(beside, path);
  } catch (const std::exception& error) {
    std::error_code ignored;
    if (!beside.empty()) fs::remove(beside, ignored);
    const std::lock_guard<std::mutex> lock(mutex_);
    problem_ = error.what();
  }
}

PlanStore::Info PlanStore::info() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {hits_, misses_, problem_};
}

PlanStore& plan_store() {
  static auto& store = *new PlanStore;
  return store;
}

}  // namespace jaxgrad
