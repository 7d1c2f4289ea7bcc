"""The convolutions that are measured: on a CPU one for each kind, on a GPU those of whole networks."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from functools import cached_property
from typing import Any

from jaxgrad._src.bench.conv import ConvCall


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution whose window, stride, dilation and padding are the same on every spatial axis."""

    spatial: tuple[int, ...]
    batch: int
    features: int
    out_features: int
    window: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padding: int = 0
    transposed: bool = False
    channels_last: bool = True
    dtype: str = "float32"
    causal: bool = False  # padding of dilation * (window - 1) before the first element, none after the last
    extra: bool = False

    def __post_init__(self) -> None:
        if self.causal and (self.padding or self.transposed):
            raise ValueError("a causal convolution has its own padding, and is not transposed")

    @cached_property
    def call(self) -> ConvCall:
        """The call of `python -m jaxgrad bench`, which has the padding of the convolution that is transposed."""
        n = len(self.spatial)
        pads = (self.dilation * (self.window - 1), 0) if self.causal else (self.padding, self.padding)
        sizes = (self.batch, self.spatial, self.features, (self.window,) * n, self.out_features)
        steps = ((self.stride,) * n, (self.dilation,) * n, (pads,) * n)
        return ConvCall("", self.dtype, self.transposed, *sizes, *steps, self.groups, self.channels_last)

    @property
    def dimension_numbers(self) -> tuple[str, str, str]:
        return self.call.dimension_numbers

    @property
    def label(self) -> str:
        optional = {"s": (self.stride, 1), "d": (self.dilation, 1), "g": (self.groups, 1), "p": (self.padding, 0)}
        words = [
            "x".join(map(str, (self.batch, *self.spatial))),
            f"{self.features}->{self.out_features}",
            f"k{self.window}",
            *(f"{letter}{value}" for letter, (value, usual) in optional.items() if value != usual),
            *(["causal"] if self.causal else []),
            *(["T"] if self.transposed else []),
            self.dimension_numbers[0],
        ]
        return " ".join([*words, *(["bf16"] if self.dtype == "bfloat16" else [])])

    @property
    def is_depthwise(self) -> bool:
        return 1 < self.groups == self.features

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the convolution."""
        call = self.call
        common = {"rhs_dilation": call.dilation, "dimension_numbers": call.dimension_numbers}
        if self.transposed:
            return {"strides": call.stride, "padding": call.dilated_pads, **common}
        return {
            "window_strides": call.stride,
            "padding": call.pads,
            "feature_group_count": self.groups,
            **common,
        }

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of x, w and y."""
        x, w, y = (each.shape for each in self.call.operands())
        return x, w, y

    @property
    def flops(self) -> int:
        """Multiplications and additions, with the padding as if it were data."""
        x, _, y = self.shapes()
        places = math.prod(x) // self.features if self.transposed else math.prod(y) // self.out_features
        taps = self.window ** len(self.spatial)
        return 2 * places * taps * self.features * self.out_features // self.groups


def _both_layouts(*cases: Case) -> tuple[Case, ...]:
    return tuple(dataclasses.replace(case, channels_last=last) for case in cases for last in (True, False))


# Depthwise convolutions of MobileNetV2, EfficientNet, a Conformer, state-space models and X3D.
_CPU_DEPTHWISE = (
    Case((56, 56), 8, 144, 144, 3, groups=144, padding=1),
    Case((112, 112), 8, 96, 96, 3, stride=2, groups=96, padding=1),
    Case((14, 14), 8, 384, 384, 3, groups=384, padding=1),
    Case((28, 28), 8, 240, 240, 5, groups=240, padding=2),
    Case((28, 28), 8, 240, 240, 5, stride=2, groups=240, padding=2),
    Case((512,), 8, 256, 256, 31, groups=256, padding=15),
    Case((2048,), 4, 768, 768, 4, groups=768, causal=True),
    Case((8, 56, 56), 2, 54, 54, 3, groups=54, padding=1),
)
_CPU_BOTH_LAYOUTS = _both_layouts(
    *_CPU_DEPTHWISE,
    Case((56, 56), 8, 128, 128, 3, groups=32, padding=1),
    Case((56, 56), 8, 96, 96, 7, groups=96, padding=3),
    Case((56, 56), 8, 64, 64, 3, padding=1),
    Case((56, 56), 8, 256, 64, 1),
    Case((224, 224), 8, 3, 64, 7, stride=2, padding=3),
    Case((56, 56), 8, 128, 128, 3, stride=2, padding=1),
    Case((56, 56), 8, 64, 64, 3, dilation=4, padding=4),
    Case((28, 28), 8, 1, 32, 3, padding=1),
    Case((28, 28), 64, 1, 32, 5, padding=2),
    Case((4096,), 8, 128, 128, 3, dilation=8, padding=8),
    Case((16, 16, 16), 2, 32, 64, 3, padding=1),
    Case((28, 28), 8, 64, 32, 2, stride=2, transposed=True),
    Case((16, 16), 8, 64, 32, 4, stride=2, padding=1, transposed=True),
    Case((224, 224), 8, 3, 768, 16, stride=16),
    Case((224, 224), 8, 3, 768, 32, stride=32),
    Case((224, 224), 8, 3, 96, 4, stride=4),
    Case((56, 56), 8, 96, 192, 2, stride=2),
    Case((14, 14), 8, 384, 768, 2, stride=2),
    Case((8, 8), 1, 1, 1, 3, padding=1),
    Case((8, 8), 1, 8, 8, 3, padding=1),
)
# Layers of MobileNetV3 and ConvNeXt-B, a patch embedding, and a transposed convolution that inverts a patch embedding.
_CPU_CHANNELS_LAST = (
    Case((14, 14), 8, 672, 672, 5, stride=2, groups=672, padding=2),
    Case((7, 7), 8, 1024, 1024, 7, groups=1024, padding=3),
    Case((224, 224), 8, 3, 1024, 14, stride=14),
    Case((14, 14), 8, 768, 3, 16, stride=16, transposed=True),
)
_CPU_16_BITS = tuple(
    dataclasses.replace(case, dtype="bfloat16")
    for case in (
        Case((56, 56), 8, 144, 144, 3, groups=144, padding=1),
        Case((56, 56), 8, 96, 96, 7, groups=96, padding=3),
        Case((512,), 8, 256, 256, 31, groups=256, padding=15),
    )
)
_CPU_CASES = (*_CPU_BOTH_LAYOUTS, *_CPU_CHANNELS_LAST, *_CPU_16_BITS)
# Shapes for which XLA is known to be slow or fast; below, the other shapes of some networks.
_GPU_KNOWN = (
    Case((16384,), 8, 128, 128, 3, dilation=8, padding=8),
    Case((64, 64), 16, 256, 256, 3, dilation=4, padding=4),
    Case((64, 64), 16, 256, 128, 2, stride=2, transposed=True),
    Case((8, 8), 128, 512, 256, 4, stride=2, padding=1, transposed=True),
    Case((56, 56), 64, 96, 96, 7, groups=96, padding=3),
    Case((56, 56), 64, 96, 96, 7, groups=96, padding=3, channels_last=False),
    Case((7, 7), 64, 1024, 1024, 3, groups=32, padding=1),
    Case((64, 64, 64), 2, 32, 64, 3, padding=1),
    Case((56, 56), 64, 64, 64, 3, padding=1),
    Case((56, 56), 64, 256, 64, 1),
    Case((224, 224), 64, 3, 64, 7, stride=2, padding=3),
    Case((56, 56), 64, 128, 128, 3, stride=2, padding=1),
)
_GPU_NETWORKS = {
    "ResNet-50": (
        Case((56, 56), 64, 64, 256, 1),
        Case((56, 56), 64, 256, 512, 1, stride=2),
        Case((28, 28), 64, 128, 512, 1),
        Case((28, 28), 64, 128, 128, 3, padding=1),
        Case((28, 28), 64, 256, 256, 3, stride=2, padding=1),
        Case((14, 14), 64, 1024, 256, 1),
        Case((14, 14), 64, 256, 256, 3, padding=1),
        Case((14, 14), 64, 1024, 2048, 1, stride=2),
        Case((7, 7), 64, 512, 512, 3, padding=1),
        Case((7, 7), 64, 512, 2048, 1),
    ),
    "ResNeXt-50": (
        Case((56, 56), 64, 128, 128, 3, groups=32, padding=1),
        Case((56, 56), 64, 256, 256, 3, stride=2, groups=32, padding=1),
        Case((28, 28), 64, 256, 256, 3, groups=32, padding=1),
        Case((14, 14), 64, 512, 512, 3, groups=32, padding=1),
    ),
    "MobileNetV2": (
        Case((224, 224), 64, 3, 32, 3, stride=2, padding=1),
        Case((112, 112), 64, 96, 96, 3, stride=2, groups=96, padding=1),
        Case((56, 56), 64, 144, 144, 3, groups=144, padding=1),
        Case((14, 14), 64, 384, 384, 3, groups=384, padding=1),
        Case((112, 112), 64, 16, 96, 1),
        Case((7, 7), 64, 320, 1280, 1),
    ),
    "MobileNetV3": (Case((14, 14), 64, 672, 672, 5, stride=2, groups=672, padding=2),),
    "EfficientNet": (
        Case((28, 28), 64, 240, 240, 5, groups=240, padding=2),
        Case((56, 56), 64, 144, 144, 5, stride=2, groups=144, padding=2),
        Case((14, 14), 64, 672, 672, 5, groups=672, padding=2),
    ),
    "EfficientNet-B4": (Case((48, 48), 64, 336, 336, 5, groups=336, padding=2),),
    "MobileOne": (Case((28, 28), 64, 192, 192, 3, stride=2, groups=192, padding=1),),
    "ConvNeXt-T": (
        Case((224, 224), 64, 3, 96, 4, stride=4),
        Case((56, 56), 64, 96, 192, 2, stride=2),
        Case((14, 14), 64, 384, 384, 7, groups=384, padding=3),
        Case((56, 56), 64, 96, 384, 1),
    ),
    "ConvNeXt-B": (Case((7, 7), 64, 1024, 1024, 7, groups=1024, padding=3),),
    "ViT": (
        Case((224, 224), 64, 3, 1024, 14, stride=14),
        Case((224, 224), 64, 3, 768, 16, stride=16),
        Case((224, 224), 64, 3, 768, 32, stride=32),
        Case((14, 14), 64, 768, 3, 16, stride=16, transposed=True),
    ),
    "RepLKNet": (
        Case((28, 28), 32, 512, 512, 13, groups=512, padding=6),
        Case((56, 56), 32, 128, 128, 31, groups=128, padding=15),
    ),
    "Conformer": (Case((1024,), 16, 512, 512, 31, groups=512, padding=15),),
    "Mamba": (Case((2048,), 8, 1536, 1536, 4, groups=1536, causal=True),),
    "X3D": (Case((16, 40, 40), 16, 108, 108, 3, groups=108, padding=1),),
    "U-Net": (
        Case((256, 256), 16, 64, 64, 3, padding=1),
        Case((256, 256), 16, 128, 64, 3, padding=1),
        Case((32, 32), 16, 512, 512, 3, padding=1),
        Case((128, 128), 16, 128, 64, 2, stride=2, transposed=True),
    ),
    "3D U-Net": (
        Case((64, 64, 64), 2, 1, 32, 3, padding=1),
        Case((64, 64, 64), 2, 64, 32, 3, padding=1),
        Case((16, 16, 16), 2, 128, 128, 3, padding=1),
        Case((32, 32, 32), 2, 64, 32, 2, stride=2, transposed=True),
    ),
    "DCGAN": (
        Case((1, 1), 128, 100, 1024, 4, transposed=True),
        Case((32, 32), 128, 128, 3, 4, stride=2, padding=1, transposed=True),
        Case((32, 32), 128, 128, 256, 4, stride=2, padding=1),
    ),
    "WaveNet": (
        Case((16384,), 8, 128, 128, 2, dilation=512, causal=True),
        Case((16384,), 8, 128, 128, 3, dilation=8, causal=True),
        Case((16384,), 8, 128, 128, 1),
    ),
    "DeepLab": (
        Case((32, 32), 8, 512, 512, 3, dilation=2, padding=2),
        Case((32, 32), 8, 2048, 256, 3, dilation=12, padding=12),
        Case((128, 128), 8, 304, 256, 3, padding=1),
    ),
}
# Measured in bfloat16 only: in float32 it resembles the 16x16 windows of one image above. It embeds two images, each
# with its own weights.
_GPU_NETWORKS_IN_16_BITS = {"ViT": (Case((224, 224), 64, 6, 768, 16, stride=16, groups=2),)}
_GPU_CASES = tuple(
    dataclasses.replace(case, dtype=dtype, extra=extra and not case.causal)
    for dtype, networks in (
        ("bfloat16", (*_GPU_NETWORKS.values(), *_GPU_NETWORKS_IN_16_BITS.values())),
        ("float32", _GPU_NETWORKS.values()),
    )
    for cases, extra in ((_GPU_KNOWN, False), *((cases, True) for cases in networks))
    for case in cases
)
CASES = {"cpu": _CPU_CASES, "gpu": _GPU_CASES}
QUICK_CASES = _both_layouts(
    Case((9, 9), 2, 8, 4, 3, stride=2, groups=2, padding=1),
    Case((5,), 2, 4, 8, 3, stride=2, padding=1, transposed=True),
    Case((12,), 2, 4, 8, 3, dilation=2, causal=True),
    Case((8, 6), 2, 4, 6, 2, stride=2, groups=2),
)
_NUMBERS = {"k": "window", "s": "stride", "d": "dilation", "g": "groups", "p": "padding"}
_DTYPES = {"bf16": "bfloat16", "f32": "float32"}


def parse_case(text: str) -> Case:
    """sizes, features and settings as in the tables, joined by commas: 8x56x56,128->128,k3,s2,g32,p1,T,NCHW,bf16"""
    sizes, _, rest = text.partition(",")
    features, *words = rest.split(",")
    found = re.fullmatch(r"(\d+)->(\d+)", features)
    values: dict[str, Any] = {}
    valid = re.fullmatch(r"\d+(x\d+){1,3}", sizes) is not None and found is not None
    for word in words:
        if (number := re.fullmatch(r"([ksdgp])(\d+)", word)) is not None:
            values[_NUMBERS[number[1]]] = int(number[2])
        elif word == "T":
            values["transposed"] = True
        elif word == "causal":
            values["causal"] = True
        elif re.fullmatch(r"N(C[DHW]+|[DHW]+C)", word):
            values["channels_last"] = word.endswith("C")
        elif word in _DTYPES:
            values["dtype"] = _DTYPES[word]
        else:
            valid = False
    if not valid or "window" not in values:
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    assert found is not None
    batch, *spatial = map(int, sizes.split("x"))
    case = Case(tuple(spatial), batch, int(found[1]), int(found[2]), **values)
    if case.groups < 1 or case.features % case.groups or case.out_features % case.groups:
        raise argparse.ArgumentTypeError(f"the groups must divide the features, got {text!r}")
    if case.transposed and case.groups > 1:
        raise argparse.ArgumentTypeError(f"jax.lax has no transposed convolution with groups, got {text!r}")
    return case
