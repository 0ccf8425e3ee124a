"""check_overfit: pass/fail gate before training: a draft must overfit one row.   python -m stages.check_overfit [e000]

If a copy of e000 can't reach nearly whole accepted chains on the one row it was trained on, then features, masks, RoPE or
vocabulary disagree, and more data will not help. The torch engine decodes along the row's own answer
(engine/forced_decode.py), as in a benchmark, so a mismatch between trainer and engine fails the gate too.

train_draft depends on results/overfit_pass.json, so training starts only after this gate. That file has the row and the
digest of the draft, but no threshold, tau or time: an edit of check_overfit.min_tau that still passes retrains nothing. The
measurement is kept in .scratch, so such an edit does not repeat it.
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
from stages.engine import forced_decode
from stages.hidden_states import format, reader
from stages.hidden_states.reader import HiddenStatesReader
from stages.params import schema
from stages.params.section import ROOT_CHECKPOINT
from stages.runtime import atomic, scratch
from stages.target import loading, manifest, vision
from stages.target.feature_layers import locate_feature_layers
from stages.target.feature_target import FeatureTarget
from stages.telemetry.run_stage import run_stage
from stages.training import adamw, ttt
from stages.trees import accept_length

SAMPLED, HIDDENS = Path("data/sampled/train"), Path("data/hiddens/train")
REPORT, PASS = Path("results/train/e000.overfit.json"), Path("results/overfit_pass.json")
NUM_CANDIDATES = 16  # rows of median length, of which the most predictable one is learned
LEAST_TELLING_TAU = (
    2.0  # of perfect guesses; below, the row has too few argmax tokens for the engine's tau to tell anything
)


@dataclass(frozen=True)
class OverfitMeasurement:
    """Results of training a copy of e000 on one row; independent of the threshold."""

    row: str
    perfect_tau: float  # of a draft that always predicts the target's argmax
    trainer_tau: float  # by the trainer's forward
    engine_tau: float | None  # by the torch engine; None where it can't decode the row
    losses: list[float]  # one per step


def main(name: str = ROOT_CHECKPOINT) -> None:
    params = schema.load_params()
    schema.check_initial(params, name)
    torch.set_num_threads(params.target.num_threads)
    path = _locate_measurement(params) / "measured.json"
    if path.exists():
        measurement = OverfitMeasurement(**atomic.read_json(path, "check_overfit"))
        print(f"measured before, on the same inputs by the same code: {path}")
    else:
        measurement = _learn_row(params)
        scratch.remove_scratch(path.parent)  # earlier measurements
        if all(map(math.isfinite, measurement.losses)):  # JSON has no NaN; _check_threshold reports one
            atomic.write_json(path, asdict(measurement))
    _check_threshold(params, measurement)


def _locate_measurement(params: schema.Params) -> Path:
    """Return the folder of the measurement, by a digest of its inputs and code without the threshold."""
    settings, training = params.check_overfit.model_dump(exclude={"min_tau"}), params.train_draft
    trained = [training.ttt_steps, training.ttt_decay, training.mask, training.loss, training.grad_clip]
    inputs = [manifest.TARGET_FOLDER, checkpoint.locate_checkpoint(ROOT_CHECKPOINT) / "draft", SAMPLED]
    digests = [reader.digest_folder(HIDDENS), *map(scratch.digest_folder, inputs)]
    return scratch.locate_scratch("check_overfit", params.target.model_dump(), settings, trained, digests)


def _learn_row(params: schema.Params) -> OverfitMeasurement:
    """Train a copy of e000 on one row, then decode that row's answer with it."""
    target_manifest, device = manifest.read_manifest(), params.target.device
    embedding, head = (t.to(device) for t in manifest.read_embedding_and_head(target_manifest))
    config, tensors = checkpoint.read_draft(
        checkpoint.locate_checkpoint(ROOT_CHECKPOINT), f"init_draft@{ROOT_CHECKPOINT}"
    )
    draft = Eagle3Draft.from_checkpoint(config, tensors).to(device)
    row, perfect_tau = _choose_row(params, target_manifest, config, head)
    losses = _train_on_row(params, draft, row, embedding, head)
    trainer_tau = measure_chain_tau(draft, row, embedding, head, params.train_draft.ttt_steps)
    del embedding, head  # the target may need their memory
    engine_tau = _measure_engine_tau(params, target_manifest, config, draft, row)
    return OverfitMeasurement(row.id, perfect_tau, trainer_tau, engine_tau, losses)


def _train_on_row(
    params: schema.Params, draft: Eagle3Draft, row: format.HiddenStatesRow, embedding: torch.Tensor, head: torch.Tensor
) -> list[float]:
    """Train the draft on the row and return the loss of each step."""
    settings, learning_rate = params.train_draft, params.check_overfit.learning_rate
    pack = ttt.TrainingPack.from_rows([row], settings.ttt_steps, settings.mask).to(params.target.device)
    objective = ttt.TrainingObjective(settings.ttt_steps, settings.ttt_decay, settings.mask, settings.loss)
    optimizer = adamw.MasterWeightOptimizer(draft, learning_rate, weight_decay=0.0)
    losses: list[float] = []
    for _ in trange(params.check_overfit.steps, desc=f"overfit row {row.id}", unit="step", mininterval=2):
        total_loss = ttt.compute_loss(draft, pack, embedding, head, objective).total_loss
        total_loss.backward()
        optimizer.step(learning_rate, settings.grad_clip)
        losses.append(total_loss.item())
    return losses


def _check_threshold(params: schema.Params, measurement: OverfitMeasurement) -> None:
    """Write the report and the pass. Raises ValueError where tau is below the threshold of check_overfit.min_tau."""
    settings, losses, perfect_tau = params.check_overfit, measurement.losses, measurement.perfect_tau
    if measurement.engine_tau is None:
        # The trainer counts argmax matches even where the row has another token, so all of min_tau can be reached.
        tau, required = measurement.trainer_tau, settings.min_tau
    else:
        tau, required = (
            measurement.engine_tau,
            scale_threshold(settings.min_tau, perfect_tau, params.train_draft.ttt_steps),
        )
    report = {
        "row": measurement.row,
        "tau": tau,
        "min_tau": settings.min_tau,
        "perfect_tau": perfect_tau,
        "required_tau": round(required, 3),
        "steps": settings.steps,
        "losses": [round(x, 5) for x in losses[:: max(1, len(losses) // 40)]],
    }
    nothing = " (check_overfit.min_tau is 1.0, so nothing is: this does not tell whether a draft can learn)"
    print(
        f"after {settings.steps} steps on one row {tau:.2f} tokens per verify cycle of {perfect_tau:.2f}, "
        f"{measurement.trainer_tau:.2f} by the trainer's own forward, loss {losses[0]:.2f} -> {losses[-1]:.2f}; "
        f"{required:.2f} required{nothing if settings.min_tau == 1 else ''}"
    )
    if tau < required:
        raise ValueError(
            f"check_overfit: after {settings.steps} steps on row {measurement.row} a chain of "
            f"{params.train_draft.ttt_steps} drafts commits {tau:.2f} tokens per verify cycle, expected at least {required:.2f}: "
            f"check_overfit.min_tau {settings.min_tau}, in proportion to {perfect_tau:.2f}, which perfect guesses reach on "
            f"this row. {_advise(measurement.trainer_tau, required, losses)}"
        )
    if perfect_tau < LEAST_TELLING_TAU and measurement.trainer_tau < settings.min_tau:
        raise ValueError(
            f"check_overfit: after {settings.steps} steps on row {measurement.row} the trainer's own forward commits "
            f"{measurement.trainer_tau:.2f} of the target's most likely tokens per verify cycle, expected at least "
            f"check_overfit.min_tau {settings.min_tau}. It decides here, since the row's own tokens are seldom those: perfect "
            f"guesses reach {perfect_tau:.2f} on it. {_advise(measurement.trainer_tau, math.inf, losses)}. A target of random "
            "weights, whose tokens are about equally likely, is not learned in so few steps: to try the rest of the run "
            "with one, set check_overfit.min_tau: 1.0, which demands nothing"
        )
    atomic.write_json(REPORT, report)
    draft = manifest.digest_files(checkpoint.locate_checkpoint(ROOT_CHECKPOINT) / "draft", "*.safetensors")
    atomic.write_json(PASS, {"passed": True, "row": measurement.row, "draft": draft})


def scale_threshold(min_tau: float, perfect_tau: float, num_steps: int) -> float:
    """Return the accept length that a row must reach.

    `min_tau` is for a row of argmax tokens only, whose chains of `num_steps` drafts perfect guesses fill. Its drafted part is
    scaled by what they fill of this row's; the token that every cycle has in any case is not.
    """
    return 1 + (min_tau - 1) * (perfect_tau - 1) / num_steps


def _advise(trainer_tau: float, required: float, losses: list[float]) -> str:
    if trainer_tau >= required:
        return (
            f"By the trainer's own forward it is {trainer_tau:.2f}: the torch engine gives the draft other inputs than it was "
            "trained on, so compare target.feature_layers, target.model and target.dtype with those that the hidden states "
            "were extracted with (extract_hiddens.import?); if these agree, it is a bug in aerie"
        )
    return (
        f"Loss went {losses[0]:.3f} -> {losses[-1]:.3f}: if it fell, raise check_overfit.steps; if not, look at "
        "results/train/e000.json (no token that init_draft.draft_vocab_size leaves out can be learned), at "
        "target.feature_layers and at the row's loss span; if it is nan, lower check_overfit.learning_rate"
    )


def _choose_row(
    params: schema.Params, target_manifest: manifest.TargetManifest, config: dict[str, Any], head: torch.Tensor
) -> tuple[format.HiddenStatesRow, float]:
    """Return the row with the highest tau of perfect drafts, among rows of median length, and that tau.

    It has the features that the draft with this config.json reads. Where none are stored, the target computes them here.
    """
    layers = checkpoint.read_feature_layers(config, target_manifest.num_layers)
    places = locate_feature_layers(target_manifest.feature_layers, layers, f"the draft of {ROOT_CHECKPOINT}")
    hidden_states = HiddenStatesReader(HIDDENS, places)
    by_length = sorted(range(len(hidden_states)), key=lambda i: hidden_states.lengths[i])
    start = max(0, (len(hidden_states) - NUM_CANDIDATES) // 2)
    stored = [hidden_states.read_row(number, torch.float32) for number in by_length[start : start + NUM_CANDIDATES]]
    rows = _compute_hidden_states(params, target_manifest, layers, stored) if hidden_states.online else iter(stored)

    def measure(row: format.HiddenStatesRow) -> float:
        answer = slice(row.prompt_length, None)
        last = row.last[answer].to(head.device, head.dtype)
        return forced_decode.compute_perfect_tau(row.ids[answer], last, head, params.train_draft.ttt_steps)

    return max(((row, measure(row)) for row in rows), key=lambda found: found[1])


def _compute_hidden_states(
    params: schema.Params,
    target_manifest: manifest.TargetManifest,
    layers: list[int],
    rows: list[format.HiddenStatesRow],
) -> Iterator[format.HiddenStatesRow]:
    """Yield the rows with hidden states computed by the target, features of `layers`."""
    target = FeatureTarget.load(target_manifest, params.target, params.target.device, layers=layers)
    image_paths = conversations.read_image_paths(SAMPLED, "sample_target")
    for row in rows:
        inputs = target.build_inputs([row.id], [row.ids], image_paths)
        states = target.compute_hidden_states(row.ids.long().to(target.model.device), [len(row.ids)], inputs)
        found = {name: tensor.cpu() for name, tensor in states._asdict().items() if tensor is not None}
        if inputs is not None:
            found |= {"positions": inputs.positions.T, "image_token_mask": inputs.image_token_mask}
        yield replace(row, **found)


def _measure_engine_tau(
    params: schema.Params,
    target_manifest: manifest.TargetManifest,
    config: dict[str, Any],
    draft: Eagle3Draft,
    row: format.HiddenStatesRow,
) -> float | None:
    """Return the draft's tau on the torch engine along the row's answer; print why and return None where it can't decode it.

    The draft is loaded in the target's dtype, as in `benchmark`.
    """
    folder, ids = str(manifest.resolve_weights_folder(target_manifest)), row.ids.tolist()
    paths = {row.id: conversations.read_image_paths(SAMPLED, "sample_target").get(row.id)}
    trust = params.target.trust_remote_code
    try:
        model = loading.load_target(folder, params.target.dtype, params.target.device, trust)
        served = Eagle3Draft.from_checkpoint(config, draft.state_dict())
        served = served.to(params.target.device, model.dtype).requires_grad_(False)
        answer = ids[row.prompt_length :]
        layers = checkpoint.read_feature_layers(config, target_manifest.num_layers)
        engine = forced_decode.ForcedDecodingEngine(model, layers, served, answer)
        try:
            engine.slots.check_length(len(ids))
        except ValueError as error:  # as with layers of a smaller window
            reason = str(error)
        else:
            images = vision.load_image_patches(folder, trust, paths)[row.id]
            num_steps = params.train_draft.ttt_steps
            return forced_decode.measure_chain_tau(engine, ids[: row.prompt_length], num_steps, images)
    except torch.OutOfMemoryError as error:
        reason = str(error).split("\n")[0]
    print(f"the row is not decoded by the torch engine, only by the trainer's own forward: {reason}")
    return None


def measure_chain_tau(
    draft: Eagle3Draft, row: format.HiddenStatesRow, embedding: torch.Tensor, head: torch.Tensor, num_steps: int
) -> float:
    """Return tau of chains of `num_steps` drafts over the row's answer, by the trainer's forward.

    Gradients are on, though none is computed: without them a GPU would compile every function once more.
    """
    pack = ttt.TrainingPack.from_rows([row], num_steps, "aligned").to(head.device)
    result = ttt.compute_loss(draft, pack, embedding, head, ttt.TrainingObjective(num_steps))
    accepted = ttt.count_chain_accepted(result, pack).tolist()  # of each position of the answer, in order
    position, total, cycles = 0, 0, 0
    while position < len(accepted):
        total, cycles, position = total + accepted[position], cycles + 1, position + accepted[position] + 1
    return accept_length.compute_tau(torch.tensor([total]).numpy(), torch.tensor([cycles]).numpy())


if __name__ == "__main__":
    run_stage(main, lambda: schema.load_params().target.gpus())
