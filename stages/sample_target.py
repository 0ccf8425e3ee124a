"""sample_target: questions -> the target's own answers.   python -m stages.sample_target [--preview N]

A draft learns what the target says, not what the data says: training on the target's own answers is worth about 10% of
accept length (research/users.md 1.4). Training answers are drawn at `temperature`; eval answers are the target's at
temperature 0, and a second set at `temperature` where that is above 0. Each assistant turn is one row: its prompt is
the conversation before it, rendered by the chat template as a server would.

Answers come from the target in this process, or from servers; or, for training only, from the data itself. Each is
kept in .scratch as it comes, under the digest of what was asked, so that a killed run goes on where it was.
`--preview N` shows N rows with what is trained on in colour. More in docs/sampling.md.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import torch
from tqdm import tqdm

from stages import params
from stages.drafting import prompt, sample, target
from stages.formats import atomic, conversations, manifest, scratch
from stages.formats.journal import Journal, key
from stages.serving import client, server

FIXED, SAMPLED, REPORT = Path("data/fixed"), Path("data/sampled"), Path("results/sample_report.json")
COLUMNS = ("id", "prompt_ids", "source_row", "verdict")
ALL_REFUSED = 8  # refused rows, and none answered, that stop a run
Rows = list[dict[str, Any]]


@dataclass
class Work:
    """What every backend needs."""

    p: params.Params
    tokenizer: Any
    made: manifest.Manifest
    folder: Path
    journal: Journal
    end: int  # the token that closes an answer
    dropped: Counter = field(default_factory=Counter)
    token_ids: Counter = field(default_factory=Counter)  # where those of an answer come from
    asked_again: Counter = field(default_factory=Counter)


def main(*words: str) -> None:
    p = params.load()
    if words:
        _preview(p, *words)
        return
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    made = manifest.read()
    folder = manifest.weights(made)
    tokenizer = prompt.load_tokenizer(folder, p.target.trust_remote_code, made.chat_template)
    s = p.sample_target
    place = scratch.place("sample_target", asdict(made), p.target.dtype, s.server.launch, s.server.launch_args)

    report: dict = {"rows_in": 0, "rows_out": 0, "not_asked": {}, "truncated": {}, "tokens": {}}
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(place / "answers.jsonl"))
        work = Work(p, tokenizer, made, folder, journal, prompt.end_id(tokenizer, made.eos_token_ids))
        if work.journal.resumed:
            print(f"resumed: {work.journal.resumed} pieces of work were done before, kept in {place}")
        answer = _backend(work, stack, place)
        for split, source, rows, temperature in [
            ("train", "train", s.train_rows, s.temperature),
            ("eval", "eval", s.eval_rows, 0.0),
            ("eval_t", "eval", s.eval_rows if s.temperature > 0 else 0, s.temperature),
        ]:
            fixed = conversations.read(FIXED / f"{source}.parquet", conversations.FIXED, "fix_data")
            if s.backend == "keep" and split == "train":
                asked, answers = _keep(work, fixed, rows)
            else:
                questions = _questions(fixed, rows)
                asked, answers = len(questions), answer(questions, temperature, split)
            kept = [a for a in answers if s.truncated == "keep" or a["finish_reason"] == "stop"]
            report["rows_in"] += asked
            report["not_asked"][split] = _turns(fixed) - asked  # beyond train_rows or eval_rows
            report["rows_out"] += len(kept)
            work.dropped["truncated"] += len(answers) - len(kept)
            report["truncated"][split] = sum(a["finish_reason"] == "length" for a in answers)
            report["tokens"][split] = sum(len(a["answer_ids"]) for a in kept)
            if not kept and split != "eval_t":
                raise ValueError(
                    f"sample_target: no row is left in the {split} split, expected at least one ({asked} sampled, "
                    f"{report['truncated'][split]} cut at max_new_tokens); raise sample_target.{source}_rows or max_new_tokens"
                )
            table = pl.DataFrame(kept, schema=conversations.SAMPLED)
            conversations.write(SAMPLED / f"{split}.parquet", table, conversations.SAMPLED)
            how = "of the data" if s.backend == "keep" and split == "train" else f"at temperature {temperature}"
            shares = f"{report['truncated'][split]} cut at {s.max_new_tokens} tokens"
            shares += f", {report['not_asked'][split]} questions not asked" if report["not_asked"][split] else ""
            print(f"{split}: {len(kept)} answers {how}, {report['tokens'][split]} tokens, {shares}")
    report["dropped"] = dict(work.dropped)
    assert report["rows_in"] == report["rows_out"] + sum(work.dropped.values())
    report |= {"backend": s.backend, "token_ids": dict(work.token_ids), "asked_again": dict(work.asked_again)}
    atomic.write_json(REPORT, {**report, "seconds": round(time.perf_counter() - started, 2)})
    scratch.done(place)


def _turns(fixed: pl.DataFrame) -> int:
    """How many answers there are to ask for."""
    roles = pl.element().struct.field("role") == "assistant"
    return int(fixed.select(pl.col("messages").list.eval(roles).list.sum().sum()).item() or 0)


def _questions(fixed: pl.DataFrame, rows: int | None) -> Rows:
    """One question per assistant turn, in the data's order, the first `rows` of them."""
    questions: Rows = []
    for row in fixed.iter_rows(named=True):
        for number, turn in enumerate(prompt.turns(row["messages"])):
            if rows is not None and len(questions) >= rows:
                return questions
            questions.append({**row, "id": f"{row['id']}.{number}", "conversation": row["id"], "turn": turn})
    return questions


def _backend(work: Work, stack: contextlib.ExitStack, place: Path) -> Callable[[Rows, float, str], Rows]:
    """What answers questions. The eval split of `keep` too: replay is exact on the target's own words only."""
    s = work.p.sample_target
    if s.backend == "server" or (s.backend == "keep" and s.server.known):
        reach = _reach(work, stack, place)
        return lambda questions, temperature, split: asyncio.run(_ask_all(work, reach, questions, temperature, split))
    t = work.p.target
    model = target.load(str(work.folder), None, t.dtype, t.device, t.trust_remote_code)
    return lambda questions, temperature, split: _answer(work, model, questions, temperature, split)


# In this process


def _answer(work: Work, model: Any, questions: Rows, temperature: float, split: str) -> Rows:
    """Answers in the questions' order; batches hold prompts of like length, so that little is padding."""
    s, eos, tokenizer = work.p.sample_target, work.made.eos_token_ids, work.tokenizer
    for q in questions:
        q["prompt_ids"] = prompt.prompt_ids(tokenizer, q["messages"][: q["turn"]], s.thinking)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    order = sorted(range(len(questions)), key=lambda i: len(questions[i]["prompt_ids"]))
    answers: dict[int, dict] = {}
    with tqdm(total=len(questions), desc=f"sample {split}", unit="row", mininterval=2) as bar:
        for first in range(0, len(order), s.batch_size):
            batch = order[first : first + s.batch_size]
            prompts = [questions[i]["prompt_ids"] for i in batch]
            settings = (s.max_new_tokens, temperature, s.top_p)
            asked = key(["transformers", prompts, settings, s.seed + first])
            if asked not in work.journal.done:
                work.journal.add(asked, sample.answer(model, prompts, *settings, eos, pad, seed=s.seed + first))
            for i, (ids, finish_reason) in zip(batch, work.journal.done[asked], strict=True):
                columns = {name: questions[i][name] for name in COLUMNS}
                answers[i] = {**columns, "answer_ids": ids, "finish_reason": finish_reason, "temperature": temperature}
            bar.update(len(batch))
    work.token_ids["exact"] += len(questions)
    return [answers[i] for i in range(len(questions))]


# The data's own answers


def _keep(work: Work, fixed: pl.DataFrame, rows: int | None) -> tuple[int, Rows]:
    """How many turns there are, and each as the target would have been prompted for it and have said it."""
    s, eos = work.p.sample_target, work.made.eos_token_ids
    kept: Rows = []
    for row in fixed.iter_rows(named=True):
        if rows is not None and len(kept) >= rows:
            break
        try:
            turns = prompt.exploded(work.tokenizer, row["messages"], eos, s.thinking)
        except ValueError as error:
            raise ValueError(
                f"sample_target: row {row['id']} (line {row['source_row']} of the raw data), {error}"
            ) from None
        for number, (prompt_ids, answer_ids) in enumerate(turns):
            name = f"{row['id']}.{number}"
            prompt.check(name, prompt_ids, answer_ids, eos)
            columns = {"id": name, "prompt_ids": prompt_ids, "source_row": row["source_row"], "verdict": row["verdict"]}
            kept.append({**columns, "answer_ids": answer_ids, "finish_reason": "stop", "temperature": None})
    kept = kept if rows is None else kept[:rows]
    work.token_ids["template"] += len(kept)
    return len(kept), kept


# Through servers


@dataclass
class Reach:
    """How to reach the servers; a client lives as long as an event loop, so there is one for each split."""

    urls: list[str]
    model: str
    engine: str | None
    check: Callable[[], None]
    api_key: str | None


def _reach(work: Work, stack: contextlib.ExitStack, place: Path) -> Reach:
    s, t = work.p.sample_target.server, work.p.target
    if s.launch is None:
        return Reach(client.expand(s.base_urls), s.model or t.model, None, lambda: None, client.api_key(s.api_key_env))
    folder, port = str(work.folder), server.free_port()
    line = server.command(s.launch, folder, port, t.dtype, t.device, t.trust_remote_code) + s.launch_args
    log = place.parent / f"{s.launch}_server.log"  # outlives the run: it is what one looks at when it failed
    print(f"starting {s.launch} on port {port}; its log is {log}", flush=True)
    running = stack.enter_context(server.started(s.launch, line, port, folder, log, s.start_timeout_s))
    return Reach([running.base_url], running.model, s.launch, running.check, None)


async def _ask_all(work: Work, reach: Reach, questions: Rows, temperature: float, split: str) -> Rows:
    """Answers in the questions' order, without those that were dropped; workers take conversations from one queue."""
    s, way = work.p.sample_target, work.p.sample_target.server
    found: list[dict | None] = [None] * len(questions)
    conversations_: dict[str, list[int]] = {}
    for i, q in enumerate(questions):
        # Turns are asked one after the other where a later one quotes an earlier one's answer, else all at once.
        conversations_.setdefault(q["conversation"] if s.history == "target" else q["id"], []).append(i)
    queue = iter(conversations_.values())
    refused: list[str] = []
    begun, tokens = time.perf_counter(), 0
    with tqdm(total=len(questions), desc=f"sample {split}", unit="row", mininterval=2) as bar:
        async with client.Client(
            reach.urls,
            reach.model,
            way.concurrency,
            way.timeout_s,
            way.attempts,
            reach.api_key,
            reach.engine,
            reach.check,
        ) as http:

            async def worker() -> None:
                nonlocal tokens
                for indices in queue:
                    said: dict[int, str] = {}  # turn -> the target's own words
                    broken = False
                    for i in indices:
                        q = questions[i]
                        if broken:
                            work.dropped["earlier_turn_incomplete"] += 1
                            bar.update()
                            continue
                        history = [
                            {**m, "content": said.get(k, m["content"])}
                            for k, m in enumerate(q["messages"][: q["turn"]])
                        ]
                        try:
                            answer = await _ask(work, http, q["id"], history, temperature)
                        except client.Refused as error:
                            refused.append(f"row {q['id']}: {error}")
                            if len(refused) >= ALL_REFUSED and not any(found):
                                raise ValueError(
                                    f"the servers refused the first {len(refused)} rows; correct what they say: {refused[0]}"
                                ) from None
                            work.dropped["refused"] += 1
                            broken = True
                        else:
                            row = _row(work, q, history, answer, temperature)
                            found[i] = row
                            tokens += len(row["answer_ids"]) if row else 0
                            said[q["turn"]] = answer.text
                            broken = s.history == "target" and (row is None or row["finish_reason"] != "stop")
                        bar.update()
                        rate = tokens / (time.perf_counter() - begun)
                        bar.set_postfix_str(
                            f"{rate:.0f} tokens/s, {sum(http.asked_again.values())} asked again", refresh=False
                        )

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(way.concurrency, len(conversations_))):
                        group.create_task(worker())
            except* ValueError as failed:  # the first says it; the others were cancelled, or failed the same way
                raise failed.exceptions[0] from None
            finally:
                work.asked_again.update(http.asked_again)
    if refused:
        print(f"{split}: {len(refused)} rows refused, the first: {refused[0]}")
    return [row for row in found if row is not None]


async def _ask(work: Work, http: client.Client, name: str, history: Rows, temperature: float) -> client.Answer:
    """One answer, from the journal where it was given before."""
    s, eos = work.p.sample_target, work.made.eos_token_ids
    body: dict[str, Any] = {
        "messages": history,
        "temperature": temperature,
        "top_p": s.top_p,
        "max_tokens": s.max_new_tokens,
        "seed": _seed(s.seed, name),
    }
    if s.thinking is not None:
        body["chat_template_kwargs"] = prompt.template_settings(s.thinking)
    asked = key(["server", name, body])
    if asked not in work.journal.done:
        # Only temperature and top_p shape the distribution: the model's generation defaults are put aside, as in
        # sample.py. `transformers serve` would even stay greedy at any temperature, unless do_sample is said.
        pad = work.tokenizer.pad_token_id
        config = {
            "do_sample": temperature > 0, "top_k": 0, "repetition_penalty": 1.0, "eos_token_id": eos,
            "pad_token_id": eos[0] if pad is None else pad, "max_new_tokens": s.max_new_tokens,
        }  # fmt: skip
        plain = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        engines: dict[str, dict[str, Any]] = {
            "transformers": {"generation_config": json.dumps(config)},
            "sglang": plain,
            "vllm": {**plain, "return_token_ids": True},
        }
        try:
            answer = await http.ask(body, engines)
        except ValueError as error:
            raise ValueError(f"sample_target: row {name}: {error}") from None
        work.journal.add(asked, asdict(answer))
    return client.Answer(**work.journal.done[asked])


def _row(work: Work, q: dict, history: Rows, answer: client.Answer, temperature: float) -> dict | None:
    """The answer as token ids, or None where they can't be had.

    Raises ValueError where the server's prompt is not ours: then its template is another one, and no row is right.
    """
    s, eos = work.p.sample_target, work.made.eos_token_ids
    ours = prompt.prompt_ids(work.tokenizer, history, s.thinking)
    theirs = answer.prompt_ids
    if (theirs is not None and theirs != ours) or (theirs is None and answer.prompt_tokens not in (None, len(ours))):
        raise ValueError(
            f"sample_target: row {q['id']}: the server was prompted with {len(theirs) if theirs else answer.prompt_tokens} "
            f"tokens, this tokenizer and its chat template give {len(ours)}{' others' if theirs else ''}; let the server use "
            "the target's own template, and set sample_target.thinking as it does"
        )
    if answer.answer_ids:
        ids, finish_reason, source = answer.answer_ids, answer.finish_reason, "server"
        if finish_reason == "stop" and ids[-1] not in eos:
            ids = [*ids, work.end]
    else:
        ids = prompt.retokenised(work.tokenizer, history, answer.text, answer.reasoning, eos, s.thinking)
        finish_reason, source = answer.finish_reason, "text"
        said = answer.completion_tokens
        if finish_reason == "length" and said == len(ids) + 1:
            finish_reason = "stop"  # the end token was the last that fitted
        if finish_reason == "stop":
            ids = [*ids, work.end]
        # Some servers leave the end token out of their count.
        if said is not None and said not in ((len(ids), len(ids) - 1) if finish_reason == "stop" else (len(ids),)):
            work.dropped["token_ids_unknown"] += 1
            return None
        source = "text, unchecked" if said is None else "text, as many"
    if not ids:  # a target may end at once, but then with an end token
        work.dropped["empty"] += 1
        return None
    work.token_ids[source] += 1
    columns = {"id": q["id"], "prompt_ids": ours, "source_row": q["source_row"], "verdict": q["verdict"]}
    return {**columns, "answer_ids": ids, "finish_reason": finish_reason, "temperature": temperature}


def _seed(seed: int, name: str) -> int:
    """Of one request: from the row and its turn, so that neither order nor concurrency is in it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


# Preview


def _preview(p: params.Params, *words: str) -> None:
    """Print rows with their masks: sampled ones where there are any, else the data's own answers as `keep` would mask them."""
    if len(words) != 2 or words[0] != "--preview" or not words[1].isdigit() or words[1] == "0":
        raise ValueError(f"expected no arguments or --preview N, found {' '.join(words)}")
    made, count = manifest.read(), int(words[1])
    tokenizer = prompt.load_tokenizer(manifest.weights(made), p.target.trust_remote_code, made.chat_template)
    sampled = SAMPLED / "train.parquet"
    if sampled.exists():
        print(f"{sampled}, its first {count} rows")
        rows = conversations.read(sampled, conversations.SAMPLED, "sample_target").head(count).to_dicts()
    else:
        print(f"{FIXED}/train.parquet, its first {count} turns, with the data's own answers; nothing is sampled yet")
        fixed = conversations.read(FIXED / "train.parquet", conversations.FIXED, "fix_data").head(count)
        rows = []
        for row in fixed.to_dicts():
            turns = prompt.exploded(tokenizer, row["messages"], made.eos_token_ids, p.sample_target.thinking)
            rows += [{"id": f"{row['id']}.{n}", "prompt_ids": a, "answer_ids": b} for n, (a, b) in enumerate(turns)]
    on, off = ("[[", "]]") if os.environ.get("NO_COLOR") else ("\x1b[30;42m", "\x1b[0m")
    for row in rows[:count]:
        supervised, whole = len(row["answer_ids"]), len(row["prompt_ids"]) + len(row["answer_ids"])
        print(
            f"\n--- {row['id']}: {supervised} of {whole} tokens are trained on, {row.get('finish_reason', 'the data')}"
        )
        # Colour line by line: a terminal would else paint the margin too.
        answer = "\n".join(f"{on}{line}{off}" for line in tokenizer.decode(row["answer_ids"]).split("\n"))
        print(tokenizer.decode(row["prompt_ids"]) + answer)


if __name__ == "__main__":
    params.run_stage(main)
