"""Runs every handler of the CUDA module on a GPU that JAX does not use, so that compute-sanitizer can watch it.

    JAX_PLATFORMS=cpu python tests/gpu_handlers.py [PART OF A NAME...]

`.ci/gpu` runs it. JAX runs on the CPU, and gpu_calls.c hands its arrays to the handlers. Each value and gradient is
compared with XLA's. Exits with 1 if one is wrong or was not computed by a handler, or if no case calls a handler.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cuda_on_cpu
import jax
import jax.numpy as jnp
import numpy as np

import jaxgrad
from jaxgrad._src.native import cuda

_TESTS = Path(__file__).parent
_ALLOWED = {"float32": 5e-6, "float64": 1e-13, "bfloat16": 1.2e-2, "float16": 2e-3}  # of the largest value
_LAYOUTS = {"last": ("NHWC", "HWIO", "NHWC"), "first": ("NCHW", "OIHW", "NCHW"), "mixed": ("NHWC", "OIHW", "NCHW")}
_rng = np.random.default_rng(0)

Case = tuple[str, Callable[..., Any], tuple[jax.Array, ...]]  # name, function of implementation and arrays, arrays


def _array(dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(_rng.standard_normal(shape), dtype)


def _conv(name: str, x: tuple[int, ...], w: tuple[int, ...], dtype: str, layout: str, **settings: Any) -> Case:
    """x and w: shapes in NHWC and HWIO order."""
    settings = {"window_strides": (1, 1), "padding": "SAME"} | settings

    def function(implementation: str, x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jaxgrad.conv_general_dilated(
            x, w, dimension_numbers=numbers, bias=bias, implementation=implementation, **settings
        )

    numbers = _LAYOUTS[layout]
    x = tuple(x["NHWC".index(axis)] for axis in numbers[0])
    shape = tuple(w["HWIO".index(axis)] for axis in numbers[1])
    return f"{name} {layout} {dtype}", function, (_array(dtype, *x), _array(dtype, *shape), _array(dtype, w[-1]))


def _convolutions() -> Iterator[Case]:
    grouped = {"feature_group_count": 2, "window_strides": (2, 1), "padding": ((2, 0), (-1, 3)), "rhs_dilation": (1, 2)}
    for dtype in ("float32", "bfloat16", "float64"):
        for layout in ("last", "first", "mixed"):
            yield _conv("convolution", (3, 7, 9, 5), (3, 2, 5, 6), dtype, layout, activation="relu")
            yield _conv("two groups, lopsided", (2, 9, 11, 6), (3, 3, 3, 10), dtype, layout, **grouped)
    yield _conv("1x1", (2, 5, 7, 16), (1, 1, 16, 24), "bfloat16", "last")


def _depthwise() -> Iterator[Case]:
    def case(window: int, stride: int, size: int, dtype: str, layout: str = "last") -> Case:
        settings = {"window_strides": (stride, stride), "feature_group_count": 40}
        x, w = (3, size, size + 2, 40), (window, window, 1, 40)
        return _conv(f"depthwise {window}x{window} stride {stride}", x, w, dtype, layout, **settings)

    for dtype in ("float32", "bfloat16"):
        for window, stride, size in ((3, 1, 9), (3, 2, 12), (5, 1, 14)):
            yield case(window, stride, size, dtype)
            yield case(window, stride, size, dtype, "first")
        yield case(7, 2, 11, dtype)
        yield case(13, 1, 17, dtype)
    yield case(21, 1, 25, "bfloat16")
    yield _conv("depthwise 1x5", (2, 1, 40, 136), (1, 5, 1, 136), "bfloat16", "last", feature_group_count=136)


def _batch_norms() -> Iterator[Case]:
    def function(axis: int, activation: str | None, implementation: str, *arrays: jax.Array) -> Any:
        x, scale, bias, residual = arrays
        settings = {"feature_axis": axis, "activation": activation, "residual": residual if activation else None}
        return jaxgrad.batch_norm_training(x, scale, bias, implementation=implementation, **settings)

    for dtype in ("float32", "bfloat16"):
        for axis, activation in ((-1, None), (-1, "relu"), (1, None)):
            channels = 24
            shape = (6, 5, 7, channels) if axis == -1 else (6, channels, 5, 7)
            vectors = (_array("float32", channels) + 2, _array("float32", channels))
            arrays = (_array(dtype, *shape), *vectors, _array(dtype, *shape))
            yield f"batch norm, axis {axis}, {activation} {dtype}", partial(function, axis, activation), arrays


def _norms() -> Iterator[Case]:
    def group(axis: int, implementation: str, *arrays: jax.Array) -> Any:
        x, scale, bias, residual = arrays
        settings = {"feature_axis": axis, "activation": "silu", "residual": residual}
        return jaxgrad.group_norm(x, scale, bias, num_groups=4, implementation=implementation, **settings)

    def rows(norm: Callable[..., Any], implementation: str, *arrays: jax.Array) -> Any:
        x, scale, bias, residual = arrays
        return norm(x, scale, bias, activation="relu", residual=residual, implementation=implementation)

    for dtype in ("float32", "bfloat16", "float16"):
        for name, function, shape, axis in (
            ("group norm", partial(group, -1), (3, 5, 7, 24), -1),
            ("group norm, channels first", partial(group, 1), (3, 24, 5, 7), 1),
            ("layer norm", partial(rows, jaxgrad.layer_norm), (40, 9, 100), -1),
            ("RMS norm", partial(rows, jaxgrad.rms_norm), (40, 9, 31), -1),
        ):
            channels = shape[axis]
            vectors = (_array("float32", channels) + 2, _array("float32", channels))
            yield f"{name} {dtype}", function, (_array(dtype, *shape), *vectors, _array(dtype, *shape))


def _batch_norms_in_steps() -> Iterator[Case]:
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def function(axis: int, implementation: str, *arrays: jax.Array) -> Any:
        settings = {"feature_axis": axis, "axis_name": "batch", "implementation": implementation}
        norm = partial(jaxgrad.batch_norm_training, **settings)
        shard = jax.sharding.PartitionSpec("batch")
        whole = jax.sharding.PartitionSpec()
        return jax.shard_map(norm, mesh=mesh, in_specs=(shard, whole, whole), out_specs=(shard, whole, whole))(*arrays)

    for dtype in ("float32", "bfloat16"):
        for axis in (-1, 1):
            shape = (6, 5, 7, 24) if axis == -1 else (6, 24, 5, 7)
            arrays = (_array(dtype, *shape), _array("float32", 24) + 2, _array("float32", 24))
            yield f"batch norm over a mesh, axis {axis} {dtype}", partial(function, axis), arrays


def _grus() -> Iterator[Case]:
    def function(settings: dict[str, Any], implementation: str, *arrays: jax.Array) -> Any:
        x, w, r, b, h = arrays
        return jaxgrad.gru(x, w, r, b, initial_h=h, implementation=implementation, **settings)

    def case(name: str, T: int, B: int, H: int, D: int, dtype: str, **settings: Any) -> Case:
        scale = H**-0.5
        weights = (_array(dtype, D, 3 * H, 5), _array(dtype, D, 3 * H, H), _array(dtype, D, 6 * H))
        arrays = (_array(dtype, T, B, 5), *(jnp.asarray(scale * each, dtype) for each in weights))
        return f"GRU {name} {dtype}", partial(function, settings), (*arrays, _array(dtype, D, B, H))

    lens = {"sequence_lens": np.array([3, 0, 5])}
    for dtype in ("float32", "bfloat16"):
        yield case("T=5 B=3 H=20, both directions", 5, 3, 20, 2, dtype, direction="bidirectional", **lens)
        yield case("T=4 B=70 H=64, linear before reset, clip", 4, 70, 64, 1, dtype, linear_before_reset=True, clip=0.5)
        yield case("T=3 B=40 H=200, reverse", 3, 40, 200, 1, dtype, direction="reverse")


def _pools() -> Iterator[Case]:
    def function(op: str, settings: dict[str, Any], implementation: str, x: jax.Array) -> Any:
        return getattr(jaxgrad, op)(x, (3, 2), (2, 1), ((1, 0), (0, 1)), implementation=implementation, **settings)

    for dtype in ("float32", "bfloat16", "float64"):
        for axis, shape in ((-1, (3, 9, 8, 40)), (-1, (2, 9, 8, 5)), (1, (3, 6, 9, 8))):
            settings = {"feature_axis": axis}
            for op in ("max_pool", "avg_pool"):
                yield f"{op}, axis {axis}, {shape} {dtype}", partial(function, op, settings), (_array(dtype, *shape),)


def _pool_tangents() -> Iterator[Case]:
    """The value, the tangent, and the gradients of both."""
    for dtype in ("float32", "bfloat16"):
        x = _array(dtype, 3, 9, 8, 40)

        def function(implementation: str, x: jax.Array) -> Any:
            def pool(x: jax.Array) -> jax.Array:
                return jaxgrad.max_pool(x, (3, 2), (2, 1), implementation=implementation)

            with jaxgrad.forward_mode():
                return jax.jvp(pool, (x,), (x * x,))[1]

        yield f"tangent of max_pool {dtype}", function, (x,)


# The cases, their implementation, the calls of handlers in each, and the allowed errors by dtype.
_KINDS = (
    (_convolutions, "cudnn", 3, _ALLOWED),
    (_depthwise, "cuda", 3, _ALLOWED),
    (_batch_norms, "cudnn", 2, {**_ALLOWED, "float32": 1e-3}),  # cuDNN's mean in float32 may have half the digits
    (_batch_norms, "cuda", 2, _ALLOWED),
    (_batch_norms_in_steps, "cuda", 3, _ALLOWED),
    (_norms, "cuda", 2, _ALLOWED),
    (_grus, "cuda", 2, _ALLOWED),
    (_pools, "cuda", 2, _ALLOWED),
    (_pool_tangents, "cuda", 2, _ALLOWED),
)


def _values_and_gradients(function: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
    def derivative(y: jax.Array) -> jax.Array:
        return jnp.cos(jnp.arange(y.size).reshape(y.shape)).astype("bfloat16").astype(y.dtype)  # the same in all dtypes

    @jax.jit
    def run(*arrays: jax.Array) -> Any:
        y, pullback = jax.vjp(function, *arrays)
        return y, pullback(jax.tree.map(derivative, y))

    with jax.default_matmul_precision("highest"):
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(run(*arrays))]


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error over the largest value, or over 1 if all are 0, as the gradient of an operand without use.

    NaN, which is in memory that was not written, is infinitely wrong.
    """
    error = float(np.max(np.abs(found - expected)) / (np.max(np.abs(expected)) or 1))
    return error if error == error else float("inf")


def _build(folder: Path) -> Any:
    """The library of gpu_calls.c. The driver is opened before, for all to see."""
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    path = folder / "libgpu_calls.so"
    flags = ["-O2", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", f"-I{_TESTS}", "-lpthread"]
    subprocess.run(["gcc", "-o", path, _TESTS / "gpu_calls.c", *flags], check=True)
    library = ctypes.CDLL(str(path))
    library.num_gpu_calls.restype = ctypes.c_long
    return library


def main(names: Sequence[str]) -> int:
    """Runs the cases whose names contain one of `names`, or all. Returns the exit status."""
    jax.config.update("jax_enable_x64", True)
    with tempfile.TemporaryDirectory() as folder:
        library = _build(Path(folder))
    cuda_on_cpu.register(library)
    jaxgrad.config.update(search="heuristic")  # to time engines under compute-sanitizer would take long
    failures = 0
    for cases, implementation, calls, allowed in _KINDS:
        for name, function, arrays in cases():
            if names and not any(each in name for each in names):
                continue
            before = library.num_gpu_calls()
            found = _values_and_gradients(partial(function, implementation), arrays)
            called = library.num_gpu_calls() - before
            expected = _values_and_gradients(partial(function, "xla"), tuple(a.astype("float64") for a in arrays))
            error = max(map(_error, found, expected))
            right = error <= allowed[arrays[0].dtype.name] and called == calls
            failures += not right
            print(f"{name:60s} {'right' if right else 'WRONG'} ({error:.2g}, {called} of {calls} calls)", flush=True)
    called, handlers = library.num_handlers(), len(cuda.module.registrations())
    print(f"{failures} wrong, {library.num_gpu_calls()} calls of {called} handlers")
    return 1 if failures or called < (1 if names else handlers) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
