"""What `python -m benchmarks preferences --measure` does before it measures. It needs the CUDA module and no GPU."""

from __future__ import annotations

import benchmarks_package  # noqa: F401
import pytest
from cuda_module import NEEDS_CUDA_MODULE

from benchmarks import preference_calls
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.kernels.depthwise_cuda import kernel_rejection
from jaxgrad._src.native import cuda

pytestmark = pytest.mark.jax_version


@NEEDS_CUDA_MODULE
def test_calls_are_recorded_without_plans(monkeypatch):
    """Plans of all calls would take minutes on a GPU. The call to measure has one, and the caches are clean then."""
    asked = []
    monkeypatch.setattr(cuda, "gpu_ordinal", lambda: asked.append("GPU"))
    depthwise = next(each for each in preference_calls.functions("gpu") if "feature_group_count=144" in str(each[0]))
    monkeypatch.setattr(preference_calls, "functions", lambda platform: [depthwise])
    monkeypatch.setattr(preference_calls, "_calls_with_functions", preference_calls._calls_with_functions.__wrapped__)
    texts = preference_calls.calls.__wrapped__("gpu")
    assert len(texts) == len(PASSES)
    assert not asked
    assert kernel_rejection.cache_info().currsize == 0
    for text in texts:
        recorded = preference_calls.with_plan(text, "gpu")
        assert recorded.call.text(recorded.pass_name, "cuda") == text
    assert asked
