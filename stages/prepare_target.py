"""prepare_target: model id -> a pinned manifest; or the embedded target.   python -m stages.prepare_target

A Hugging Face id or a local folder is pinned, not copied: its commit, digests and shapes go into target.json, for a local
folder also a digest of all weights (20 s for 16 GB). The default parameters need no download: builtin/weather-tiny is copied
from the repository (stages/toy/shipped_target.py), other `builtin/NAME` are trained here, from a seed and for a fixed number
of steps.
"""

import datetime
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from stages.draft import supported_targets
from stages.engine import tree_masks
from stages.families.block import mask_token
from stages.params import checks, schema, target_files
from stages.params.section import BUILTIN, PARAMS_FILE
from stages.runtime import atomic, scratch
from stages.target import (
    chat_template,
    checkpoint_check,
    config_facts,
    foreign_files,
    gguf_target,
    head_check,
    loading,
    manifest,
    quantisation,
    template_facts,
)
from stages.target.manifest import TargetManifest
from stages.telemetry.run_stage import run_stage
from stages.toy import multimodal_target, shipped_target, text_targets


def main() -> None:
    p = schema.load_params()  # all: they are checked against the target, whose facts depend on what the stage declares
    checks.check_raw(p)  # before anything that takes minutes
    checks.check_target(p)
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    template = checks.read_chat_template(p.target.chat_template)
    with atomic.write_folder(manifest.TARGET_FOLDER) as folder:
        target = _make_target(p, folder) if p.target.is_embedded or p.target.is_gguf else _pin_target(p)
        target = replace(target, chat_template=template)
        tokenizer = _load_tokenizer(p, target, folder)
        target = _fix_date(target, tokenizer)
        target = replace(target, template=template_facts.probe_template(tokenizer))
        target = replace(target, eos_token_ids=_unite_end_tokens(target, tokenizer))
        supported_targets.check_chat_template(p, tokenizer, target)
        if blocks := p.train_draft.list_fresh_drafts():  # before hours of sampling
            has_others = len(blocks) < len(p.train_draft.checkpoints)
            print(mask_token.describe_mask_token(blocks, has_others, tokenizer, target))
        if not p.target.is_embedded:
            weights = manifest.resolve_weights_folder(target, folder)
            checkpoint_check.check_checkpoint(target.model, weights, p.target.trust_remote_code)
        target = replace(target, logits_scale=_measure_logits_scale(p, target, folder))
        if target.chat_template is not None:  # for servers, --chat-template
            (folder / "chat_template.jinja").write_text(target.chat_template, encoding="utf-8")
        manifest.write_manifest(folder, target)
    if target.date:
        print(f"its chat template shows today's date: {target.date} in every prompt, on any day (target.json: date)")
    if target.template.hides:
        print(
            f"its chat template does not show {', '.join(target.template.hides)}; rows are dropped where that is asked for"
        )
    print(
        f"target {target.describe_model()}: {target.num_layers} layers, {target.hidden_size} wide, {target.vocab_size} tokens, "
        f"features entering blocks {target.feature_layers} ({time.perf_counter() - started:.0f} s)"
    )


def _make_target(p: schema.Params, folder: Path) -> TargetManifest:
    """Write a target's files to `folder`: of a GGUF file, or a builtin one."""
    weights = None
    if p.target.is_gguf:
        weights = gguf_target.write_gguf_target(Path(p.target.model), folder)
    else:
        _make_builtin_target(p, folder)
    return replace(_describe_config(p, folder, None, False), weights=weights)


def _describe_config(p: schema.Params, folder: Path, revision: str | None, trust_remote_code: bool) -> TargetManifest:
    """Check the config in `folder`, and return the manifest by it. Raises ValueError where the target can't be used."""
    config = foreign_files.read_config(folder, trust_remote_code)
    with foreign_files.refuse_unreadable(f"{folder}/config.json", "a config by which transformers builds its class"):
        supported_targets.check_target_config(p, config)
        target = supported_targets.describe_target(p.target.model, revision, config, folder, p.target.feature_layers)
        return replace(target, weights=quantisation.describe_weights(config))


def _make_builtin_target(p: schema.Params, folder: Path) -> None:
    name = p.target.model.removeprefix(BUILTIN)
    names = (*text_targets.TARGET_NAMES, multimodal_target.TARGET_NAME)
    if name not in names:
        raise ValueError(
            f"params.yaml: target.model builtin/{name} is unknown; there is builtin/{', builtin/'.join(names)}"
        )
    if p.prepare_target.weights == "shipped":
        shipped_target.copy_files(name, p.prepare_target, folder)
    else:
        _train_builtin_target(p, name, folder)


def _train_builtin_target(p: schema.Params, name: str, folder: Path) -> None:
    model, tokenizer, training = _start_training(p, name, folder)
    with tqdm(total=p.prepare_target.steps, desc="train the target", unit="step", mininterval=2) as bar:
        for _, loss in training:
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _start_training(p: schema.Params, name: str, folder: Path) -> tuple[Any, Any, Iterator[tuple[int, float]]]:
    """Return a model, its tokenizer and its training, an iterator of (step, loss); save an image processor in `folder`."""
    train = p.prepare_target
    settings = train.seed, train.steps, train.batch_tokens, train.learning_rate
    if name != multimodal_target.TARGET_NAME:
        return text_targets.start_training(name, *settings)
    map_corpus, processor = multimodal_target.make_corpus(train.seed), multimodal_target.build_processor()
    processor.save_pretrained(folder)
    tokenizer = multimodal_target.build_tokenizer(map_corpus[:2000])
    model = multimodal_target.build_model(tokenizer, train.seed)
    map_rows = multimodal_target.encode_conversations(tokenizer, processor, map_corpus)
    image_inputs = multimodal_target.make_image_inputs(map_rows, model.config.image_token_id)
    rows = [(row.ids, row.labels) for row in map_rows]
    return model, tokenizer, text_targets.train_target(model, rows, *settings, image_inputs)


def _pin_target(p: schema.Params) -> TargetManifest:
    """Describe a target from its small files, without copying it. Raises ValueError where it cannot be found."""
    folder, revision = Path(p.target.model), None
    if not folder.is_dir():
        folder, revision = _fetch_from_hub(p.target.model, p.target.revision)
    target_files.check_file_kinds(folder)
    target = _describe_config(p, folder, revision, p.target.trust_remote_code)
    if revision is not None:
        return target
    digest, sample = manifest.digest_files(folder, manifest.WEIGHTS), manifest.sample_weights(folder)
    return replace(target, weights_digest=digest, weights_sample=sample)


def _fetch_from_hub(model: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import HfApi, snapshot_download

    try:
        commit = HfApi().model_info(model, revision=revision).sha
        small = ["*.json", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(model, revision=commit, allow_patterns=small)), str(commit)
    except Exception as error:  # the hub's errors, and those of its HTTP client
        raise ValueError(
            f"params.yaml: target.model {model} (revision {revision}) is neither a folder here nor to be had from "
            f"Hugging Face ({type(error).__name__}); check the spelling, the network, and HF_TOKEN for gated models"
        ) from None


def _load_tokenizer(p: schema.Params, target: TargetManifest, folder: Path) -> Any:
    """Return the target's tokenizer. Raises ValueError for one without a chat template, or none at all."""
    source = manifest.resolve_weights_folder(target, folder)
    target_files.check_tokenizer_files(target.model, source)
    tokenizer = chat_template.load_tokenizer(source, p.target.trust_remote_code, target.chat_template)
    if not tokenizer.chat_template:
        raise ValueError(target_files.describe_missing_template(target.model))
    return tokenizer


def _measure_logits_scale(p: schema.Params, target: TargetManifest, folder: Path) -> float:
    """Check that the embedding and head read by name are those the target computes with; return what it multiplies its logits
    by. Cost: docs/guide.md

    Raises ValueError naming the largest difference.
    """
    weights = manifest.resolve_weights_folder(target, folder)
    embedding, head = manifest.read_embedding_and_head(target, folder)
    try:
        model = head_check.load_first_block(str(weights), p.target.trust_remote_code)
        found = head_check.compare_head(model, embedding, head)
        in_trees = tree_masks.explain_tree_mask_failure(model)
    except Exception as error:  # remote code may not run with one block; check_overfit decodes with all
        print(f"the head was not compared: one block of {target.model} alone gives {type(error).__name__}: {error}")
        config = foreign_files.read_config(weights, p.target.trust_remote_code)
        if (
            window := config_facts.read_sliding_window(config)
        ) is not None:  # whether masks reach its layers is not known
            checks.check_sliding_window(p, window)
        return 1.0
    loading.check_layers(model, target.model)
    if in_trees:
        raise ValueError(
            f"params.yaml: target.model {target.model}: of {type(model).__name__}, {in_trees}; the torch engine, by which "
            "check_overfit, time_cycles and benchmark decode, can't verify trees with it. Take another target, as Llama, Qwen3, "
            "Mixtral or Gemma 3"
        )
    if not found.same_embedding:
        raise ValueError(
            f"{weights}: embed_tokens.weight is another table than the embedding of {type(model).__name__}; later stages would "
            "give the draft other embeddings than the target has. This target's files can't be read by name"
        )
    if found.agrees:
        if found.scale != 1:
            print(f"logits of {type(model).__name__} are {found.scale:g} times final hidden states times its head")
        return found.scale
    difference = (
        f"of {type(model).__name__}, logits of {head_check.TOKENS} tokens differ from final hidden states times its head by "
        f"up to {found.logits:.3g} (largest logit {found.largest:.3g}), expected at most {found.allowed:.2g} in float32"
    )
    if found.has_bias:
        raise ValueError(
            f"params.yaml: target.model {target.model}: {difference}. Its head adds a bias, expected none: drafts, replay and "
            "the torch engine compute logits without; such a model can't be a target yet"
        )
    if found.same_head and found.same_choice:
        _check_drawn_tokens(p, difference)
        print(
            f"note: {difference}. It is the class's own head, so the class caps its logits; drafts are trained without"
        )
        return 1.0
    raise ValueError(
        f"params.yaml: target.model {target.model}: {difference}: lm_head.weight of its files is another table than the class's "
        "head; such a model can't be a target yet"
    )


def _check_drawn_tokens(params: schema.Params, difference: str) -> None:
    """Raise ValueError where the torch engine or replay is to draw tokens by logits that lack the class's cap.

    `difference` says how far the target's own logits are from those.
    """
    workloads = params.benchmark.workloads
    hot = [name for name in params.benchmark.torch_workloads if workloads[name].temperature > 0]
    drawn = [f"benchmark.workloads.{name}.temperature" for name in hot]
    replayed = [params.train_draft.checkpoints.get(name) for name in params.replay_trees.checkpoints]
    if params.sample_target.eval_temperature > 0 and any(
        segment and segment.family.samples_drafts for segment in replayed
    ):
        drawn.append("sample_target.temperature")  # chains of sampled drafts are replayed on answers as they were drawn
    if drawn:
        raise ValueError(
            f"{PARAMS_FILE}: {', '.join(drawn)} above 0, expected 0: {difference}. The class caps its logits, and the torch "
            "engine and replay would draw by logits without; set 0, or measure the workload by benchmark_served"
        )


def _fix_date(target: TargetManifest, tokenizer: Any) -> TargetManifest:
    """Return the target with one date for its whole life, where its chat template shows today's: that of its first day.

    DVC removes target.json before a rerun, so the date is kept in .scratch too. The tokenizer gets the template of that date.
    """
    if not template_facts.reads_date(tokenizer.chat_template):
        return target
    kept, facts = scratch.SCRATCH_FOLDER / "template_dates.json", [target.config_digest, target.tokenizer_digest]
    key = scratch.digest_values(target.model, target.weights_digest, tokenizer.chat_template, *facts)
    dates = atomic.read_json(kept, "prepare_target") if kept.exists() else {}
    day = datetime.date.fromisoformat(dates.setdefault(key, datetime.date.today().isoformat()))
    atomic.write_json(kept, dates)
    tokenizer.chat_template = template_facts.fix_date(tokenizer.chat_template, day)
    return replace(target, date=day.isoformat(), chat_template=tokenizer.chat_template)


def _unite_end_tokens(target: TargetManifest, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer by any of the target's files: servers stop at all of them.

    The tokenizer's own and what closes an answer in the chat template may lack in config.json and generation_config.json.
    """
    found = dict.fromkeys(target.eos_token_ids)  # a set in order
    own = tokenizer.get_vocab().get(tokenizer.eos_token)
    if own is not None:
        found[own] = None
    closing = chat_template.find_closing_token(tokenizer, set(found))
    if closing is not None:
        found[closing] = None
    if not found:
        raise ValueError(
            f"params.yaml: target.model {target.model} names no eos_token_id, neither in generation_config.json nor in "
            "config.json, no eos_token of its tokenizer, and its chat template closes answers by no token; without one no answer "
            "ends"
        )
    checkpoint_check.check_end_tokens(target.model, target.vocab_size, list(found))
    if added := [token for token in found if token not in target.eos_token_ids]:
        names = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in added)
        print(f"end tokens by its tokenizer or chat template, beside {target.eos_token_ids} of its configs: {names}")
    return list(found)


if __name__ == "__main__":
    run_stage(main, lambda: schema.load_params().target.gpus())
