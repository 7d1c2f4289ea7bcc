"""The public op `jaxgrad.gru`: checks of its arguments, and the selection of an implementation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._src.choice.op import Op
from jaxgrad._src.choice.selection import reject_symbolic_shapes, select
from jaxgrad._src.core import checks
from jaxgrad._src.core.precision import default_precision
from jaxgrad._src.gru.backend import PASSES
from jaxgrad._src.gru.backends import BACKENDS
from jaxgrad._src.gru.batch_major import batch_major_y
from jaxgrad._src.gru.params import GruParams, GruProblem
from jaxgrad._src.gru.remat import call, gru_in_chunks

OP = Op("gru", PASSES, BACKENDS)

_NAME = "jaxgrad.gru"
_DIRECTIONS = ("forward", "reverse", "bidirectional")


@OP.public
def gru(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    r: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike | None = None,
    sequence_lens: jax.typing.ArrayLike | Sequence[int] | None = None,
    initial_h: jax.typing.ArrayLike | None = None,
    *,
    reset: jax.typing.ArrayLike | None = None,
    reset_h: jax.typing.ArrayLike | None = None,
    direction: str = "forward",
    linear_before_reset: bool = False,
    clip: float | None = None,
    time_major: bool = True,
    remat_every: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gated recurrent unit (GRU) over whole sequences, in the convention of ONNX.

    For each step and direction, with s the logistic function:

        z = s(x Wz' + h Rz' + Wbz + Rbz)                           update gate
        r = s(x Wr' + h Rr' + Wbr + Rbr)                           reset gate
        n = tanh(x Wn' + (r * h) Rn' + Rbn + Wbn)                  new state, linear_before_reset=False
        n = tanh(x Wn' + r * (h Rn' + Rbn) + Wbn)                  new state, linear_before_reset=True
        h = (1 - z) * n + z * h                                    hidden state

    T is the number of steps, B the batch size, I the input size, H the hidden size, and D the number of directions: 2
    for `direction="bidirectional"`, otherwise 1.

    Warning:
      Weights of other libraries do not fit as they are. flax, equinox, PyTorch, Keras (by default) and cuDNN compute
      `linear_before_reset=True`, which is not the default here. nnx, equinox, PyTorch and cuDNN also order the gates
      r, z, n where z, r, n is expected here; linen has one array for each gate, and Keras transposes the weights. The
      gate z of Haiku weighs n. `jaxgrad.convert` reads and writes the weights of all but cuDNN. The layers
      `jaxgrad.nn.linen.RNN`, `jaxgrad.nn.nnx.RNN`, `jaxgrad.nn.equinox.scan_gru`, `jaxgrad.nn.haiku.dynamic_unroll` and
      `jaxgrad.nn.keras.GRU` have the parameters of the frameworks, and `jaxgrad.nn.GRU` those of PyTorch.

    Args:
      x: [T, B, I], the inputs: float32, float64, bfloat16 or float16. All other floating-point arrays must have the
        same dtype. For the 16-bit dtypes, arithmetic and the hidden state between steps are float32.
      w: [D, 3H, I], the input weights, with the gates in the order z, r, n.
      r: [D, 3H, H], the recurrent weights, with the gates in the order z, r, n.
      b: [D, 6H], the biases Wbz, Wbr, Wbn, Rbz, Rbr, Rbn; None for zeros.
      sequence_lens: [B], integers in [0, T], the length of each row; None if every row has T steps. Past its length,
        the hidden state of a row does not change, its output is zero, and its inputs are not used.
      initial_h: [D, B, H], the hidden state before the first step; None for zeros.
      reset: [T, B], bools, or numbers that are true where they are not 0, as in `jnp.where`: NaN is true, and the
        gradient is zero. Where it is true, `reset_h` or zeros replace the hidden state of the row before that step, as
        at the first step of an episode in reinforcement learning. "Before" is in the order in which a direction takes
        the steps: in reverse, a reset at index t replaces the state that comes from index t + 1. A reset at the first
        step of a row replaces `initial_h`. A reset past the length of a row has no effect. None for no resets.
      reset_h: [D, B, H], the new state of each row at a reset; None for zeros. Requires `reset`.
      direction: "forward", "reverse" (each row reversed within its length) or "bidirectional".
      linear_before_reset: whether the reset gate multiplies the recurrent product instead of the hidden state.
      clip: a positive number; the input of each activation is clipped to [-clip, clip], and its gradient is zero at
        the bounds and beyond. None for no clipping.
      time_major: False if the batch comes first, as with `layout=1` in ONNX: x [B, T, I], initial_h and reset_h
        [B, D, H], reset [B, T], and the results y [B, T, D, H] and y_h [B, D, H]. Under `jax.jit`, the CPU kernels
        read and write x, y and their gradients in this order. Other implementations, and remat_every, transpose them.
      remat_every: for long sequences, save the state for the backward pass only every `remat_every` steps, and compute
        the rest again. This costs one more forward pass, and for the 16-bit dtypes the state is rounded to the dtype
        of x every `remat_every` steps. The square root of T, or more, is a good choice. None saves the gates of all
        steps, three or four times as large as y.
      implementation: "cpu" for the C++ kernels, "cuda" for the CUDA kernels, "xla" for a `jax.lax.scan`, None for the
        fastest available. An implementation that is given runs or raises. `jaxgrad.explain` reports what None selects.

    Returns:
      A pair `(y, y_h)`:

      y: [T, D, B, H], the hidden state after each step.
      y_h: [D, B, H], the hidden state after the last step of each row.

    Raises:
      TypeError: an array has an unsupported dtype or a dtype other than that of x, sequence_lens is not an integer
        array, reset has neither bools nor real numbers, linear_before_reset or time_major is not a bool, clip is not a
        number, or remat_every is not an integer.
      ValueError: the shape of an array does not fit, direction or implementation is unknown, clip or remat_every is not
        positive, sequence_lens has a value outside [0, T], reset_h is given without reset, or remat_every is given
        for a symbolic number of steps; or `implementation="cpu"` or "cuda" is lowered for another platform, has
        symbolic shapes, or is not supported: the CUDA kernels require a GPU of compute capability 8.0 or later where
        the program is lowered, with room for the recurrent weights, at most 2048 hidden units, and no float64.
      RuntimeError: `implementation="cpu"` or "cuda" is given and the compiled module or NVRTC cannot be loaded.
      jax.errors.JaxRuntimeError: sequence_lens has a value outside [0, T] that is not known while tracing, and the CPU
        kernels run. The XLA implementation and the CUDA kernels clamp such a value to [0, T].

    Notes:
      A reset stops gradients: the state that it replaced has a gradient of zero, and a NaN in it does not propagate.
      The gradient of `reset_h` is the sum, over the resets of a row, of the gradients of the new states.

      On a GPU, float32 operands of matrix products are rounded to TF32, as in JAX, unless the configuration option
      `jax_default_matmul_precision` is "highest" or "float32" where the op is called. With more than 96 hidden units,
      the CUDA kernels then split each operand of the recurrent product into three bfloat16 numbers, which keep its 24
      bits. With up to 96, they compute the recurrent product in float32 in any dtype and precision.

      Reverse mode works to any order: the first derivative uses the kernels, higher derivatives run on XLA. Forward
      mode runs on XLA and requires `jaxgrad.forward_mode`. Under `jit` over a mesh, the batch may be split: each device
      computes its rows, and the gradients of w, r and b are summed over the mesh. Operands that are split in other
      dimensions are gathered first. The formula and the shapes are those of the GRU operator (version 22) of the ONNX
      specification, which writes h for the gate n.

    Examples:
      >>> T, B, I, H = 10, 4, 3, 5
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> x = jax.random.normal(keys[0], (T, B, I))
      >>> w = jax.random.normal(keys[1], (1, 3 * H, I)) / I**0.5
      >>> r = jax.random.normal(keys[2], (1, 3 * H, H)) / H**0.5
      >>> y, y_h = jaxgrad.gru(x, w, r, sequence_lens=[10, 7, 7, 2])
      >>> y.shape, y_h.shape
      ((10, 1, 4, 5), (1, 4, 5))
      >>> gradients = jax.grad(lambda w, r: jaxgrad.gru(x, w, r)[1].sum(), (0, 1))(w, r)
      >>> [g.shape for g in gradients]
      [(1, 15, 3), (1, 15, 5)]
    """
    checks.check_choice(_NAME, "direction", direction, _DIRECTIONS)
    OP.check_implementation(implementation)
    linear_before_reset = checks.check_flag(_NAME, "linear_before_reset", linear_before_reset)
    clip = _check_clip(clip)
    D = 2 if direction == "bidirectional" else 1
    time_major = checks.check_flag(_NAME, "time_major", time_major)
    arrays = _check_arrays(_Layout(time_major), x, w, r, b, sequence_lens, initial_h, reset, reset_h, D)
    precision = default_precision()
    _check_remat_every(remat_every, arrays[0].shape[0])

    x, _, r, _, sequence_lens, _, reset, reset_h = arrays
    options: dict[str, Any] = {
        "linear_before_reset": linear_before_reset,
        "clip": clip,
        "precision": precision,
        "has_lengths": sequence_lens is not None,
        "has_resets": reset is not None,
        "has_reset_h": reset_h is not None,
    }
    symbolic = reject_symbolic_shapes(*arrays)

    def params_of(direction: str, x: Any, r: Any) -> GruParams:
        candidates = select(OP, implementation, GruProblem.of(x, r, **options), symbolic).candidates
        chosen: dict[str, Any] = {f"{name}_candidates": candidates[name] for name in PASSES}
        # Chunks of steps are slices of time-major arrays. Outside of `jax.jit`, XLA sees the transposes one by one.
        batch_major = not time_major and remat_every is None and isinstance(x, jax.core.Tracer)
        return GruParams(direction, **options, batch_major=batch_major, **chosen)

    if remat_every is None or arrays[0].shape[0] == 0:
        y, y_h = call(params_of(direction, x, r), *arrays)
    else:
        y, y_h = gru_in_chunks(params_of, int(remat_every), direction, arrays)
    return (y, y_h) if time_major else (batch_major_y(y), jnp.swapaxes(y_h, 0, 1))


def _check_clip(clip: Any) -> float | None:
    if clip is None:
        return None
    if isinstance(clip, bool) or not isinstance(clip, (int, float, np.integer, np.floating)):
        raise TypeError(f"{_NAME}: clip must be a Python number or None, got {type(clip).__name__}")
    if not clip > 0:
        raise ValueError(f"{_NAME}: clip must be positive, got {clip}")
    return None if math.isinf(clip) else float(clip)


def _check_remat_every(remat_every: Any, T: Any) -> None:
    if remat_every is None:
        return
    if isinstance(remat_every, bool) or not isinstance(remat_every, (int, np.integer)):
        raise TypeError(f"{_NAME}: remat_every must be an integer or None, got {type(remat_every).__name__}")
    if remat_every < 1:
        raise ValueError(f"{_NAME}: remat_every must be positive, got {remat_every}")
    if not isinstance(T, int):
        raise ValueError(f"{_NAME}: remat_every={remat_every} requires a known number of steps, got T = {T}")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The order of the first two dimensions of the arrays that have rows."""

    time_major: bool

    def order(self, first: Any, second: Any, *others: Any) -> tuple[Any, ...]:
        """Dimensions, or their names, that are given in the order of `time_major=True`."""
        return (first, second, *others) if self.time_major else (second, first, *others)

    def to_time_major(self, array: jax.Array | None) -> jax.Array | None:
        return array if array is None or self.time_major else jnp.swapaxes(array, 0, 1)

    def note(self, T: int, B: int) -> str:
        """For errors: an x in the other layout is not recognized by its shape."""
        dims, sizes = ", ".join(self.order("T", "B", "I")), self.order(f"T = {T} steps", f"B = {B} rows")
        return f"; x [{dims}] has {' and '.join(sizes)}"


def _check_arrays(
    layout: _Layout,
    x: Any,
    w: Any,
    r: Any,
    b: Any,
    sequence_lens: Any,
    initial_h: Any,
    reset: Any,
    reset_h: Any,
    D: int,
) -> tuple[Any, ...]:
    """Returns the arrays, time-major."""
    x, w, r = (checks.as_array(_NAME, name, a) for name, a in (("x", x), ("w", w), ("r", r)))
    checks.check_floating(_NAME, "x", x)
    checks.check_rank(_NAME, "x", x, layout.order("T", "B", "I"))
    checks.check_rank(_NAME, "r", r, ("D", "3H", "H"))
    T, B, I = layout.order(*x.shape)  # noqa: E741
    H = r.shape[2]
    if H == 0 or I == 0:
        name, array = ("r", r) if H == 0 else ("x", x)
        raise ValueError(f"{_NAME}: the last dimension of {name} must be positive, got the shape {array.shape}")
    checks.check_shape(_NAME, "r", r, ("D", "3H", "H"), (D, 3 * H, H))
    checks.check_shape(_NAME, "w", w, ("D", "3H", "I"), (D, 3 * H, I))
    if b is not None:
        b = checks.as_array(_NAME, "b", b)
        checks.check_shape(_NAME, "b", b, ("D", "6H"), (D, 6 * H))
    note = layout.note(T, B)
    initial_h, reset_h = (
        _check_state(name, a, layout, (D, B, H), note) for name, a in (("initial_h", initial_h), ("reset_h", reset_h))
    )
    for name, array in (("w", w), ("r", r), ("b", b), ("initial_h", initial_h), ("reset_h", reset_h)):
        if array is not None:
            checks.check_same_dtype(_NAME, name, array, "x", x)
    if reset is None and reset_h is not None:
        dims = ", ".join(layout.order("T", "B"))
        raise ValueError(f"{_NAME}: reset_h requires reset, an array [{dims}] that says where; got reset=None")
    lengths = _check_lengths(sequence_lens, T, B, note)
    x, initial_h, reset, reset_h = map(
        layout.to_time_major, (x, initial_h, _check_reset(reset, layout, T, B, note), reset_h)
    )
    return x, w, r, b, lengths, initial_h, reset, reset_h


def _check_state(name: str, state: Any, layout: _Layout, shape: tuple[int, ...], note: str) -> jax.Array | None:
    if state is None:
        return None
    state = checks.as_array(_NAME, name, state)
    checks.check_shape(_NAME, name, state, layout.order("D", "B", "H"), layout.order(*shape), note)
    return state


def _check_reset(reset: Any, layout: _Layout, T: int, B: int, note: str) -> jax.Array | None:
    if reset is None:
        return None
    reset = checks.as_mask(_NAME, "reset", reset)
    checks.check_shape(_NAME, "reset", reset, layout.order("T", "B"), layout.order(T, B), note)
    return reset


def _is_on_host(array: jax.Array) -> bool:
    """Whether the values of an array are known and in the memory of this process."""
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in array.devices())


def _check_lengths(sequence_lens: Any, T: int, B: int, note: str) -> jax.Array | None:
    if sequence_lens is None:
        return None
    if not isinstance(sequence_lens, jax.Array) or _is_on_host(sequence_lens):
        # The values on a GPU are not checked: reading them would wait for the device, and XLA clamps them.
        try:
            values = np.asarray(sequence_lens)
        except (TypeError, ValueError) as error:  # random keys, nested lists of unequal lengths
            raise TypeError(f"{_NAME}: sequence_lens must be an array, got {type(sequence_lens).__name__}") from error
        # NumPy has objects for Python ints that do not fit into 64 bits.
        kind = values.dtype.kind
        are_ints = kind in "iu" or (kind == "O" and all(isinstance(value, int) for value in values.flat))
        if isinstance(T, int) and are_ints and ((values < 0) | (values > T)).any():
            wrong = values[(values < 0) | (values > T)][0]
            raise ValueError(f"{_NAME}: sequence_lens must lie in [0, T] = [0, {T}], got {wrong}{note}")
    lengths = checks.as_array(_NAME, "sequence_lens", sequence_lens)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{_NAME}: sequence_lens must have an integer dtype, got {lengths.dtype.name}")
    checks.check_shape(_NAME, "sequence_lens", lengths, ("B",), (B,), note)
    if lengths.dtype == np.int32:
        return lengths
    if lengths.dtype.itemsize >= 4:  # clamp before the cast, so that an invalid length stays invalid
        integer = lengths.dtype.type
        lengths = jnp.minimum(lengths, jnp.asarray(T + 1, lengths.dtype))
        if jnp.issubdtype(lengths.dtype, jnp.signedinteger):
            lengths = jnp.maximum(lengths, integer(-1))
    return lengths.astype(np.int32)
