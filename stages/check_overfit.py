"""check_overfit: can this draft learn one row by heart?   python -m stages.check_overfit

If a copy of e000 can't reach nearly whole accepted chains on a single row it was trained on, then features, masks,
rotation or vocabulary disagree, and no amount of data will help (research/users.md 1.1). train_draft depends on
results/overfit_pass.json, so nothing longer starts before this passes. That file says that it passed, of which row and
draft, and neither threshold nor tau nor clock: an edited check_overfit.min_tau retrains nothing while it is reached.
The measurement is kept in .scratch, so that such an edit measures nothing again.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import trange

from stages import params
from stages.drafting import acceptance, optim, ttt
from stages.drafting.draft import Draft
from stages.drafting.live import Live
from stages.formats import atomic, checkpoint, conversations, hiddens, manifest, scratch
from stages.formats.store import Store
from stages.sections.section import ROOT_CHECKPOINT
from stages.serving import spent

SAMPLED, HIDDENS = Path("data/sampled/train"), Path("data/hiddens/train")
REPORT, PASS = Path("results/overfit_report.json"), Path("results/overfit_pass.json")


@dataclass(frozen=True)
class Measured:
    """What was learned of one row; no threshold."""

    row: str
    tau: float
    losses: list[float]  # of each step


def main() -> None:
    p = params.load()
    torch.set_num_threads(p.target.num_threads)
    kept = _place(p) / "measured.json"
    if kept.exists():
        found = Measured(**atomic.read_json(kept, "check_overfit"))
        print(f"measured before, on the same inputs by the same code: {kept}")
    else:
        found = _measure(p)
        scratch.done(kept.parent)  # earlier measurements
        if all(map(math.isfinite, found.losses)):  # JSON holds no NaN, and _judge says what to do about one
            atomic.write_json(kept, asdict(found))
    _judge(p, found)


def _place(p: params.Params) -> Path:
    """Where the measurement is kept: by all that it depends on, the code among it, but for the threshold."""
    settings, t = p.check_overfit.model_dump(exclude={"min_tau"}), p.train_draft
    trained = [t.ttt_steps, t.ttt_decay, t.mask, t.loss, t.grad_clip]
    inputs = [
        manifest.FOLDER,
        checkpoint.folder(ROOT_CHECKPOINT) / "draft",
        *([SAMPLED] if Store(HIDDENS).online else []),
    ]
    digests = [hiddens.digest(HIDDENS), *map(scratch.digest, inputs)]
    return scratch.place("check_overfit", p.target.model_dump(), settings, trained, digests)


def _measure(p: params.Params) -> Measured:
    """Train a copy of e000 on one row, and walk its chains over that row's answer."""
    made = manifest.read()
    embedding, head = (t.to(p.target.device) for t in manifest.tables(made))
    config, tensors = checkpoint.read_draft(checkpoint.folder(ROOT_CHECKPOINT), "init_draft")
    draft = Draft.of(config, tensors).to(p.target.device)
    row, settings = _row(p, made), p.train_draft
    pack = ttt.Pack.of([row], settings.ttt_steps, settings.mask).to(p.target.device)
    objective = ttt.Objective(settings.ttt_steps, settings.ttt_decay, settings.mask, settings.loss)

    optimizer = optim.Optimizer(draft, p.check_overfit.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    for _ in trange(p.check_overfit.steps, desc=f"learn row {row.id} by heart", unit="step", mininterval=2):
        total = ttt.forward(draft, pack, embedding, head, objective).total
        total.backward()
        optimizer.step(p.check_overfit.learning_rate, settings.grad_clip)
        losses.append(total.item())
    return Measured(row.id, chain_tau(draft, row, embedding, head, settings.ttt_steps), losses)


def _judge(p: params.Params, found: Measured) -> None:
    """Write the report and the pass. Raises ValueError where tau is below check_overfit.min_tau."""
    tau, losses = found.tau, found.losses
    report = {
        "row": found.row,
        "tau": tau,
        "min_tau": p.check_overfit.min_tau,
        "perfect_tau": p.train_draft.ttt_steps + 1,
        "steps": p.check_overfit.steps,
        "losses": [round(x, 5) for x in losses[:: max(1, len(losses) // 40)]],
    }
    print(
        f"one row by heart: chain accept length {tau:.2f} of {report['perfect_tau']}, loss {losses[0]:.2f} -> {losses[-1]:.2f}"
    )
    if tau < p.check_overfit.min_tau:
        raise ValueError(
            f"check_overfit: after {p.check_overfit.steps} steps on row {found.row} a chain of {p.train_draft.ttt_steps} drafts "
            f"is accepted {tau:.2f} tokens long, expected at least {p.check_overfit.min_tau} (check_overfit.min_tau). Loss went "
            f"{losses[0]:.3f} -> {losses[-1]:.3f}: if it fell, raise check_overfit.steps; if not, look at "
            "results/vocab_report.json (coverage), target.feature_layers, and the row's loss span"
        )
    atomic.write_json(REPORT, report)
    draft = manifest.digest(checkpoint.folder(ROOT_CHECKPOINT) / "draft", "*.safetensors")
    atomic.write_json(PASS, {"passed": True, "row": found.row, "draft": draft})


def _row(p: params.Params, made: manifest.Manifest) -> hiddens.Row:
    """A row of middling length, its hidden states by the target itself where none are stored."""
    store = Store(HIDDENS)
    row = store.row(sorted(range(len(store)), key=lambda i: store.lengths[i])[len(store) // 2], torch.float32)
    if not store.online:
        return row
    where = (p.target.dtype, p.target.device, p.target.trust_remote_code)
    live = Live.load(str(manifest.weights(made)), *where, made.feature_layers)
    view = live.look([row.id], [row.ids], [conversations.images(SAMPLED, "sample_target").get(row.id)])
    states = live(row.ids.long().to(live.model.device), [len(row.ids)], view)
    row = replace(row, features=states.features.cpu(), last=states.last.cpu())
    if view is None or states.visual is None:
        return row
    return replace(row, positions=view.positions.T, pictured=view.pictured, visual=states.visual.cpu())


@torch.no_grad()
def chain_tau(draft: Draft, row: hiddens.Row, embedding, head, steps: int) -> float:
    """The accept length of chains of `steps` drafts over the row's answer, walked as decoding would."""
    pack = ttt.Pack.of([row], steps, "aligned").to(head.device)
    result = ttt.forward(draft, pack, embedding, head, ttt.Objective(steps))
    accepted = ttt.chain_accepted(result, pack).tolist()  # at each supervised position, in order: the answer's own
    place, total, cycles = 0, 0, 0
    while place < len(accepted):
        total, cycles, place = total + accepted[place], cycles + 1, place + accepted[place] + 1
    return acceptance.tau(torch.tensor([total]).numpy(), torch.tensor([cycles]).numpy())


if __name__ == "__main__":
    params.run_stage(spent.recorded(main, "check_overfit", lambda: params.load().target.gpus()))
