#include "cuda/gru/bindings.h"

#include <nanobind/stl/string.h>

#include "cuda/gru/op.h"
#include "cuda/runtime/nvrtc.h"

namespace nb = nanobind;

namespace jaxgrad {
namespace {

GruKey key_of(bool is_backward, int64_t device, int64_t type, bool allow_tf32, bool linear_before_reset,
              int64_t problems, int64_t rows, int64_t hidden) {
  GruKey key;
  key.is_backward = is_backward;
  key.device = static_cast<int>(device);
  key.type = static_cast<FloatType>(type);
  key.allow_tf32 = allow_tf32;
  key.linear_before_reset = linear_before_reset;
  key.problems = problems;
  key.rows = rows;
  key.hidden = hidden;
  return key;
}

// Returns why the kernels of the two passes do not support a call; empty if they do. Compiles nothing.
std::string rejection(int64_t device, int64_t type, bool allow_tf32, bool linear_before_reset, int64_t problems,
                      int64_t rows, int64_t hidden) {
  const nb::gil_scoped_release release;
  try {
    for (const bool is_backward : {false, true})
      gru_variant(key_of(is_backward, device, type, allow_tf32, linear_before_reset, problems, rows, hidden));
  } catch (const NoPlan& reason) {
    return reason.what();
  }
  return "";
}

// Returns why the kernel of a pass cannot be compiled; empty if it is loaded. Throws nb::value_error if the GPU cannot
// run it, and std::runtime_error for an error that may pass.
std::string load(bool is_backward, int64_t device, int64_t type, bool allow_tf32, bool linear_before_reset,
                 int64_t problems, int64_t rows, int64_t hidden, bool has_lengths, bool has_resets, bool has_reset_h,
                 bool has_clip) {
  GruKey key = key_of(is_backward, device, type, allow_tf32, linear_before_reset, problems, rows, hidden);
  key.has_lengths = has_lengths;
  key.has_resets = has_resets;
  key.has_reset_h = has_reset_h;
  key.has_clip = has_clip;
  const nb::gil_scoped_release release;
  const driver::CurrentDevice current(key.device);
  try {
    gru_plan(key);
  } catch (const NoPlan& reason) {
    throw nb::value_error(reason.what());
  } catch (const nvrtc::Error& error) {
    return error.what();
  }
  return "";
}

// The kernel of a pass for single blocks of so many rows, which multiply in float32 or on tensor cores.
nb::dict block_program(bool is_backward, int64_t type, bool linear_before_reset, int64_t problems, int64_t rows,
                       int64_t hidden, bool has_lengths, bool has_resets, bool has_reset_h, bool has_clip,
                       int64_t rows_of_block, bool on_tensor_cores) {
  GruKey key = key_of(is_backward, 0, type, on_tensor_cores, linear_before_reset, problems, rows, hidden);
  key.has_lengths = has_lengths;
  key.has_resets = has_resets;
  key.has_reset_h = has_reset_h;
  key.has_clip = has_clip;
  const auto rows_at_once = static_cast<int>(rows_of_block);
  if (on_tensor_cores && rows_at_once % kGruTile != 0) throw nb::value_error("rows_of_block must be a multiple of 8");
  const GruVariant found =
      on_tensor_cores ? gru_tensor_block_variant(key, rows_at_once / kGruTile) : gru_block_variant(key, rows_at_once);
  nb::dict fields;
  fields["definitions"] = gru_definitions(key, found);
  fields["source"] = gru_source(key, found);
  fields["blocks"] = found.holders;
  fields["tiles"] = found.tiles;
  fields["threads"] = gru_threads(found);
  fields["shared_bytes"] = found.shared_bytes;
  return fields;
}

nb::dict variant(bool is_backward, int64_t device, int64_t type, bool allow_tf32, bool linear_before_reset,
                 int64_t problems, int64_t rows, int64_t hidden) {
  const GruVariant found =
      gru_variant(key_of(is_backward, device, type, allow_tf32, linear_before_reset, problems, rows, hidden));
  nb::dict fields;
  fields["holder"] = found.holder == GruHolder::kBlock         ? "block"
                     : found.holder == GruHolder::kTensorBlock ? "tensor block"
                     : found.holder == GruHolder::kCluster     ? "cluster"
                                                               : "team";
  fields["padded"] = found.padded;
  fields["units"] = found.units;
  fields["row_tiles"] = found.row_tiles;
  fields["batches"] = found.batches;
  fields["pair"] = found.pair;
  fields["rows"] = found.rows;
  fields["tiles"] = found.tiles;
  fields["holders"] = found.holders;
  fields["shared_bytes"] = found.shared_bytes;
  fields["workspace_bytes"] = found.workspace_bytes;
  return fields;
}

}  // namespace

void bind_gru(nb::module_& module) {
  module.def("gru_rejection", &rejection, nb::arg("device"), nb::arg("type"), nb::arg("allow_tf32"),
             nb::arg("linear_before_reset"), nb::arg("problems"), nb::arg("rows"), nb::arg("hidden"),
             "Returns why the kernels do not support a call; empty if they do. Compiles nothing.");
  module.def("load_gru_kernel", &load, nb::arg("is_backward"), nb::arg("device"), nb::arg("type"),
             nb::arg("allow_tf32"), nb::arg("linear_before_reset"), nb::arg("problems"), nb::arg("rows"),
             nb::arg("hidden"), nb::arg("has_lengths") = false, nb::arg("has_resets") = false,
             nb::arg("has_reset_h") = false, nb::arg("has_clip") = false,
             "Compiles and loads the kernel of a pass. Returns why it cannot be compiled; empty if it is loaded. "
             "Raises ValueError if the GPU cannot run it, and RuntimeError for an error that may pass.");
  module.def(
      "gru_block_program", &block_program, nb::arg("is_backward"), nb::arg("type"), nb::arg("linear_before_reset"),
      nb::arg("problems"), nb::arg("rows"), nb::arg("hidden"), nb::arg("has_lengths"), nb::arg("has_resets"),
      nb::arg("has_reset_h"), nb::arg("has_clip"), nb::arg("rows_of_block"), nb::arg("on_tensor_cores"),
      "The source and launch parameters of the kernel of a pass for single blocks of so many rows. Needs no GPU.");
  module.def("gru_variant", &variant, nb::arg("is_backward"), nb::arg("device"), nb::arg("type"), nb::arg("allow_tf32"),
             nb::arg("linear_before_reset"), nb::arg("problems"), nb::arg("rows"), nb::arg("hidden"),
             "The kernel of a pass: its sizes, as sizes.cuh defines them, and the bytes of its workspace. Raises "
             "RuntimeError if no kernel supports the call. Compiles nothing.");
}

}  // namespace jaxgrad
