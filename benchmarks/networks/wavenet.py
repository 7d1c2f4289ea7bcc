"""WaveNet (van den Oord et al., 2016): dilated convolutions of a waveform, with gates, residuals and skips."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.ops import Ops

_CHANNELS = 128
_DILATIONS = tuple(2**i for i in range(10)) * 2
_GAIN = 1 / len(_DILATIONS)  # of each layer, whose outputs are summed


def wavenet(ops: Ops, x: Any, padding: str) -> Any:
    """One output for each sample; from the past alone with a padding of "causal", from both sides with "centered"."""
    x, skips = ops.conv(x, _CHANNELS, 1), []
    for i, dilation in enumerate(_DILATIONS):
        filtered, gate = ops.halves(ops.conv(x, 2 * _CHANNELS, 3, gain=1, dilation=dilation, padding=padding))
        gated = ops.tanh(filtered) * ops.sigmoid(gate)
        skips.append(ops.conv(gated, _CHANNELS, 1, gain=_GAIN))
        if i + 1 < len(_DILATIONS):  # the last layer has no successor
            x = x + ops.conv(gated, _CHANNELS, 1, gain=_GAIN)
    x = ops.conv(ops.relu(sum(skips[1:], skips[0])), _CHANNELS, 1, relu=True)
    return ops.conv(x, 1, 1, gain=1)
