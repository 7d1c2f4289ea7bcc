"""The gated recurrent unit: the public op and its checks.

The path of a call: `gru` checks its arguments, `_gru_vjp` holds the `jax.custom_vjp`, `_gru_units` wraps one kernel
call for `jit`, `vmap` and meshes of devices, `_ffi` calls the handler in ffi/cpu/gru_ffi.cc, which runs ffi/cpu/gru.cc.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad import _checks, _ffi, _forward_mode, _gru_vjp
from jaxgrad._dispatch import IMPLEMENTATIONS, Op, cpu_kernel, symbolic_obstacle
from jaxgrad._gru_units import Spec
from jaxgrad._partitioning import vary_alike

_OP = "jaxgrad.gru"
_DISPATCH = Op("gru", (cpu_kernel("the CPU kernel takes every dtype and shape of this op", _ffi.cpu_problem),))
_DIRECTIONS = ("forward", "reverse", "bidirectional")


def gru(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    r: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike | None = None,
    sequence_lens: jax.typing.ArrayLike | None = None,
    initial_h: jax.typing.ArrayLike | None = None,
    *,
    direction: str = "forward",
    linear_before_reset: bool = False,
    clip: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A layer of gated recurrent units over whole sequences, with the names, gate order and shapes of ONNX's GRU.

    With s the logistic function, at each step, for each direction:

      z = s(x Wz' + h Rz' + Wbz + Rbz)                           update gate
      r = s(x Wr' + h Rr' + Wbr + Rbr)                           reset gate
      n = tanh(x Wh' + (r * h) Rh' + Rbh + Wbh)                  linear_before_reset=False
      n = tanh(x Wh' + r * (h Rh' + Rbh) + Wbh)                  linear_before_reset=True (cuDNN, PyTorch, Keras)
      h = (1 - z) * n + z * h

    T is the number of time steps, B of rows in the batch, I of inputs, H of hidden units, D of directions (2 if
    `direction="bidirectional"`, otherwise 1).

    Args:
      x: [T, B, I], the inputs: float32, float64, bfloat16 or float16. The other float arrays have the same dtype. The
        16-bit types are storage: arithmetic and the carried state are float32.
      w: [D, 3H, I], the input weights, gates in the order z, r, h.
      r: [D, 3H, H], the recurrent weights, gates in the order z, r, h.
      b: [D, 6H], the biases Wbz, Wbr, Wbh, Rbz, Rbr, Rbh, or None for zeros.
      sequence_lens: [B], integers in [0, T], each row's own length, or None where every row has T steps. Past its
        length a row's state is carried on unchanged and its output is zero. What x holds there is never used.
      initial_h: [D, B, H], the state before the first step, or None for zeros.
      direction: "forward", "reverse" (each row reversed within its own length) or "bidirectional".
      linear_before_reset: applies the reset gate after the recurrent product instead of before it.
      clip: bounds the input of each activation to [-clip, clip], with a gradient of zero at and beyond the bounds; a
        positive Python number, or None for no bound.
      implementation: None for the fastest known, "cpu" for the CPU kernels, "xla" for a scan on plain XLA.
        `jaxgrad.explain` tells what None comes to.

    Returns:
      y: [T, D, B, H], the state after each step.
      y_h: [D, B, H], the state after each row's last step.

    Raises:
      TypeError: an array's dtype is not a supported float or differs from that of x, sequence_lens is not of integers,
        linear_before_reset is not a bool, or clip is not a number.
      ValueError: a rank or a dimension does not fit, direction or implementation is unknown, clip is not positive, or
        sequence_lens holds a value outside [0, T]. Lengths whose values are not known while tracing are checked by the
        CPU kernels when they run, which raises `jax.errors.JaxRuntimeError`; the XLA implementation takes the nearest
        length in [0, T]. Or `implementation="cpu"` is lowered for another platform.
      RuntimeError: `implementation="cpu"` where the compiled module cannot be loaded.

    Reverse-mode differentiation works to any order; the first uses the kernels, those above it XLA. Forward mode, on
    XLA, works inside `jaxgrad.forward_mode`. The formula and the shapes are those of the operator GRU (version 22) of
    the ONNX specification.

    Under `jit` over a mesh each device works on its own rows of the batch, and the gradients of w, r and b are summed
    over the mesh. What is spread otherwise is gathered first.

    Example:
      >>> T, B, I, H = 10, 4, 3, 5
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> x = jax.random.normal(keys[0], (T, B, I))
      >>> w = jax.random.normal(keys[1], (1, 3 * H, I)) / I**0.5
      >>> r = jax.random.normal(keys[2], (1, 3 * H, H)) / H**0.5
      >>> y, y_h = jaxgrad.gru(x, w, r)
      >>> y.shape, y_h.shape
      ((10, 1, 4, 5), (1, 4, 5))
    """
    _checks.check_choice(_OP, "direction", direction, _DIRECTIONS)
    _checks.check_choice(_OP, "implementation", implementation, IMPLEMENTATIONS)
    linear_before_reset = _checks.check_flag(_OP, "linear_before_reset", linear_before_reset)
    clip = _check_clip(clip)
    arrays = _check_arrays(x, w, r, b, sequence_lens, initial_h, 2 if direction == "bidirectional" else 1)
    route = _DISPATCH.decide(implementation, symbolic_obstacle(*arrays)).route
    spec = Spec(direction, linear_before_reset, clip, route)
    y, y_h = _forward_mode.call(_gru_vjp.gru, _gru_vjp.FORWARD_MODE, spec, *vary_alike(*arrays))
    return y, y_h


def _check_clip(clip: Any) -> float | None:
    if clip is None:
        return None
    if isinstance(clip, bool) or not isinstance(clip, (int, float, np.integer, np.floating)):
        raise TypeError(f"{_OP}: clip must be a Python number or None, got {type(clip).__name__}")
    if not clip > 0:
        raise ValueError(f"{_OP}: clip must be positive, got {clip}")
    return None if math.isinf(clip) else float(clip)


def _check_arrays(x: Any, w: Any, r: Any, b: Any, sequence_lens: Any, initial_h: Any, D: int) -> tuple[Any, ...]:
    x, w, r = (_checks.as_array(_OP, name, a) for name, a in (("x", x), ("w", w), ("r", r)))
    _checks.check_floating(_OP, "x", x)
    _checks.check_rank(_OP, "x", x, ("T", "B", "I"))
    _checks.check_rank(_OP, "r", r, ("D", "3H", "H"))
    T, B, I = x.shape  # noqa: E741
    H = r.shape[2]
    if H == 0 or I == 0:
        name, array = ("r", r) if H == 0 else ("x", x)
        raise ValueError(f"{_OP}: the last dimension of {name} must be positive, got the shape {array.shape}")
    _checks.check_shape(_OP, "r", r, ("D", "3H", "H"), (D, 3 * H, H))
    _checks.check_shape(_OP, "w", w, ("D", "3H", "I"), (D, 3 * H, I))
    if b is not None:
        b = _checks.as_array(_OP, "b", b)
        _checks.check_shape(_OP, "b", b, ("D", "6H"), (D, 6 * H))
    if initial_h is not None:
        initial_h = _checks.as_array(_OP, "initial_h", initial_h)
        _checks.check_shape(_OP, "initial_h", initial_h, ("D", "B", "H"), (D, B, H))
    for name, array in (("w", w), ("r", r), ("b", b), ("initial_h", initial_h)):
        if array is not None:
            _checks.check_same_dtype(_OP, name, array, "x", x)
    return x, w, r, b, _check_lengths(sequence_lens, T, B), initial_h


def _check_lengths(sequence_lens: Any, T: int, B: int) -> jax.Array | None:
    if sequence_lens is None:
        return None
    if not isinstance(sequence_lens, jax.Array):
        # Values that the host holds are checked now. A jax.Array is left alone: reading it would wait for the device.
        try:
            values = np.asarray(sequence_lens)
        except ValueError as error:  # lists within lists, of several lengths
            raise TypeError(f"{_OP}: sequence_lens must be an array, got {type(sequence_lens).__name__}") from error
        if values.size and values.dtype.kind in "iu" and (values.min() < 0 or values.max() > T):
            wrong = values[(values < 0) | (values > T)][0]
            raise ValueError(f"{_OP}: sequence_lens must lie in [0, T] = [0, {T}], got {wrong}")
    lengths = _checks.as_array(_OP, "sequence_lens", sequence_lens)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{_OP}: sequence_lens must be of integers, got {lengths.dtype.name}")
    _checks.check_shape(_OP, "sequence_lens", lengths, ("B",), (B,))
    if lengths.dtype == np.int32:
        return lengths
    if lengths.dtype.itemsize >= 4:  # bounded before it is narrowed, so that a wrong length stays wrong
        integer = lengths.dtype.type
        lengths = jnp.minimum(lengths, integer(T + 1))
        if jnp.issubdtype(lengths.dtype, jnp.signedinteger):
            lengths = jnp.maximum(lengths, integer(-1))
    return lengths.astype(np.int32)
