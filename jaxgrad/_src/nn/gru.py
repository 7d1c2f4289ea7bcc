"""`jaxgrad.nn.GRU`: several layers of GRUs, as `torch.nn.GRU`, for programs without a framework."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.convert.gru_weights import GRUWeights, as_layers
from jaxgrad._src.core import checks

_NAME = "jaxgrad.nn.GRU"


@jax.tree_util.register_pytree_with_keys_class
class GRU:
    """Layers of GRUs, one after the other, with dropout between them: `torch.nn.GRU` on `jaxgrad.gru`.

    The arguments have PyTorch's names and meanings, and with the same weights the results are PyTorch's. The layer is a
    pytree of arrays, so that `jax.grad`, `jax.jit` and optax take it as it is.

    T is the number of steps, B the batch size, L the number of layers, D the number of directions, 1 or 2, I the input
    size, and H the hidden size.

    Args:
      input_size: I.
      hidden_size: H.
      num_layers: L.
      bias: whether the layers have biases.
      batch_first: whether the batch comes before the steps in x, the output and reset. The states do not depend on it.
      dropout: the probability with which an element of the output of each layer but the last is zeroed, in calls with a
        key.
      bidirectional: whether each layer runs in both directions, so that the next has inputs of size 2H.
      dtype: of the weights.
      key: a random key. The weights are uniform in [-1/sqrt(H), 1/sqrt(H)], as PyTorch's.

    Attributes:
      layers: one `jaxgrad.convert.GRUWeights` for each layer.
      batch_first: as above.
      dropout: as above.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a size is not positive, or dropout lies outside [0, 1].

    Examples:
      >>> from jaxgrad import nn
      >>> gru = nn.GRU(3, 5, num_layers=2, dropout=0.1, key=jax.random.key(0))
      >>> x = jnp.ones((10, 4, 3))
      >>> output, h_n = gru(x)
      >>> output.shape, h_n.shape
      ((10, 4, 5), (2, 4, 5))
      >>> gradient = jax.grad(lambda gru, key: gru(x, key=key)[0].sum())(gru, jax.random.key(1))
      >>> gradient.layers[1].w.shape
      (1, 15, 5)
    """

    layers: tuple[GRUWeights, ...]
    batch_first: bool
    dropout: float

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: Any = jnp.float32,
        key: jax.Array,
    ) -> None:
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
        I, H, L = (checks.as_size(_NAME, name, size) for name, size in sizes.items())  # noqa: E741
        bias = checks.check_flag(_NAME, "bias", bias)
        D = 1 + checks.check_flag(_NAME, "bidirectional", bidirectional)
        layers = []
        for layer, layer_key in enumerate(jax.random.split(key, L)):
            shapes = [(D, 3 * H, D * H if layer else I), (D, 3 * H, H), *[(D, 3 * H)] * (2 * bias)]
            keys = jax.random.split(layer_key, len(shapes))
            arrays = [
                jax.random.uniform(key, shape, dtype, -(H**-0.5), H**-0.5)
                for key, shape in zip(keys, shapes, strict=True)
            ]
            layers.append(GRUWeights(*arrays, linear_before_reset=True))
        self._set(tuple(layers), batch_first, dropout)

    @classmethod
    def from_weights(cls, layers: Sequence[GRUWeights], *, batch_first: bool = False, dropout: float = 0.0) -> GRU:
        """The layer with given weights, such as `jaxgrad.convert.torch.read_gru` returns."""
        gru = object.__new__(cls)
        gru._set(as_layers(_NAME, layers), batch_first, dropout)
        for below, layer in zip(gru.layers, gru.layers[1:], strict=False):
            outputs = below.r.shape[0] * below.r.shape[2]
            if layer.w.shape[2] != outputs:
                raise ValueError(
                    f"{_NAME}: the input size of a layer must be that of the output of the layer below, {outputs}, "
                    f"got {layer.w.shape[2]}"
                )
        return gru

    def _set(self, layers: tuple[GRUWeights, ...], batch_first: bool, dropout: float) -> None:
        self.layers = layers
        self.batch_first = checks.check_flag(_NAME, "batch_first", batch_first)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
            raise TypeError(f"{_NAME}: dropout must be a number, got {type(dropout).__name__}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"{_NAME}: dropout must lie in [0, 1], got {dropout}")
        if dropout and len(layers) == 1:
            warnings.warn(f"{_NAME}: dropout={dropout} has no effect with a single layer", stacklevel=3)
        self.dropout = float(dropout)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return ((jax.tree_util.GetAttrKey("layers"), self.layers),), (self.batch_first, self.dropout)

    @classmethod
    def tree_unflatten(cls, static: tuple[bool, float], children: tuple[Any]) -> GRU:
        gru = object.__new__(cls)
        (gru.layers,), (gru.batch_first, gru.dropout) = children, static
        return gru

    @jax.named_scope(_NAME)
    def __call__(
        self,
        x: jax.typing.ArrayLike,
        hx: jax.typing.ArrayLike | None = None,
        *,
        sequence_lens: jax.typing.ArrayLike | Sequence[int] | None = None,
        reset: jax.typing.ArrayLike | None = None,
        key: jax.Array | None = None,
        remat_every: int | None = None,
        implementation: str | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the layers.

        Args:
          x: [T, B, I], or [B, T, I] with `batch_first`, or [T, I] without a batch.
          hx: [L * D, B, H], the states before the first step, or [L * D, H] without a batch; None for zeros.
          sequence_lens: [B], the lengths of the rows, as PyTorch packs them: past its length, the output of a row is
            zero. None if every row has T steps.
          reset: [T, B], or [B, T] with `batch_first`, or [T]; bools, or numbers. Zeros replace the states of all layers
            before the steps where it is true; `jaxgrad.gru` says more.
          key: a random key for dropout; None for no dropout, as in PyTorch's evaluation mode.
          remat_every: as in `jaxgrad.gru`.
          implementation: as in `jaxgrad.gru`.

        Returns:
          `(output, h_n)`:

          output: [T, B, D * H], or [B, T, D * H] with `batch_first`, or [T, D * H]: the states of the last layer after
            each step.
          h_n: [L * D, B, H], or [L * D, H]: the states after the last step of each row.

        Raises:
          TypeError, ValueError: as `jaxgrad.gru`.
        """
        x = checks.as_array(_NAME, "x", x)
        if x.ndim not in (2, 3):
            raise ValueError(f"{_NAME}: x must have rank 2 or 3, got rank {x.ndim}, {x.shape}")
        has_batch, batch_first = x.ndim == 3, x.ndim == 3 and self.batch_first
        if not has_batch:
            x = x[:, None]
            reset, hx = (
                None if value is None else jnp.expand_dims(checks.as_array(_NAME, name, value), 1)
                for name, value in (("reset", reset), ("hx", hx))
            )
        options: dict[str, Any] = {"reset": reset, "remat_every": remat_every, "implementation": implementation}
        states = self._initial_states(hx, x.shape[0 if batch_first else 1])
        last = []
        for number, (layer, initial_h) in enumerate(zip(self.layers, states, strict=True)):
            if number and key is not None and self.dropout:
                x = _drop(x, self.dropout, jax.random.fold_in(key, number))
            with jax.named_scope(f"layer_{number}"):
                if batch_first:
                    initial_h = None if initial_h is None else jnp.swapaxes(initial_h, 0, 1)
                    y, y_h = layer(x, sequence_lens, initial_h, time_major=False, **options)
                    y_h = jnp.swapaxes(y_h, 0, 1)
                else:
                    y, y_h = layer(x, sequence_lens, initial_h, **options)
                    y = jnp.swapaxes(y, 1, 2)
            x = y.reshape(*x.shape[:2], y.shape[2] * y.shape[3])
            last.append(y_h)
        h_n = jnp.concatenate(last)
        return (x, h_n) if has_batch else (x[:, 0], h_n[:, 0])

    def _initial_states(self, hx: Any, B: int) -> list[jax.Array | None]:
        """[D, B, H] for each layer."""
        D, _, H = self.layers[0].r.shape
        L = len(self.layers)
        if hx is None:
            return [None] * L
        hx = checks.as_array(_NAME, "hx", hx)
        checks.check_shape(_NAME, "hx", hx, ("L * D", "B", "H"), (L * D, B, H))
        return list(hx.reshape(L, D, B, H))


def _drop(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    if rate == 1:
        return jnp.zeros_like(x)
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)
