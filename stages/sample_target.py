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
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages.data import conversations, requests, sampled_split
from stages.data.parquet_shards import ParquetShardWriter
from stages.data.requests import TargetRequest
from stages.data.sampled_split import SampledSplit
from stages.params import schema
from stages.runtime import atomic, scratch
from stages.runtime.journal import make_journal_key
from stages.serving import client, conversation_sampling, http_session, replicas
from stages.serving.conversation_sampling import ConversationSampler, SamplingProgress
from stages.serving.server_group import ServerGroup
from stages.target import chat_template, generation, loading, manifest, row_preview, served_answers, vision
from stages.target.prompt_encoder import PromptEncoder
from stages.telemetry import unfinished
from stages.telemetry.run_stage import run_stage

FIXED_FOLDER, SAMPLED_FOLDER, REPORT = Path("data/fixed"), Path("data/sampled"), Path("results/sample_report.json")
# They change no answer.
ACCESS_KEYS = {"base_urls", "start_timeout_s", "concurrency", "timeout_s", "attempts", "api_key_env"}
PREVIEW_ROWS = 3  # in the report
PREVIEW_COLUMNS = ("id", "prompt_ids", "answer_ids", "finish_reason")


@dataclass
class SamplingContext:
    """The inputs of every backend."""

    p: schema.Params
    target: manifest.TargetManifest
    folder: Path  # of the target's weights
    encoder: PromptEncoder
    retries: Counter = field(default_factory=Counter)  # by reason
    local_servers: ServerGroup | None = None  # where some were started


def main(*words: str) -> None:
    p = schema.load_params()
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
    place = scratch.locate_scratch(
        "sample_target", asdict(target), p.target.model_dump(), settings, scratch.digest_folder(FIXED_FOLDER)
    )
    with scratch.lock_scratch(place):
        _sample(context, place, started)


def _sample(context: SamplingContext, place: Path, started: float) -> None:
    """Sample all answers that the scratch folder `place` lacks, and publish the splits."""
    p = context.p
    with contextlib.ExitStack() as stack:
        splits = _plan_splits(p, place, stack)
        if resumed := sum(split.shards.num_resumed for split in splits):
            print(f"resumed: {resumed} pieces of work were done before, kept in {place}")
        sample_splits = _make_backend(context, stack, place)
        kept = splits[:1] if p.sample_target.backend == "keep" else []  # train comes first
        for split in kept:
            _keep_data_answers(context, split)
            _finish_split(p, split)
        sample_splits(splits[len(kept) :])
    if warning := sampled_split.describe_truncation(splits):
        print(f"warning: {warning}")
    for split in splits:
        split.shards.publish(SAMPLED_FOLDER / split.name)
    atomic.write_json(REPORT, _build_report(context, splits) | {"seconds": round(time.perf_counter() - started, 2)})
    scratch.remove_scratch(place)


def _load_image_processor(
    p: schema.Params, target: manifest.TargetManifest, folder: Path
) -> vision.CachedImageProcessor | None:
    """Return the target's image processor where the data has images. Raises ValueError where the target takes text only."""
    for path in (FIXED_FOLDER / "train.parquet", FIXED_FOLDER / "eval.parquet"):
        images = conversations.count_with_images(path, "fix_data")
        if images and target.modality == "text":
            raise ValueError(
                f"sample_target: {images} conversations of {path} have images, expected none: {target.model} reads text "
                "only, and without them its answers would be to other questions. Name data without images in fix_data.raw, "
                "or set target.model to a vision-language model"
            )
        if images:
            return vision.CachedImageProcessor(folder, p.target.trust_remote_code)
    return None


def _plan_splits(p: schema.Params, place: Path, stack: contextlib.ExitStack) -> list[SampledSplit]:
    s, splits = p.sample_target, []
    for name, source, max_rows, mixture in [
        ("train", "train", s.train_rows, s.temperature_weights),
        ("eval", "eval", s.eval_rows, [(0.0, 1.0)]),
        ("eval_t", "eval", s.eval_rows if s.eval_temperature else 0, [(s.eval_temperature, 1.0)]),
    ]:
        path = FIXED_FOLDER / f"{source}.parquet"
        choice = requests.select_requests(path, max_rows)
        shards = stack.enter_context(
            ParquetShardWriter(place / name, choice.num_requests, s.shard_size, conversations.SAMPLED_SCHEMA)
        )
        splits.append(SampledSplit(name, path, max_rows, choice, mixture, shards))
    return splits


def _make_backend(
    context: SamplingContext, stack: contextlib.ExitStack, place: Path
) -> Callable[[list[SampledSplit]], None]:
    """Return the function that samples splits. `keep` needs one for eval, since replay is exact on own answers only."""
    s, t = context.p.sample_target, context.p.target
    if _uses_servers(s):
        make_client = _open_servers(context, stack, place)
        return lambda splits: asyncio.run(_sample_from_servers(context, make_client, splits))
    model = loading.load_target(str(context.folder), t.dtype, t.device, t.trust_remote_code)

    def generate(splits: list[SampledSplit]) -> None:
        for split in splits:
            _generate_split(context, model, split)
            _finish_split(context.p, split)

    return generate


def _uses_servers(s: schema.SampleTarget) -> bool:
    return s.backend == "server" or (s.backend == "keep" and s.server.is_configured)


def _finish_split(p: schema.Params, split: SampledSplit) -> None:
    """Print a summary of a split and write its last shard. Raises ValueError where no row is left."""
    s, counted, selection = p.sample_target, split.shards.counts, split.selection
    refused = split.describe_refusals()
    if refused:
        print(refused)
    if not counted["rows"] and split.name != "eval_t" and not (split.name == "train" and s.train_rows == 0):
        raise ValueError(
            f"sample_target: no row is left in the {split.name} split, expected at least one ({selection.num_requests} sampled, "
            f"{counted['truncated']} cut at max_new_tokens); "
            + (refused or f"raise sample_target.{split.name}_rows or max_new_tokens")
        )
    temperatures = " and ".join(f"{temperature:g}" for temperature, _ in split.mixture)
    is_kept = s.backend == "keep" and split.name == "train"
    origin = "of the data" if is_kept else f"at temperature {temperatures}"
    print(split.describe(origin, s.max_new_tokens))
    split.shards.finish()


def _build_report(context: SamplingContext, splits: list[SampledSplit]) -> dict[str, Any]:
    """Return results/sample_report.json; it includes the counts of shards that earlier, killed runs published."""
    sampled = SAMPLED_FOLDER / "train"
    rows = conversations.read_table(sampled, conversations.SAMPLED_SCHEMA, "sample_target", PREVIEW_ROWS)
    counts = sampled_split.count_rows(splits)
    assert counts.rows_in == counts.rows_out + sum(counts.dropped.values())
    return {
        **asdict(counts),
        "backend": context.p.sample_target.backend,
        "asked_again": dict(context.retries),
        "server_restarts": context.local_servers.restarted if context.local_servers else 0,
        "preview": [
            asdict(row_preview.describe_row(context.encoder.tokenizer, *row))
            for row in rows.select(PREVIEW_COLUMNS).iter_rows()
        ],
    }


def _settle_answer(
    context: SamplingContext,
    split: SampledSplit,
    request: TargetRequest,
    temperature: float | None,
    answer: served_answers.SampledAnswer,
) -> None:
    """Store an answer's row, or count why it is dropped. Raises ValueError for a mask without or with only trained tokens."""
    s, eos = context.p.sample_target, context.target.eos_token_ids
    is_cut, dropped = answer.finish_reason == "length", None
    if answer.source != "template" and all(token in eos for token in answer.answer_ids):
        dropped = "empty"  # a target may end at once: nothing to learn, and no error
    elif context.encoder.has_image_token(answer.answer_ids):
        dropped = "picture_token_in_answer"  # an image token without an image
    else:
        chat_template.check_loss_mask(request.id, answer.prompt_ids, answer.answer_ids, eos, not is_cut)
    if is_cut and s.truncated == "drop":
        dropped = "truncated"
    counts = {"truncated": int(is_cut)}
    if dropped:
        split.shards.set_row(request.position, None, {f"dropped/{dropped}": 1} | counts)
        return
    row = conversations.SampledRow(
        id=request.id,
        prompt_ids=answer.prompt_ids,
        answer_ids=answer.answer_ids,
        finish_reason=answer.finish_reason,
        temperature=temperature,
        top_p=s.top_p if temperature else None,
        source_row=request.source_row,
        verdict=request.verdict,
        images=request.images or None,
    )
    counts |= {"rows": 1, "tokens": len(answer.answer_ids), f"token_ids/{answer.source}": 1}
    if split.name == "train":
        counts[f"temperature/{'the data' if temperature is None else format(temperature, 'g')}"] = 1
    split.shards.set_row(request.position, row, counts)
    unfinished.note_progress(f"after {split.shards.num_set} of {split.selection.num_requests} answers of {split.name}")


def _explain_unusable(context: SamplingContext, request: TargetRequest) -> str | None:
    """Return why a request cannot be sampled, as one word that the report counts; decodes its images."""
    if request.unusable_reason:
        return request.unusable_reason
    return context.encoder.explain_image_problem(request.messages[: request.answer_index + 1], request.images)


# In this process


def _generate_split(context: SamplingContext, model: Any, split: SampledSplit) -> None:
    """Sample shard by shard, in batches of one temperature and like prompt lengths, so that little is padding."""
    s, eos, shards = context.p.sample_target, context.target.eos_token_ids, split.shards
    tokenizer, processor = context.encoder.tokenizer, context.encoder.image_processor
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    every = itertools.chain.from_iterable(split.read_conversations())
    with tqdm(total=split.selection.num_requests, desc=f"sample {split.name}", unit="row", mininterval=2) as bar:
        for number, group in itertools.groupby(every, key=lambda request: shards.shard_of(request.position)):
            if number in shards.published:
                bar.update(shards.shard_length(number))
                continue
            for first, temperature, batch in _batch_requests(context, split, list(group)):
                prompts = [ids for _, ids in batch]
                settings, seed = (s.max_new_tokens, temperature, s.top_p), s.seed + number * s.shard_size + first
                images = [path for request, _ in batch for path in request.images]
                key = make_journal_key(["transformers", prompts, images, settings, seed])
                journal = shards.journal(number)
                if key not in journal.done:
                    patches = processor.load_patches(images) if processor and images else None
                    journal.add(key, generation.generate_answers(model, prompts, *settings, eos, pad, seed, patches))
                # Settling may publish the shard, which removes its journal.
                for (request, prompt_ids), (ids, reason) in zip(batch, list(journal.done[key]), strict=True):
                    answer = served_answers.SampledAnswer(prompt_ids, ids, reason, "exact")
                    _settle_answer(context, split, request, temperature, answer)
                bar.update(len(batch))


def _batch_requests(
    context: SamplingContext, split: SampledSplit, group: list[TargetRequest]
) -> Iterator[tuple[int, float, list[tuple[TargetRequest, list[int]]]]]:
    """Yield (number of its first row, temperature, requests and their prompts) of each batch; drop unusable requests."""
    seed, size = context.p.sample_target.seed, context.p.sample_target.batch_size
    ready = []
    for request in group:
        if reason := _explain_unusable(context, request):
            split.drop_request(request, reason)
        else:
            history = request.messages[: request.answer_index]
            try:
                prompt_ids = context.encoder.encode_prompt(request.id, history, request.tools, request.images)
            except chat_template.TemplateRefusalError as error:
                split.refuse_request(request, str(error))
                continue
            ready.append((split.draw_temperature(seed, request.id), request, prompt_ids))
    ready.sort(key=lambda one: (one[0], len(one[2])))
    first = 0
    for temperature, alike in itertools.groupby(ready, key=lambda one: one[0]):
        rows = [(request, ids) for _, request, ids in alike]
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            yield first, temperature, batch
            first += len(batch)


# The data's own answers


def _keep_data_answers(context: SamplingContext, split: SampledSplit) -> None:
    """Store each turn's own answer after the prompt that the target would have had."""
    for conversation in split.read_conversations():
        missing = [request for request in conversation if not split.shards.is_published(request.position)]
        if not missing:
            continue
        first, turns = conversation[0], []
        try:
            if not all(request.unusable_reason for request in conversation):
                turns = context.encoder.encode_turns(first.messages, first.tools)
        except chat_template.TemplateRefusalError as error:
            for request in missing:
                split.refuse_request(request, str(error))
            continue
        except ValueError as error:
            name = first.id.rpartition(".")[0]
            raise ValueError(f"sample_target: row {name} (line {first.source_row} of the raw data), {error}") from None
        for request in missing:
            if reason := _explain_unusable(context, request):
                split.drop_request(request, reason)
            else:
                prompt_ids, answer_ids = turns[request.position - first.position]
                prompt_ids = context.encoder.expand_images(request.id, prompt_ids, request.images)
                answer = served_answers.SampledAnswer(prompt_ids, answer_ids, "stop", "template")
                _settle_answer(context, split, request, None, answer)


# From servers


def _open_servers(
    context: SamplingContext, stack: contextlib.ExitStack, place: Path
) -> Callable[[], client.ChatClient]:
    """Return a function that makes a client, which lives as long as one event loop; start servers if asked to."""
    s, t = context.p.sample_target.server, context.p.target
    limits = s.concurrency, s.timeout_s, s.attempts
    if s.launch is None:
        urls, secret = client.expand_urls(s.base_urls), http_session.read_api_key(s.api_key_env, client.PARAMS_SECTION)
        return lambda: client.ChatClient(urls, s.model or t.model, *limits, secret)
    folder, threads = str(context.folder), t.num_threads if t.device == "cpu" else None
    target = folder, t.dtype, t.device, t.trust_remote_code
    logs = place.parent  # they outlive the run, to explain a failure
    planned = replicas.plan_replicas(s.launch, *target, s.launch_args, s.start_timeout_s, logs, threads)
    own = context.local_servers = stack.enter_context(planned)
    return lambda: client.ChatClient(own.base_urls, folder, *limits, None, s.launch, own.check_alive)


async def _sample_from_servers(
    context: SamplingContext, make_client: Callable[[], client.ChatClient], splits: list[SampledSplit]
) -> None:
    """Sample whole splits."""
    s, from_target = context.p.sample_target, context.p.sample_target.history == "target"
    rows = sum(split.selection.num_requests for split in splits)
    with tqdm(total=rows, desc="sample", unit="row", mininterval=2) as bar:
        bar.update(sum(split.shards.shard_length(n) for split in splits for n in split.shards.published))
        async with make_client() as http:
            progress = SamplingProgress(bar, http)
            samplers = [
                ConversationSampler(split, _ServedAnswerHandler(context, split), http, progress, from_target)
                for split in splits
            ]
            try:
                await conversation_sampling.sample_splits(samplers, s.server.concurrency)
            finally:
                context.retries.update(http.retries_by_reason)
    for sampler in samplers:
        if sampler.refused:
            print(f"{sampler.split.name}: {len(sampler.refused)} rows refused, the first: {sampler.refused[0]}")
        _finish_split(context.p, sampler.split)


@dataclass(frozen=True)
class _ServedAnswerHandler:
    """The target's side of `ConversationSampler`."""

    context: SamplingContext
    split: SampledSplit

    def explain_unusable(self, request: TargetRequest) -> str | None:
        return _explain_unusable(self.context, request)

    def build_body(self, request: TargetRequest, history: list[dict[str, Any]]) -> dict[str, Any]:
        s = self.context.p.sample_target
        return requests.build_chat_body(
            request,
            history,
            self.context.encoder.build_image_url,
            chat_template.build_template_kwargs(s.thinking),
            temperature=self.split.draw_temperature(s.seed, request.id),
            top_p=s.top_p,
            max_tokens=s.max_new_tokens,
            seed=sampled_split.make_seed(s.seed, request.id),
        )

    def build_engine_options(self, request: TargetRequest, temperature: float) -> dict[str, dict[str, Any]]:
        eos, pad = self.context.target.eos_token_ids, self.context.encoder.tokenizer.pad_token_id
        max_new_tokens = self.context.p.sample_target.max_new_tokens
        return requests.build_engine_options(request, temperature, max_new_tokens, eos, pad)

    def settle_answer(
        self, request: TargetRequest, history: list[dict[str, Any]], answer: client.ChatAnswer, write: bool
    ) -> bool:
        context, encoder = self.context, self.context.encoder
        prompt_ids = encoder.encode_prompt(request.id, history, request.tools, request.images)
        served_answers.check_served_prompt(
            encoder, request.id, prompt_ids, answer, history, request.tools, request.images
        )
        recovered = served_answers.recover_token_ids(encoder, history, request.tools, prompt_ids, answer)
        if write and recovered is None:
            self.split.drop_request(request, "token_ids_unknown")
        elif write and recovered:
            temperature = self.split.draw_temperature(context.p.sample_target.seed, request.id)
            _settle_answer(context, self.split, request, temperature, recovered)
        if not recovered or not recovered.answer_ids or recovered.finish_reason != "stop":
            return False
        return not encoder.has_image_token(recovered.answer_ids)

    def read_log_tail(self) -> str:
        return self.context.local_servers.read_log_tails() if self.context.local_servers else ""


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
        row_preview.print_row(encoder.tokenizer, *row)


def _list_stage_gpus() -> list[int] | None:
    """Return None, all GPUs, for a server started here; no GPU for external servers."""
    p = schema.load_params()
    s = p.sample_target
    if _uses_servers(s):
        return None if s.server.launch and p.target.device != "cpu" else []
    return p.target.gpus()


if __name__ == "__main__":
    run_stage(main, _list_stage_gpus)
