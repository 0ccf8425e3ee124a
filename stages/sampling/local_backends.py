"""Answers without a server: from the target in this process, or those of the data itself.

The torch engine answers the rows of all splits in pools, each row kept as it ends. Where it can't run the target,
transformers' generate answers batches of each split.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from stages.data import row_lengths
from stages.engine import pooled_decode
from stages.engine.decode_state import DecodeRequest
from stages.engine.pooled_decode import PooledEngine
from stages.engine.sampling import SamplingParams
from stages.params.engines import TORCH
from stages.sampling import sampled_split
from stages.sampling.answer_token_ids import SampledAnswer
from stages.sampling.requests import TargetRequest, UnusableRequestError
from stages.sampling.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import chat_template, generation
from stages.telemetry.machine_errors import is_out_of_memory

NO_ANSWER = (
    "the data has no answer to keep; set sample_target.backend: transformers or server, and the target writes answers"
)
POOL_ROWS = 1 << 13  # answered together: slots are idle at the end of a pool alone
MAX_BATCH_TOKENS = 1 << 17  # of the prompts of a batch, padded to the longest: 64 of 2,048
EncodedTurn = tuple[list[int], list[int]]  # prompt and answer ids


def keep_answers(context: SamplingContext, split: SampledSplit) -> None:
    """Store each turn's own answer after the prompt that the target would have had."""
    for conversation in split.read_unfinished_groups(by_conversation=True):
        missing = [request for request in conversation if not split.shards.is_set(request.position)]
        turns: list[EncodedTurn] = []
        for request in missing:
            try:
                if request.answer is None:
                    raise UnusableRequestError("no_answer", NO_ANSWER)
                context.check_request(request, request.messages[: request.answer_index + 1], request.messages)
                turns = turns or _encode_conversation(context, conversation[0])
                prompt_ids, answer_ids = turns[request.num_earlier_answers]
                context.check_tokens([*prompt_ids, *answer_ids])
            except UnusableRequestError as error:
                split.drop_request(request, error)
                continue
            prompt_ids = context.encoder.expand_images(request.row, prompt_ids, request.images)
            context.settle_answer(split, request, None, SampledAnswer(prompt_ids, answer_ids, "stop", "template"))


def _encode_conversation(context: SamplingContext, first: TargetRequest) -> list[EncodedTurn]:
    """Return the turns of the conversation of its `first` request. Raises UnusableRequestError, or ValueError naming the row."""
    try:
        return context.encoder.encode_turns(first.messages, first.tools)
    except chat_template.TemplateRefusalError as error:
        raise UnusableRequestError("refused_by_template", str(error)) from None
    except ValueError as error:
        name = first.id.rpartition(".")[0]
        raise ValueError(f"sample_target: row {name} ({first.origin}), {error}") from None


@dataclass(frozen=True)
class LocalRow:
    """A row to be answered in this process."""

    split: SampledSplit
    request: TargetRequest
    prompt_ids: list[int]
    temperature: float

    def settle(self, context: SamplingContext, ids: list[int], reason: str) -> None:
        answer = SampledAnswer(self.prompt_ids, ids, reason, "exact")
        context.settle_answer(self.split, self.request, self.temperature, answer)


def sample_splits(context: SamplingContext, model: Any, splits: list[SampledSplit]) -> None:
    """Sample whole splits by the torch engine, or by transformers' generate where it can't run the target."""
    engine = _build_engine(context, model)
    with sampled_split.show_progress(splits) as bar:
        if isinstance(engine, str):
            context.sampled_by = f"transformers' generate, since {engine}"
            for split in splits:
                _generate_split(context, model, split, bar)
            return
        context.sampled_by = TORCH.title
        slots = context.p.sample_target.batch_size or (64 if model.device.type == "cpu" else 512)
        rows = itertools.chain.from_iterable(_read_rows(context, split, bar) for split in splits)
        while pool := list(itertools.islice(rows, POOL_ROWS)):
            slots = _answer_pool(context, engine, pool, slots, bar)


def _build_engine(context: SamplingContext, model: Any) -> PooledEngine | str:
    """Return the engine, or why it can't run the target."""
    if reason := pooled_decode.explain_unsupported(model):
        return reason
    target = context.target
    try:
        return PooledEngine(model, target.eos_token_ids, context.p.sample_target.top_p, target.logits_scale)
    except ValueError as error:
        return str(error)


def _read_rows(
    context: SamplingContext, split: SampledSplit, bar: tqdm, with_answered: bool = False
) -> Iterator[LocalRow]:
    """Yield the rows that have no answer, `with_answered` all of shards that are not published; drop unusable requests."""
    for (request,) in split.read_unfinished_groups(by_conversation=False):
        if split.shards.is_set(request.position) and not with_answered:
            continue
        try:
            prompt_ids = context.encode_prompt(request, request.messages[: request.answer_index])
        except UnusableRequestError as error:
            split.drop_request(request, error)
            bar.update()
        else:
            temperature = split.draw_temperature(context.p.sample_target.seed, request.id)
            yield LocalRow(split, request, prompt_ids, temperature)


def _answer_pool(context: SamplingContext, engine: PooledEngine, pool: list[LocalRow], slots: int, bar: tqdm) -> int:
    """Answer all rows of a pool, each kept as it ends; halve the slots where memory runs out, and return them."""
    s, eos = context.p.sample_target, set(context.target.eos_token_ids)
    requests = []
    for row in pool:
        seed = sampled_split.make_seed(s.seed, row.request.id)
        sampling = SamplingParams(row.temperature, s.top_p, None, seed) if row.temperature else None
        requests.append(DecodeRequest(row.prompt_ids, s.max_new_tokens, sampling=sampling))
    missing = list(range(len(pool)))
    while missing:
        answered = set[int]()
        try:
            for index, ids in engine.answer([requests[number] for number in missing], slots):
                pool[missing[index]].settle(context, ids, "stop" if ids[-1] in eos else "length")
                answered.add(missing[index])
                bar.update()
        except (RuntimeError, MemoryError) as error:
            if engine.num_slots == 1 or not is_out_of_memory(error):
                raise
            slots = engine.num_slots // 2
            tqdm.write(f"out of memory with {engine.num_slots} answers at once, going on with {slots}")
        missing = [number for number in missing if number not in answered]
        if missing:  # the error is gone, and with it the tensors of its frames
            engine.free_memory()
    return slots


def _generate_split(context: SamplingContext, model: Any, split: SampledSplit, bar: tqdm) -> None:
    """Sample the shards in batches of one temperature and like prompt lengths, so that little is padding.

    Answers above temperature 0 depend on their batch: one of which a row is missing is answered again as a whole.
    """
    s, target, processor = context.p.sample_target, context.target, context.encoder.image_processor
    read = _read_rows(context, split, bar, with_answered=True)
    for shard, shard_rows in itertools.groupby(read, lambda row: split.shards.shard_of(row.request.position)):
        first = split.shards.find_start(shard)
        ready = sorted(shard_rows, key=lambda row: (row.temperature, len(row.prompt_ids)))
        for temperature, same_temperature in itertools.groupby(ready, key=lambda row: row.temperature):
            rows = list(same_temperature)
            lengths = [len(row.prompt_ids) for row in rows]
            for part in row_lengths.split_ascending(lengths, MAX_BATCH_TOKENS, s.batch_size or 64):
                batch, seed = rows[part], s.seed + first + part.start
                is_missing = [not split.shards.is_set(row.request.position) for row in batch]
                if not any(is_missing):
                    continue
                prompts = [row.prompt_ids for row in batch]
                settings = s.max_new_tokens, temperature, s.top_p
                images = [path for row in batch for path in row.request.images]
                patches = processor.load_patches(images) if processor and images else None
                ends, pad = target.eos_token_ids, context.encoder.pad_token
                found = generation.generate_answers(model, prompts, *settings, ends, pad, seed, patches)
                for row, answer in itertools.compress(zip(batch, found, strict=True), is_missing):
                    row.settle(context, *answer)
                bar.update(sum(is_missing))
            first += len(rows)
