"""PyTorch's GRU as a reference: `linear_before_reset=True`, with the gates in the order r, z, n."""

from __future__ import annotations

import numpy as np
import pytest
from gru_cases import Case, Cotangents, Inputs, make_inputs
from gru_running import values_and_gradients
from tolerances import assert_results_close

torch = pytest.importorskip("torch")

SETTINGS = [
    Case(7, 4, 5, 9, direction, linear_before_reset=True, sequence_lens=ragged, b=bias, reset=False)
    for direction in ("forward", "bidirectional")
    for ragged in (False, True)
    for bias in (False, True)
]


def _swap_gates(rows: np.ndarray) -> np.ndarray:
    """z, r, n to r, z, n, and back."""
    z, r, n = np.split(rows, 3)
    return np.concatenate([r, z, n])


def _torch_gru(inputs: Inputs, cotangents: Cotangents) -> tuple[np.ndarray, np.ndarray, Inputs]:
    """`(y, y_h, gradients)` of `torch.nn.GRU` in ONNX's shapes."""
    T, B, I = inputs.x.shape  # noqa: E741
    D, _, H = inputs.r.shape
    layer = torch.nn.GRU(I, H, bias=inputs.b is not None, bidirectional=D == 2, dtype=torch.float64)
    kinds = {"weight_ih": inputs.w, "weight_hh": inputs.r}
    if inputs.b is not None:
        kinds |= {"bias_ih": inputs.b[:, : 3 * H], "bias_hh": inputs.b[:, 3 * H :]}
    suffixes = ["", "_reverse"][:D]
    with torch.no_grad():
        for kind, arrays in kinds.items():
            for array, suffix in zip(arrays, suffixes, strict=True):
                getattr(layer, f"{kind}_l0{suffix}").copy_(torch.from_numpy(_swap_gates(array)))

    x = torch.tensor(inputs.x, requires_grad=True)
    h0 = torch.tensor(inputs.initial_h, requires_grad=True)
    if inputs.sequence_lens is None:
        packed = layer(x, h0)
        y, y_h = packed
    else:
        lengths = torch.from_numpy(inputs.sequence_lens).long()
        packed, y_h = layer(torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False), h0)
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(packed, total_length=T)
    y = y.reshape(T, B, D, H).permute(0, 2, 1, 3)
    torch.autograd.backward([y, y_h], [torch.from_numpy(cotangents.y), torch.from_numpy(cotangents.y_h)])

    def gradient(kind: str) -> np.ndarray:
        found = [getattr(layer, f"{kind}_l0{suffix}").grad.numpy() for suffix in suffixes]
        return np.stack([_swap_gates(rows) for rows in found])

    db = None if inputs.b is None else np.concatenate([gradient("bias_ih"), gradient("bias_hh")], 1)
    gradients = Inputs(x.grad.numpy(), gradient("weight_ih"), gradient("weight_hh"), db, None, h0.grad.numpy())
    return y.detach().numpy(), y_h.detach().numpy(), gradients


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_values_and_gradients(backend, case):
    inputs, cotangents = make_inputs(case, "float64")
    if case.sequence_lens:  # PyTorch takes no length of zero
        inputs = inputs._replace(sequence_lens=np.array([7, 1, 4, 2], np.int32))
    actual = values_and_gradients(backend, inputs, cotangents, case.settings)
    assert_results_close(actual, _torch_gru(inputs, cotangents), dtype="float64", terms=case.terms)
