#include "cpu/conv/summed_plan.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "cpu/runtime/arena.h"

namespace jaxgrad {
namespace {

constexpr int64_t kMaxPositions = 1 << 16;  // of a part, for each thread
constexpr int64_t kMaxParts = 1 << 16;      // more are of calls that fit no memory, and their list would fill it

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Images [begin, end).
ConvPart images(const ConvKey& key, int64_t begin, int64_t end) {
  ConvPart part{key, begin * key.x.strides[0], begin * key.y.strides[0]};
  part.key.x.sizes[0] = part.key.y.sizes[0] = end - begin;
  return part;
}

// Rows [begin, end) of y along the first spatial axis, and the rows of x that their windows cover. x has no rows if the
// windows cover only padding.
ConvPart band(ConvPart part, int64_t begin, int64_t end) {
  ConvKey& key = part.key;
  const int64_t window = (key.w.sizes[2] - 1) * key.rhs_dilation[0] + 1;
  const int64_t first = begin * key.window_strides[0] - key.padding_low[0];
  const int64_t last = (end - 1) * key.window_strides[0] - key.padding_low[0] + window;
  const int64_t x_begin = std::max<int64_t>(first, 0), x_end = std::min(last, key.x.sizes[2]);
  part.x_offset += x_begin * key.x.strides[2];
  part.y_offset += begin * key.y.strides[2];
  key.x.sizes[2] = x_end - x_begin;
  key.y.sizes[2] = end - begin;
  // The strides of a dense image: oneDNN recognizes layouts by all strides, and there is only one image.
  key.x.strides[0] = key.x.sizes[2] * key.x.strides[2];
  key.y.strides[0] = key.y.sizes[2] * key.y.strides[2];
  key.padding_low[0] = x_begin - first;
  key.padding_high[0] = last - x_end;
  return part;
}

// Bands are not dense where the features come before the rows. A 1x1 window would then have no fast kernel. With three
// spatial axes, oneDNN has wrong results for some geometries, which a band could have.
bool allows_bands(const ConvKey& key) {
  const bool channels_last = is_channels_last(key.x, key.spatial) && is_channels_last(key.y, key.spatial);
  const bool is_1x1 = std::all_of(key.w.sizes.begin() + 2, key.w.sizes.begin() + 2 + key.spatial,
                                  [](int64_t size) { return size == 1; });
  return key.spatial < 3 && (channels_last || !is_1x1);
}

class SummedPlan final : public ConvPlan {
 public:
  SummedPlan(const ConvKey& key, const std::vector<ConvPart>& parts)
      : weights_(elements(key.w, key.spatial)), features_(key.has_bias ? key.w.sizes[0] : 0) {
    for (const ConvPart& part : parts) {
      parts_.push_back(
          {conv_plan(part.key), part.x_offset * int64_t{sizeof(float)}, part.y_offset * int64_t{sizeof(float)}});
      part_bytes_ = std::max(part_bytes_, parts_.back().plan->workspace_bytes());
    }
  }

  int64_t workspace_bytes() const override {
    Arena arena(nullptr);
    Scratch(*this, arena);
    return arena.bytes();
  }

  // The slowest kernel of a part: that of the reference, if any part has it.
  std::string implementation() const override {
    for (const Part& part : parts_)
      if (std::string name = part.plan->implementation(); name.rfind("ref", 0) == 0) return name;
    return parts_.front().plan->implementation();
  }

  void run(const void* x, const void* dy, void* db, void* dw, std::byte* workspace) const override {
    Arena arena(workspace);
    const Scratch scratch(*this, arena);
    for (const Part& part : parts_) {
      const bool is_first = &part == &parts_.front();
      part.plan->run(static_cast<const std::byte*>(x) + part.x_bytes, static_cast<const std::byte*>(dy) + part.y_bytes,
                     is_first || db == nullptr ? db : scratch.db, is_first ? dw : scratch.dw, scratch.part);
      if (is_first) continue;
      add(static_cast<float*>(dw), scratch.dw, weights_);
      if (db != nullptr) add(static_cast<float*>(db), scratch.db, features_);
    }
  }

 private:
  struct Part {
    std::shared_ptr<const ConvPlan> plan;
    int64_t x_bytes, y_bytes;  // offsets
  };
  struct Scratch {
    Scratch(const SummedPlan& plan, Arena& arena)
        : dw(arena.take<float>(plan.weights_)),
          db(arena.take<float>(plan.features_)),
          part(arena.take<std::byte>(plan.part_bytes_)) {}

    float *dw, *db;
    std::byte* part;
  };

  int64_t weights_, features_, part_bytes_ = 0;
  std::vector<Part> parts_;
};

}  // namespace

void add(float* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

std::vector<ConvPart> conv_parts(const ConvKey& key) {
  const int64_t num_images = key.y.sizes[0], rows = key.y.sizes[2], limit = kMaxPositions * key.threads;
  int64_t image = 1;
  for (int i = 0; i < key.spatial; ++i) image *= key.y.sizes[i + 2];
  const ConvPart whole{key, 0, 0};
  if (key.pass != ConvPass::kWeightGradient || key.type != ConvType::kFloat32 || num_images * image <= limit)
    return {whole};
  const int64_t num_parts = divide_up(num_images, std::max<int64_t>(1, limit / image));
  const int64_t num_bands = allows_bands(key) ? divide_up(rows, std::max<int64_t>(1, limit / (image / rows))) : 1;
  if (num_parts > kMaxParts / num_bands) return {whole};
  std::vector<ConvPart> parts;
  for (int64_t i = 0; i < num_parts; ++i) {
    const ConvPart part = images(key, i * num_images / num_parts, (i + 1) * num_images / num_parts);
    if (num_bands == 1) parts.push_back(part);
    for (int64_t j = 0; num_bands > 1 && j < num_bands; ++j) {
      parts.push_back(band(part, j * rows / num_bands, (j + 1) * rows / num_bands));
      if (parts.back().key.x.sizes[2] < 1) return {whole};
    }
  }
  return parts;
}

std::shared_ptr<const ConvPlan> make_summed_plan(const ConvKey& key, const std::vector<ConvPart>& parts) {
  return std::make_shared<SummedPlan>(key, parts);
}

}  // namespace jaxgrad
