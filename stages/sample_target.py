"""sample_target: requests -> the target's own answers.   python -m stages.sample_target [--preview N]

Drafts train on the target's own answers, not on the data's: about 10% more accept length (SpecForge PR 223). Training
answers are sampled at `temperature`, a number or a mixture; eval answers at temperature 0, with a second set above 0 where
training has one. Each assistant turn is one row, whose prompt is the conversation before it, rendered by the chat template
as a server would.

Answers come from the target in this process or from servers; for training only, also from the data itself. Answers and
finished shards are kept in .scratch, so that a killed run resumes. `--preview N` prints N rows with the trained tokens in
colour. docs/sampling.md
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stages.data import conversations
from stages.params import schema, stage_inputs
from stages.runtime import atomic, scratch
from stages.sampling import local_backends, requests, sampled_split, server_backend
from stages.sampling.parquet_shards import ParquetShardWriter
from stages.sampling.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import loading, manifest, prompt_encoder, vision
from stages.target.prompt_encoder import PromptEncoder
from stages.telemetry.run_stage import run_stage

FIXED_FOLDER, SAMPLED_FOLDER, REPORT = Path("data/fixed"), Path("data/sampled"), Path("results/sample_report.json")
# They change no answer.
ACCESS_KEYS = {"base_urls", "start_timeout_s", "concurrency", "timeout_s", "attempts", "api_key_env"}
PREVIEW_ROWS = 3  # in the report
PREVIEW_COLUMNS = ("id", "prompt_ids", "answer_ids", "finish_reason")


def main(*words: str) -> None:
    p = stage_inputs.read_params("sample_target")
    if words:
        _print_preview(p, *words)
        return
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    target = manifest.read_manifest()
    folder = manifest.resolve_weights_folder(target)
    encoder = PromptEncoder.load(
        target, folder, p.target.trust_remote_code, p.sample_target.thinking, _load_image_processor(p, target, folder)
    )
    context = SamplingContext(p, target, folder, encoder)
    settings = p.sample_target.model_dump(exclude={"server": ACCESS_KEYS})
    scratch_folder = scratch.locate_scratch(
        "sample_target", asdict(target), p.target.model_dump(), settings, scratch.digest_folder(FIXED_FOLDER)
    )
    _sample(context, scratch_folder, started)


def _sample(context: SamplingContext, scratch_folder: Path, started: float) -> None:
    """Sample all answers that `scratch_folder` lacks, and publish the splits."""
    p = context.p
    with contextlib.ExitStack() as stack:
        splits = _plan_splits(p, scratch_folder, stack)
        if resumed := sum(split.shards.num_resumed for split in splits):
            print(f"resumed: {resumed} pieces of work were done before, kept in {scratch_folder}")
        sample_splits = _make_backend(context, stack, scratch_folder)
        kept = splits[:1] if p.sample_target.backend == "keep" else []  # train comes first
        for split in kept:
            local_backends.keep_answers(context, split)
            _finish_split(p, split)
        sample_splits(splits[len(kept) :])
    warnings = [*filter(None, (sampled_split.describe_truncation(splits), sampled_split.describe_unchecked(splits)))]
    for warning in warnings:
        print(f"warning: {warning}")
    for split in splits:
        split.shards.publish(SAMPLED_FOLDER / split.name)
    rows = ", ".join(f"{split.name} {split.shards.counts['rows']}" for split in splits if _is_asked_for(p, split))
    tokens = sum(split.shards.counts["tokens"] for split in splits)
    sampled_by = f", by {context.sampled_by}" if context.sampled_by else ""
    print(f"{rows} answers, {tokens} tokens{sampled_by}")  # the last line is the one that a run shows
    seconds = round(time.perf_counter() - started, 2)
    atomic.write_json(REPORT, _build_report(context, splits) | {"warnings": warnings, "seconds": seconds})
    scratch.remove_scratch(scratch_folder)


def _load_image_processor(
    p: schema.Params, target: manifest.TargetManifest, folder: Path
) -> vision.CachedImageProcessor | None:
    """Return the image processor of a target whose images are supported: of texts it tells those that hold the image token.

    Raises ValueError where the data has images and the target takes none here.
    """
    for path in (FIXED_FOLDER / "train.parquet", FIXED_FOLDER / "eval.parquet"):
        images = conversations.count_with_images(path, "fix_data")
        if images and target.modality == "text":
            raise ValueError(
                f"sample_target: {images} conversations of {path} have images, expected none: {target.model} reads text "
                "only, and without them its answers would be to other questions. Name data without images in fix_data.raw, "
                "or set target.model to a vision-language model"
            )
        if images and target.image_token_id is None:
            raise ValueError(
                f"sample_target: {images} conversations of {path} have images, expected none: {target.model} has no positions "
                "on three axes (mrope_section), as Qwen2-VL, Qwen2.5-VL and Qwen3-VL have, and extract_hiddens takes images of "
                "such classes only (docs/hiddens.md, Images). Name data without images in fix_data.raw: its drafts learn from "
                "texts alone; or take another target.model"
            )
    return None if target.image_token_id is None else vision.CachedImageProcessor(folder, p.target.trust_remote_code)


def _plan_splits(p: schema.Params, scratch_folder: Path, stack: contextlib.ExitStack) -> list[SampledSplit]:
    s, splits = p.sample_target, []
    for name, source, max_rows, mixture in [
        ("train", "train", s.train_rows, s.temperature_weights),
        ("eval", "eval", s.eval_rows, [(0.0, 1.0)]),
        ("eval_t", "eval", s.eval_rows if s.eval_temperature else 0, [(s.eval_temperature, 1.0)]),
    ]:
        path = FIXED_FOLDER / f"{source}.parquet"
        choice = requests.select_requests(path, max_rows, is_even=source == "eval" and p.fix_data.eval_file is not None)
        shards = ParquetShardWriter(
            scratch_folder / name, choice.num_requests, s.shard_size, conversations.SAMPLED_SCHEMA
        )
        stack.callback(shards.close)
        splits.append(SampledSplit(name, path, max_rows, choice, mixture, shards, s.server.concurrency))
    return splits


def _make_backend(
    context: SamplingContext, stack: contextlib.ExitStack, scratch_folder: Path
) -> Callable[[list[SampledSplit]], None]:
    """Return the function that samples splits. `keep` needs one for eval, since replay is exact on own answers only."""
    s, t = context.p.sample_target, context.p.target
    if _uses_servers(s):
        make_client = server_backend.open_servers(context, stack, scratch_folder)

        def ask(splits: list[SampledSplit]) -> None:
            asyncio.run(server_backend.ask_servers(context, make_client, splits))
            for split in splits:
                _finish_split(context.p, split)

        return ask
    model = loading.load_target(str(context.folder), t.dtype, t.device, t.trust_remote_code)

    def generate(splits: list[SampledSplit]) -> None:
        local_backends.sample_splits(context, model, splits)
        for split in splits:
            _finish_split(context.p, split)

    return generate


def _uses_servers(s: schema.SampleTarget) -> bool:
    return s.backend == "server" or (s.backend == "keep" and s.server.is_configured)


def _finish_split(p: schema.Params, split: SampledSplit) -> None:
    """Print a summary of a split and write its last shard. Raises ValueError where no row is left."""
    s = p.sample_target
    for line in split.describe_dropped():
        print(line)
    if split.name != "eval_t" and not (split.name == "train" and s.train_rows == 0):
        split.check_rows()
    temperatures = " and ".join(f"{temperature:g}" for temperature, _ in split.mixture)
    is_kept = s.backend == "keep" and split.name == "train"
    origin = "of the data" if is_kept else f"at temperature {temperatures}"
    if _is_asked_for(p, split):
        print(split.describe(origin))
    split.shards.finish()


def _is_asked_for(p: schema.Params, split: SampledSplit) -> bool:
    """Return whether the split may have rows: the second eval set has none without a temperature above 0, an empty file alone."""
    return split.name != "eval_t" or p.sample_target.eval_temperature > 0


def _build_report(context: SamplingContext, splits: list[SampledSplit]) -> dict[str, Any]:
    """Return results/sample_report.json; it includes the counts of shards that earlier, killed runs published."""
    sampled = SAMPLED_FOLDER / "train"
    rows = conversations.read_table(sampled, conversations.SAMPLED_SCHEMA, "sample_target", PREVIEW_ROWS)
    origins = requests.read_origins(FIXED_FOLDER / "train.parquet", rows["id"])
    counts = sampled_split.count_rows([split for split in splits if _is_asked_for(context.p, split)])
    assert counts["rows_in"] == counts["rows_out"] + sum(counts["dropped"].values())
    return {
        "target": context.target.describe_model(),
        **counts,
        "backend": context.p.sample_target.backend,
        "sampled_by": context.sampled_by,
        "asked_again": dict(context.retries),
        "server_restarts": context.local_servers.restarted if context.local_servers else 0,
        "preview": [
            prompt_encoder.describe_row(context.encoder.tokenizer, origin, *row)
            for origin, row in zip(origins, rows.select(PREVIEW_COLUMNS).iter_rows(), strict=True)
        ],
    }


def _print_preview(p: schema.Params, *words: str) -> None:
    """Print rows with their masks: sampled ones, or before sampling the data's own answers as `keep` would mask them."""
    if len(words) != 2 or words[0] != "--preview" or not words[1].isdigit() or words[1] == "0":
        raise ValueError(f"expected no arguments or --preview N, found {' '.join(words)}")
    target, count = manifest.read_manifest(), int(words[1])
    folder = manifest.resolve_weights_folder(target)
    encoder = PromptEncoder.load(target, folder, p.target.trust_remote_code, p.sample_target.thinking)
    sampled, fixed = SAMPLED_FOLDER / "train", FIXED_FOLDER / "train.parquet"
    if sampled.exists():
        print(f"{sampled}, its first {count} rows")
        table = conversations.read_table(sampled, conversations.SAMPLED_SCHEMA, "sample_target", count)
        rows = list(table.select(PREVIEW_COLUMNS).iter_rows())
    else:
        print(f"{fixed}, {count} of its turns, with the data's own answers; nothing is sampled yet")
        rows = []
        for group in requests.read_requests(fixed, requests.select_requests(fixed, count)):
            turns = encoder.encode_turns(group[0].messages, group[0].tools)
            pairs = zip(group, turns, strict=False)  # the last conversation may be chosen in part
            rows += [(q.id, *ids, "the data") for q, ids in pairs]
    for row in rows:
        prompt_encoder.print_row(encoder.tokenizer, *row)


def _list_stage_gpus() -> list[int] | None:
    """Return None, all GPUs, for a server started here; no GPU for external servers."""
    p = schema.load_params()
    s = p.sample_target
    if _uses_servers(s):
        return None if s.server.launch and p.target.device != "cpu" else []
    return p.target.gpus()


if __name__ == "__main__":
    run_stage(main, _list_stage_gpus)
