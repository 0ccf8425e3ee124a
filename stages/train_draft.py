"""train_draft: hidden states -> draft checkpoint.   python -m stages.train_draft CHECKPOINT

One segment of training: `epochs` more epochs from the checkpoint it names, with the optimizer's moments, so that e009
after e003 is bit for bit nine epochs straight. The schedule has no end: warm-up, then constant. A killed run resumes
after its last whole epoch. Logs loss and accuracy per TTT step; tau belongs to replay_trees, so that editing a tree
never retrains.
"""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from stages import params
from stages.drafting import ttt
from stages.drafting.draft import Draft
from stages.formats import atomic, checkpoint, hiddens, manifest, scratch
from stages.formats.hiddens import Row

HIDDENS, REPORTS = Path("data/hiddens/train"), Path("results/train")


def main(name: str) -> None:
    p = params.load()
    torch.set_num_threads(p.target.num_threads)
    segment, settings = params.named(p.train_draft.checkpoints, name, "train_draft.checkpoints"), p.train_draft
    parent, root = checkpoint.folder(segment.from_), segment.from_ == params.ROOT_CHECKPOINT
    made_by = "init_draft" if root else f"train_draft@{segment.from_}"
    made = manifest.read()
    hyper = settings.model_dump(exclude={"checkpoints"})
    work = scratch.place(
        f"train_draft-{name}", hyper, segment.model_dump(), p.target.model_dump(), hiddens.digest(HIDDENS),
        [scratch.digest(parent / part) for part in ("draft", "state")],
    )  # fmt: skip
    resumed = work.exists()
    run = Run.load(work if resumed else parent, made_by)
    if resumed:
        run.log = atomic.read_json(work / "log.json", made_by)
        print(f"resumed after epoch {run.epoch} from {work}")

    rows = list(hiddens.read(HIDDENS))
    run.to(p.target.device, *manifest.tables(made), settings)
    last = checkpoint.read_state(parent, made_by)[1]["epoch"] + segment.epochs
    with tqdm(total=last * len(rows), initial=run.epoch * len(rows), desc=name, unit="row", mininterval=2) as bar:
        while run.epoch < last:
            run.train_epoch(rows, settings, bar)
            with atomic.folder(work) as whole:  # weights, moments and log belong together: all of an epoch, or none
                run.save(whole)
                atomic.write_json(whole / "log.json", run.log)
    run.save(checkpoint.folder(name))
    seconds = round(sum(e["seconds"] for e in run.log), 2)
    report = {"checkpoint": name, "from": segment.from_, "epochs": run.log, "seconds": seconds}
    atomic.write_json(REPORTS / f"{name}.json", report)
    scratch.done(work)
    print(f"{name}: {run.epoch} epochs, {run.step} steps, loss {run.log[0]['loss']:.3f} -> {run.log[-1]['loss']:.3f}")


@dataclass
class Run:
    """Training as it stands: weights, optimizer, how far it got, and what it logged."""

    draft: Draft
    config: dict
    moments: dict[str, Tensor]  # of AdamW, until `to` builds it
    epoch: int
    step: int
    log: list[dict] = field(default_factory=list)  # of this segment's epochs
    optimizer: torch.optim.AdamW | None = None
    embedding: Tensor | None = None
    head: Tensor | None = None

    @classmethod
    def load(cls, place: Path, made_by: str) -> "Run":
        config, tensors = checkpoint.read_draft(place, made_by)
        draft = Draft.of(config, tensors)
        moments, progress = checkpoint.read_state(place, made_by)
        return cls(draft, config, moments, progress["epoch"], progress["step"])

    def to(self, device: str, embedding: Tensor, head: Tensor, s: params.TrainDraft) -> None:
        """Move to the device and give the optimizer its moments back."""
        self.draft.to(device)
        self.embedding, self.head = embedding.to(device), head.to(device)
        self.optimizer = torch.optim.AdamW(
            self.draft.parameters(), lr=s.learning_rate, betas=(0.9, 0.95), weight_decay=s.weight_decay
        )
        if self.moments:
            for name, parameter in self.draft.named_parameters():
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": self.moments[f"exp_avg.{name}"].to(device),
                    "exp_avg_sq": self.moments[f"exp_avg_sq.{name}"].to(device),
                }

    def train_epoch(self, rows: list[Row], s: params.TrainDraft, bar: tqdm) -> None:
        """One epoch over all rows; appends its loss and accuracies to the log."""
        assert self.optimizer is not None and self.embedding is not None and self.head is not None
        started, batches = time.perf_counter(), plan([len(r.ids) for r in rows], s.batch_tokens, s.seed, self.epoch)
        totals = torch.zeros(3, s.ttt_steps, dtype=torch.float64)  # loss * count, hits, count
        for batch in batches:
            result = ttt.forward(
                self.draft, ttt.Batch.of([rows[i] for i in batch], str(self.head.device)), self.embedding, self.head,
                s.ttt_steps, s.mask,
            )  # fmt: skip
            loss = ttt.weighted(result.loss, s.ttt_decay)
            if not torch.isfinite(loss):
                raise ValueError(
                    f"train_draft: the loss is {loss.item()} at step {self.step} (epoch {self.epoch}); lower "
                    "train_draft.learning_rate or grad_clip. Whole epochs so far are kept in .scratch"
                )
            for group in self.optimizer.param_groups:
                group["lr"] = s.learning_rate * min(1.0, (self.step + 1) / max(1, s.warmup_steps))
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.draft.parameters(), s.grad_clip)
            self.optimizer.step()
            self.step += 1
            counts = torch.stack([g.sum() for g in result.supervised]).double().cpu()
            totals[0] += torch.stack([x.detach() for x in result.loss]).double().cpu() * counts
            totals[1] += torch.stack([h.sum() for h in result.hits]).double().cpu()
            totals[2] += counts
            bar.update(len(batch))
        self.epoch += 1
        step_loss = (totals[0] / totals[2].clamp(min=1)).tolist()
        weights = [s.ttt_decay**k for k in range(s.ttt_steps)]
        entry = {
            "epoch": self.epoch,
            "loss": sum(w * x for w, x in zip(weights, step_loss, strict=True)),
            "step_loss": step_loss,
            "step_accuracy": (totals[1] / totals[2].clamp(min=1)).tolist(),
            "tokens": sum(len(r.ids) for r in rows),
            "seconds": round(time.perf_counter() - started, 2),
        }
        self.log = [*self.log, entry]
        bar.set_postfix_str(f"epoch {self.epoch}, loss {entry['loss']:.3f}, accuracy {entry['step_accuracy'][0]:.2f}")

    def save(self, place: Path) -> None:
        """Weights for whoever decodes, moments and position for the next segment."""
        assert self.optimizer is not None
        moments = {
            f"{kind}.{name}": self.optimizer.state[parameter][kind].cpu()
            for name, parameter in self.draft.named_parameters()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        checkpoint.write_draft(place, self.config, {k: v.cpu() for k, v in self.draft.state_dict().items()})
        checkpoint.write_state(place, moments, {"epoch": self.epoch, "step": self.step})


def plan(lengths: list[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The epoch's batches of row indices: at most `batch_tokens` tokens each, padding counted; rows of like length meet.

    Depends on seed and epoch only, so a segment that starts at epoch 3 sees what a straight run would.
    """
    rng = random.Random(seed * 1_000_003 + epoch)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    # Sort within a few batches' worth of rows: little padding, and yet other neighbours every epoch.
    mean = sum(lengths) / len(lengths)
    chunk = max(1, round(8 * batch_tokens / mean))
    ordered = [i for c in range(0, len(order), chunk) for i in sorted(order[c : c + chunk], key=lambda i: lengths[i])]
    batches: list[list[int]] = [[]]
    for index in ordered:
        if (
            batches[-1]
            and (len(batches[-1]) + 1) * max(lengths[index], *(lengths[i] for i in batches[-1])) > batch_tokens
        ):
            batches.append([])
        batches[-1].append(index)
    rng.shuffle(batches)
    return batches


if __name__ == "__main__":
    params.run_stage(main)
