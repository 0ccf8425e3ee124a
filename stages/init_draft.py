"""init_draft: token counts -> draft vocabulary and initial draft, checkpoint e000.   python -m stages.init_draft [e000]

The draft vocabulary is the most frequent tokens of the training answers; sizes follow the target. Weights are random, but for
the head, which is the target's, and the fusion, which starts near the mean of the three feature layers. With `init_draft.from`
the vocabulary, sizes and weights are those of a published draft (warm start).
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.draft import checkpoint, published_files
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.families.eagle3 import files as eagle3_files
from stages.hidden_states import format, reader
from stages.params import schema, stage_inputs
from stages.params.families import EAGLE3
from stages.params.section import ROOT_CHECKPOINT
from stages.runtime import atomic
from stages.target import feature_layers, manifest
from stages.target.manifest import TargetManifest
from stages.telemetry.run_stage import run_stage

HIDDENS, REPORTS_FOLDER = Path("data/hiddens"), Path("results/train")
LEAST_COVERAGE = 0.98  # of the eval answers' tokens by the draft's vocabulary, below which a warning is due


def main(name: str = ROOT_CHECKPOINT) -> None:
    params = stage_inputs.read_params("init_draft", name)
    target_manifest = manifest.read_manifest()
    counts = {split: _count_tokens(split, target_manifest.vocab_size) for split in ("train", "eval")}
    if params.init_draft.from_:
        draft, layers = _load_published_draft(params, target_manifest)
    else:
        draft, layers = _build_fresh_draft(params, target_manifest, counts["train"])
        _copy_head(draft, target_manifest)
    required = _count_required_positions(params)
    if draft.config.max_position_embeddings < required:
        raise ValueError(
            f"params.yaml: init_draft.draft_config_path has max_position_embeddings {draft.config.max_position_embeddings}, "
            f"expected extract_hiddens.max_length + train_draft.ttt_steps = {required} or more: later positions would be trained "
            "wrong; raise it, or leave it out for the target's"
        )
    folder = checkpoint.locate_checkpoint(name)
    config = build_config_json(draft.config, layers, target_manifest)
    eagle3_checkpoint.ROOT_FILES.write(folder, config, draft.state_dict())
    checkpoint.write_state(folder, {}, {"epoch": 0, "step": 0})
    _write_report(name, draft, counts)


def _write_report(name: str, draft: Eagle3Draft, counts: dict[str, torch.Tensor]) -> None:
    """Write and print the coverage of the vocabulary by counts [V] of each split."""
    config = draft.config
    report = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_vocab_size": config.vocab_size,
        "distinct_tokens_train": int((counts["train"] > 0).sum()),
        "coverage_train": compute_coverage(counts["train"], draft.t2d),
        "coverage_eval": compute_coverage(counts["eval"], draft.t2d),
        "draft_parameters": sum(x.numel() for x in draft.parameters()),
    }
    atomic.write_json(REPORTS_FOLDER / f"{name}.json", report)
    print(
        f"{name}: {report['draft_parameters']:,} parameters, draft vocabulary {config.draft_vocab_size} of "
        f"{config.vocab_size}, covers {report['coverage_eval']:.2%} of the eval answers' tokens"
    )
    if report["coverage_eval"] < LEAST_COVERAGE:
        print(
            f"warning: {1 - report['coverage_eval']:.1%} of the eval answers' tokens are not in the draft's vocabulary, and each "
            f"ends a chain of accepted drafts; raise init_draft.draft_vocab_size (all: {config.vocab_size})"
        )


def _build_fresh_draft(
    params: schema.Params, target_manifest: TargetManifest, counts: torch.Tensor
) -> tuple[Eagle3Draft, list[int]]:
    """Return a draft with random weights and the vocabulary by counts [V], and its feature layers."""
    config = infer_config(params, target_manifest)
    chosen = choose_vocabulary(counts, config.draft_vocab_size, target_manifest.eos_token_ids)
    d2t, t2d = build_vocabulary_maps(chosen, target_manifest.vocab_size)
    torch.manual_seed(params.init_draft.seed)
    draft = Eagle3Draft(config)
    draft.d2t.copy_(d2t)
    draft.t2d.copy_(t2d)
    for name, parameter in draft.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
        if name == "fc.weight":
            count = feature_layers.NUM_EAGLE3_FEATURES
            parameter.data += torch.eye(target_manifest.hidden_size).repeat(1, count) / count
    return draft, choose_feature_layers(params, target_manifest)


def _copy_head(draft: Eagle3Draft, target_manifest: TargetManifest) -> None:
    """Begin with the target's logits: SmolLM2's draft had a third more drafts accepted after two epochs on 549 answers."""
    _, head = manifest.read_embedding_and_head(target_manifest)
    draft.lm_head.weight.data.copy_(head[draft.t2d] * target_manifest.logits_scale)


def infer_config(params: schema.Params, target_manifest: TargetManifest) -> DraftConfig:
    """Return a new draft's sizes and options: those of params.yaml, and of the target where they are null.

    Raises ValueError where a new draft is asked for and the feature layers that it reads are not stored.
    """
    init = params.init_draft
    inferred = DraftConfig(
        hidden_size=target_manifest.hidden_size,
        intermediate_size=target_manifest.intermediate_size,
        num_attention_heads=target_manifest.num_attention_heads,
        num_key_value_heads=target_manifest.num_key_value_heads,
        head_dim=target_manifest.head_dim,
        vocab_size=target_manifest.vocab_size,
        draft_vocab_size=init.choose_vocab_size(target_manifest.vocab_size),
        max_position_embeddings=max(target_manifest.max_position_embeddings, _count_required_positions(params)),
        rms_norm_eps=target_manifest.rms_norm_eps,
        rope=target_manifest.rope,
        fc_norm=init.fc_norm,
        norm_output=init.norm_output,
        sliding_window=init.sliding_window,
    )
    return _override_config(params, target_manifest, choose_feature_layers(params, target_manifest), inferred)


def choose_feature_layers(params: schema.Params, target_manifest: TargetManifest) -> list[int]:
    """Return the feature layers of a new draft, of EAGLE-3's own where none is made, but its size estimated."""
    own_layers = feature_layers.default_eagle3_feature_layers(target_manifest.num_layers)
    if not params.init_draft.makes_fresh_draft:
        return own_layers
    return params.init_draft.choose_feature_layers(target_manifest.feature_layers, own_layers)


def choose_vocabulary(counts: torch.Tensor, size: int, always: list[int]) -> torch.Tensor:
    """Return the ids [D] of the `size` most frequent tokens by counts [V] int64, ascending; `always` (end tokens) are included.

    Ties go to the lower id, so equal counts give the same vocabulary on every machine.
    """
    priority = counts.clone()
    priority[always] = counts.max() + 1
    order = torch.sort(priority, descending=True, stable=True).indices
    return order[:size].sort().values


def build_vocabulary_maps(chosen: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return d2t [D] int64, offsets (target id - draft id), and t2d [V] bool of ascending ids `chosen` [D]."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(len(chosen)), t2d


def compute_coverage(counts: torch.Tensor, t2d: torch.Tensor) -> float:
    """Return the fraction of the tokens counted in counts [V] that are in the draft vocabulary; 1.0 without tokens."""
    total = int(counts.sum())
    return int(counts[t2d].sum()) / total if total else 1.0


def _load_published_draft(params: schema.Params, target_manifest: TargetManifest) -> tuple[Eagle3Draft, list[int]]:
    """Return a published draft in float32, with its own vocabulary, and its feature layers.

    Raises ValueError where draft_config_path has other sizes than its weights.
    """
    init = params.init_draft
    name = init.from_
    assert name is not None
    folder, commit = published_files.fetch_draft(name, init.revision)
    read_tables = partial(manifest.read_embedding_and_head, target_manifest)
    published = eagle3_files.Files(EAGLE3).read_published_folder(folder, target_manifest, read_tables, name)
    print(f"{ROOT_CHECKPOINT} starts from {name}" + (f" at {commit}" if commit else ""))
    for note in published.notes:
        print(f"note: {note}")
    given = DraftConfig.from_json(published.config)
    max_positions = max(given.max_position_embeddings, _count_required_positions(params))
    inferred = replace(given, max_position_embeddings=max_positions, sliding_window=init.sliding_window)
    layers = eagle3_checkpoint.read_feature_layers(published.config, target_manifest.num_layers)
    config = _override_config(params, target_manifest, layers, inferred)
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        if (wanted := getattr(config, key)) != (found := getattr(given, key)):
            raise ValueError(
                f"params.yaml: init_draft.draft_config_path: {key} is {wanted}, but {found} in the weights of init_draft.from"
            )
    draft = Eagle3Draft(config)
    draft.load_state_dict(published.tensors)
    return draft, layers


def _count_required_positions(params: schema.Params) -> int:
    return params.extract_hiddens.max_length + params.train_draft.ttt_steps


def _override_config(
    params: schema.Params, target_manifest: TargetManifest, layers: list[int], inferred: DraftConfig
) -> DraftConfig:
    """Return the sizes of a draft that reads `layers`, overridden by the file of draft_config_path."""
    path = params.init_draft.draft_config_path
    if path is None:
        return inferred
    fixed = build_config_json(inferred, layers, target_manifest)
    return eagle3_checkpoint.override_config(Path(path), inferred, fixed)


def build_config_json(config: DraftConfig, layers: list[int], target_manifest: TargetManifest) -> dict[str, Any]:
    """Return config.json of a draft of this target that reads `layers`."""
    return eagle3_checkpoint.build_eagle3_config(
        config, layers, target_manifest.num_layers, target_manifest.eos_token_ids
    )


def _count_tokens(split: str, vocab_size: int) -> torch.Tensor:
    """Count the tokens of the split's answers: [V] int64. Raises ValueError for ids outside of the target's vocabulary."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for head in reader.read_headers(HIDDENS / split):
        if len(head.ids) and not 0 <= int(head.ids.min()) <= int(head.ids.max()) < vocab_size:
            raise _make_vocabulary_error(HIDDENS / split, head, vocab_size)
        counts += torch.bincount(head.ids[head.mask].to(torch.int64), minlength=vocab_size)
    return counts


def _make_vocabulary_error(folder: Path, head: format.RowHeader, vocab_size: int) -> ValueError:
    (shard,) = reader.read_index(folder).filter(id=head.id)["shard"].unique().to_list()
    wrong = head.ids[(head.ids < 0) | (head.ids >= vocab_size)]
    return ValueError(
        f"{folder / shard}: row {head.id} has {len(wrong)} token ids that the target has not, the first of them {int(wrong[0])}; "
        f"expected 0 to {vocab_size - 1}; run: dvc repro -f -s extract_hiddens, and if it happens again, sample_target"
    )


if __name__ == "__main__":
    run_stage(main)
