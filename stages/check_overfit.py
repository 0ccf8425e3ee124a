"""check_overfit: pass/fail gate before training: a draft must overfit one row.   python -m stages.check_overfit [e000]

If a copy of e000 can't reach nearly whole accepted chains on the one row it was trained on, then features, masks, RoPE or
vocabulary disagree, and more data will not help. The torch engine decodes along the row's own answer
(engine/forced_decode.py), as in a benchmark, so a mismatch between trainer and engine fails the gate too. The same is asked of
the untrained draft of every other segment that starts from e000, if engines serve its family (families/overfit_run.py). The
stage fails where all of them do; else each segment of a draft that failed is refused by train_draft, and the others are trained.

train_draft depends on results/overfit_pass.json, so training starts only after this gate. That file has the row and the
digest of e000's draft, but no threshold, tau, time or block draft: an edit of check_overfit.min_tau that still passes retrains
nothing, nor does another segment. Each draft's measurement is kept in .scratch, so such an edit does not repeat it.
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
from stages.engine import forced_decode
from stages.families import registry
from stages.families.draft_decoding import build_drafter
from stages.families.overfit_run import OverfitRun
from stages.hidden_states import format, reader
from stages.hidden_states.reader import HiddenStatesReader
from stages.params import schema, stage_inputs
from stages.params.families import ROOT_FAMILY, DraftFamily
from stages.params.section import ROOT_CHECKPOINT
from stages.runtime import atomic, scratch
from stages.target import loading, manifest, vision
from stages.target.feature_layers import locate_feature_layers
from stages.telemetry.run_stage import run_stage
from stages.training.compile_on_cuda import without_compiling
from stages.training.optimizer import MasterWeightOptimizer, OptimizerSettings

SAMPLED, HIDDENS = Path("data/sampled/train"), Path("data/hiddens/train")
REPORT, PASS = Path("results/train/e000.overfit.json"), Path("results/overfit_pass.json")
# Steps between looks at whether the row is learned; the share of whole chains, by the trainer's own forward, that says so.
LOOK_STEPS, LEARNED = 20, 0.98
LEAST_COVERAGE = 0.9  # of the row's answer by the draft's vocabulary: below, that is what a failure is put down to
NUM_CANDIDATES = 16  # rows of median length, of which the most predictable one is learned
# of perfect guesses; below, the row has too few argmax tokens for the engine's tau to tell anything
LEAST_TELLING_TAU = 2.0


@dataclass(frozen=True)
class OverfitMeasurement:
    """Results of training a draft on one row; independent of the threshold."""

    row: str
    perfect_tau: float  # of a draft that predicts the target's argmax; of DFlash and DFlash2: the row's tokens
    coverage: float  # share of the row's answer that the draft's vocabulary has
    trainer_tau: float  # by the trainer's forward
    engine_tau: float | None  # by the torch engine; None where it can't decode the row
    losses: list[float]  # one per step


def main(name: str = ROOT_CHECKPOINT) -> None:
    params = stage_inputs.read_params("check_overfit", name)
    torch.set_num_threads(params.target.num_threads)
    others = params.train_draft.list_fresh_drafts()
    report, failure = _check_threshold(params, name, _measure(params, name))
    failures = {name: failure} if failure else {}
    reports = dict[str, Any]()
    for other in others:
        try:
            reports[other], failure = _check_threshold(params, other, _measure(params, other))
        except ValueError as error:  # one draft's refusal stops no other's training
            failure = str(error)
        failures |= {other: failure} if failure else {}
    if len(failures) == 1 + len(others):
        raise ValueError("\n  ".join(failures.values()))
    for failure in failures.values():
        print(f"warning: {failure}; the other drafts are trained")
    more = ({"block_drafts": reports} if reports else {}) | ({"refused": failures} if failures else {})
    atomic.write_json(REPORT, report | more)
    draft = manifest.digest_files(checkpoint.locate_checkpoint(ROOT_CHECKPOINT) / "draft", "*.safetensors")
    atomic.write_json(PASS, {"passed": True, "row": report["row"], "draft": draft})


def _measure(params: schema.Params, name: str) -> OverfitMeasurement:
    """Return the measurement of e000, or of the draft that a segment starts from: the kept one, or a new one."""
    path = _locate_measurement(params, name) / "measured.json"
    if path.exists():
        print(f"{name}: measured before, on the same inputs by the same code: {path}")
        return OverfitMeasurement(**atomic.read_json(path, "check_overfit"))
    measurement = _learn_row(params, name)
    scratch.remove_scratch(path.parent)  # earlier measurements
    if all(map(math.isfinite, measurement.losses)):  # JSON has no NaN; _check_threshold reports one
        atomic.write_json(path, asdict(measurement))
    return measurement


def _locate_measurement(params: schema.Params, name: str = ROOT_CHECKPOINT) -> Path:
    """Return the folder of the measurement, by a digest of its inputs and code without the threshold."""
    settings, training = params.check_overfit.model_dump(exclude={"min_tau"}), params.train_draft
    trained: list[Any] = [training.ttt_steps, training.ttt_decay, training.mask, training.loss, training.grad_clip]
    if name != ROOT_CHECKPOINT:
        segment = training.checkpoints[name].model_dump(exclude={"from_", "epochs", "horizon_epochs"})
        trained = [segment, training.seed, training.grad_clip]
    inputs = [manifest.TARGET_FOLDER, checkpoint.locate_checkpoint(ROOT_CHECKPOINT) / "draft", SAMPLED]
    digests = [reader.digest_folder(HIDDENS), *map(scratch.digest_folder, inputs)]
    modules = stage_inputs.list_family_modules("check_overfit", [_get_family(params, name)])
    return scratch.locate_scratch(
        f"check_overfit-{name}", params.target.model_dump(), settings, trained, digests, modules=modules
    )


def _get_family(params: schema.Params, name: str) -> DraftFamily:
    return ROOT_FAMILY if name == ROOT_CHECKPOINT else params.train_draft.checkpoints[name].family


def _learn_row(params: schema.Params, name: str) -> OverfitMeasurement:
    """Train a fresh draft on one row, then decode that row's answer with it."""
    target_manifest, device = manifest.read_manifest(), params.target.device
    build_overfit = registry.get(_get_family(params, name)).build_overfit
    assert build_overfit is not None, name
    run = build_overfit(name, params, target_manifest, device)
    embedding, head = (t.to(device) for t in manifest.read_embedding_and_head(target_manifest))
    row, perfect_tau = _choose_row(params, target_manifest, run, name, head)
    coverage = run.compute_coverage(row)
    covered = "" if coverage == 1 else f"; the draft's vocabulary covers {coverage:.0%} of its answer"
    print(
        f"{name}: learns row {row.id}, on which perfect guesses reach {perfect_tau:.2f} tokens per verify cycle{covered}",
        flush=True,
    )
    with without_compiling():
        losses = _train_on_row(params, run, row, embedding, head, name)
        trainer_tau = run.compute_trainer_tau(row, embedding, head)
    del embedding, head  # the target may need their memory
    engine_tau = _measure_engine_tau(params, target_manifest, run, row)
    return OverfitMeasurement(row.id, perfect_tau, coverage, trainer_tau, engine_tau, losses)


def _train_on_row(
    params: schema.Params,
    run: OverfitRun,
    row: format.HiddenStatesRow,
    embedding: torch.Tensor,
    head: torch.Tensor,
    name: str,
) -> list[float]:
    """Train the draft on the row until it has learned it, or for all steps; return the loss of each."""
    optimizer = MasterWeightOptimizer(run.draft, OptimizerSettings(params.check_overfit.learning_rate))
    losses, whole = list[float](), LEARNED * (1 + run.num_steps)
    steps = trange(params.check_overfit.steps, desc=f"{name}: overfit row {row.id}", unit="step", mininterval=2)
    for _, total_loss in zip(steps, run.generate_losses(row, embedding, head), strict=False):
        total_loss.backward()
        optimizer.step(1.0, params.train_draft.grad_clip)
        losses.append(total_loss.item())
        if len(losses) % LOOK_STEPS == 0 and run.compute_trainer_tau(row, embedding, head) >= whole:
            break
    return losses


def _check_threshold(
    params: schema.Params, name: str, measurement: OverfitMeasurement
) -> tuple[dict[str, Any], str | None]:
    """Return the report of a draft, and why its tau is below the threshold of check_overfit.min_tau, if it is."""
    settings, losses, perfect_tau = params.check_overfit, measurement.losses, measurement.perfect_tau
    min_tau = round(settings.choose_min_tau(params.train_draft.ttt_steps), 3)
    ttt_steps, num_steps = params.train_draft.ttt_steps, _count_chain_drafts(params, name)
    # The trainer counts matches with the labels even where the row has another token, so a whole chain can be reached.
    of_whole_chains = scale_threshold(min_tau, 1 + num_steps, ttt_steps)
    if measurement.engine_tau is None:
        tau, required = measurement.trainer_tau, of_whole_chains
    else:
        tau, required = measurement.engine_tau, scale_threshold(min_tau, perfect_tau, ttt_steps)
    report = {
        "row": measurement.row,
        "tau": tau,
        "min_tau": min_tau,
        "perfect_tau": perfect_tau,
        "vocabulary_coverage": round(measurement.coverage, 4),
        "required_tau": round(required, 3),
        "steps": len(losses),
        "losses": [round(x, 5) for x in losses[:: max(1, len(losses) // 40)]],
    }
    nothing = " (check_overfit.min_tau is 1.0, so nothing is: this does not tell whether a draft can learn)"
    print(
        f"{name}: after {len(losses)} steps on one row {tau:.2f} tokens per verify cycle of {perfect_tau:.2f}, "
        f"{measurement.trainer_tau:.2f} by the trainer's own forward, loss {losses[0]:.2f} -> {losses[-1]:.2f}; "
        f"{required:.2f} required{nothing if min_tau == 1 else ''}"
    )
    learned = f"check_overfit of {name}: after {len(losses)} steps on row {measurement.row}"
    if tau < required:
        advice = _advise(name, measurement, of_whole_chains)
        if measurement.coverage < LEAST_COVERAGE and name == ROOT_CHECKPOINT:
            advice = (
                f"The draft vocabulary covers {measurement.coverage:.0%} of the row, and no other token can be drafted: raise "
                "init_draft.draft_vocab_size"
            )
        elif perfect_tau < LEAST_TELLING_TAU and measurement.engine_tau is not None:
            advice = (
                "So few that the row tells nothing of the draft: its answer has few of the target's most likely tokens, as "
                "those that are sampled from a target of random weights. Set sample_target.temperature: 0, or "
                "check_overfit.min_tau: 1.0, which demands nothing"
            )
        return report, (
            f"{learned} a chain of {num_steps} drafts commits {tau:.2f} tokens per verify cycle, expected at least "
            f"{required:.2f}: check_overfit.min_tau {min_tau}, in proportion to {perfect_tau:.2f}, which perfect "
            f"guesses reach on this row. {advice}"
        )
    if perfect_tau < LEAST_TELLING_TAU and measurement.trainer_tau < of_whole_chains:
        return report, (
            f"{learned} the trainer's own forward commits {measurement.trainer_tau:.2f} of the target's most likely tokens "
            f"per verify cycle, expected at least {of_whole_chains:.2f}: check_overfit.min_tau {min_tau}. It decides "
            "here, since the row's own tokens are seldom those: perfect guesses reach "
            f"{perfect_tau:.2f} on it. {_advise(name, measurement, math.inf)}. A target of random "
            "weights, whose tokens are about equally likely, is not learned in so few steps: to try the rest of the run "
            "with one, set check_overfit.min_tau: 1.0, which demands nothing"
        )
    return report, None


def _count_chain_drafts(params: schema.Params, name: str) -> int:
    """Return the drafts of a chain: those of a block, or the steps of EAGLE-3's training."""
    segment = params.train_draft.checkpoints.get(name)
    return (segment and segment.draft.depth) or params.train_draft.ttt_steps


def scale_threshold(min_tau: float, perfect_tau: float, num_steps: int) -> float:
    """Return the accept length that a row must reach.

    `min_tau` is for chains of `num_steps` draft tokens (train_draft.ttt_steps), all of them accepted. min_tau - 1 is scaled by
    what a perfect draft accepts on this row; the bonus token of each cycle is not.
    """
    return 1 + (min_tau - 1) * (perfect_tau - 1) / num_steps


def _advise(name: str, measurement: OverfitMeasurement, of_whole_chains: float) -> str:
    """Return what to look at. The trainer's own tau is compared on its own scale, on which a whole chain can be reached."""
    losses = measurement.losses
    if measurement.trainer_tau >= of_whole_chains:
        return (
            f"By the trainer's own forward it is {measurement.trainer_tau:.2f}: the torch engine gives the draft other inputs "
            "than it was trained on, so compare target.feature_layers, target.model and target.dtype with those that the "
            "hidden states were extracted with (extract_hiddens.import?); if these agree, it is a bug in aerie"
        )
    look_at = ""
    if name != ROOT_CHECKPOINT:
        look_at = f"train_draft.checkpoints.{name} (feature_layers, layers), at "
    return (
        f"Loss went {losses[0]:.3f} -> {losses[-1]:.3f}: if it fell, raise check_overfit.steps; if not, look at "
        f"{look_at}target.feature_layers and at the row's loss span; if it is nan, lower check_overfit.learning_rate"
    )


def _choose_row(
    params: schema.Params, target_manifest: manifest.TargetManifest, run: OverfitRun, name: str, head: torch.Tensor
) -> tuple[format.HiddenStatesRow, float]:
    """Return the row with the highest tau of perfect drafts, among rows of median length, and that tau.

    It has the features that the draft reads. Where none are stored, the target computes them here.
    """
    layers = run.loaded.feature_layers
    layer_indices = locate_feature_layers(target_manifest.feature_layers, layers, f"the draft of {name}")
    hidden_states = HiddenStatesReader(HIDDENS, layer_indices)
    by_length = sorted(range(len(hidden_states)), key=lambda i: hidden_states.lengths[i])
    start = max(0, (len(hidden_states) - NUM_CANDIDATES) // 2)
    stored = [hidden_states.read_row(number, torch.float32) for number in by_length[start : start + NUM_CANDIDATES]]
    rows = _compute_hidden_states(params, target_manifest, layers, stored) if hidden_states.online else iter(stored)
    return max(((row, run.compute_perfect_tau(row, head)) for row in rows), key=lambda found: found[1])


def _compute_hidden_states(
    params: schema.Params,
    target_manifest: manifest.TargetManifest,
    layers: list[int],
    rows: list[format.HiddenStatesRow],
) -> Iterator[format.HiddenStatesRow]:
    """Yield the rows with hidden states computed by the target, features of `layers`."""
    from stages.target.feature_target import FeatureTarget  # transformers' model classes: seconds

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
    params: schema.Params, target_manifest: manifest.TargetManifest, run: OverfitRun, row: format.HiddenStatesRow
) -> float | None:
    """Return the draft's tau on the torch engine along the row's answer; print why and return None where it can't decode it.

    The draft is loaded in the target's dtype, as in `benchmark`.
    """
    folder, ids = str(manifest.resolve_weights_folder(target_manifest)), row.ids.tolist()
    paths = {row.id: conversations.read_image_paths(SAMPLED, "sample_target").get(row.id)}
    trust = params.target.trust_remote_code
    try:
        model = loading.load_target(folder, params.target.dtype, params.target.device, trust)
        draft = run.build_engine_draft().freeze(params.target.device, model.dtype)
        drafter = build_drafter(draft, model)
        engine = forced_decode.ForcedDecodingEngine(model, drafter, ids[row.prompt_length :])
        try:
            engine.slots.check_length(len(ids))
        except ValueError as error:  # as with layers of a smaller window
            reason = str(error)
        else:
            images = vision.load_image_patches(folder, trust, paths)[row.id]
            return forced_decode.measure_chain_tau(engine, ids[: row.prompt_length], run.num_steps, images)
    except torch.OutOfMemoryError as error:
        reason = str(error).split("\n")[0]
    print(f"the row is not decoded by the torch engine, only by the trainer's own forward: {reason}")
    return None


if __name__ == "__main__":
    run_stage(main, lambda: schema.load_params().target.gpus())
