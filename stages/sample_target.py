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
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import torch

from stages.data import conversations
from stages.params import schema, stage_inputs
from stages.runtime import atomic, scratch
from stages.sampling import local_backends, requests, sampled_split, server_backend
from stages.sampling.parquet_shards import ParquetShardWriter
from stages.sampling.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import loading, manifest, vision
from stages.target.prompt_encoder import PromptEncoder
from stages.telemetry.run_stage import run_stage

FIXED_FOLDER, SAMPLED_FOLDER, REPORT = Path("data/fixed"), Path("data/sampled"), Path("results/sample_report.json")
# They change no answer.
ACCESS_KEYS = {"base_urls", "start_timeout_s", "concurrency", "timeout_s", "attempts", "api_key_env"}
PREVIEW_ROWS = 3  # in the report
MAX_CHARACTERS = 1600  # shown of a prompt or an answer in the report
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
    warnings = [*filter(None, (_describe_truncation(splits), _describe_unchecked(splits)))]
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
        assigned = choice.assign_shards(s.shard_size)
        shards = ParquetShardWriter(scratch_folder / name, assigned, conversations.SAMPLED_SCHEMA)
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
    origins = _read_origins(FIXED_FOLDER / "train.parquet", rows["id"])
    counts = _count_rows([split for split in splits if _is_asked_for(context.p, split)])
    assert counts["rows_in"] == counts["rows_out"] + sum(counts["dropped"].values())
    return {
        "target": context.target.describe_model(),
        **counts,
        "backend": context.p.sample_target.backend,
        "sampled_by": context.sampled_by,
        "asked_again": dict(context.retries),
        "server_restarts": context.local_servers.restarted if context.local_servers else 0,
        "preview": [
            _describe_row(context.encoder.tokenizer, origin, *row)
            for origin, row in zip(origins, rows.select(PREVIEW_COLUMNS).iter_rows(), strict=True)
        ],
    }


def _describe_truncation(splits: list[SampledSplit]) -> str | None:
    """Return a warning, one for all splits, where half of the answers of one are cut at the limit; else None."""
    counts = {split.name: (split.shards.counts["truncated"], split.selection.num_requests) for split in splits}
    if not any(0 < total <= 2 * cut for cut, total in counts.values()):
        return None
    shown = ", ".join(f"{name} {cut} of {total}" for name, (cut, total) in counts.items() if total)
    cut, total = map(sum, zip(*counts.values(), strict=True))
    return (
        f"{cut} of {total} answers are cut ({shown}), and drafts and tau know nothing of how answers go on; raise "
        "sample_target.max_new_tokens (or a server's own limit), or see whether the target ends its answers"
    )


def _describe_unchecked(splits: list[SampledSplit]) -> str | None:
    """Return a warning where servers returned neither token ids nor counts; else None."""
    total: Counter[str] = sum((split.shards.counts for split in splits), Counter())
    unchecked = total["token_ids/text, unchecked"]
    if not unchecked:
        return None
    return (
        f"of {unchecked} of {total['rows']} answers the servers returned neither token ids nor how many tokens they had: nothing "
        "shows that they prompted this target by its own template, or that these are its tokens; let them return `usage`, or "
        "token ids (docs/sampling.md, Token ids)"
    )


def _count_rows(splits: list[SampledSplit]) -> dict[str, Any]:
    """Return the counts of results/sample_report.json, those of shards that earlier, killed runs published too."""
    total: Counter[str] = sum((split.shards.counts for split in splits), Counter())
    return {
        "rows_in": sum(split.selection.num_requests for split in splits),
        "rows_out": total["rows"],
        "dropped": sampled_split.select_counts(total, "dropped"),
        "not_asked": {split.name: split.selection.num_unrequested for split in splits},
        "missing": {split.name: split.num_missing for split in splits},  # requests that the data lacks
        "sources": {split.name: {n: asdict(c) for n, c in split.selection.sources.items()} for split in splits},
        "truncated": {split.name: split.shards.counts["truncated"] for split in splits},
        "tokens": {split.name: split.shards.counts["tokens"] for split in splits},
        "shards": {split.name: split.shards.num_shards for split in splits},
        "token_ids": sampled_split.select_counts(total, "token_ids"),  # by origin
        "temperatures": sampled_split.select_counts(total, "temperature"),
    }


def _read_origins(path: Path, ids: Iterable[str]) -> list[str]:
    """Return where the conversations of requests are in the raw data; `ids` are the requests', `path` is their split."""
    names = [request_id.rpartition(".")[0] for request_id in ids]
    rows = pl.scan_parquet(path).filter(pl.col("id").is_in(names)).select("id", "source", "source_row").collect()
    origins = {name: conversations.describe_origin(source, source_row) for name, source, source_row in rows.iter_rows()}
    return [origins[name] for name in names]


def _describe_row(
    tokenizer: Any, origin: str, row_id: str, prompt_ids: list[int], answer_ids: list[int], finish_reason: str
) -> dict[str, Any]:
    """Return a row as results/sample_report.json has it; long texts without their middle. `origin`: file and row of raw data."""
    texts = _decode_prompt(tokenizer, prompt_ids), tokenizer.decode(answer_ids)
    half = MAX_CHARACTERS // 2
    prompt, answer = (t if len(t) <= MAX_CHARACTERS else f"{t[:half]} […] {t[-half:]}" for t in texts)
    counts = {"prompt_tokens": len(prompt_ids), "answer_tokens": len(answer_ids)}
    return (
        {"id": row_id, "origin": origin, "prompt": prompt, "answer": answer} | counts | {"finish_reason": finish_reason}
    )


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
        _print_row(encoder.tokenizer, *row)


def _print_row(tokenizer: Any, row_id: str, prompt_ids: list[int], answer_ids: list[int], ending: str) -> None:
    """Print a row with its answer, the tokens trained on, in colour; `ending` is its finish reason."""
    start, stop = ("[[", "]]") if os.environ.get("NO_COLOR") else ("\x1b[30;42m", "\x1b[0m")
    supervised, total = len(answer_ids), len(prompt_ids) + len(answer_ids)
    print("", f"--- {row_id}: {supervised} of {total} tokens are trained on, {ending}", sep="\n")
    print(*_decode_prompt(tokenizer, prompt_ids).split("\n"), sep="\n", end="")
    # Coloured line by line, since a terminal would otherwise paint the margin too.
    for line in tokenizer.decode(answer_ids).split("\n"):
        print(start, line, stop, sep="")


def _decode_prompt(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of ids, each run of one special token (an image's) as the token and its count."""
    return re.sub(r"(<\|\w+\|>)\1+", lambda m: f"{m[1]}×{len(m[0]) // len(m[1])}", tokenizer.decode(ids))


def _list_stage_gpus() -> list[int] | None:
    """Return None, all GPUs, for a server started here; no GPU for external servers."""
    p = schema.load_params()
    s = p.sample_target
    if _uses_servers(s):
        return None if s.server.launch and p.target.device != "cpu" else []
    return p.target.gpus()


if __name__ == "__main__":
    run_stage(main, _list_stage_gpus)
