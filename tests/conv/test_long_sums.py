"""Weight and bias gradients over many positions, which the oneDNN backend computes in parts.

The number of positions in a part grows with the number of threads.
"""

from __future__ import annotations

import pytest

_SCRIPT = """
import os
import jax, jax.numpy as jnp, numpy as np
import jaxgrad

jax.config.update("jax_enable_x64", True)
FIRST, LAST = ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")
# Layout, shapes of x and w, strides, padding, dilation, groups. Each has 1e5 to 1e6 positions.
CASES = {
    "one image": (FIRST, (1, 3, 900, 1000), (8, 3, 3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    "one image, last": (LAST, (1, 900, 1000, 3), (3, 3, 3, 8), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    "strides": (FIRST, (2, 3, 907, 801), (4, 3, 3, 2), (2, 1), ((0, 4), (3, 0)), (3, 2), 1),
    "strides, last": (LAST, (2, 907, 801, 4), (5, 2, 2, 6), (3, 1), ((5, 1), (0, 2)), (2, 1), 2),
    "few rows": (FIRST, (3, 2, 2, 70000), (3, 2, 2, 3), (1, 1), ((1, 1), (0, 0)), (1, 1), 1),
    "images": (FIRST, (11, 4, 170, 160), (6, 2, 3, 5), (1, 1), ((2, 0), (1, 2)), (1, 1), 2),
    "1x1": (FIRST, (7, 5, 200, 160), (6, 5, 1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    "1x1, one image": (FIRST, (1, 5, 700, 300), (6, 5, 1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    "1x1, last": (LAST, (1, 700, 300, 5), (1, 1, 5, 6), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    "one axis": (("NCH", "OIH", "NCH"), (1, 3, 300000), (4, 3, 7), (1,), ((9, 2),), (2,), 1),
    "three axes": (("NCDHW", "OIDHW", "NCDHW"), (4, 2, 50, 40, 32), (3, 2, 3, 3, 3), (1, 1, 1), ((1, 1),) * 3,
                   (1, 1, 1), 1),
    "depthwise": (LAST, (3, 250, 240, 8), (3, 3, 1, 8), (1, 1), ((1, 1), (1, 1)), (1, 1), 8),
}

for name, (layout, x_shape, w_shape, strides, padding, dilation, groups) in CASES.items():
    def gradients(implementation, x, dy):
        def conv(w, bias):
            return jaxgrad.conv_general_dilated(
                x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=layout, feature_group_count=groups,
                bias=bias, implementation=implementation)

        w = jnp.zeros(w_shape, x.dtype)
        bias = jnp.zeros(w_shape[layout[1].index("O")], x.dtype)
        y = jax.eval_shape(conv, w, bias)
        return jax.vjp(conv, w, bias)[1](jnp.broadcast_to(dy[: y.size].reshape(y.shape), y.shape))

    random = np.random.default_rng(0)
    x, dy = random.random(x_shape, "float32"), random.random(10**7, "float32")  # positive: rounding errors add up
    if LIMIT is None:
        exact = jax.jit(lambda x, dy: gradients("xla", x, dy))(x.astype("float64"), dy.astype("float64"))
        np.savez(os.path.join(FOLDER, name), *exact)
        continue
    found = jax.jit(lambda x, dy: gradients("onednn", x, dy))(x, dy)
    exact = np.load(os.path.join(FOLDER, f"{name}.npz")).values()
    for a, b in zip(found, exact, strict=True):
        error = np.abs(np.asarray(a, "float64") - b).max() / np.abs(b).max()
        print(name, error)
        assert error < LIMIT, (name, error)
"""
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "False"}


@pytest.fixture(scope="module")
def run(run_python, tmp_path_factory):
    """Compares the gradients, on a number of threads, with those that XLA computes in float64."""
    folder = str(tmp_path_factory.mktemp("exact"))
    run_python(f"FOLDER, LIMIT = {folder!r}, None\n{_SCRIPT}", **_ENVIRONMENT)

    def run(limit, threads):
        run_python(f"FOLDER, LIMIT = {folder!r}, {limit}\n{_SCRIPT}", OMP_NUM_THREADS=threads, **_ENVIRONMENT)

    return run


def test_weight_and_bias_gradients_over_many_positions(run):
    """If oneDNN computes each sum in one call, the error is up to 1.8e-4."""
    run(1.5e-5, "1")


@pytest.mark.parametrize("threads", ["2", "3"])
def test_parts_on_several_threads(threads, run):
    run(3e-5, threads)
