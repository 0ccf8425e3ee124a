"""Loading of packs: rows are read, packed and copied to a GPU by threads while earlier steps are computed."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from stages.hidden_states.reader import HiddenStatesReader
from stages.runtime.distributed import RankContext
from stages.training.online_packs import OnlinePacks
from stages.training.pack_plan import share_packs
from stages.training.ttt import TrainingObjective, TrainingPack

PREFETCHED_STEPS = 3
READER_THREADS = 4


@dataclass(frozen=True)
class PackLoader:
    """Loads this process's packs of each step to its device."""

    reader: HiddenStatesReader
    objective: TrainingObjective
    ranks: RankContext
    dtype: torch.dtype  # of rows stored in fp8
    online: OnlinePacks | None = None

    def load_steps(self, steps: list[list[list[int]]]) -> Iterator[list[TrainingPack]]:
        """Yield the packs of each step of a plan. Raises ValueError for a broken shard, as HiddenStatesReader."""
        shares = [share_packs(packs, self.ranks.rank, self.ranks.world) for packs in steps]
        if self.ranks.device.startswith("cuda"):
            yield from self._prefetch(shares)
        else:  # threads would take the cores that compute
            yield from ([self._build_pack(*task) for task in tasks] for tasks in shares)

    def _prefetch(self, shares: list[list[tuple[list[int], bool]]]) -> Iterator[list[TrainingPack]]:
        with ThreadPoolExecutor(READER_THREADS) as threads:

            def submit(tasks: list[tuple[list[int], bool]]) -> list[Future[TrainingPack]]:
                return [threads.submit(self._build_pack, *task) for task in tasks]

            pending, copier = deque(map(submit, shares[:PREFETCHED_STEPS])), _DeviceCopier(self.ranks.device)
            for number in range(len(shares)):
                pending.extend(map(submit, shares[number + PREFETCHED_STEPS : number + PREFETCHED_STEPS + 1]))
                yield copier.copy([future.result() for future in pending.popleft()])

    def _build_pack(self, rows: list[int], supervised: bool) -> TrainingPack:
        read = [self.reader.read_row(i, self.dtype) for i in rows]
        on_gpu = self.ranks.device.startswith("cuda")
        pack = TrainingPack.from_rows(read, self.objective.num_steps, self.objective.loss_mask, pinned=on_gpu)
        pack = self.online.add_images(pack, read) if self.online else pack
        return pack if supervised else pack.without_supervision()


class _DeviceCopier:
    """Copies packs to a GPU while it computes. The host may run ahead of the GPU by two steps at most."""

    def __init__(self, device: str):
        self.device, self.stream = device, torch.cuda.Stream()
        self.in_flight: deque[tuple[torch.cuda.Event, list[TrainingPack]]] = deque()

    def copy(self, packs: list[TrainingPack]) -> list[TrainingPack]:
        launched = torch.cuda.Event()
        launched.record()  # completes when all work launched so far has
        self.in_flight.append((launched, packs))  # keeps the pinned memory until its copy has certainly completed
        if len(self.in_flight) > 2:
            self.in_flight.popleft()[0].synchronize()
        with torch.cuda.stream(self.stream):
            copies = [pack.to(self.device) for pack in packs]
        main = torch.cuda.current_stream()
        main.wait_stream(self.stream)
        for pack in copies:
            pack.record_stream(main)
        return copies
