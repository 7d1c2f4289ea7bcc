"""The names of all contenders, and which of them stand for JAX and for PyTorch."""

from __future__ import annotations

OURS = "jaxgrad"
OURS_ON_XLA = "jaxgrad on XLA"
OURS_ON_CUDNN = "jaxgrad on cuDNN"
OURS_ON_ONEDNN = "jaxgrad on oneDNN"
OURS_LOOPED = "jaxgrad in lax.map"
# Convolutions of jaxgrad, everything else as in jax.lax.
OURS_CONVOLUTIONS = "jaxgrad convolutions"
# With what jaxgrad.tune measured for the step; with tables of preferences that prefer the other implementation.
OURS_TUNED = "jaxgrad, tuned"
OURS_WRONG = "jaxgrad, wrong table"
OURS_WRONG_TUNED = "jaxgrad, wrong table, tuned"
# The program of jax.lax under jaxgrad.accelerate.
ACCELERATED = "jax.lax, accelerated"

LAX = "jax.lax"
# jnp.pad and a convolution without padding, as Flax writes causal padding.
LAX_PADDED = "jax.lax after jnp.pad"
# lax.pad with interior padding and an ordinary convolution, in place of a convolution that dilates its input.
LAX_DILATED = "jax.lax after lax.pad"
# The maximum of slices in place of lax.reduce_window.
LAX_SLICED = "jax.lax, maximum of slices"
LAX_LOOPED = "jax.lax in lax.map"
# With the flags of XLA in lax_variants.py; on a CPU alone.
BEST_FLAGS = ", best flags"
LAX_FLAGS = LAX + BEST_FLAGS
# Norms as flax writes them (flax_norm.py).
FLAX = "jax.numpy as in flax"
# Batch normalization in older results: the variance in a second pass over x, and x.var.
NUMPY_FUSED = "jax.grad of jax.numpy"
NUMPY_VAR = "jax.grad of x.var"
SCAN = "jax.grad of lax.scan"
# The cell of flax in lax.scan: the input product of each step is in the loop.
SCAN_CELL = "lax.scan of a flax cell"

TORCH_EAGER = "torch, eager"
TORCH_COMPILED = "torch, compiled"
TORCH_GRU = "torch.nn.GRU, eager"
TORCH_GRU_GRAPH = "torch.nn.GRU, CUDA graph"
# cuDNN's RNN functions, called directly; in float16 beside cases in bfloat16, for which cuDNN has fewer algorithms.
CUDNN_RNN = "cuDNN RNN"
CUDNN_RNN_F16 = "cuDNN RNN, float16"

# A pass of a convolution whose windows do not overlap, on rearranged arrays (matrix_product.py). It is no peer.
MATRIX_PRODUCT = "matrix product"
# The GRU of a case with resets, without them: another result, and no peer.
OURS_WITHOUT_RESETS = "jaxgrad without resets"

ONE_DEVICE = " on one device"

_OF_LAX = (LAX, LAX_PADDED, LAX_DILATED, LAX_SLICED, LAX_LOOPED)
# A speed-up over JAX or PyTorch is over the fastest of these that a row has.
PEERS = {
    "JAX": (
        *(
            name + flags
            for name in (LAX, LAX_PADDED, LAX_DILATED, LAX_SLICED, LAX_LOOPED)
            for flags in ("", BEST_FLAGS)
        ),
        *(FLAX, NUMPY_FUSED, NUMPY_VAR, SCAN, SCAN_CELL),
    ),
    "PyTorch": (TORCH_EAGER, TORCH_COMPILED, TORCH_GRU, TORCH_GRU_GRAPH),
}
# Further peers, in the table of the GRU alone.
GRU_PEERS = {"jaxgrad on XLA": (OURS_ON_XLA,), "cuDNN": (CUDNN_RNN, CUDNN_RNN_F16)}
# The order of columns.
ORDER = (
    *(
        OURS,
        OURS_TUNED,
        OURS_WRONG,
        OURS_WRONG_TUNED,
        OURS_CONVOLUTIONS,
        ACCELERATED,
        OURS_ON_XLA,
        OURS_ON_CUDNN,
        OURS_ON_ONEDNN,
        OURS_LOOPED,
    ),
    *(name for names in PEERS.values() for name in names),
    *(CUDNN_RNN, CUDNN_RNN_F16),
    *(MATRIX_PRODUCT, OURS_WITHOUT_RESETS),
    *(OURS + ONE_DEVICE, LAX + ONE_DEVICE),
)
# Names in older results.
RENAMED = {
    "torch": TORCH_EAGER,
    "torch batch_norm": TORCH_EAGER,
    "torch.nn.GRU": TORCH_GRU,
    "lax.map, jaxgrad": OURS_LOOPED,
    "lax.map, jax.lax": LAX_LOOPED,
    "jaxgrad, one device": OURS + ONE_DEVICE,
    "jax.lax, one device": LAX + ONE_DEVICE,
}
