"""train_draft: hidden states -> draft checkpoint.   python -m stages.train_draft CHECKPOINT

Trains one segment: `epochs` more epochs from the checkpoint it names, with that one's optimizer state, so that e009 after
e003 is bit for bit nine epochs straight: a learning rate that falls (training/learning_rate.py) does so over
`horizon_epochs` from e000, whatever a segment's length. A killed run resumes after its last whole epoch.
The log has loss and accuracy per TTT step; tau is computed by replay_trees, so that editing a tree never retrains.

A segment trains EAGLE-3's draft, or that of the method it names, which starts from the sizes of e000 and reads the same rows
in the same order: EAGLE or Medusa with e000's vocabulary (methods/registry.py), or a block draft, DFlash, DFlash2 or DSpark
(training/block_training.py), whose log has the drafts of a block instead of TTT steps.

An optimizer step uses `packs_per_step` packs of at most `batch_tokens` tokens, concatenated rows. Several processes share the
packs of a step, so their number does not change what is learned. With `extract_hiddens.online` no hidden states are stored, and
the target computes those of each pack here.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from stages.data import conversations
from stages.draft import block_checkpoint, block_initialisation, checkpoint, eagle3_checkpoint
from stages.draft.block_draft import BlockDraft
from stages.draft.eagle3 import Eagle3Draft
from stages.draft.eagle3_config import DraftConfig
from stages.hidden_states import reader
from stages.hidden_states.reader import HiddenStatesReader
from stages.methods import method_checkpoint, registry
from stages.params import schema, stage_inputs
from stages.params.block_draft_methods import BLOCK_METHODS
from stages.params.draft_sections import BlockSegment, Segment, TrainDraft
from stages.params.section import ROOT_CHECKPOINT, get_named
from stages.runtime import atomic, distributed, scratch
from stages.target import manifest
from stages.target.feature_layers import locate_feature_layers
from stages.target.feature_target import FeatureTarget
from stages.target.manifest import TargetManifest
from stages.telemetry import unfinished
from stages.telemetry.run_stage import run_stage
from stages.training import block_training, trackers, ttt
from stages.training.packed_rows import PackObjective
from stages.training.packs import OnlinePacks, PackLoader, plan_epoch
from stages.training.trainer import ComputeLoss, EpochLog, Trainer, TrainingProgress

SAMPLED, HIDDENS, REPORTS_FOLDER = Path("data/sampled/train"), Path("data/hiddens/train"), Path("results/train")
GATE_REPORT = REPORTS_FOLDER / f"{ROOT_CHECKPOINT}.overfit.json"
MAX_MEASURED_PACKS = 64  # packs on which the rank accuracy of another method is measured
UNTRACKED_KEYS = {"processes", "parallel", "report_to", "run_name"}  # without effect on the weights


@dataclass(frozen=True)
class DraftModel:
    """A draft and its config.json; `method` is None for EAGLE-3."""

    model: nn.Module
    config: dict[str, Any]
    method: str | None

    @property
    def is_block_draft(self) -> bool:
        return self.method in BLOCK_METHODS


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
        reader.digest_folder(HIDDENS),
        [scratch.digest_folder(folder) for folder in folders],
    )
    with scratch.lock_scratch(work):
        _train_segment(params, name, ranks, work)


def _train_segment(params: schema.Params, name: str, ranks: distributed.RankContext, work: Path) -> None:
    """Train from the parent, or from the last whole epoch in `work`, and write the checkpoint and its report."""
    segment, settings = params.train_draft.checkpoints[name], params.train_draft
    _check_gate(name, segment)
    parent = checkpoint.locate_checkpoint(segment.from_)
    parent_stage = (
        f"init_draft@{ROOT_CHECKPOINT}" if segment.from_ == ROOT_CHECKPOINT else f"train_draft@{segment.from_}"
    )
    target_manifest, resumed = manifest.read_manifest(), work.exists()
    embedding, head = manifest.read_embedding_and_head(target_manifest)
    scale = target_manifest.logits_scale
    if resumed:
        with scratch.check_unfinished(work):
            draft, progress = _read_draft(work, parent_stage, segment.non_eagle3_method, head, scale)
            progress = replace(progress, epochs=read_log(work / "log.json", parent_stage))
    elif segment.from_ == ROOT_CHECKPOINT and isinstance(segment, BlockSegment):
        draft, progress = _initialise_block_draft(name, segment, target_manifest, params), TrainingProgress({})
    elif segment.from_ == ROOT_CHECKPOINT and segment.non_eagle3_method:
        draft, progress = _initialise_method_draft(segment, head, scale, settings), TrainingProgress({})
    else:
        draft, progress = _read_draft(parent, parent_stage, segment.non_eagle3_method, head, scale)
    last_epoch = checkpoint.read_progress(parent, parent_stage)["epoch"] + segment.epochs
    if resumed and ranks.first:
        print(f"resumed after epoch {progress.epoch} from {work}")
        unfinished.note_progress(f"after epoch {progress.epoch}")

    layers = _list_feature_layers(draft, target_manifest)
    layer_indices = locate_feature_layers(target_manifest.feature_layers, layers, f"the draft of {segment.from_}")
    hidden_states = HiddenStatesReader(HIDDENS, layer_indices)
    objective, compute_loss = _choose_objective(draft, segment, settings, scale)
    trainer = Trainer(draft.model, embedding, head, objective, compute_loss, settings, ranks, progress)
    del progress  # the trainer has its own copy of the optimizer state
    if hidden_states.online:
        compile_tokens = settings.batch_tokens if params.extract_hiddens.compile else None
        target = FeatureTarget.load(target_manifest, params.target, ranks.device, compile_tokens, layers)
        trainer.online_packs = OnlinePacks(target, conversations.read_image_paths(SAMPLED, "sample_target"))
    _train_epochs(trainer, hidden_states, draft, name, work, last_epoch)
    weights, state = trainer.gather_state()
    if not ranks.first:
        return
    if draft.method in registry.TRAINABLE_METHODS:
        draft.config["rank_accuracy"] = _measure_rank_accuracy(trainer, hidden_states, draft, weights)
    folder = checkpoint.locate_checkpoint(name)
    _write_checkpoint(folder, draft, trainer, weights, state)
    _write_report(name, segment, folder, trainer.log)
    scratch.remove_scratch(work)
    first, last = trainer.log[0], trainer.log[-1]
    epochs = f"{trainer.epoch} epoch{'s' * (trainer.epoch != 1)}, {trainer.step} steps"
    before = "" if first is last else f"{first.loss:.3f} -> "
    print(f"{name}: {epochs}, loss {before}{last.loss:.3f}")


def _list_feature_layers(draft: DraftModel, target: TargetManifest) -> list[int]:
    """Return the feature layers that the draft reads; EAGLE and Medusa read none and are given those that are stored."""
    if isinstance(draft.model, BlockDraft):
        return list(draft.model.config.feature_layers)
    if draft.method:
        return target.feature_layers
    return eagle3_checkpoint.read_feature_layers(draft.config, target.num_layers)


def _choose_objective(
    draft: DraftModel, segment: Segment, settings: TrainDraft, logits_scale: float
) -> tuple[PackObjective, ComputeLoss]:
    """Return what is learned, and the function that computes its loss."""
    if isinstance(segment, BlockSegment) and isinstance(draft.model, BlockDraft):
        num_drafts = draft.model.config.num_drafts
        block = block_training.BlockTrainingObjective.of_segment(segment, num_drafts, settings.seed, logits_scale)
        return block, block_training.compute_loss
    compute_loss = registry.TRAINABLE_METHODS[draft.method].compute_loss if draft.method else ttt.compute_loss
    num_steps = {None: settings.ttt_steps, "eagle": 1, "medusa": draft.config.get("heads", 0)}[draft.method]
    weights = settings.ttt_decay, settings.mask, settings.loss
    return ttt.TrainingObjective(num_steps, *weights, settings.batch_tokens, logits_scale), compute_loss


def _train_epochs(
    trainer: Trainer, hidden_states: HiddenStatesReader, draft: DraftModel, name: str, work: Path, last_epoch: int
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
            if is_first:
                with atomic.write_folder(work) as temporary:  # weights, state and log of an epoch: all or none
                    _write_checkpoint(temporary, draft, trainer, weights, state)
                    atomic.write_json(temporary / "log.json", [asdict(entry) for entry in trainer.log])
                unfinished.note_progress(f"after epoch {entry.epoch}")


def _list_tracked_settings(settings: TrainDraft) -> dict[str, Any]:
    """Return the settings that decide the weights."""
    return settings.model_dump(exclude={"checkpoints", *UNTRACKED_KEYS})


def read_log(path: Path, made_by: str) -> list[EpochLog]:
    """Read the finished epochs of unfinished work. Raises BrokenArtifactError where the file is missing, empty or malformed."""
    entries: list[dict] = atomic.read_json(path, made_by, list)
    try:
        epochs = [EpochLog(**entry) for entry in entries]
    except TypeError:
        epochs = []
    if not epochs:
        raise atomic.BrokenArtifactError(
            f"{path}: expected a list of epochs, found {entries!r:.60}", atomic.format_rerun_hint(made_by)
        )
    return epochs


def _read_draft(
    folder: Path, made_by: str, method: str | None, head: Tensor, logits_scale: float
) -> tuple[DraftModel, TrainingProgress]:
    """Read the draft and the training progress of a checkpoint; `head` [V, H] and `logits_scale` are the target's."""
    model: nn.Module
    if method is None:
        config, tensors = eagle3_checkpoint.read_eagle3_draft(folder, made_by)
        model = Eagle3Draft.from_checkpoint(config, tensors)
    elif method in BLOCK_METHODS:
        config, tensors = block_checkpoint.read_block_draft(folder, made_by)
        model = BlockDraft(block_checkpoint.parse_block_config(config))
        model.load_state_dict(tensors)
    else:
        config, tensors = method_checkpoint.read_method_draft(folder, method, made_by)
        model = registry.build_draft(config, tensors, head, logits_scale)
    state, progress = checkpoint.read_state(folder, made_by)
    return DraftModel(model, config, method), TrainingProgress(state, progress["epoch"], progress["step"])


def _initialise_method_draft(segment: Segment, head: Tensor, logits_scale: float, settings: TrainDraft) -> DraftModel:
    """Return an untrained draft of another method, with the sizes and the vocabulary of e000; `head` [V, H] and `logits_scale`
    are the target's.
    """
    assert segment.non_eagle3_method is not None
    root, tensors = eagle3_checkpoint.read_eagle3_draft(
        checkpoint.locate_checkpoint(ROOT_CHECKPOINT), f"init_draft@{ROOT_CHECKPOINT}"
    )
    config = method_checkpoint.build_method_config(
        segment.non_eagle3_method, DraftConfig.from_json(root), settings.dtype, segment.num_heads
    )
    method = registry.TRAINABLE_METHODS[segment.non_eagle3_method]
    inputs = registry.DraftInputs(config, head, logits_scale, tensors["d2t"], tensors["t2d"], settings.seed)
    model = method.initialise(inputs)
    return DraftModel(model, config, segment.non_eagle3_method)


def _check_gate(name: str, segment: Segment) -> None:
    """Raise ValueError where check_overfit refused the draft that the segment starts from.

    DVC does not know the report as an input: a refusal changes no checkpoint, and one of another draft retrains none.
    """
    if segment.from_ == ROOT_CHECKPOINT and GATE_REPORT.exists():
        gated = name if isinstance(segment, BlockSegment) else ROOT_CHECKPOINT
        if failure := atomic.read_json(GATE_REPORT, "check_overfit").get("refused", {}).get(gated):
            raise ValueError(f"train_draft@{name} does not start: {failure}")


def _initialise_block_draft(
    name: str, segment: BlockSegment, target: TargetManifest, params: schema.Params
) -> DraftModel:
    """Return an untrained block draft with the sizes of e000. Raises ValueError where the segment can't be trained."""
    root, _ = eagle3_checkpoint.read_eagle3_draft(
        checkpoint.locate_checkpoint(ROOT_CHECKPOINT), f"init_draft@{ROOT_CHECKPOINT}"
    )
    longest = int(reader.read_index(HIDDENS)["length"].max() or 0)
    sizes = DraftConfig.from_json(root)
    model, config = block_initialisation.build_untrained_draft(
        name, segment, sizes, target, params, longest, reader.list_tokens(HIDDENS)
    )
    return DraftModel(model, config, segment.non_eagle3_method)


def _measure_rank_accuracy(
    trainer: Trainer, hidden_states: HiddenStatesReader, draft: DraftModel, weights: dict[str, Tensor]
) -> list[list[float]]:
    """Measure on one process how often each rank of each step of another method's draft is the row's own token."""
    settings, device = trainer.settings, trainer.ranks.device
    num_steps = registry.get_max_steps(draft.config, settings.ttt_steps)
    embedding, head = trainer.training_step.tables
    model = registry.build_draft(draft.config, weights, head, 1.0).to(device)  # a scale moves no rank
    plan = [[pack] for step in plan_epoch(hidden_states.lengths, settings, 0) for pack in step][:MAX_MEASURED_PACKS]
    objective = ttt.TrainingObjective(num_steps, settings.ttt_decay)
    ranks = distributed.RankContext(0, 1, device)
    loader = PackLoader(hidden_states, objective, ranks, trainer.dtype, trainer.online_packs)
    packs = (trainer.fill_hidden_states(pack) for step in loader.load_steps([(0, plan)]) for pack in step.packs)
    return registry.measure_rank_accuracy(draft.config, model, packs, embedding, head, num_steps)


def _write_checkpoint(
    folder: Path, draft: DraftModel, trainer: Trainer, weights: dict[str, Tensor], state: dict[str, Tensor]
) -> None:
    write = method_checkpoint.write_method_draft if draft.method else eagle3_checkpoint.write_eagle3_draft
    write = block_checkpoint.write_block_draft if draft.is_block_draft else write
    write(folder, {**draft.config, "dtype": trainer.settings.dtype}, weights)
    checkpoint.write_state(folder, state, {"epoch": trainer.epoch, "step": trainer.step})


def _write_report(name: str, segment: Segment, folder: Path, log: list[EpochLog]) -> None:
    report = {
        "checkpoint": name,
        "from": segment.from_,
        "epochs": [asdict(entry) for entry in log],
        "seconds": round(sum(entry.seconds for entry in log), 2),
        "weights": manifest.digest_files(folder / "draft", "*.safetensors"),
    }
    atomic.write_json(REPORTS_FOLDER / f"{name}.json", report)


if __name__ == "__main__":
    run_stage(main, lambda: (p := schema.load_params()).target.gpus(p.train_draft.processes))
