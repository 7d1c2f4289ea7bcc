"""The calls that are measured when the command line has none: kinds of layers, each in a size that takes seconds."""

from __future__ import annotations

# A CPU computes these in float32 by default.
_CPU = (
    ("conv", "8x28x28x128,3x3,128"),
    ("conv", "8x28x28x256,1x1,128"),
    ("conv", "8x112x112x3,7x7,64,stride=2"),
    ("conv", "8x28x28x64,3x3,64,dilation=4"),
    ("conv", "4x2048x64,3,64,dilation=8,padding=causal"),
    ("conv", "4x14x14x128,3x3,128,groups=32"),
    ("conv", "8x28x28x192,3x3,192,groups=192"),
    ("conv", "4x256x256,31,256,groups=256"),
    ("conv", "2x16x16x16x32,3x3x3,64"),
    ("conv-transpose", "8x16x16x64,4x4,32,stride=2"),
    ("batch-norm", "8x56x56x64"),
    ("group-norm", "8x28x28x128,groups=32,activation=silu"),
    ("layer-norm", "4096x768"),
    ("rms-norm", "4096x768"),
    ("gru", "100,16,64,128"),
)
# A GPU in bfloat16.
_GPU = (
    ("conv", "64x56x56x64,3x3,64"),
    ("conv", "64x56x56x256,1x1,64"),
    ("conv", "64x224x224x3,7x7,64,stride=2,padding=3"),
    ("conv", "16x64x64x256,3x3,256,dilation=4"),
    ("conv", "8x4096x128,3,128,dilation=8,padding=causal"),
    ("conv", "64x28x28x256,3x3,256,groups=32"),
    ("conv", "64x56x56x96,7x7,96,groups=96"),
    ("conv", "8x2048x768,4,768,groups=768,padding=causal"),
    ("conv", "2x64x64x64x32,3x3x3,64"),
    ("conv-transpose", "16x64x64x256,2x2,128,stride=2"),
    ("conv-transpose", "128x8x8x512,4x4,256,stride=2,padding=1"),
    ("batch-norm", "128x56x56x64"),
    ("group-norm", "64x64x64x128,groups=32,activation=silu"),
    ("layer-norm", "65536x1024"),
    ("rms-norm", "65536x1024"),
    ("gru", "200,64,128,128"),
)


def default_calls(platform: str) -> tuple[tuple[str, str], ...]:
    """The options of the command line and their values."""
    return _GPU if platform == "gpu" else _CPU
