"""The mark of tests that need the CUDA module. They need no GPU."""

from __future__ import annotations

import pytest

from jaxgrad._src.native import cuda

NO_CUDA_MODULE = "this build has no CUDA module: JAXGRAD_CUDA=1 makes one that has"
NEEDS_CUDA_MODULE = pytest.mark.skipif(not cuda.targets(), reason=NO_CUDA_MODULE)
