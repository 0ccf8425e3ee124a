"""check_overfit: can this draft learn one row?   python -m stages.check_overfit

If a copy of e000 can't reach nearly whole accepted chains on a single row it was trained on, then features, masks, rotation
or vocabulary disagree, and no amount of data will help. The torch engine decodes the row, as a benchmark does, along the
row's own answer (engine/recite.py), so a mismatch between trainer and engine shows here too.

train_draft depends on results/overfit_pass.json, so no training starts before this gate passes. That file names the row and
the draft and holds neither threshold nor tau nor clock: editing check_overfit.min_tau retrains nothing while the threshold is
reached. The measurement is kept in .scratch, so such an edit does not repeat it.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import trange

from stages.data import conversations
from stages.draft import checkpoint
from stages.draft.eagle3 import Eagle3Draft
from stages.engine import recite
from stages.hidden_states import format, reader
from stages.hidden_states.reader import HiddenStatesReader
from stages.params import schema
from stages.params.section import ROOT_CHECKPOINT
from stages.runtime import atomic, scratch
from stages.target import loading, manifest, vision
from stages.target.online import OnlineTarget
from stages.telemetry import stage_record
from stages.training import adamw, ttt
from stages.trees import acceptance

SAMPLED, HIDDENS = Path("data/sampled/train"), Path("data/hiddens/train")
REPORT, PASS = Path("results/overfit_report.json"), Path("results/overfit_pass.json")
CANDIDATES = 16  # rows of middling length, of which the most predictable one is learned


@dataclass(frozen=True)
class Measured:
    """What one row taught a copy of e000; independent of the threshold."""

    row: str
    perfect: float  # accept length of perfect guesses on the row
    trained: float  # accept length by the trainer's own forward
    served: float | None  # accept length by the torch engine; None where it can't decode the row
    losses: list[float]  # one per step


def main() -> None:
    p = schema.load_params()
    torch.set_num_threads(p.target.num_threads)
    kept = _place(p) / "measured.json"
    if kept.exists():
        found = Measured(**atomic.read_json(kept, "check_overfit"))
        print(f"measured before, on the same inputs by the same code: {kept}")
    else:
        found = _measure(p)
        scratch.remove_scratch(kept.parent)  # earlier measurements
        if all(map(math.isfinite, found.losses)):  # JSON holds no NaN, and _judge says what to do about one
            atomic.write_json(kept, asdict(found))
    _judge(p, found)


def _place(p: schema.Params) -> Path:
    """Where the measurement is kept: by all that it depends on, the code among it, but for the threshold."""
    settings, t = p.check_overfit.model_dump(exclude={"min_tau"}), p.train_draft
    trained = [t.ttt_steps, t.ttt_decay, t.mask, t.loss, t.grad_clip]
    inputs = [manifest.TARGET_FOLDER, checkpoint.locate_checkpoint(ROOT_CHECKPOINT) / "draft", SAMPLED]
    digests = [reader.digest_folder(HIDDENS), *map(scratch.digest_folder, inputs)]
    return scratch.locate_scratch("check_overfit", p.target.model_dump(), settings, trained, digests)


def _measure(p: schema.Params) -> Measured:
    """Train a copy of e000 on one row, then decode that row's answer with it."""
    made = manifest.read_manifest()
    embedding, head = (t.to(p.target.device) for t in manifest.read_embedding_and_head(made))
    config, tensors = checkpoint.read_draft(checkpoint.locate_checkpoint(ROOT_CHECKPOINT), "init_draft")
    draft = Eagle3Draft.of(config, tensors).to(p.target.device)
    (row, perfect), settings = _read_middle_row(p, made, head), p.train_draft
    pack = ttt.TrainingPack.of([row], settings.ttt_steps, settings.mask).to(p.target.device)
    objective = ttt.TrainingObjective(settings.ttt_steps, settings.ttt_decay, settings.mask, settings.loss)

    optimizer = adamw.MasterWeightOptimizer(draft, p.check_overfit.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    for _ in trange(p.check_overfit.steps, desc=f"learn row {row.id} by heart", unit="step", mininterval=2):
        total = ttt.compute_loss(draft, pack, embedding, head, objective).total
        total.backward()
        optimizer.step(p.check_overfit.learning_rate, settings.grad_clip)
        losses.append(total.item())
    trained = measure_chain_tau(draft, row, embedding, head, settings.ttt_steps)
    del optimizer, total, embedding, head  # the target may need their room
    served = _served_tau(p, made, config, draft, row)
    return Measured(row.id, perfect, trained, served, losses)


def _judge(p: schema.Params, found: Measured) -> None:
    """Write the report and the pass. Raises ValueError where tau is below what check_overfit.min_tau asks for."""
    losses, perfect = found.losses, found.perfect
    if found.served is None:
        # The trainer counts every guess of the target's likeliest token, so the whole of min_tau can be reached.
        tau, needed = found.trained, p.check_overfit.min_tau
    else:
        tau, needed = found.served, _needed(p, perfect)
    report = {
        "row": found.row,
        "tau": tau,
        "min_tau": p.check_overfit.min_tau,
        "perfect_tau": perfect,
        "steps": p.check_overfit.steps,
        "losses": [round(x, 5) for x in losses[:: max(1, len(losses) // 40)]],
    }
    print(
        f"one row learned: chain accept length {tau:.2f} of {perfect:.2f}, {found.trained:.2f} by the trainer's own forward, "
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f}"
    )
    if tau < needed:
        raise ValueError(
            f"check_overfit: after {p.check_overfit.steps} steps on row {found.row} a chain of {p.train_draft.ttt_steps} drafts "
            f"is accepted {tau:.2f} tokens long, expected at least {needed:.2f}: check_overfit.min_tau "
            f"{p.check_overfit.min_tau}, in proportion to {perfect:.2f}, which perfect guesses reach on this row. "
            f"{_advice(found.trained, needed, losses)}"
        )
    atomic.write_json(REPORT, report)
    draft = manifest.digest_files(checkpoint.locate_checkpoint(ROOT_CHECKPOINT) / "draft", "*.safetensors")
    atomic.write_json(PASS, {"passed": True, "row": found.row, "draft": draft})


def _needed(p: schema.Params, perfect: float) -> float:
    """min_tau is of a row that can be guessed whole; of one that can't, the same share of what can be reached."""
    return min(p.check_overfit.min_tau, p.check_overfit.min_tau * perfect / (p.train_draft.ttt_steps + 1))


def _advice(trained: float, needed: float, losses: list[float]) -> str:
    if trained >= needed:
        return (
            f"By the trainer's own forward it is {trained:.2f}: the torch engine gives the draft other inputs than it was "
            "trained on, so compare target.feature_layers, target.model and target.dtype with what the hidden states were "
            "made with (extract_hiddens.import?); if these agree, the fault is ours"
        )
    return (
        f"Loss went {losses[0]:.3f} -> {losses[-1]:.3f}: if it fell, raise check_overfit.steps; if not, look at "
        "results/vocab_report.json (coverage), target.feature_layers, and the row's loss span; if it is nan, lower "
        "check_overfit.learning_rate"
    )


def _read_middle_row(
    p: schema.Params, made: manifest.TargetManifest, head: torch.Tensor
) -> tuple[format.HiddenStatesRow, float]:
    """Return a row of middling length and the accept length of perfect guesses on it, the most of some such rows.

    Its hidden states are by the target itself where none are stored.
    """
    store, steps = HiddenStatesReader(HIDDENS), p.train_draft.ttt_steps
    order, first = sorted(range(len(store)), key=lambda i: store.lengths[i]), max(0, (len(store) - CANDIDATES) // 2)
    stored = [store.read_row(number, torch.float32) for number in order[first : first + CANDIDATES]]
    rows = _seen(p, made, stored) if store.online else iter(stored)

    def reachable(row: format.HiddenStatesRow) -> float:
        answer = slice(row.prompt_length, None)
        return recite.perfect_tau(row.ids[answer], row.last[answer].to(head.device, head.dtype), head, steps)

    return max(((row, reachable(row)) for row in rows), key=lambda found: found[1])


def _seen(
    p: schema.Params, made: manifest.TargetManifest, rows: list[format.HiddenStatesRow]
) -> Iterator[format.HiddenStatesRow]:
    """Yield the rows with the hidden states that the target makes of them here."""
    where = (p.target.dtype, p.target.device, p.target.trust_remote_code)
    live = OnlineTarget.load(str(manifest.resolve_weights_folder(made)), *where, made.feature_layers)
    images = conversations.read_image_paths(SAMPLED, "sample_target")
    for row in rows:
        view = live.build_inputs([row.id], [row.ids], [images.get(row.id)])
        states = live(row.ids.long().to(live.model.device), [len(row.ids)], view)
        row = replace(row, features=states.features.cpu(), last=states.last.cpu())
        if view is not None and states.image_embeddings is not None:
            row = replace(
                row,
                positions=view.positions.T,
                image_token_mask=view.image_token_mask,
                image_embeddings=states.image_embeddings.cpu(),
            )
        yield row


def _served_tau(
    p: schema.Params,
    made: manifest.TargetManifest,
    config: dict[str, Any],
    draft: Eagle3Draft,
    row: format.HiddenStatesRow,
) -> float | None:
    """Return the accept length that the torch engine finds along the row's answer; None, and say why, where it can't decode it.

    The draft is loaded as from its file, in the target's dtype, as `benchmark` does.
    """
    folder, ids = str(manifest.resolve_weights_folder(made)), row.ids.tolist()
    shown = {row.id: conversations.read_image_paths(SAMPLED, "sample_target").get(row.id)}
    try:
        model = loading.load_target(folder, None, p.target.dtype, p.target.device, p.target.trust_remote_code)
        served = Eagle3Draft.of(config, draft.state_dict()).to(p.target.device, model.dtype).requires_grad_(False)
        engine = recite.ReciteEngine(model, made.feature_layers, served, ids[row.prompt_length :])
        if (told := _too_long(engine, len(ids))) is None:
            pictures = vision.load_image_patches(folder, p.target.trust_remote_code, shown)[row.id]
            return recite.chain_tau(engine, ids[: row.prompt_length], p.train_draft.ttt_steps, pictures)
    except torch.OutOfMemoryError as error:
        told = str(error).split("\n")[0]
    print(f"the row is not decoded by the torch engine, only by the trainer's own forward: {told}")
    return None


def _too_long(engine: recite.ReciteEngine, tokens: int) -> str | None:
    """What the engine says against so many tokens: of a target whose layers see fewer it decodes none."""
    try:
        engine.check(tokens)
    except ValueError as error:
        return str(error)
    return None


@torch.no_grad()
def measure_chain_tau(draft: Eagle3Draft, row: format.HiddenStatesRow, embedding, head, steps: int) -> float:
    """The accept length of chains of `steps` drafts over the row's answer, walked as decoding would."""
    pack = ttt.TrainingPack.of([row], steps, "aligned").to(head.device)
    result = ttt.compute_loss(draft, pack, embedding, head, ttt.TrainingObjective(steps))
    accepted = ttt.count_chain_accepted(
        result, pack
    ).tolist()  # at each supervised position, in order: the answer's own
    place, total, cycles = 0, 0, 0
    while place < len(accepted):
        total, cycles, place = total + accepted[place], cycles + 1, place + accepted[place] + 1
    return acceptance.compute_tau(torch.tensor([total]).numpy(), torch.tensor([cycles]).numpy())


if __name__ == "__main__":
    schema.run_stage(stage_record.record_stage(main, "check_overfit", lambda: schema.load_params().target.gpus()))
