"""A check of an installed jaxgrad, which needs no checkout, compiler or GPU: .ci/wheel and cibuildwheel run it.

Every op runs on its CPU kernel, and its gradients are compared with those of plain JAX. The diagnosis must report no
missing part of the CPU, and the CUDA module must be importable.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxgrad


def main() -> None:
    check_diagnosis()
    for op, reference, arrays in cases():
        explanation = jaxgrad.explain(op.func, *arrays, **op.keywords)
        assert explanation.implementation in ("cpu", "onednn"), explanation
        check_gradients(op, reference, arrays)
        print(f"{op.func.__name__}: value and gradients as those of plain JAX")


def check_diagnosis() -> None:
    version = importlib.metadata.version("jaxgrad")
    assert jaxgrad.__version__ == version, f"jaxgrad.__version__ is {jaxgrad.__version__}, the package's is {version}"
    done = subprocess.run([sys.executable, "-m", "jaxgrad"], capture_output=True, text=True, check=True)
    print(done.stdout)
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["jaxgrad"].startswith(f"{version} from "), lines["jaxgrad"]
    assert "\nCUDA handlers jaxgrad_cuda_" in done.stdout, "the wheel has no CUDA module that can be loaded"
    missing = [line for line in done.stdout.splitlines() if line.startswith(("CPU", "oneDNN")) and "missing" in line]
    assert not missing, missing


def check_gradients(op, reference, arrays):
    def value_and_gradients(function):
        y, pullback = jax.vjp(function, *arrays)
        return y, *pullback(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    def first(*arguments):
        y = op(*arguments)
        return y[0] if isinstance(y, tuple) else y

    with jax.default_matmul_precision("highest"):
        results = zip(value_and_gradients(first), value_and_gradients(reference), strict=True)
    for found, expected in results:
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max(), err_msg=op.func.__name__
        )


def cases():
    """Yields an op with its settings, the same function in plain JAX, and arrays."""
    rng = np.random.default_rng(0)

    def arrays(*shapes):
        return [jnp.asarray(rng.uniform(-1, 1, shape), "float32") for shape in shapes]

    layout = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    settings = {"window_strides": (2, 1), "feature_group_count": 2, **layout}
    convolutions = (partial(module.conv_general_dilated, **settings) for module in (jaxgrad, lax))
    yield *convolutions, arrays((4, 13, 10, 6), (3, 3, 3, 8))
    transposed = (partial(module.conv_transpose, strides=(2, 1), **layout) for module in (jaxgrad, lax))
    yield *transposed, arrays((4, 7, 10, 6), (3, 3, 6, 8))
    x, scale, bias, mean, var = arrays((4, 5, 6, 7), (7,), (7,), (7,), (7,))
    yield partial(jaxgrad.batch_norm_training), batch_norm, [x, scale, bias]
    yield partial(jaxgrad.batch_norm_inference), batch_norm, [x, scale, bias, mean, jnp.exp(var)]
    steps, rows, inputs, hidden = 6, 3, 5, 4
    gates = 3 * hidden
    yield (
        partial(jaxgrad.gru),
        gru,
        arrays((steps, rows, inputs), (1, gates, inputs), (1, gates, hidden), (1, 2 * gates)),
    )


def batch_norm(x, scale, bias, mean=None, var=None):
    if mean is None:
        mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias


def gru(x, w, r, b):
    wz, wr, wn = jnp.split(w[0], 3)
    rz, rr, rn = jnp.split(r[0], 3)
    bz, br, bn = jnp.split(b[0, : b.shape[1] // 2] + b[0, b.shape[1] // 2 :], 3)

    def step(h, x):
        z = jax.nn.sigmoid(x @ wz.T + h @ rz.T + bz)
        reset = jax.nn.sigmoid(x @ wr.T + h @ rr.T + br)
        h = (1 - z) * jnp.tanh(x @ wn.T + (reset * h) @ rn.T + bn) + z * h
        return h, h

    return lax.scan(step, jnp.zeros((x.shape[1], r.shape[2])), x)[1][:, None]


main()
