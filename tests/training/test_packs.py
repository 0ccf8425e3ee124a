"""Loading of packs: in the order of the plans, and on a GPU ahead of the step that is computed."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stages.runtime.distributed import RankContext
from stages.training import packs
from stages.training.packs import EpochPlan, PackLoader

PLANS: list[tuple[int, EpochPlan]] = [(4, [[[0, 1], [2]], [[3]]]), (5, [[[2], [3, 0]], [[1]]])]


class RowNumberLoader(PackLoader):
    """Builds packs that are only their index and their rows; `built` is released for each."""

    built = threading.Semaphore(0)

    def _build_pack(self, rows: list[int], supervised: bool, pack_index: packs.PackIndex) -> Any:
        if -1 in rows:
            raise ValueError("a broken shard")
        self.built.release()
        return pack_index.epoch, pack_index.step, rows


class FakeCopier:
    """Stands in for the copies to a GPU."""

    def __init__(self, device: str):
        pass

    def copy_packs(self, loaded: list) -> list:
        return loaded


@pytest.fixture(params=["cpu", "cuda"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RowNumberLoader:
    monkeypatch.setattr(packs, "_DeviceCopier", FakeCopier)
    monkeypatch.setattr(RowNumberLoader, "built", threading.Semaphore(0))
    unused: Any = None
    return RowNumberLoader(unused, unused, RankContext(0, 1, request.param), unused)


@pytest.mark.parametrize("loader", ["cuda"], indirect=True)
def test_the_next_epochs_packs_are_built_before_they_are_asked_for(loader: RowNumberLoader) -> None:
    steps = loader.load_steps(PLANS)
    while not next(steps).ends_epoch:
        pass
    for _ in range(6):  # all six packs, with nothing asked of the second epoch
        assert loader.built.acquire(timeout=30)


def test_a_broken_shard_is_told_by_its_own_step_not_by_the_end_of_the_epoch_before(loader: RowNumberLoader) -> None:
    steps: Iterator = loader.load_steps([*PLANS[:1], (5, [[[-1]]])])
    assert [next(steps).ends_epoch for _ in range(2)] == [False, True]
    with pytest.raises(ValueError, match="broken shard"):
        next(steps)
