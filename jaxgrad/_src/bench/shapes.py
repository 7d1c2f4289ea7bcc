"""Calls as the command line describes them, such as 8x56x56x64,3x3,128,stride=2."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from jaxgrad._src.bench.conv import ConvCall
from jaxgrad._src.bench.gru import GruCall
from jaxgrad._src.bench.norm import NormCall

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
CONV = "8x56x56x64,3x3,128 (batch x sizes x features, window, output features)"
BATCH_NORM = "8x56x56x64 (batch x sizes x features)"
ROWS = "4096x768 (rows x features)"
GRU = "100,32,64,128 (steps, batch, input size, hidden size)"
_CONV_OPTIONS = ("stride", "padding", "dilation", "groups", "layout", "dtype")
_Error = argparse.ArgumentTypeError


def conv(text: str) -> ConvCall:
    return _conv(text, transposed=False)


def conv_transpose(text: str) -> ConvCall:
    return _conv(text, transposed=True)


def _conv(text: str, transposed: bool) -> ConvCall:
    (data, window, out), options = _split(text, CONV, 3, _CONV_OPTIONS)
    batch, *spatial, features = _sizes("the first value", data, "batch x 1 to 3 sizes x features", (3, 4, 5))
    n = len(spatial)
    groups = _number("groups", options.get("groups", "1"))
    out_features = _number("the output features", out)
    if features % groups or out_features % groups:
        raise _Error(
            f"groups must divide the features, {features}, and the output features, {out_features}, got {groups}"
        )
    windows = _each_axis("the window", window, n)
    dilation = _each_axis("dilation", options.get("dilation", "1"), n)
    reach = [d * (k - 1) for k, d in zip(windows, dilation, strict=True)]
    call = ConvCall(
        text=f"{'conv-transpose' if transposed else 'conv'} {text}",
        dtype=_dtype(options),
        transposed=transposed,
        batch=batch,
        spatial=tuple(spatial),
        features=features,
        window=windows,
        out_features=out_features,
        stride=_each_axis("stride", options.get("stride", "1"), n),
        dilation=dilation,
        padding=_padding(options.get("padding", "SAME"), reach, transposed),
        groups=groups,
        channels_last=_channels_last(options.get("layout"), n),
    )
    if min(call.out_spatial) < 1:
        sizes = "x".join(map(str, call.out_spatial))
        raise _Error(f"the window and padding must leave an output, got one of the sizes {sizes}")
    return call


def batch_norm(text: str) -> NormCall:
    return _norm("batch-norm", text, ("feature_axis", "activation", "dtype"))


def group_norm(text: str) -> NormCall:
    return _norm("group-norm", text, ("groups", "feature_axis", "activation", "dtype"))


def layer_norm(text: str) -> NormCall:
    return _norm("layer-norm", text, ("activation", "dtype"))


def rms_norm(text: str) -> NormCall:
    return _norm("rms-norm", text, ("activation", "dtype"))


def _norm(kind: str, text: str, names: Sequence[str]) -> NormCall:
    (data,), options = _split(text, BATCH_NORM if "feature_axis" in names else ROWS, 1, names)
    shape = _sizes("the first value", data, "2 sizes or more", range(2, 9))
    axis, first = options.get("feature_axis", "-1"), int(kind == "group-norm")
    if not re.fullmatch(r"-?\d", axis) or not -len(shape) <= int(axis) < len(shape) or int(axis) % len(shape) < first:
        raise _Error(f"feature_axis must be an axis of {data}, {first} to {len(shape) - 1}, got {axis!r}")
    if (activation := options.get("activation")) is not None:
        _one_of("activation", activation, ("relu", "silu", "gelu"))
    features, groups = shape[int(axis)], _number("groups", options.get("groups", "1"))
    if features % groups:
        raise _Error(f"groups must divide the features, {features}, got {groups}")
    return NormCall(f"{kind} {text}", _dtype(options), shape, int(axis) % len(shape), activation, kind, groups)


def gru(text: str) -> GruCall:
    values, options = _split(text, GRU, 4, ("direction", "linear_before_reset", "dtype"))
    steps, batch, inputs, hidden = map(_number, ("the steps", "the batch", "the input size", "the hidden size"), values)
    direction = _one_of("direction", options.get("direction", "forward"), ("forward", "bidirectional"))
    linear = _one_of("linear_before_reset", options.get("linear_before_reset", "true"), ("true", "false"))
    return GruCall(
        text=f"gru {text}",
        dtype=_dtype(options),
        T=steps,
        B=batch,
        I=inputs,
        H=hidden,
        bidirectional=direction == "bidirectional",
        linear_before_reset=linear == "true",
    )


def dtype(text: str) -> str:
    """The name in JAX of a dtype."""
    if text not in (*DTYPES, *DTYPES.values()):
        raise _Error(f"dtype must be {', '.join(DTYPES)}, got {text!r}")
    return DTYPES.get(text, text)


def _dtype(options: dict[str, str]) -> str:
    return dtype(options["dtype"]) if "dtype" in options else ""


def _split(text: str, example: str, count: int, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The values, and the options behind them."""
    parts = text.split(",")
    values, options = parts[:count], parts[count:]
    if len(values) < count or any("=" in value for value in values):
        raise _Error(f"must be like {example}, got {text!r}")
    found: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in names or not value or name in found:
            raise _Error(f"options are each of {', '.join(f'{n}=' for n in names)} once, got {option!r} in {text!r}")
        found[name] = value
    return values, found


def _sizes(name: str, text: str, expected: str, counts: Sequence[int]) -> tuple[int, ...]:
    sizes = text.split("x")
    if len(sizes) not in counts or not all(map(_is_positive, sizes)):
        raise _Error(f"{name} must be {expected}, joined by x, got {text!r}")
    return tuple(map(int, sizes))


def _each_axis(name: str, text: str, n: int) -> tuple[int, ...]:
    """A number for each spatial axis; one number is that of all."""
    sizes = text.split("x")
    if len(sizes) not in (1, n) or not all(map(_is_positive, sizes)):
        raise _Error(f"{name} must be a number, or {n} joined by x, got {text!r}")
    return tuple(map(int, sizes * (n // len(sizes))))


def _number(name: str, text: str) -> int:
    if not _is_positive(text):
        raise _Error(f"{name} must be a positive number, got {text!r}")
    return int(text)


def _is_positive(text: str) -> bool:
    return re.fullmatch(r"0*[1-9]\d{0,8}", text) is not None


def _padding(text: str, reach: Sequence[int], transposed: bool) -> str | tuple[tuple[int, int], ...]:
    if text in ("SAME", "VALID"):
        return text
    if text == "causal" and not transposed:
        return tuple((size, 0) for size in reach)
    sizes = text.split("x")
    if len(sizes) not in (1, len(reach)) or not all(re.fullmatch(r"\d{1,9}", size) for size in sizes):
        causal = "" if transposed else ", causal"
        raise _Error(f"padding must be SAME, VALID{causal}, a number, or {len(reach)} joined by x, got {text!r}")
    return tuple((int(size), int(size)) for size in sizes * (len(reach) // len(sizes)))


def _channels_last(layout: str | None, n: int) -> bool:
    axes = "DHW"[3 - n :]
    last, second = f"N{axes}C", f"NC{axes}"
    return layout is None or _one_of("layout", layout, (last, second)) == last


def _one_of(name: str, text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise _Error(f"{name} must be {' or '.join(choices)}, got {text!r}")
    return text
