"""train_draft: hidden states -> draft checkpoint.   python -m stages.train_draft CHECKPOINT

A checkpoint is of EAGLE-3, or of the method that its segment names: EAGLE or Medusa (methods/registry.py), which learn from
the same rows in the same order and begin with e000's shapes and vocabulary.

One segment of training: `epochs` more epochs from the checkpoint it names, with the optimizer's state, so that e009
after e003 is bit for bit nine epochs straight. The schedule has no end: warm-up, then constant. A killed run resumes
after its last whole epoch. Logs loss and accuracy per TTT step; tau belongs to replay_trees, so that editing a tree
never retrains.

A step learns from `packs_per_step` packs of at most `batch_tokens` tokens, rows end to end; with several processes each
takes its share of a step's packs, so their number changes who computes, not what. For a GPU, packs are read, put together
and sent by threads while the one before is learned from. Where `extract_hiddens.online` has left the hidden states out, the
target runs here, on each pack before it is learned from.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from stages.data import conversations
from stages.draft import checkpoint
from stages.draft.eagle3 import Eagle3Draft
from stages.hidden_states import format, reader
from stages.hidden_states.reader import HiddenStatesReader
from stages.methods import method_checkpoint, registry
from stages.params import schema
from stages.params.draft_sections import Segment, TrainDraft
from stages.params.section import ROOT_CHECKPOINT, get_named
from stages.runtime import atomic, distributed, scratch
from stages.target import manifest
from stages.target.online import OnlineTarget
from stages.telemetry import stage_record
from stages.training import adamw, trackers, ttt

SAMPLED, HIDDENS, REPORTS_FOLDER = Path("data/sampled/train"), Path("data/hiddens/train"), Path("results/train")
STEPS_AHEAD, READER_THREADS = 3, 4  # steps whose packs are read before their turn, and who reads them for a GPU
OPEN_PACKS = 8
MAX_MEASURED_PACKS = 64  # packs that a rival's guesses are measured on
LOG_STEPS = 50  # between looks at the loss: each waits for the device
UNTRACKED_KEYS = {"processes", "parallel", "report_to", "run_name"}  # computes and watches: moves no weight


def main(name: str) -> None:
    p = schema.load_params()
    if distributed.launch_ranks("train_draft", [name], p.train_draft.processes):
        return
    with distributed.join_process_group(p.target.device) as group:
        _train_checkpoint(p, name, group)


def _train_checkpoint(p: schema.Params, name: str, group: distributed.RankContext) -> None:
    torch.set_num_threads(p.target.num_threads)
    segment, settings = get_named(p.train_draft.checkpoints, name, "train_draft.checkpoints"), p.train_draft
    parent = checkpoint.locate_checkpoint(segment.from_)
    work = scratch.locate_scratch(
        f"train_draft-{name}", _hyper(settings), segment.model_dump(), p.target.model_dump(), reader.digest_folder(HIDDENS),
        [scratch.digest_folder(folder) for folder in (manifest.TARGET_FOLDER, parent / "draft", parent / "state")],
    )  # fmt: skip
    with scratch.held(work):
        _train(p, name, group, work)


def _train(p: schema.Params, name: str, group: distributed.RankContext, work: Path) -> None:
    """Train from the parent, or from the last whole epoch in the scratch folder `work`, and put the checkpoint in its place."""
    segment, settings = p.train_draft.checkpoints[name], p.train_draft
    parent, root = checkpoint.locate_checkpoint(segment.from_), segment.from_ == ROOT_CHECKPOINT
    made_by = "init_draft" if root else f"train_draft@{segment.from_}"
    made, hyper = manifest.read_manifest(), _hyper(settings)
    resumed = work.exists()
    tables = manifest.read_embedding_and_head(made)
    if resumed:
        with scratch.reading(work):
            run = TrainingRun.load(work, made_by, segment.rival, tables[1])
            run.log = read_log(work / "log.json", made_by)
    elif root and segment.rival:
        run = TrainingRun.begin(segment, tables[1], settings)
    else:
        run = TrainingRun.load(parent, made_by, segment.rival, tables[1])
    last = checkpoint.read_progress(parent, made_by)["epoch"] + segment.epochs
    if resumed and group.first:
        print(f"resumed after epoch {run.epoch} from {work}")

    store = HiddenStatesReader(HIDDENS)
    run.to(group, *tables, settings)
    if store.online:
        tokens = settings.batch_tokens if p.extract_hiddens.compile else None
        where = (p.target.dtype, group.device, p.target.trust_remote_code)
        run.live = OnlineTarget.load(str(manifest.resolve_weights_folder(made)), *where, made.feature_layers, tokens)
        run.images = conversations.read_image_paths(SAMPLED, "sample_target")
    watched = f"{settings.run_name or name}-{work.name[-8:]}"  # new parameters, a new curve
    with (
        trackers.open_trackers(settings.report_to if group.first else (), watched, hyper, run.step) as run.tell,
        tqdm(
            total=last * len(store), initial=run.epoch * len(store), desc=name, unit="row", mininterval=2,
            disable=not group.first,
        ) as bar,
    ):  # fmt: skip
        while run.epoch < last:
            run.train_epoch(store, bar)
            state = run.state()  # gathered by all, written by the first
            if group.first:
                with atomic.write_folder(
                    work
                ) as whole:  # weights, optimizer and log belong together: all of an epoch, or none
                    run.save(whole, *state)
                    atomic.write_json(whole / "log.json", run.log)
    state = run.state()
    if not group.first:
        return
    if run.rival:
        run.measure(store, state[0])
    run.save(checkpoint.locate_checkpoint(name), *state)
    seconds = round(sum(e["seconds"] for e in run.log), 2)
    report = {"checkpoint": name, "from": segment.from_, "epochs": run.log, "seconds": seconds}
    report["weights"] = manifest.digest_files(checkpoint.locate_checkpoint(name) / "draft", "*.safetensors")
    atomic.write_json(REPORTS_FOLDER / f"{name}.json", report)
    scratch.remove_scratch(work)
    print(f"{name}: {run.epoch} epochs, {run.step} steps, loss {run.log[0]['loss']:.3f} -> {run.log[-1]['loss']:.3f}")


def _hyper(settings: TrainDraft) -> dict[str, Any]:
    """Return what decides about the weights."""
    return settings.model_dump(exclude={"checkpoints", *UNTRACKED_KEYS})


def read_log(path: Path, made_by: str) -> list[dict]:
    """Return an entry for each epoch that unfinished work has behind it. Raises Broken where there is none."""
    found: list[dict] = atomic.read_json(path, made_by, list)
    if not found or not all(isinstance(entry, dict) for entry in found):
        raise atomic.Broken(f"{path}: expected a list of epochs, found {found!r:.60}", atomic.rerun(made_by))
    return found


class TrainingStep(nn.Module):
    """A pack's loss, as a module: what FSDP gathers weights for. The target's tables are nobody's parameters."""

    def __init__(
        self,
        draft: nn.Module,
        embedding: Tensor,
        head: Tensor,
        objective: ttt.TrainingObjective,
        learn: registry.LossFunction,
    ):
        super().__init__()
        self.draft, self.objective, self.learn = draft, objective, learn
        self.tables = (embedding, head)

    def forward(self, pack: ttt.TrainingPack, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> total, loss [L], hits [L, P]; see ttt.Result."""
        result = self.learn(self.draft, pack, *self.tables, self.objective, counts)
        return result.total, result.loss, result.hits


@dataclass
class TrainingRun:
    """Training as it stands: weights, optimizer, how far it got, and what it logged."""

    draft: nn.Module
    config: dict
    rival: str | None  # the method, where it is not EAGLE-3
    saved: dict[str, Tensor]  # the optimizer's state, until `to` builds it
    epoch: int
    step: int
    log: list[dict] = field(default_factory=list)  # of this segment's epochs
    group: distributed.RankContext = field(init=False)  # this and what follows by `to`
    settings: TrainDraft = field(init=False)
    objective: ttt.TrainingObjective = field(init=False)
    lesson: nn.Module = field(init=False)
    optimizer: adamw.MasterWeightOptimizer = field(init=False)
    shares: int = 1
    live: OnlineTarget | None = None  # the target, where no hidden states are stored
    images: dict[str, list[str]] = field(default_factory=dict)  # and the pictures of its rows, by their ids
    tell: trackers.LogStep = lambda step, numbers: None

    @classmethod
    def load(cls, place: Path, made_by: str, method: str | None = None, head: Tensor | None = None) -> "TrainingRun":
        """A rival needs the target's head [V, H]."""
        draft: nn.Module
        if method is None:
            config, tensors = checkpoint.read_draft(place, made_by)
            draft = Eagle3Draft.of(config, tensors)
        else:
            assert head is not None
            config, tensors = method_checkpoint.read_method_draft(place, method, made_by)
            draft = registry.build_draft(config, tensors, head)
        state, progress = checkpoint.read_state(place, made_by)
        return cls(draft, config, method, state, progress["epoch"], progress["step"])

    @classmethod
    def begin(cls, segment: Segment, head: Tensor, s: TrainDraft) -> "TrainingRun":
        """A rival untrained, of e000's shapes and vocabulary, with the target's head [V, H]."""
        made, tensors = checkpoint.read_draft(checkpoint.locate_checkpoint(ROOT_CHECKPOINT), "init_draft")
        assert segment.rival is not None
        config = method_checkpoint.build_method_config(segment.rival, made, s.dtype, segment.width)
        draft = registry.TRAINABLE_METHODS[segment.rival].fresh(config, head, tensors["d2t"], tensors["t2d"], s.seed)
        return cls(draft, config, segment.rival, {}, 0, 0)

    def to(self, group: distributed.RankContext, embedding: Tensor, head: Tensor, s: TrainDraft) -> None:
        """Move to the devices, cast, shard, and give the optimizer its state back."""
        self.group, self.settings, dtype = group, s, getattr(torch, s.dtype)
        steps = {None: s.ttt_steps, "eagle": 1, "medusa": self.config.get("heads", 0)}[self.rival]
        self.objective = ttt.TrainingObjective(steps, s.ttt_decay, s.mask, s.loss)
        masters = {name.removeprefix("master."): t for name, t in self.saved.items() if name.startswith("master.")}
        self.draft.load_state_dict(masters, strict=False)  # where the checkpoint's own weights are rounded
        self.draft.to(group.device)
        learn = registry.TRAINABLE_METHODS[self.rival].forward if self.rival else ttt.compute_loss
        tables = embedding.to(group.device, dtype), head.to(group.device, dtype)
        self.lesson = TrainingStep(self.draft, *tables, self.objective, learn)
        exact = None
        if s.parallel == "fsdp" and group.world > 1:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            # Weights stay float32 and sharded; each forward gathers them in `dtype`, gradients are summed in float32.
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(self.lesson, mp_policy=policy)
            self.shares = group.world  # FSDP gives the mean over processes, ours is a sum
        elif dtype != torch.float32:
            exact = {name: w.detach().clone() for name, w in self.draft.named_parameters()}
            self.draft.to(dtype)
        self.optimizer = adamw.MasterWeightOptimizer(self.draft, s.learning_rate, s.weight_decay, exact)
        self.optimizer.restore(self.saved, self.step)
        self.saved = {}

    def train_epoch(self, store: HiddenStatesReader, bar: tqdm) -> None:
        """One epoch over all rows; appends its loss and accuracies to the log."""
        s, steps = self.settings, plan_epoch(store.lengths, self.settings, self.epoch)
        started, device = time.perf_counter(), self.group.device
        totals = torch.zeros(3, self.objective.steps, dtype=torch.float64, device=device)  # loss, hits, taught
        look = self._look if self.live and self.live.image_processor else None
        reading = prefetch_packs(store, steps, self.objective, self.group, getattr(torch, s.dtype), look)
        for number, packs in enumerate(reading):
            totals += self.learn(packs)
            bar.update(sum(map(len, steps[number])))
            if number % LOG_STEPS == 0:
                loss = self._checked(totals)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                self.tell(self.step, {"step/loss": loss, "step/learning_rate": self._rate()})
        if self.group.world > 1:
            dist.all_reduce(totals)
        self._checked(totals)
        self.epoch += 1
        loss, hits, taught = totals.tolist()
        step_loss = [x / max(1.0, n) for x, n in zip(loss, taught, strict=True)]
        entry: dict[str, Any] = {
            "epoch": self.epoch,
            "loss": sum(self.objective.decay**k * x for k, x in enumerate(step_loss)),
            "step_loss": step_loss,
            "step_accuracy": [x / max(1.0, n) for x, n in zip(hits, taught, strict=True)],
            "tokens": sum(store.lengths),
            "seconds": round(time.perf_counter() - started, 2),
        }
        self.log = [*self.log, entry]
        by_step = {f"epoch/{kind}_{k}": x for kind in ("loss", "accuracy") for k, x in enumerate(entry[f"step_{kind}"])}
        speed = {"epoch/tokens_per_s": entry["tokens"] / max(entry["seconds"], 0.01)}
        self.tell(self.step, {"epoch/loss": entry["loss"], **by_step, **speed})
        bar.set_postfix_str(f"epoch {self.epoch}, loss {entry['loss']:.3f}, accuracy {entry['step_accuracy'][0]:.2f}")

    def learn(self, packs: list[ttt.TrainingPack]) -> Tensor:
        """One step of the optimizer -> loss, hits and taught positions, summed: [3, L] float64. Waits for nothing."""
        counts = torch.tensor([p.counts for p in packs]).sum(0).to(self.group.device, non_blocking=True)  # [L]
        taught = counts.clone()
        if self.group.world > 1:
            dist.all_reduce(counts)
        found = torch.zeros(3, len(counts), dtype=torch.float64, device=self.group.device)
        found[2] = taught
        for pack in packs:
            total, loss, hits = self.lesson(self._whole(pack), counts)
            (total * self.shares).backward()
            self.optimizer.collect()
            found[0] += loss
            found[1] += hits.sum(1)
        self.optimizer.step(self._rate(), self.settings.grad_clip)
        self.step += 1
        return found

    def _rate(self) -> float:
        """The learning rate of the next step."""
        return self.settings.learning_rate * min(1.0, (self.step + 1) / max(1, self.settings.warmup_steps))

    def _whole(self, pack: ttt.TrainingPack) -> ttt.TrainingPack:
        """The pack with its hidden states, by the live target where there is one."""
        if self.live is None:
            return pack
        return replace(pack, **self.live(pack.ids, pack.lengths, pack.view)._asdict())

    def _look(self, pack: ttt.TrainingPack, rows: list[format.HiddenStatesRow]) -> ttt.TrainingPack:
        """A pack with the pictures of its rows, for the live target; called by the threads that read."""
        assert self.live is not None
        view = self.live.build_inputs(
            [r.id for r in rows], [r.ids for r in rows], [self.images.get(r.id) for r in rows]
        )
        assert view is not None
        return replace(
            pack,
            view=view,
            positions=view.positions.T.contiguous(),
            piece=ttt.number_image_tokens(view.image_token_mask),
        )

    def _checked(self, totals: Tensor) -> float:
        """The first step's mean loss so far. Raises ValueError where any is not finite."""
        loss, _, taught = totals.tolist()
        if not all(map(math.isfinite, loss)):
            raise ValueError(
                f"train_draft: the loss is {loss} by step {self.step} (epoch {self.epoch}); lower "
                "train_draft.learning_rate or grad_clip. Whole epochs so far are kept in .scratch"
            )
        return loss[0] / max(1.0, taught[0])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and the optimizer's state, whole and on the CPU, whoever holds which part.

        Raises ValueError, in every process, where any is NaN or infinite.
        """
        exact = {name: _gather_full_tensor(t) for name, t in self.optimizer.masters.items()}
        state = {name: _gather_full_tensor(t) for name, t in self.optimizer.moments().items()}
        dtype = getattr(torch, self.settings.dtype)
        if dtype != torch.float32:
            state |= {f"master.{name}": t for name, t in exact.items()}
        maps = {name: t.cpu() for name, t in self.draft.state_dict().items() if name not in exact}
        weights = {name: t.to(dtype) for name, t in exact.items()}
        if found := checkpoint.not_finite(weights | state):  # the loss of the last step is of the weights before it
            raise ValueError(
                f"train_draft diverged by step {self.step} (epoch {self.epoch}): {found}. They were not written; lower "
                "train_draft.learning_rate or grad_clip. Whole epochs before this one are kept in .scratch"
            )
        return {**weights, **maps}, state

    def measure(self, store: HiddenStatesReader, weights: dict[str, Tensor]) -> None:
        """Writes into the config how often a rival's guesses are right: by whoever has all weights, on what all would."""
        s, alone = self.settings, distributed.RankContext(0, 1, self.group.device)
        steps = registry.get_max_steps(self.config, s.ttt_steps)
        objective = ttt.TrainingObjective(steps, s.ttt_decay)
        embedding, head = self.lesson.tables
        module = registry.build_draft(self.config, weights, head).to(self.group.device)
        look = self._look if self.live and self.live.image_processor else None
        packs = [[pack] for step in plan_epoch(store.lengths, s, 0) for pack in step][:MAX_MEASURED_PACKS]
        reading = prefetch_packs(store, packs, objective, alone, getattr(torch, s.dtype), look)
        whole = (self._whole(pack) for read in reading for pack in read)
        self.config["rank_accuracy"] = registry.measure_rank_accuracy(
            self.config, module, whole, embedding, head, steps
        )

    def save(self, place: Path, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Weights for whoever decodes, the optimizer and its position for the next segment."""
        write = method_checkpoint.write_method_draft if self.rival else checkpoint.write_draft
        write(place, {**self.config, "dtype": self.settings.dtype}, weights)
        checkpoint.write_state(place, state, {"epoch": self.epoch, "step": self.step})


def _gather_full_tensor(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)  # of a DTensor
    return (full() if full else tensor).detach().cpu()


def plan_epoch(lengths: list[int], s: TrainDraft, epoch: int) -> list[list[list[int]]]:
    """The epoch's steps, each of `packs_per_step` packs of row numbers, a pack of at most `batch_tokens` tokens.

    Depends on seed and epoch only, so a segment that starts at epoch 3 sees what a straight run would.
    """
    rng = random.Random(s.seed * 1_000_003 + epoch)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    packs: list[list[int]] = []
    open_: list[tuple[list[int], list[int]]] = []  # packs with room, and that room
    for (
        row
    ) in order:  # into the first of a few open packs that has room: few tokens short, and other neighbours every epoch
        pack, room = next((x for x in open_ if x[1][0] >= lengths[row]), ([], [s.batch_tokens]))
        if not pack:
            packs.append(pack)
            open_ = [*open_, (pack, room)][-OPEN_PACKS:]
        pack.append(row)
        room[0] -= lengths[row]
    rng.shuffle(packs)
    return [packs[i : i + s.packs_per_step] for i in range(0, len(packs), s.packs_per_step)]


def share_packs(packs: list[list[int]], rank: int, world: int) -> list[tuple[list[int], bool]]:
    """This process's packs of a step, as (rows, mute). All get as many, since each forward is a meeting of all under FSDP:
    where packs run out, the step's first once more, muted: it teaches nothing.
    """
    even = [(rows, False) for rows in packs] + [(packs[0], True)] * (-len(packs) % world)
    return even[rank::world]


def prefetch_packs(
    store: HiddenStatesReader, steps: list[list[list[int]]], objective: ttt.TrainingObjective, group: distributed.RankContext, dtype: torch.dtype,
    look: Callable[[ttt.TrainingPack, list[format.HiddenStatesRow]], ttt.TrainingPack] | None = None,
) -> Iterator[list[ttt.TrainingPack]]:  # fmt: skip
    """Each step's packs of this process, on the device; for a GPU made by threads, a few steps before their turn.

    `look` gives a pack the pictures of its rows, where the target is to see them here.
    Raises ValueError where a shard is broken; see Store.row.
    """
    on_gpu = group.device.startswith("cuda")

    def made(rows: list[int], mute: bool) -> ttt.TrainingPack:
        read = [store.read_row(i, dtype) for i in rows]
        pack = ttt.TrainingPack.of(read, objective.steps, objective.mask, pinned=on_gpu)
        pack = look(pack, read) if look else pack
        return pack.muted() if mute else pack

    shares = [share_packs(packs, group.rank, group.world) for packs in steps]
    if not on_gpu:  # threads would take the cores that learn
        yield from ([made(*task) for task in tasks] for tasks in shares)
        return
    with ThreadPoolExecutor(READER_THREADS) as threads:

        def begun(tasks: list[tuple[list[int], bool]]) -> list[Future[ttt.TrainingPack]]:
            return [threads.submit(made, *task) for task in tasks]

        coming, device = deque(map(begun, shares[:STEPS_AHEAD])), _PackSender(group.device)
        for number in range(len(steps)):
            coming.extend(map(begun, shares[number + STEPS_AHEAD : number + STEPS_AHEAD + 1]))
            yield device.send([x.result() for x in coming.popleft()])


class _PackSender:
    """Copies packs to a GPU while it computes. The host may run ahead of the GPU, but by two steps only."""

    def __init__(self, device: str):
        self.device, self.stream = device, torch.cuda.Stream()
        self.under_way: deque[tuple[torch.cuda.Event, list[ttt.TrainingPack]]] = deque()

    def send(self, packs: list[ttt.TrainingPack]) -> list[ttt.TrainingPack]:
        learned = torch.cuda.Event()
        learned.record()  # when all that was launched so far is done
        self.under_way.append((learned, packs))  # the pinned memory is kept until it was copied for certain
        if len(self.under_way) > 2:
            self.under_way.popleft()[0].synchronize()
        with torch.cuda.stream(self.stream):
            there = [pack.to(self.device) for pack in packs]
        main = torch.cuda.current_stream()
        main.wait_stream(self.stream)
        for pack in there:
            pack.used_on(main)
        return there


def _list_stage_gpus() -> list[int]:
    p = schema.load_params()
    return p.target.gpus(p.train_draft.processes)


if __name__ == "__main__":
    schema.run_stage(stage_record.record_stage(main, "train_draft", _list_stage_gpus))
