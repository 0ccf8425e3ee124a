"""Packs of training rows: their plan, and their loading by threads while earlier steps are computed.

Rows are assigned to packs, packs to optimizer steps, and a step's packs to processes. On a GPU rows are read, packed and
copied ahead.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch

from stages.hidden_states.format import HiddenStatesRow
from stages.hidden_states.reader import HiddenStatesReader
from stages.params.draft_sections import TrainDraft
from stages.runtime.distributed import RankContext
from stages.training.packed_rows import PackIndex, PackObjective, SupervisedPack, number_image_tokens

if TYPE_CHECKING:  # transformers' model classes take seconds, and stored hidden states need none
    from stages.target.feature_target import FeatureTarget

MAX_OPEN_PACKS = 8
PREFETCHED_STEPS = 3
READER_THREADS = 4

P = TypeVar("P")
EpochPlan = list[list[list[int]]]  # steps, their packs, and the numbers of each pack's rows


def plan_epoch(lengths: list[int], settings: TrainDraft, epoch: int) -> EpochPlan:
    """Return the steps of an epoch, each `packs_per_step` packs of row numbers with at most `batch_tokens` tokens a pack.

    The plan depends on the seed and the epoch only, so a segment that starts at epoch 3 has the same plan as a straight run.
    """
    assert settings.batch_tokens is not None, "fill_batch_tokens comes first"
    rng = random.Random(settings.seed * 1_000_003 + epoch)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    packs: list[list[int]] = []
    open_packs: list[tuple[list[int], list[int]]] = []  # packs that may take more rows, and the tokens left in each
    for row in order:  # first fit among a few open packs: nearly full packs, with other rows together every epoch
        pack, tokens_left = next((x for x in open_packs if x[1][0] >= lengths[row]), ([], [settings.batch_tokens]))
        if not pack:
            packs.append(pack)
            open_packs = [*open_packs, (pack, tokens_left)][-MAX_OPEN_PACKS:]
        pack.append(row)
        tokens_left[0] -= lengths[row]
    rng.shuffle(packs)
    return [packs[i : i + settings.packs_per_step] for i in range(0, len(packs), settings.packs_per_step)]


def share_packs(packs: list[list[int]], rank: int, world: int) -> list[tuple[list[int], bool]]:
    """Return this process's packs of a step, each with whether it is supervised.

    All processes get the same number, since FSDP synchronises them at each forward: the step's first pack is repeated, without
    supervision, where packs run out.
    """
    padded = [(rows, True) for rows in packs] + [(packs[0], False)] * (-len(packs) % world)
    return padded[rank::world]


class PackTask(NamedTuple):
    """A pack to be built."""

    rows: list[int]  # numbers in the index
    supervised: bool
    pack_index: PackIndex


@dataclass(frozen=True)
class PackStep(Generic[P]):
    """This process's packs of a step: to be built, or on its device."""

    packs: list[P]
    num_rows: int  # of all processes
    ends_epoch: bool


@dataclass(frozen=True)
class OnlinePacks:
    """Hidden states of packs from a target that runs in the trainer (`extract_hiddens.online`)."""

    target: "FeatureTarget"
    image_paths: dict[str, list[str]]  # by row id

    def add_images(self, pack: SupervisedPack, rows: list[HiddenStatesRow]) -> SupervisedPack:
        """Return the pack with the image inputs of its rows, if any. May be called by several threads."""
        inputs = self.target.build_inputs([row.id for row in rows], [row.ids for row in rows], self.image_paths)
        if inputs is None:
            return pack
        return replace(
            pack,
            multimodal_inputs=inputs,
            rope_positions=inputs.positions.T.contiguous(),
            image_token_index=number_image_tokens(inputs.image_token_mask),
        )

    def fill_hidden_states(self, pack: SupervisedPack) -> SupervisedPack:
        """Return the pack with hidden states of the target."""
        return replace(
            pack, **self.target.compute_hidden_states(pack.ids, pack.lengths, pack.multimodal_inputs)._asdict()
        )


@dataclass(frozen=True)
class PackLoader:
    """Loads this process's packs of each step to its device."""

    reader: HiddenStatesReader
    objective: PackObjective
    ranks: RankContext
    dtype: torch.dtype  # of rows stored in fp8
    online: OnlinePacks | None = None

    def load_steps(self, plans: Iterable[tuple[int, EpochPlan]]) -> Iterator[PackStep[SupervisedPack]]:
        """Yield the steps of epochs, each with its plan. Raises ValueError for a broken shard, as HiddenStatesReader.

        On a GPU an epoch's first steps are read while the one before it ends, and while its checkpoint is written.
        """
        tasks = (step for epoch, plan in plans for step in self._list_tasks(plan, epoch))
        if self.ranks.device.startswith("cuda"):
            yield from self._prefetch(tasks)
        else:  # threads would take the cores that compute
            for step in tasks:
                yield PackStep([self._build_pack(*task) for task in step.packs], step.num_rows, step.ends_epoch)

    def _list_tasks(self, plan: EpochPlan, epoch: int) -> Iterator[PackStep[PackTask]]:
        """Yield this process's packs of each step."""
        rank, world = self.ranks.rank, self.ranks.world
        for step, packs in enumerate(plan):
            share = share_packs(packs, rank, world)
            tasks = [PackTask(*x, PackIndex(epoch, step, rank + i * world)) for i, x in enumerate(share)]
            yield PackStep(tasks, sum(map(len, packs)), ends_epoch=step == len(plan) - 1)

    def _prefetch(self, tasks: Iterator[PackStep[PackTask]]) -> Iterator[PackStep[SupervisedPack]]:
        with ThreadPoolExecutor(READER_THREADS) as threads:

            def submit(step: PackStep[PackTask]) -> tuple[PackStep[PackTask], list[Future[SupervisedPack]]]:
                return step, [threads.submit(self._build_pack, *task) for task in step.packs]

            pending, copier = deque(map(submit, islice(tasks, PREFETCHED_STEPS))), _DeviceCopier(self.ranks.device)
            while pending:
                pending.extend(map(submit, islice(tasks, 1)))
                step, packs = pending.popleft()
                # Without a name for the copies: they would live through the checkpoint after an epoch's last step.
                yield PackStep(copier.copy_packs([future.result() for future in packs]), step.num_rows, step.ends_epoch)

    def _build_pack(self, rows: list[int], supervised: bool, pack_index: PackIndex) -> SupervisedPack:
        stored_rows = [self.reader.read_row(i, self.dtype) for i in rows]
        on_gpu = self.ranks.device.startswith("cuda")
        pack = self.objective.build_pack(stored_rows, pack_index, pinned=on_gpu)
        pack = self.online.add_images(pack, stored_rows) if self.online else pack
        return pack if supervised else pack.without_supervision()


class _DeviceCopier:
    """Copies packs to a GPU while it computes. The host may run ahead of the GPU by two steps at most."""

    def __init__(self, device: str):
        self.device, self.stream = device, torch.cuda.Stream()
        self.in_flight: deque[tuple[torch.cuda.Event, list[SupervisedPack]]] = deque()

    def copy_packs(self, packs: list[SupervisedPack]) -> list[SupervisedPack]:
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
