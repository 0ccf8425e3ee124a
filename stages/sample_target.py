"""sample_target: questions -> the target's own answers.   python -m stages.sample_target [--preview N]

A draft learns what the target says, not what the data says: training on the target's own answers is worth about 10% of
accept length (research/users.md 1.4). Training answers are drawn at `temperature`, a number or a mixture; eval answers
are the target's at temperature 0, and a second set above 0 where training is. Each assistant turn is one row: its
prompt is the conversation before it, rendered by the chat template as a server would.

Answers come from the target in this process, or from servers; or, for training only, from the data itself. Each is
kept in .scratch as it comes, and each shard of rows as soon as it is whole, so that a killed run goes on where it was.
`--preview N` shows N rows with what is trained on in colour. More in docs/sampling.md.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages.data import conversations, requests
from stages.data.parquet_shards import ParquetShardWriter
from stages.data.requests import TargetRequest
from stages.params import schema
from stages.runtime import atomic, scratch
from stages.runtime.journal import make_journal_key
from stages.serving import client, http_session, server
from stages.target import chat_template, generation, loading, manifest, vision
from stages.telemetry.run_stage import run_stage

FIXED_FOLDER, SAMPLED_FOLDER, REPORT = Path("data/fixed"), Path("data/sampled"), Path("results/sample_report.json")
ACCESS_KEYS = {"base_urls", "start_timeout_s", "concurrency", "timeout_s", "attempts", "api_key_env"}  # moves no answer
MAX_LEADING_REFUSALS = 8  # refused rows, and none answered, that stop a run
MAX_SERVER_RESTARTS = 3  # of a server of one's own, in one run
SHARDS_AHEAD = 4  # under way at once, beyond what the concurrency needs: one slow row must not fill the memory
PREVIEW_ROWS, PREVIEW_CHARACTERS = 3, 1600  # rows of the report's preview, and what is shown of a prompt or an answer


@dataclass
class SampledSplit:
    """Questions of one kind, and where their answers go."""

    name: str
    source: Path
    choice: requests.RequestSelection
    mixture: list[tuple[float, float]]  # (temperature, weight)
    shards: ParquetShardWriter

    @property
    def asked(self) -> int:
        """How many questions, of those there are."""
        return self.choice.num_requests

    def conversations(self) -> Iterator[list[TargetRequest]]:
        return requests.read_requests(self.source, self.choice)


@dataclass
class SamplingContext:
    """What every backend needs."""

    p: schema.Params
    tokenizer: Any
    made: manifest.TargetManifest
    folder: Path
    end: int  # the token that closes an answer
    eyes: vision.CachedImageProcessor | None  # where there are pictures
    asked_again: Counter = field(default_factory=Counter)
    own_server: server.ServerProcess | None = None  # where one was started


def main(*words: str) -> None:
    p = schema.load_params()
    if words:
        _print_preview(p, *words)
        return
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    made = manifest.read_manifest()
    folder = manifest.resolve_weights_folder(made)
    tokenizer = chat_template.load_tokenizer(folder, p.target.trust_remote_code, made.chat_template)
    end, eyes = chat_template.find_end_token(tokenizer, made.eos_token_ids), _load_image_processor(p, made, folder)
    work = SamplingContext(p, tokenizer, made, folder, end, eyes)
    s = p.sample_target
    asked_for = s.model_dump(exclude={"server": ACCESS_KEYS})
    place = scratch.locate_scratch(
        "sample_target", asdict(made), p.target.model_dump(), asked_for, scratch.digest_folder(FIXED_FOLDER)
    )
    with scratch.held(place):
        _sample(work, place, started)


def _sample(work: SamplingContext, place: Path, started: float) -> None:
    """Ask for all answers, those apart that are in the scratch folder, and put them in their place."""
    p, s = work.p, work.p.sample_target
    with contextlib.ExitStack() as stack:
        splits = _plan_splits(p, place, stack)
        if resumed := sum(split.shards.num_resumed for split in splits):
            print(f"resumed: {resumed} pieces of work were done before, kept in {place}")
        answer = _make_backend(work, stack, place)
        for split in splits:
            if s.backend == "keep" and split.name == "train":
                _keep_data_answers(work, split)
            else:
                answer(split)
            _print_split(p, split)
            split.shards.finish()
    for split in splits:
        split.shards.publish(SAMPLED_FOLDER / split.name)
    atomic.write_json(REPORT, _write_report(work, splits) | {"seconds": round(time.perf_counter() - started, 2)})
    scratch.remove_scratch(place)


def _load_image_processor(
    p: schema.Params, made: manifest.TargetManifest, folder: Path
) -> vision.CachedImageProcessor | None:
    """What the target sees pictures with, where there are any. Raises ValueError where it reads text only."""
    for path in (FIXED_FOLDER / "train.parquet", FIXED_FOLDER / "eval.parquet"):
        images = conversations.count_with_images(path, "fix_data")
        if images and made.modality == "text":
            raise ValueError(
                f"sample_target: {images} conversations of {path} have images, expected none: {made.model} reads text only, "
                "and without them its answers would be to other questions. Name data without pictures in fix_data.raw, or set "
                "target.model to a vision-language model"
            )
        if images:
            return vision.CachedImageProcessor(folder, p.target.trust_remote_code)
    return None


def _plan_splits(p: schema.Params, place: Path, stack: contextlib.ExitStack) -> list[SampledSplit]:
    """What is to be asked."""
    s = p.sample_target
    hot = s.eval_temperature
    splits = []
    for name, source, most, mixture in [
        ("train", "train", s.train_rows, s.temperature_weights),
        ("eval", "eval", s.eval_rows, [(0.0, 1.0)]),
        ("eval_t", "eval", s.eval_rows if hot else 0, [(hot, 1.0)]),
    ]:
        path = FIXED_FOLDER / f"{source}.parquet"
        choice = requests.select_requests(path, most)
        shards = stack.enter_context(
            ParquetShardWriter(place / name, choice.num_requests, s.shard_size, conversations.SAMPLED_SCHEMA)
        )
        splits.append(SampledSplit(name, path, choice, mixture, shards))
    return splits


def _make_backend(work: SamplingContext, stack: contextlib.ExitStack, place: Path) -> Callable[[SampledSplit], None]:
    """What answers questions. The eval split of `keep` too: replay is exact on the target's own words only."""
    s, t = work.p.sample_target, work.p.target
    if s.backend == "server" or (s.backend == "keep" and s.server.is_configured):
        reach = _open_server_access(work, stack, place)
        return lambda split: asyncio.run(_ask_servers(work, reach, split))
    model = loading.load_target(str(work.folder), None, t.dtype, t.device, t.trust_remote_code)
    return lambda split: _generate_split(work, model, split)


def _print_split(p: schema.Params, split: SampledSplit) -> None:
    """Print what became of a split. Raises ValueError where nothing did."""
    s, counted = p.sample_target, split.shards.counts
    if not counted["rows"] and split.name != "eval_t":
        raise ValueError(
            f"sample_target: no row is left in the {split.name} split, expected at least one ({split.asked} sampled, "
            f"{counted['truncated']} cut at max_new_tokens); raise sample_target.{split.name}_rows or max_new_tokens"
        )
    how = " and ".join(f"{temperature:g}" for temperature, _ in split.mixture)
    how = "of the data" if s.backend == "keep" and split.name == "train" else f"at temperature {how}"
    shares = f"{counted['truncated']} cut at {s.max_new_tokens} tokens"
    left = split.choice.num_unrequested
    shares += f", {left} questions not asked" if left else ""
    print(f"{split.name}: {counted['rows']} answers {how}, {counted['tokens']} tokens, {shares}")


def _write_report(work: SamplingContext, splits: list[SampledSplit]) -> dict[str, Any]:
    """results/sample_report.json. What was counted in shards that an earlier, killed run published is in it."""
    whole: Counter[str] = sum((split.shards.counts for split in splits), Counter())
    of = lambda kind: {k.split("/")[1]: n for k, n in sorted(whole.items()) if k.startswith(f"{kind}/")}  # noqa: E731
    report: dict[str, Any] = {
        "rows_in": sum(split.asked for split in splits),
        "rows_out": whole["rows"],
        "dropped": of("dropped"),
        "not_asked": {split.name: split.choice.num_unrequested for split in splits},  # beyond train_rows or eval_rows
        "sources": {
            split.name: {name: asdict(share) for name, share in split.choice.sources.items()} for split in splits
        },
        "truncated": {split.name: split.shards.counts["truncated"] for split in splits},
        "tokens": {split.name: split.shards.counts["tokens"] for split in splits},
        "shards": {split.name: split.shards.num_shards for split in splits},
        "token_ids": of("token_ids"),  # where those of an answer come from
        "temperatures": of("temperature"),
        "backend": work.p.sample_target.backend,
        "asked_again": dict(work.asked_again),
        "server_restarts": work.own_server.restarted if work.own_server else 0,
        "preview": _read_examples(work.tokenizer),
    }
    assert report["rows_in"] == report["rows_out"] + sum(report["dropped"].values())
    return report


def _settle_answer(
    work: SamplingContext, split: SampledSplit, q: TargetRequest, heat: float | None, prompt_ids: list[int], answer_ids: list[int],
    finish_reason: str, source: str,
) -> None:  # fmt: skip
    """Put an answer into its place, or count why it has none. Raises ValueError for a mask that would teach nothing."""
    s, eos = work.p.sample_target, work.made.eos_token_ids
    cut, dropped = finish_reason == "length", None
    if source != "template" and all(token in eos for token in answer_ids):
        dropped = "empty"  # a target may end at once: nothing to learn, and nothing broken
    elif work.eyes and work.eyes.token in answer_ids:
        dropped = "picture_token_in_answer"  # it stands for an embedding that there isn't
    else:
        chat_template.check_loss_mask(q.id, prompt_ids, answer_ids, eos, not cut)
    if cut and s.truncated == "drop":
        dropped = "truncated"
    counts = {"truncated": int(cut)}
    if dropped:
        split.shards.set_row(q.position, None, {f"dropped/{dropped}": 1} | counts)
        return
    row = {
        "id": q.id, "prompt_ids": prompt_ids, "answer_ids": answer_ids, "finish_reason": finish_reason,
        "temperature": heat, "top_p": s.top_p if heat else None, "source_row": q.source_row, "verdict": q.verdict,
        "images": q.images or None,
    }  # fmt: skip
    counts |= {"rows": 1, "tokens": len(answer_ids), f"token_ids/{source}": 1}
    if split.name == "train":
        counts[f"temperature/{'the data' if heat is None else format(heat, 'g')}"] = 1
    split.shards.set_row(q.position, row, counts)


def _drop_request(split: SampledSplit, q: TargetRequest, reason: str) -> None:
    split.shards.set_row(q.position, None, {f"dropped/{reason}": 1})


def _draw_temperature(work: SamplingContext, split: SampledSplit, name: str) -> float:
    """The temperature of one row: from the seed and its id alone, so that neither order nor shards nor servers are in it."""
    weights = list(itertools.accumulate(weight for _, weight in split.mixture))
    at = _hash_to_number(f"{work.p.sample_target.seed}:temperature:{name}") / 2**32 * weights[-1]
    return next(heat for (heat, _), upto in zip(split.mixture, weights, strict=True) if at < upto)


def _make_seed(seed: int, name: str) -> int:
    """Of one request: from the row and its turn, so that neither order nor concurrency is in it."""
    return _hash_to_number(f"{seed}:{name}") >> 1


def _hash_to_number(text: str) -> int:
    """One of 2**32, by the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _encode_prompt(work: SamplingContext, q: TargetRequest, history: list[dict[str, Any]]) -> list[int]:
    ids = chat_template.encode_prompt(work.tokenizer, history, work.p.sample_target.thinking, q.tools)
    chat_template.check_loss_mask(
        q.id, ids, [work.end], work.made.eos_token_ids, complete=False
    )  # of the mask, the prompt's half
    return _expand_images(work, q, ids)


def _expand_images(work: SamplingContext, q: TargetRequest, ids: list[int]) -> list[int]:
    """A rendered prompt's ids with each picture's token as often as the target sees it."""
    if work.eyes is None:
        return ids
    try:
        return vision.expand_image_tokens(ids, work.eyes.token, work.eyes.sizes(q.images))
    except ValueError as error:
        raise ValueError(f"sample_target: row {q.id}: {error}") from None


def _explain_unaskable(work: SamplingContext, q: TargetRequest) -> str | None:
    """Why a question can't be asked, one word that the report counts; decodes its pictures."""
    if q.unusable_reason or work.eyes is None:
        return q.unusable_reason
    mark = work.tokenizer.convert_ids_to_tokens(work.eyes.token)
    if any(mark in json.dumps(message, ensure_ascii=False) for message in q.messages[: q.answer_index + 1]):
        return "picture_token_in_text"  # a target would look for a picture there
    try:
        work.eyes.sizes(q.images)
    except vision.UnreadableImageError:
        return "image_unreadable"
    return None


# In this process


def _generate_split(work: SamplingContext, model: Any, split: SampledSplit) -> None:
    """Shard by shard; batches hold prompts of one temperature and like length, so that little is padding."""
    s, eos, tokenizer, shards = work.p.sample_target, work.made.eos_token_ids, work.tokenizer, split.shards
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    every = itertools.chain.from_iterable(split.conversations())
    with tqdm(total=split.asked, desc=f"sample {split.name}", unit="row", mininterval=2) as bar:
        for number, group in itertools.groupby(every, key=lambda q: shards.shard_of(q.position)):
            if number in shards.published:
                bar.update(shards.shard_length(number))
                continue
            for first, heat, batch in _batch_requests(work, split, list(group)):
                prompts = [ids for _, ids in batch]
                settings, seed = (s.max_new_tokens, heat, s.top_p), s.seed + number * s.shard_size + first
                images = [path for q, _ in batch for path in q.images]
                asked, journal = (
                    make_journal_key(["transformers", prompts, images, settings, seed]),
                    shards.journal(number),
                )
                if asked not in journal.done:
                    seen = work.eyes.see(images) if work.eyes and images else None
                    journal.add(asked, generation.generate_answers(model, prompts, *settings, eos, pad, seed, seen))
                # Settling may publish the shard, and with it goes its journal.
                for (q, prompt_ids), (ids, finish_reason) in zip(batch, list(journal.done[asked]), strict=True):
                    _settle_answer(work, split, q, heat, prompt_ids, ids, finish_reason, "exact")
                bar.update(len(batch))


def _batch_requests(
    work: SamplingContext, split: SampledSplit, asked: list[TargetRequest]
) -> Iterator[tuple[int, float, list[tuple[TargetRequest, list[int]]]]]:
    """(place of its first row, temperature, questions and their prompts) of each batch; malformed rows are dropped."""
    ready = []
    for q in asked:
        if reason := _explain_unaskable(work, q):
            _drop_request(split, q, reason)
        else:
            ready.append(
                (_draw_temperature(work, split, q.id), q, _encode_prompt(work, q, q.messages[: q.answer_index]))
            )
    ready.sort(key=lambda one: (one[0], len(one[2])))
    first = 0
    for heat, alike in itertools.groupby(ready, key=lambda one: one[0]):
        rows = [(q, ids) for _, q, ids in alike]
        for at in range(0, len(rows), work.p.sample_target.batch_size):
            batch = rows[at : at + work.p.sample_target.batch_size]
            yield first, heat, batch
            first += len(batch)


# The data's own answers


def _keep_data_answers(work: SamplingContext, split: SampledSplit) -> None:
    """Each turn as the target would have been prompted for it and have said it."""
    s, eos = work.p.sample_target, work.made.eos_token_ids
    for asked in split.conversations():
        missing = [q for q in asked if not split.shards.is_published(q.position)]
        if not missing:
            continue
        first = asked[0]
        try:
            turns = (
                []
                if all(q.unusable_reason for q in asked)
                else chat_template.encode_turns(work.tokenizer, first.messages, eos, s.thinking, first.tools)
            )
        except ValueError as error:
            name = first.id.rpartition(".")[0]
            raise ValueError(f"sample_target: row {name} (line {first.source_row} of the raw data), {error}") from None
        for q in missing:
            if reason := _explain_unaskable(work, q):
                _drop_request(split, q, reason)
            else:
                asked_ids, answer_ids = turns[q.position - first.position]
                _settle_answer(work, split, q, None, _expand_images(work, q, asked_ids), answer_ids, "stop", "template")


# Through servers


@dataclass
class ServerAccess:
    """How to reach the servers; a client lives as long as an event loop, so there is one for each split."""

    urls: list[str]
    model: str
    engine: str | None
    check: Callable[[], None]
    api_key: str | None


def _open_server_access(work: SamplingContext, stack: contextlib.ExitStack, place: Path) -> ServerAccess:
    s, t = work.p.sample_target.server, work.p.target
    if s.launch is None:
        secret = http_session.read_api_key(s.api_key_env, client.PARAMS_SECTION)
        return ServerAccess(client.expand_urls(s.base_urls), s.model or t.model, None, lambda: None, secret)
    folder, port = str(work.folder), server.find_free_port()
    line = server.build_server_command(s.launch, folder, port, t.dtype, t.device, t.trust_remote_code) + s.launch_args
    log = place.parent / f"{s.launch}_server.log"  # outlives the run: it is what one looks at when it failed
    print(f"starting {s.launch} on port {port}; its log is {log}", flush=True)
    threads = t.num_threads if t.device == "cpu" else None
    running = server.run_server(
        s.launch, line, port, folder, log, s.start_timeout_s, restarts=MAX_SERVER_RESTARTS, threads=threads
    )
    work.own_server = stack.enter_context(running)
    return ServerAccess([work.own_server.base_url], folder, s.launch, work.own_server.check_alive, None)


async def _ask_servers(work: SamplingContext, reach: ServerAccess, split: SampledSplit) -> None:
    """Ask all of a split; workers take conversations from one queue."""
    way, shards = work.p.sample_target.server, split.shards
    ahead = SHARDS_AHEAD + way.concurrency // shards.size
    queue = _group_requests(work, split)
    with tqdm(total=split.asked, desc=f"sample {split.name}", unit="row", mininterval=2) as bar:
        bar.update(sum(map(shards.shard_length, shards.published)))
        async with client.ChatClient(
            reach.urls,
            reach.model,
            way.concurrency,
            way.timeout_s,
            way.attempts,
            reach.api_key,
            reach.engine,
            reach.check,
        ) as http:
            asking = ServerSampling(work, split, http, bar)

            async def worker() -> None:
                for group in queue:
                    while shards.shard_of(group[0].position) > shards.oldest + ahead:
                        await asyncio.sleep(0.1)
                    await asking.converse(group)

            try:
                with http_session.raise_first_error():
                    async with asyncio.TaskGroup() as tasks:
                        for _ in range(min(way.concurrency, split.asked)):
                            tasks.create_task(worker())
            finally:
                work.asked_again.update(http.retries_by_reason)
    if asking.refused:
        print(f"{split.name}: {len(asking.refused)} rows refused, the first: {asking.refused[0]}")


def _group_requests(work: SamplingContext, split: SampledSplit) -> Iterator[list[TargetRequest]]:
    """What is asked one after the other, of what is not done: a conversation, where later turns quote earlier answers."""
    for asked in split.conversations():
        groups = [asked] if work.p.sample_target.history == "target" else [[q] for q in asked]
        yield from (group for group in groups if not all(split.shards.is_published(q.position) for q in group))


class ServerSampling:
    """A split being asked of servers."""

    def __init__(self, work: SamplingContext, split: SampledSplit, http: client.ChatClient, bar: tqdm) -> None:
        self.work, self.split, self.http, self.bar = work, split, http, bar
        self.refused: list[str] = []
        self._begun, self._tokens = time.perf_counter(), 0

    async def converse(self, group: list[TargetRequest]) -> None:
        """Settle a group in its order. Of a conversation begun in a shard that is done, the journals tell what was said."""
        own_words = self.work.p.sample_target.history == "target"
        said: dict[int, dict[str, Any]] = {}  # turn -> the target's own message
        broken = False
        for place, q in enumerate(group):
            done = self.split.shards.is_published(q.position)
            # Decoding a large picture takes as long as a hundred answers: beside the loop, which goes on.
            reason = (
                await asyncio.to_thread(_explain_unaskable, self.work, q)
                if q.images
                else _explain_unaskable(self.work, q)
            )
            if broken or reason:
                if not done:
                    _drop_request(self.split, q, reason or "earlier_turn_incomplete")
                    self.bar.update()
                continue
            history = [said.get(k, message) for k, message in enumerate(q.messages[: q.answer_index])]
            answer = await self._answer(q, history, self._homes(group[place:]), done)
            if answer is None:
                broken = own_words
                continue
            got = _recover_token_ids(self.work, q, history, answer)
            if not done:
                self._settle(q, got)
            broken = own_words and not (got and self._quotable(got))
            if (
                own_words and "tool_calls" not in q.messages[q.answer_index]
            ):  # a call stays the data's own, whose result follows
                said[q.answer_index] = {"role": "assistant", "content": answer.text}
                if answer.reasoning:
                    said[q.answer_index]["reasoning_content"] = answer.reasoning

    def _quotable(self, got: "SampledAnswer") -> bool:
        """Whether later turns may be asked after this answer."""
        pictured = self.work.eyes and self.work.eyes.token in got.answer_ids
        return bool(got.answer_ids) and got.finish_reason == "stop" and not pictured

    def _homes(self, rest: list[TargetRequest]) -> list[int]:
        """The shards whose journals keep an answer: its own, and those whose rows will quote it."""
        numbers = dict.fromkeys(self.split.shards.shard_of(q.position) for q in rest)
        return [number for number in numbers if number not in self.split.shards.published]

    async def _answer(
        self, q: TargetRequest, history: list[dict[str, Any]], homes: list[int], done: bool
    ) -> client.ChatAnswer | None:
        """From a journal where it was given before; None where the servers refuse the row, or did."""
        about = self.work, q, history, _draw_temperature(self.work, self.split, q.id)
        body = await asyncio.to_thread(_build_body, *about) if q.images else _build_body(*about)
        asked, shards = make_journal_key(["server", q.id, body]), self.split.shards
        known = next((found for n in homes if (found := shards.journal(n).done.get(asked))), None)
        if known is None and done:
            return None
        if known is None:
            try:
                known = asdict(await self.http.complete(body, _build_engine_options(self.work, q, body["temperature"])))
            except http_session.RequestRefusedError as error:
                self._refuse(q, error)
                return None
            except ValueError as error:
                own = self.work.own_server
                said = f"\nThe last lines of its log, {own.log}:\n{server.read_log_tail(own.log)}" if own else ""
                raise ValueError(f"sample_target: row {q.id}: {error}{said}") from None
            self._tokens += known["completion_tokens"] or 0
        for number in homes:
            shards.journal(number).add(asked, known)
        return client.ChatAnswer(**known)

    def _refuse(self, q: TargetRequest, error: http_session.RequestRefusedError) -> None:
        self.refused.append(f"row {q.id}: {error}")
        if len(self.refused) >= MAX_LEADING_REFUSALS and not self.split.shards.counts["rows"]:
            raise ValueError(
                f"the servers refused the first {len(self.refused)} rows; correct what they say: {self.refused[0]}"
            ) from None
        _drop_request(self.split, q, "refused")
        self.bar.update()

    def _settle(self, q: TargetRequest, got: "SampledAnswer | None") -> None:
        if got is None:
            _drop_request(self.split, q, "token_ids_unknown")
        else:
            heat = _draw_temperature(self.work, self.split, q.id)
            _settle_answer(
                self.work, self.split, q, heat, got.prompt_ids, got.answer_ids, got.finish_reason, got.source
            )
        self.bar.update()
        rate, again = self._tokens / (time.perf_counter() - self._begun), sum(self.http.retries_by_reason.values())
        self.bar.set_postfix_str(
            f"{rate:.0f} tokens/s, {again} asked again, {len(self.refused)} refused", refresh=False
        )


def _build_body(work: SamplingContext, q: TargetRequest, history: list[dict[str, Any]], heat: float) -> dict[str, Any]:
    """What every server is asked, less the model."""
    s = work.p.sample_target
    body: dict[str, Any] = {
        "messages": requests.convert_to_openai(history, work.eyes.url if work.eyes else str),
        "temperature": heat,
        "top_p": s.top_p,
        "max_tokens": s.max_new_tokens,
        "seed": _make_seed(s.seed, q.id),
    }
    if q.tools:
        body["tools"] = q.tools
    if s.thinking is not None:
        body["chat_template_kwargs"] = chat_template.build_template_kwargs(s.thinking)
    return body


def _build_engine_options(work: SamplingContext, q: TargetRequest, heat: float) -> dict[str, dict[str, Any]]:
    """What is added for each engine. Only temperature and top_p shape the distribution: the model's generation defaults are
    put aside, as in sample.py. `transformers serve` would even stay greedy at any temperature, unless do_sample is said.
    """
    eos, pad = work.made.eos_token_ids, work.tokenizer.pad_token_id
    config = {
        "do_sample": heat > 0, "top_k": 0, "repetition_penalty": 1.0, "eos_token_id": eos,
        "pad_token_id": eos[0] if pad is None else pad, "max_new_tokens": work.p.sample_target.max_new_tokens,
    }  # fmt: skip
    plain = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    # To vLLM "none" means that a call stays text, which is what is wanted; to SGLang, that it leaves the tools out.
    as_text = {"tool_choice": "none"} if q.tools else {}
    return {
        "transformers": {"generation_config": json.dumps(config)},
        "sglang": plain,
        "vllm": {**plain, **as_text, "return_token_ids": True},
    }


@dataclass(frozen=True)
class SampledAnswer:
    """An answer as token ids."""

    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str
    source: str  # of the ids


def _recover_token_ids(
    work: SamplingContext, q: TargetRequest, history: list[dict[str, Any]], answer: client.ChatAnswer
) -> SampledAnswer | None:
    """None where they can't be told.

    Raises ValueError where the server's prompt is not ours: then its template is another one, and no row is right.
    """
    s, eos = work.p.sample_target, work.made.eos_token_ids
    ours, theirs = _encode_prompt(work, q, history), answer.prompt_ids
    if theirs is not None and work.eyes and theirs.count(work.eyes.token) == len(q.images):
        theirs = _expand_images(work, q, theirs)  # as they were rendered, before the server repeated any
    if (theirs is not None and theirs != ours) or (theirs is None and answer.prompt_tokens not in (None, len(ours))):
        extras = bool(q.tools) or any({"tool_calls", "reasoning_content"} & set(message) for message in history)
        hint = "; this row has tools, calls or thoughts, which not every server renders (docs/sampling.md)" * extras
        hint += "; this row has pictures, which the server may cut otherwise (docs/sampling.md)" * bool(q.images)
        raise ValueError(
            f"sample_target: row {q.id}: the server was prompted with {len(theirs) if theirs else answer.prompt_tokens} "
            f"tokens, this tokenizer and its chat template give {len(ours)}{' others' if theirs else ''}; let the server use "
            f"the target's own template, and set sample_target.thinking as it does{hint}"
        )
    finish_reason = answer.finish_reason
    if ids := answer.answer_ids:
        ended = finish_reason == "stop" and ids[-1] not in eos
        return SampledAnswer(ours, [*ids, work.end] if ended else ids, finish_reason, "server")
    ids = chat_template.encode_answer(work.tokenizer, history, answer.text, answer.reasoning, eos, s.thinking, q.tools)
    said = answer.completion_tokens
    if finish_reason == "length" and said == len(ids) + 1:
        finish_reason = "stop"  # the end token was the last that fitted
    if finish_reason == "stop":
        ids = [*ids, work.end]
    # Some servers leave the end token out of their count.
    if said is not None and said not in ((len(ids), len(ids) - 1) if finish_reason == "stop" else (len(ids),)):
        return None
    return SampledAnswer(ours, ids, finish_reason, "text, unchecked" if said is None else "text, as many")


# Preview


def _read_examples(tokenizer: Any) -> list[dict[str, Any]]:
    """The first training rows as text, for the report, which has no tokenizer; long ones without their middle."""
    rows = conversations.read_table(
        SAMPLED_FOLDER / "train", conversations.SAMPLED_SCHEMA, "sample_target", PREVIEW_ROWS
    )
    return [
        {
            "id": row["id"],
            "prompt": _clip_text(_decode_text(tokenizer, row["prompt_ids"])),
            "answer": _clip_text(tokenizer.decode(row["answer_ids"])),
            "prompt_tokens": len(row["prompt_ids"]),
            "answer_tokens": len(row["answer_ids"]),
            "finish_reason": row["finish_reason"],
        }
        for row in rows.to_dicts()
    ]


def _decode_text(tokenizer: Any, ids: list[int]) -> str:
    """A picture's thousand tokens as one and their number."""
    return re.sub(r"(<\|\w+\|>)\1+", lambda m: f"{m[1]}×{len(m[0]) // len(m[1])}", tokenizer.decode(ids))


def _clip_text(text: str) -> str:
    half = PREVIEW_CHARACTERS // 2
    return text if len(text) <= PREVIEW_CHARACTERS else f"{text[:half]} […] {text[-half:]}"


def _print_preview(p: schema.Params, *words: str) -> None:
    """Print rows with their masks: sampled ones where there are any, else the data's own answers as `keep` would mask them."""
    if len(words) != 2 or words[0] != "--preview" or not words[1].isdigit() or words[1] == "0":
        raise ValueError(f"expected no arguments or --preview N, found {' '.join(words)}")
    made, count = manifest.read_manifest(), int(words[1])
    tokenizer = chat_template.load_tokenizer(
        manifest.resolve_weights_folder(made), p.target.trust_remote_code, made.chat_template
    )
    sampled, fixed = SAMPLED_FOLDER / "train", FIXED_FOLDER / "train.parquet"
    if sampled.exists():
        print(f"{sampled}, its first {count} rows")
        rows = conversations.read_table(sampled, conversations.SAMPLED_SCHEMA, "sample_target", count).to_dicts()
    else:
        print(f"{fixed}, {count} of its turns, with the data's own answers; nothing is sampled yet")
        rows = []
        for asked in requests.read_requests(fixed, requests.select_requests(fixed, count)):
            eos, thinking = made.eos_token_ids, p.sample_target.thinking
            turns = chat_template.encode_turns(tokenizer, asked[0].messages, eos, thinking, asked[0].tools)
            pairs = zip(asked, turns, strict=False)  # one conversation may be asked in part
            rows += [{"id": q.id, "prompt_ids": a, "answer_ids": b} for q, (a, b) in pairs]
    on, off = ("[[", "]]") if os.environ.get("NO_COLOR") else ("\x1b[30;42m", "\x1b[0m")
    for row in rows:
        supervised, whole = len(row["answer_ids"]), len(row["prompt_ids"]) + len(row["answer_ids"])
        print(
            f"\n--- {row['id']}: {supervised} of {whole} tokens are trained on, {row.get('finish_reason', 'the data')}"
        )
        # Colour line by line: a terminal would else paint the margin too.
        answer = "\n".join(f"{on}{line}{off}" for line in tokenizer.decode(row["answer_ids"]).split("\n"))
        print(_decode_text(tokenizer, row["prompt_ids"]) + answer)


def _list_stage_gpus() -> list[int] | None:
    """A server that is started here may take all that there are; one that runs somewhere is nobody's here."""
    p = schema.load_params()
    s = p.sample_target
    if s.backend == "server" or (s.backend == "keep" and s.server.is_configured):
        return None if s.server.launch and p.target.device != "cpu" else []
    return p.target.gpus()


if __name__ == "__main__":
    run_stage(main, _list_stage_gpus)
