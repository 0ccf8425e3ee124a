"""train_draft: hidden states -> draft checkpoint.   python -m stages.train_draft CHECKPOINT

Trains one segment: `epochs` more epochs from the checkpoint it names, with that one's optimizer state, so that e009 after
e003 is bit for bit nine epochs straight: a learning rate that falls (training/trainer.py) does so over
`horizon_epochs` from e000, whatever a segment's length. A killed run resumes after its last whole epoch.
The log has loss and accuracy per TTT step, and what a chain of three accepts on the eval split's answers
(families/held_out.py): other eval rows retrain nothing. Tau of every tree is computed by replay_trees.

A segment trains EAGLE-3's draft, or that of the family it names as `method`, which starts from the sizes of e000 and reads the
same rows in the same order (stages/families). The log of a block draft has the drafts of a block instead of TTT steps.

An optimizer step uses `packs_per_step` packs of at most `batch_tokens` tokens, concatenated rows. Several processes share the
packs of a step, so their number does not change what is learned. With `extract_hiddens.online` no hidden states are stored, and
the target computes those of each pack here.
"""

import copy
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from stages.data import conversations
from stages.draft import checkpoint
from stages.families import registry
from stages.families.draft_files import LoadedDraft
from stages.hidden_states import reader
from stages.hidden_states.reader import EVAL_FOLDER, TRAIN_FOLDER, HiddenStatesReader
from stages.params import schema, stage_inputs
from stages.params.draft_sections import TrainDraft
from stages.params.families import Segment
from stages.params.section import ROOT_CHECKPOINT, get_named
from stages.runtime import atomic, distributed, scratch
from stages.target import manifest
from stages.target.feature_layers import locate_feature_layers
from stages.telemetry.run_stage import run_stage
from stages.training import trackers
from stages.training.packs import OnlinePacks
from stages.training.schedule import explain_few_steps, fill_batch_tokens, plan_schedule
from stages.training.trainer import EpochLog, HeldOutScores, Trainer, TrainingProgress

SAMPLED, REPORTS_FOLDER = Path("data/sampled/train"), Path("results/train")
GATE_REPORT = REPORTS_FOLDER / f"{ROOT_CHECKPOINT}.overfit.json"
UNTRACKED_KEYS = {"processes", "parallel", "report_to", "run_name"}  # without effect on the weights
Scorer = Callable[[dict[str, Tensor]], HeldOutScores | None]


def main(name: str) -> None:
    params = stage_inputs.read_params("train_draft", name)
    if distributed.launch_ranks("train_draft", [name], params.train_draft.processes):
        return
    with distributed.join_process_group(params.target.device) as ranks:
        _train_in_scratch(params, name, ranks)


def _train_in_scratch(params: schema.Params, name: str, ranks: distributed.RankContext) -> None:
    """Train the segment, with unfinished work in a scratch folder named by the digest of its inputs."""
    torch.set_num_threads(params.target.num_threads)
    settings = params.train_draft
    segment = get_named(settings.checkpoints, name, "train_draft.checkpoints")
    parent = checkpoint.locate_checkpoint(segment.from_)
    folders = (manifest.TARGET_FOLDER, parent / "draft", parent / "state")
    work = scratch.locate_scratch(
        f"train_draft-{name}",
        _list_tracked_settings(settings),
        segment.model_dump(),
        params.target.model_dump(),
        reader.digest_folder(TRAIN_FOLDER),
        [scratch.digest_folder(folder) for folder in folders],
        modules=stage_inputs.list_family_modules("train_draft", [segment.family]),
    )
    _train_segment(params, name, ranks, work)


def _train_segment(params: schema.Params, name: str, ranks: distributed.RankContext, work: Path) -> None:
    """Train from the parent, or from the last whole epoch in `work`, and write the checkpoint and its report."""
    segment, settings = params.train_draft.checkpoints[name], params.train_draft
    _check_gate(name, settings)
    parent = checkpoint.locate_checkpoint(segment.from_)
    parent_stage = (
        f"init_draft@{ROOT_CHECKPOINT}" if segment.from_ == ROOT_CHECKPOINT else f"train_draft@{segment.from_}"
    )
    target_manifest, resumed = manifest.read_manifest(), work.exists()
    embedding, head = manifest.read_embedding_and_head(target_manifest)
    family = registry.get(segment.family)
    files, training = family.files, family.training
    assert training is not None, name

    def read_draft(folder: Path) -> tuple[LoadedDraft, TrainingProgress]:
        state, reached = checkpoint.read_state(folder, parent_stage)
        draft = files.read(folder, parent_stage, target_manifest, head)
        return draft, TrainingProgress(state, reached["epoch"], reached["step"])

    if resumed:
        with scratch.check_unfinished(work):
            draft, progress = read_draft(work)
            progress = replace(progress, epochs=read_log(work / "log.json", parent_stage))
    elif segment.from_ == ROOT_CHECKPOINT and not segment.family.has_root:
        draft = training.initialise(name, params, target_manifest, head)
        progress = TrainingProgress({})
    else:
        draft, progress = read_draft(parent)
    if resumed and ranks.first:
        print(f"resumed after epoch {progress.epoch} from {work}")
        scratch.note_progress(f"after epoch {progress.epoch}")

    layers = draft.feature_layers
    layer_indices = locate_feature_layers(target_manifest.feature_layers, layers, f"the draft of {segment.from_}")
    hidden_states = HiddenStatesReader(TRAIN_FOLDER, layer_indices)
    epochs = segment.count_epochs(len(hidden_states))
    last_epoch = checkpoint.read_progress(parent, parent_stage)["epoch"] + epochs
    horizon = segment.horizon_epochs or last_epoch
    settings = fill_batch_tokens(settings, hidden_states.lengths)
    training.freeze(draft, head, settings.train_head, target_manifest.logits_scale)
    objective, compute_loss = training.build_objective(draft, segment, settings, target_manifest.logits_scale)
    scored = None  # on other processes, and without eval rows
    if ranks.first and reader.has_rows(EVAL_FOLDER):
        scored = replace(draft, module=copy.deepcopy(draft.module))  # before the trainer shards the module
    learned = draft.module, embedding, head, objective, compute_loss
    trainer = Trainer(*learned, settings, ranks, progress, horizon, training.is_table)
    del progress  # the trainer has its own copy of the optimizer state
    trainer.schedule = plan_schedule(hidden_states.lengths, settings, horizon)
    left = range(trainer.epoch, last_epoch)
    few_steps = explain_few_steps(hidden_states.lengths, settings, trainer.schedule.warmup_steps, trainer.step, left)
    if few_steps and ranks.first:
        print(f"warning: {name}: {few_steps}", flush=True)  # `aerie run` shows it at once
    score = _open_held_out(scored, trainer, target_manifest, layer_indices)
    if hidden_states.online:
        compile_tokens = settings.batch_tokens if params.extract_hiddens.compile else None
        from stages.target.feature_target import FeatureTarget  # transformers' model classes: seconds

        target = FeatureTarget.load(target_manifest, params.target, ranks.device, compile_tokens, layers)
        trainer.online_packs = OnlinePacks(target, conversations.read_image_paths(SAMPLED, "sample_target"))
    _train_epochs(trainer, hidden_states, draft, name, work, last_epoch, score)
    weights, state = trainer.gather_state()
    if not ranks.first:
        return
    folder, best = checkpoint.locate_checkpoint(name), _locate_best(work)
    if best.exists():
        kept, progress = read_draft(best)
        trainer.epoch, trainer.step = progress.epoch, progress.step
        weights, state = kept.module.state_dict(), progress.optimizer_state
        print(f"{name}: keeps epoch {progress.epoch}, the best on eval answers (train_draft.keep)")
    draft = replace(draft, config=training.complete_config(draft, weights, trainer, hidden_states))
    _write_checkpoint(folder, draft, trainer, weights, state)
    _write_report(name, segment, folder, trainer.log, few_steps)
    scratch.remove_scratch(work)
    shutil.rmtree(best, ignore_errors=True)
    print(_describe_log(name, trainer))


def _open_held_out(
    draft: LoadedDraft | None, trainer: Trainer, target: manifest.TargetManifest, layer_indices: list[int]
) -> Scorer:
    """Return what scores weights on the eval split by `draft`; without one, what scores nothing."""
    if draft is None:
        return lambda _weights: None
    from stages.families.held_out import HeldOutAnswers  # no input of this stage: stage_inputs.WATCHING_CODE

    return HeldOutAnswers(draft, trainer, target, layer_indices).score


def _describe_log(name: str, trainer: Trainer) -> str:
    first, last = trainer.log[0], trainer.log[-1]
    epochs = f"{trainer.epoch} epoch{'s' * (trainer.epoch != 1)}, {trainer.step} steps"
    before = "" if first is last else f"{first.loss:.3f} -> "
    drawn = f", {last.coverage:.0%} of the anchors an epoch" if last.coverage < 1 else ""
    scores, held_out = last.held_out, ""
    if scores and scores.accept_length:
        held_out = f"; a chain of 3 commits {scores.accept_length:.2f} tokens a cycle on {scores.answers} eval answers"
    return f"{name}: {epochs}, loss {before}{last.loss:.3f}{drawn}{held_out}"


def _train_epochs(
    trainer: Trainer,
    hidden_states: HiddenStatesReader,
    draft: LoadedDraft,
    name: str,
    work: Path,
    last_epoch: int,
    score: Scorer,
) -> None:
    """Train up to `last_epoch`, saving every epoch to `work`."""
    settings, is_first = trainer.settings, trainer.ranks.first
    run_name = f"{settings.run_name or name}-{work.name[-8:]}"  # other parameters, another digest, another curve
    report_to = settings.report_to if is_first else ()
    rows = {"total": last_epoch * len(hidden_states), "initial": trainer.epoch * len(hidden_states), "unit": "row"}
    with (
        trackers.open_trackers(report_to, run_name, _list_tracked_settings(settings), trainer.step) as trainer.log_step,
        tqdm(**rows, desc=name, mininterval=2, disable=not is_first) as bar,
    ):
        for entry in trainer.train_epochs(hidden_states, last_epoch, bar):
            weights, state = trainer.gather_state()
            trainer.log_epoch(score(weights), bar)
            if is_first:
                with atomic.write_folder(work) as temporary:  # weights, state and log of an epoch: all or none
                    _write_checkpoint(temporary, draft, trainer, weights, state)
                    atomic.write_json(temporary / "log.json", [asdict(entry) for entry in trainer.log])
                if settings.keep == "best" and _is_best(trainer.log):
                    with atomic.write_folder(_locate_best(work)) as temporary:
                        _write_checkpoint(temporary, draft, trainer, weights, state)
                scratch.note_progress(f"after epoch {entry.epoch}")


def _locate_best(work: Path) -> Path:
    return work.with_name(f"{work.name}-best")


def _is_best(log: list[EpochLog]) -> bool:
    """Return whether the last epoch accepts most, or has the least loss where its family is not replayed."""
    scored = [x.held_out for x in log if x.held_out]
    worth = [-x.loss if x.accept_length is None else x.accept_length for x in scored]
    return log[-1].held_out is not None and worth[-1] == max(worth)


def _list_tracked_settings(settings: TrainDraft) -> dict[str, Any]:
    """Return the settings that decide the weights."""
    return settings.model_dump(exclude={"checkpoints", *UNTRACKED_KEYS})


def read_log(path: Path, made_by: str) -> list[EpochLog]:
    """Read the finished epochs of unfinished work. Raises BrokenArtifactError where the file is missing, empty or malformed."""
    entries: list[dict] = atomic.read_json(path, made_by, list)
    try:
        epochs = [EpochLog(**entry) for entry in entries]
        epochs = [replace(e, held_out=HeldOutScores(**vars(e)["held_out"])) if e.held_out else e for e in epochs]
    except TypeError:
        epochs = []
    if not epochs:
        raise atomic.BrokenArtifactError(
            f"{path}: expected a list of epochs, found {entries!r:.60}", atomic.format_rerun_hint(made_by)
        )
    return epochs


def _check_gate(name: str, settings: TrainDraft) -> None:
    """Raise ValueError where check_overfit refused the draft that the segment starts from.

    DVC does not know the report as an input: a refusal changes no checkpoint, and one of another draft retrains none.
    """
    if settings.checkpoints[name].from_ == ROOT_CHECKPOINT and GATE_REPORT.exists():
        gated = name if name in settings.list_fresh_drafts() else ROOT_CHECKPOINT
        if failure := atomic.read_json(GATE_REPORT, "check_overfit").get("refused", {}).get(gated):
            raise ValueError(f"train_draft@{name} does not start: {failure}")


def _write_checkpoint(
    folder: Path, draft: LoadedDraft, trainer: Trainer, weights: dict[str, Tensor], state: dict[str, Tensor]
) -> None:
    registry.get(draft.family).files.write(folder, {**draft.config, "dtype": trainer.settings.compute_dtype}, weights)
    checkpoint.write_state(folder, state, {"epoch": trainer.epoch, "step": trainer.step})


def _write_report(name: str, segment: Segment, folder: Path, log: list[EpochLog], few_steps: str | None) -> None:
    report = {
        "checkpoint": name,
        "from": segment.from_,
        "epochs": [asdict(entry) for entry in log],
        "seconds": round(sum(entry.seconds for entry in log), 2),
        "weights": manifest.digest_files(folder / "draft", "*.safetensors"),
        "few_steps": few_steps,
    }
    atomic.write_json(REPORTS_FOLDER / f"{name}.json", report)


if __name__ == "__main__":
    run_stage(main, lambda: (p := schema.load_params()).target.gpus(p.train_draft.processes))
