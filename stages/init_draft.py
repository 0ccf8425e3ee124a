"""init_draft: token counts -> draft vocabulary and a draft to begin with, checkpoint e000.   python -m stages.init_draft

The draft vocabulary is the most frequent tokens of the training answers; the shape follows the target. Weights are
drawn from a seed; the fusion starts as the mean of the three feature layers. Or all of it is a published draft's: a warm
start.
"""

from pathlib import Path
from typing import Any

import torch

from stages.draft import checkpoint, config_override, published_formats, vocabulary
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.hidden_states import format, reader
from stages.params import schema
from stages.params.section import ROOT_CHECKPOINT
from stages.runtime import atomic
from stages.target import manifest
from stages.target.manifest import TargetManifest
from stages.telemetry import stage_record

HIDDENS, REPORT = Path("data/hiddens"), Path("results/vocab_report.json")


def main() -> None:
    p = schema.load_params()
    schema.check_watched("init_draft.from", p.init_draft.from_, "init_draft.watch", p.init_draft.watch)
    made = manifest.read_manifest()
    schema.check_draft_vocab(p, made.vocab_size)
    counts = {split: _count_tokens(split, made.vocab_size) for split in ("train", "eval")}
    draft, config = (
        _load_published_draft(p, made) if p.init_draft.from_ else _build_fresh_draft(p, made, counts["train"])
    )
    longest = p.extract_hiddens.max_length + p.train_draft.ttt_steps
    if config["max_position_embeddings"] < longest:
        raise ValueError(
            f"params.yaml: init_draft.max_position_embeddings {config['max_position_embeddings']} is below "
            f"extract_hiddens.max_length + train_draft.ttt_steps = {longest}: positions past it would be trained wrong; raise "
            "it (or draft_config_path's), or null for the target's"
        )
    place = checkpoint.locate_checkpoint(ROOT_CHECKPOINT)
    checkpoint.write_draft(place, config, draft.state_dict())
    checkpoint.write_state(place, {}, {"epoch": 0, "step": 0})

    report = {
        "draft_vocab_size": config["draft_vocab_size"],
        "target_vocab_size": made.vocab_size,
        "distinct_tokens_train": int((counts["train"] > 0).sum()),
        "coverage_train": vocabulary.compute_coverage(counts["train"], draft.t2d),
        "coverage_eval": vocabulary.compute_coverage(counts["eval"], draft.t2d),
        "draft_parameters": sum(x.numel() for x in draft.parameters()),
    }
    atomic.write_json(REPORT, report)
    print(
        f"e000: {report['draft_parameters']:,} parameters, draft vocabulary {config['draft_vocab_size']} of "
        f"{made.vocab_size}, covers {report['coverage_eval']:.2%} of the eval answers' tokens"
    )


def _build_fresh_draft(
    p: schema.Params, made: TargetManifest, counts: torch.Tensor
) -> tuple[Eagle3Draft, dict[str, Any]]:
    """A draft drawn from the seed, its vocabulary by counts [V], and its config.json."""
    config = infer_config(p, made)
    chosen = vocabulary.choose_vocabulary(counts, config["draft_vocab_size"], made.eos_token_ids)
    d2t, t2d = vocabulary.build_vocabulary_maps(chosen, made.vocab_size)
    torch.manual_seed(p.init_draft.seed)
    draft = Eagle3Draft(DraftConfig.from_json(config))
    draft.d2t.copy_(d2t)
    draft.t2d.copy_(t2d)
    for name, parameter in draft.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
        if name == "fc.weight":
            parameter.data += torch.eye(made.hidden_size).repeat(1, 3) / 3
    return draft, config


def infer_config(p: schema.Params, made: TargetManifest) -> dict[str, Any]:
    """config.json of a draft drawn anew: the target's shapes, but for what params.yaml says."""
    shape: dict[str, Any] = {
        "hidden_size": made.hidden_size,
        "intermediate_size": p.init_draft.intermediate_size or made.intermediate_size,
        "num_attention_heads": made.num_attention_heads,
        "num_key_value_heads": made.num_key_value_heads,
        "head_dim": made.head_dim,
        "vocab_size": made.vocab_size,
        "draft_vocab_size": p.init_draft.draft_vocab_size or made.vocab_size,
        "max_position_embeddings": _choose_max_positions(p, made.max_position_embeddings),
        "rms_norm_eps": made.rms_norm_eps,
    }
    return _build_config(p, made, shape, made.rope, _read_options(p))


def _load_published_draft(p: schema.Params, made: TargetManifest) -> tuple[Eagle3Draft, dict[str, Any]]:
    """A published draft in float32, with its own vocabulary, and its config.json.

    Raises ValueError where params.yaml asks for another shape than its weights have, or for other norms.
    """
    name = p.init_draft.from_
    assert name is not None
    folder, commit = published_formats.fetch_draft(name, p.init_draft.revision)
    found = published_formats.read_published_draft(folder, made, lambda: manifest.read_embedding_and_head(made), name)
    print(f"e000 starts from {name}" + (f" at {commit}" if commit else ""))
    for note in found.notes:
        print(f"note: {note}")
    theirs = found.config
    _check_agreement("draft_vocab_size", p.init_draft.draft_vocab_size or made.vocab_size, theirs["draft_vocab_size"])
    _check_agreement("intermediate_size", p.init_draft.intermediate_size, theirs["intermediate_size"])
    for key, wanted in _read_options(p).items():
        if key != "sliding_window":  # has no weights: a draft may learn to do with one, or without
            _check_agreement(key, wanted, bool(found.options.get(key)))
    shape = {key: theirs[key] for key in checkpoint.SIZE_KEYS}
    shape["max_position_embeddings"] = _choose_max_positions(p, theirs["max_position_embeddings"])
    options = {**found.options, "sliding_window": p.init_draft.window}
    config = _build_config(p, made, shape, theirs["rope_parameters"], options)
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        _check_agreement(f"draft_config_path: {key}", config[key], theirs[key])
    return Eagle3Draft.of(config, found.tensors), config


def _check_agreement(key: str, wanted: Any, found: Any) -> None:
    if wanted not in (None, found):
        raise ValueError(
            f"params.yaml: init_draft.{key} is {wanted}, but the weights of init_draft.from have {found}; set it so"
        )


def _read_options(p: schema.Params) -> dict[str, Any]:
    """As drafting.draft.DraftConfig names them."""
    init = p.init_draft
    return {
        "fc_norm": init.fc_norm,
        "norm_before_fc": init.norm_before_fc,
        "norm_output": init.norm_output,
        "qk_norm": init.qk_norm,
        "sliding_window": init.window,
    }


def _choose_max_positions(p: schema.Params, theirs: int) -> int:
    longest = p.extract_hiddens.max_length + p.train_draft.ttt_steps
    return p.init_draft.max_position_embeddings or max(theirs, longest)


def _build_config(
    p: schema.Params, made: TargetManifest, shape: dict[str, Any], rope: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """config.json, with what draft_config_path overrides."""

    def written(shape: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
        return checkpoint.build_config(shape, rope, made.feature_layers, made.num_layers, made.eos_token_ids, options)

    config = written(shape, rope)
    if p.init_draft.draft_config_path is None:
        return config
    given = config_override.read_override(Path(p.init_draft.draft_config_path))
    return written(*config_override.apply_override(given, shape, rope, config))


def _count_tokens(split: str, vocab_size: int) -> torch.Tensor:
    """How often each token stands in the split's answers: [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for head in reader.read_headers(HIDDENS / split):
        if len(head.ids) and not 0 <= int(head.ids.min()) <= int(head.ids.max()) < vocab_size:
            raise ValueError(_corrupt(HIDDENS / split, head, vocab_size))
        counts += torch.bincount(head.ids[head.mask].to(torch.int64), minlength=vocab_size)
    return counts


def _corrupt(folder: Path, head: format.RowHeader, vocab_size: int) -> str:
    """What is wrong with a row that has token ids which the target does not."""
    (shard,) = reader.read_index(folder).filter(id=head.id)["shard"].unique().to_list()
    wrong = head.ids[(head.ids < 0) | (head.ids >= vocab_size)]
    return (
        f"{folder / shard}: row {head.id} has {len(wrong)} token ids that the target has not, the first of them {int(wrong[0])}; "
        f"expected 0 to {vocab_size - 1}; run: dvc repro -f -s extract_hiddens, and where it comes again, sample_target"
    )


if __name__ == "__main__":
    schema.run_stage(stage_record.record_stage(main, "init_draft"))
