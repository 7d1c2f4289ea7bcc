"""For tests of the CUDA module without a GPU: the mark of tests that need it, and the engines of the fake cuDNN."""

from __future__ import annotations

import pytest

NO_CUDA_MODULE = "this build has no CUDA module: JAXGRAD_CUDA=1 makes one that has"
NEEDS_CUDA_MODULE = pytest.mark.cuda_module

# As "number:workspace bytes:microseconds". The first engine of the heuristic is not the fastest; neither needs the most
# workspace.
ENGINES = "11:100:30,12:200:10,13:300:20"
