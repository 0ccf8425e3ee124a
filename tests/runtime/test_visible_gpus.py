import pytest

from stages.runtime.visible_gpus import list_named_gpus


@pytest.mark.parametrize(
    ("named", "gpus"), [(None, None), ("", []), ("1, 0", ["1", "0"]), ("GPU-8851a533,", ["GPU-8851a533"])]
)
def test_gpus_are_named_by_index_or_uuid(
    named: str | None, gpus: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert list_named_gpus() == gpus
