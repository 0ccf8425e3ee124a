"""The ways in which the engine runs a pass."""

import pytest

from stages.engine.target_runner import TargetRunner
from tests.engine import fake_cuda_graphs


@pytest.fixture(params=["called", "played", "in blocks"])
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU, as a GPU plays what it recorded of transformers' own modules, and there in few kernels."""
    if request.param != "called":
        fake_cuda_graphs.install(monkeypatch)
    if request.param == "played":
        monkeypatch.setattr(TargetRunner, "_build_fused_decoder", lambda *_: None)
    return request.param
