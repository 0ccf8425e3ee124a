"""The training loop: epochs of optimizer steps over packs, on one or several processes."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from stages.data.row_lengths import CONTEXT_EDGES
from stages.draft import checkpoint
from stages.hidden_states.reader import HiddenStatesReader
from stages.params.draft_sections import TrainDraft
from stages.runtime.distributed import RankContext
from stages.training import trackers
from stages.training.captured_step import CapturedSteps
from stages.training.optimizer import MasterWeightOptimizer, gather_full_tensor
from stages.training.packed_rows import LossOutput, PackObjective, SupervisedPack
from stages.training.packs import OnlinePacks, PackLoader, PackStep, plan_epoch
from stages.training.schedule import LearningRateSchedule, choose_optimizer, plan_schedule

LOG_STEPS = 50  # reading the loss waits for the device

# draft, pack, the target's embedding and head, objective, supervised positions [L] of the step on all processes
ComputeLoss = Callable[[Any, Any, Tensor, Tensor, Any, Tensor], LossOutput]


@dataclass(frozen=True)
class HeldOutScores:
    """How a draft does on answers that it does not learn (families/held_out.py)."""

    loss: float  # of the objective
    accuracy: float  # of the first step
    accept_length: float | None  # tau of a chain of three drafts; None of a family that is not replayed
    answers: int


@dataclass(frozen=True)
class EpochLog:
    """Results of one epoch; an entry of `epochs` in results/train/NAME.json."""

    epoch: int
    loss: float  # of the objective (`PackObjective.combine_losses`)
    step_loss: list[float]  # mean of each step of the training-time test, or of each draft of a block
    step_accuracy: list[float]
    coverage: float  # share of the positions that could be supervised at the first step: anchors of candidates
    context_accuracy: dict[str, float]  # of the first step, by the fewest tokens before its draft: 0, 128, 256, 512 ...
    tokens: int
    seconds: float
    held_out: HeldOutScores | None = None  # after the epoch; None without eval rows

    def list_values(self) -> dict[str, float]:
        by_step = {f"epoch/loss_{k}": x for k, x in enumerate(self.step_loss)}
        by_step |= {f"epoch/accuracy_{k}": x for k, x in enumerate(self.step_accuracy)}
        by_step |= {f"epoch/accuracy_0_after_{n}_tokens": x for n, x in self.context_accuracy.items()}
        by_step["epoch/coverage"] = self.coverage
        if self.held_out:
            scores = asdict(self.held_out)
            by_step |= {f"held_out/{name}": value for name, value in scores.items() if value is not None}
        return {"epoch/loss": self.loss, **by_step, "epoch/tokens_per_s": self.tokens / max(self.seconds, 0.01)}


@dataclass(frozen=True)
class TrainingProgress:
    """The point at which training starts or resumes."""

    optimizer_state: dict[str, Tensor]  # of `Trainer.gather_state`; empty before the first step
    epoch: int = 0
    step: int = 0
    epochs: list[EpochLog] = field(default_factory=list)  # of this segment


class TrainingStep(nn.Module):
    """The loss of a pack as a module, whose weights FSDP gathers. The target's tables are not registered as parameters."""

    def __init__(
        self, draft: nn.Module, embedding: Tensor, head: Tensor, objective: PackObjective, compute_loss: ComputeLoss
    ):
        super().__init__()
        self.draft, self.objective, self.compute_loss = draft, objective, compute_loss
        self.tables = (embedding, head)

    def forward(self, pack: SupervisedPack, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = self.compute_loss(self.draft, pack, *self.tables, self.objective, counts)
        return result.total_loss, result.loss_per_step, result.argmax_matches


class Trainer:
    """A draft in training: weights, optimizer, progress and log."""

    def __init__(
        self,
        draft: nn.Module,
        embedding: Tensor,  # [V, H]
        head: Tensor,  # [V, H]
        objective: PackObjective,
        compute_loss: ComputeLoss,
        settings: TrainDraft,  # with batch_tokens
        ranks: RankContext,
        start: TrainingProgress,
        horizon_epochs: int | None = None,  # of a schedule that falls
        is_table: Callable[[str], bool] = lambda name: False,  # whether a matrix has a row for each token
    ):
        """Move the draft to the device, cast and shard it, and restore the optimizer. Its frozen weights ask for no gradient."""
        self.draft, self.objective, self.settings, self.ranks = draft, objective, settings, ranks
        self.epoch, self.step, self.log = start.epoch, start.step, list(start.epochs)
        self.dtype = getattr(torch, settings.compute_dtype)
        self.horizon_epochs = horizon_epochs
        self.schedule: LearningRateSchedule | None = None  # planned from the rows of the first epoch
        self.online_packs: OnlinePacks | None = None  # where no hidden states of training rows are stored
        self.log_step: trackers.LogStep = lambda step, values: None
        # Matches and supervised positions of the epoch's first steps by their contexts; those not supervised are last.
        self.by_context = torch.zeros(2, len(CONTEXT_EDGES) + 1, dtype=torch.float64, device=ranks.device)
        self.num_shards = 1

        saved, prefix = start.optimizer_state, "master."
        exact = {name.removeprefix(prefix): t for name, t in saved.items() if name.startswith(prefix)}
        self.draft.load_state_dict(exact, strict=False)  # weights of the checkpoint are rounded to `dtype`
        self.draft.to(ranks.device)
        tables = embedding.to(ranks.device, self.dtype), head.to(ranks.device, self.dtype)
        self.training_step = TrainingStep(self.draft, *tables, objective, compute_loss)
        master_weights = self._shard_or_cast()
        self.optimizer = MasterWeightOptimizer(self.draft, choose_optimizer(settings), master_weights, is_table)
        self.optimizer.restore_moments(saved, self.step)
        captures = ranks.device.startswith("cuda") and self.num_shards == 1  # FSDP gathers weights in each forward
        self.pack_runner = CapturedSteps(
            self.training_step, self.draft, self.num_shards, settings.batch_tokens or 0, captures
        )

    def _shard_or_cast(self) -> dict[str, Tensor] | None:
        """Shard the weights by FSDP, or cast them to `dtype` and return the trained ones in float32.

        None where the draft keeps float32.
        """
        if self.settings.parallel == "fsdp" and self.ranks.world > 1:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            # Weights stay float32 and sharded; each forward gathers them in `dtype`, gradients are summed in float32.
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(self.training_step, mp_policy=policy)
            self.num_shards = self.ranks.world  # FSDP averages gradients over processes; the loss needs their sum
            return None
        if self.dtype == torch.float32:
            return None
        trained = ((name, weight) for name, weight in self.draft.named_parameters() if weight.requires_grad)
        exact = {name: weight.detach().clone() for name, weight in trained}
        self.draft.to(self.dtype)
        return exact

    def train_epochs(self, reader: HiddenStatesReader, last_epoch: int, bar: tqdm) -> Iterator[EpochLog]:
        """Train up to `last_epoch` over all rows; yield the results of each epoch when it has ended."""
        self.schedule = self.schedule or plan_schedule(reader.lengths, self.settings, self.horizon_epochs)
        plans = ((epoch, plan_epoch(reader.lengths, self.settings, epoch)) for epoch in range(self.epoch, last_epoch))
        steps = PackLoader(reader, self.objective, self.ranks, self.dtype, self.online_packs).load_steps(plans)
        while self.epoch < last_epoch:
            yield self._train_epoch(steps, sum(reader.lengths), bar)

    def _train_epoch(self, steps: Iterator[PackStep[SupervisedPack]], tokens: int, bar: tqdm) -> EpochLog:
        """Take the steps up to the epoch's last, and append its results to the log."""
        started = time.perf_counter()
        # Summed loss, argmax matches and supervised positions of each step, and candidates of the first.
        totals = torch.zeros(4, self.objective.num_steps, dtype=torch.float64, device=self.ranks.device)
        self.by_context.zero_()
        for index, step in enumerate(steps):
            totals += self.train_step(step.packs)
            bar.update(step.num_rows)
            if index % LOG_STEPS == 0:
                loss = self._summarise_epoch(totals, tokens, started).loss
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                rate = self.optimizer.settings.matrix_rate * self._get_rate_share()
                self.log_step(self.step, {"step/loss": loss, "step/learning_rate": rate})
            if step.ends_epoch:
                break
        if self.ranks.world > 1:
            dist.all_reduce(totals)
            dist.all_reduce(self.by_context)
        entry = self._summarise_epoch(totals, tokens, started)
        self.epoch = entry.epoch
        self.log.append(entry)
        return entry

    def log_epoch(self, held_out: HeldOutScores | None, bar: tqdm) -> None:
        """Add the scores of the epoch's weights to its log, and show both."""
        entry = self.log[-1] = replace(self.log[-1], held_out=held_out)
        self.log_step(self.step, entry.list_values())
        accepts = f", accepts {held_out.accept_length:.2f} held out" if held_out and held_out.accept_length else ""
        bar.set_postfix_str(
            f"epoch {self.epoch}, loss {entry.loss:.3f}, accuracy {entry.step_accuracy[0]:.2f}{accepts}"
        )

    def fill_hidden_states(self, pack: SupervisedPack) -> SupervisedPack:
        """Return the pack with hidden states, by the online target where there is one."""
        return self.online_packs.fill_hidden_states(pack) if self.online_packs else pack

    def train_step(self, packs: list[SupervisedPack]) -> Tensor:
        """Run one optimizer step; return what is summed over an epoch [4, L], without synchronising."""
        counts = torch.tensor([p.supervised_per_step for p in packs]).sum(0)
        counts = counts.to(self.ranks.device, non_blocking=True)  # [L]
        own_counts = counts.clone()
        if self.ranks.world > 1:
            dist.all_reduce(counts)
        sums = torch.zeros(4, len(counts), dtype=torch.float64, device=self.ranks.device)
        sums[2], sums[3] = own_counts, sum(p.num_candidates for p in packs)
        for pack in packs:
            loss_per_step, matches = self.pack_runner.run(self.fill_hidden_states(pack), counts)
            self.optimizer.add_gradients()
            sums[0] += loss_per_step
            sums[1] += matches.sum(1)
            self.by_context[0].index_add_(0, pack.contexts, matches[0].double())
            self.by_context[1].index_add_(0, pack.contexts, torch.ones_like(matches[0], dtype=torch.float64))
        self.optimizer.step(self._get_rate_share(), self.settings.grad_clip)
        self.step += 1
        return sums

    def _get_rate_share(self) -> float:
        assert self.schedule is not None, "train_step before train_epochs"
        return self.schedule.get_share(self.step)

    def _summarise_epoch(self, totals: Tensor, tokens: int, started: float) -> EpochLog:
        """Return the log of the epoch that is at work, so far. Raises ValueError where a loss is not finite."""
        loss, matches, supervised, candidates = totals.tolist()
        if not all(map(math.isfinite, loss)):
            raise ValueError(
                f"train_draft: the loss is {loss} by step {self.step} (epoch {self.epoch}); lower "
                "train_draft.muon_learning_rate, learning_rate or grad_clip. Whole epochs so far are kept in .scratch"
            )
        step_loss = [x / max(1.0, n) for x, n in zip(loss, supervised, strict=True)]
        return EpochLog(
            epoch=self.epoch + 1,
            loss=self.objective.combine_losses(step_loss, supervised),
            step_loss=step_loss,
            step_accuracy=[x / max(1.0, n) for x, n in zip(matches, supervised, strict=True)],
            coverage=round(supervised[0] / max(1.0, candidates[0]), 4),
            context_accuracy=dict(self._list_context_accuracy()),
            tokens=tokens,
            seconds=round(time.perf_counter() - started, 2),
        )

    def _list_context_accuracy(self) -> Iterator[tuple[str, float]]:
        matches, supervised = self.by_context[:, :-1].tolist()
        for edge, found, count in zip(CONTEXT_EDGES, matches, supervised, strict=True):
            if count:
                yield str(edge), round(found / count, 4)

    def gather_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the full weights in `dtype` and the optimizer's state on the CPU; all processes must call it.

        Raises ValueError, in every process, where any value is NaN or infinite.
        """
        exact = {name: _gather_to_cpu(t) for name, t in self.optimizer.master_weights.items()}
        state = {name: _gather_to_cpu(t) for name, t in self.optimizer.get_moments().items()}
        if self.dtype != torch.float32:
            state |= {f"master.{name}": t for name, t in exact.items()}
        weights = {name: t.to(self.dtype) for name, t in exact.items()}
        frozen = {name: _gather_to_cpu(t) for name, t in self.draft.state_dict().items() if name not in exact}
        weights |= {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in frozen.items()}
        # The last step's loss is of the weights before it.
        if problem := checkpoint.find_nonfinite_values(weights | state):
            raise ValueError(
                f"train_draft diverged by step {self.step} (epoch {self.epoch}): {problem}. They were not written; lower "
                "train_draft.muon_learning_rate, learning_rate or grad_clip. Whole epochs before this one are kept in .scratch"
            )
        return weights, state


def _gather_to_cpu(tensor: Tensor) -> Tensor:
    return gather_full_tensor(tensor).detach().cpu()
