"""Answers without a server: from the target in this process, shard by shard, or those of the data itself."""

import itertools
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from stages.data import row_lengths
from stages.runtime.journal import make_journal_key
from stages.sampling.requests import TargetRequest, UnusableRequestError
from stages.sampling.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import chat_template, generation
from stages.target.answer_token_ids import SampledAnswer

NO_ANSWER = (
    "the data has no answer to keep; set sample_target.backend: transformers or server, and the target writes answers"
)
MAX_BATCH_TOKENS = 1 << 17  # of the prompts of a batch, padded to the longest: 64 of 2,048
EncodedTurn = tuple[list[int], list[int]]  # prompt and answer ids


def keep_answers(context: SamplingContext, split: SampledSplit) -> None:
    """Store each turn's own answer after the prompt that the target would have had."""
    for conversation in split.read_conversations():
        missing = [request for request in conversation if not split.shards.is_published(request.position)]
        turns: list[EncodedTurn] | UnusableRequestError | None = None
        for request in missing:
            try:
                context.check_usable(request)
                if request.answer is None:
                    raise UnusableRequestError("no_answer", NO_ANSWER)
                if hidden := context.encoder.explain_hidden_answer(
                    request.messages, request.answer_index, request.tools
                ):
                    raise UnusableRequestError("not_in_template", hidden)
                turns = turns or _encode_conversation(context, conversation[0])
                if isinstance(turns, UnusableRequestError):
                    raise turns
                prompt_ids, answer_ids = turns[request.num_earlier_answers]
                context.check_tokens([*prompt_ids, *answer_ids])
            except UnusableRequestError as error:
                split.drop_request(request, error)
                continue
            prompt_ids = context.encoder.expand_images(request.row, prompt_ids, request.images)
            context.settle_answer(split, request, None, SampledAnswer(prompt_ids, answer_ids, "stop", "template"))


def _encode_conversation(context: SamplingContext, first: TargetRequest) -> list[EncodedTurn] | UnusableRequestError:
    """Return the turns of the conversation of its `first` request, or why it has none. Raises ValueError naming the row."""
    try:
        return context.encoder.encode_turns(first.messages, first.tools)
    except chat_template.TemplateRefusalError as error:
        return UnusableRequestError("refused_by_template", str(error))
    except ValueError as error:
        name = first.id.rpartition(".")[0]
        raise ValueError(f"sample_target: row {name} ({first.origin}), {error}") from None


def generate_split(context: SamplingContext, model: Any, split: SampledSplit) -> None:
    """Sample in batches of one temperature and like prompt lengths, so that little is padding."""
    s, eos, shards = context.p.sample_target, context.target.eos_token_ids, split.shards
    pad, processor = context.encoder.pad_token, context.encoder.image_processor
    all_requests = itertools.chain.from_iterable(split.read_conversations())
    with tqdm(total=split.selection.num_requests, desc=f"sample {split.name}", unit="row", mininterval=2) as bar:
        for number, group in itertools.groupby(all_requests, key=lambda request: shards.shard_of(request.position)):
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
                    context.settle_answer(split, request, temperature, SampledAnswer(prompt_ids, ids, reason, "exact"))
                bar.update(len(batch))


def _batch_requests(
    context: SamplingContext, split: SampledSplit, group: list[TargetRequest]
) -> Iterator[tuple[int, float, list[tuple[TargetRequest, list[int]]]]]:
    """Yield (number of its first row, temperature, requests and their prompts) of each batch; drop unusable requests."""
    seed, size = context.p.sample_target.seed, context.p.sample_target.batch_size
    ready = []
    for request in group:
        try:
            prompt_ids = context.encode_prompt(request, request.messages[: request.answer_index])
        except UnusableRequestError as error:
            split.drop_request(request, error)
        else:
            ready.append((split.draw_temperature(seed, request.id), request, prompt_ids))
    ready.sort(key=lambda entry: (entry[0], len(entry[2])))
    first = 0
    for temperature, same_temperature in itertools.groupby(ready, key=lambda entry: entry[0]):
        rows = [(request, ids) for _, request, ids in same_temperature]
        for part in row_lengths.split_ascending([len(ids) for _, ids in rows], MAX_BATCH_TOKENS, size):
            yield first, temperature, rows[part]
            first += part.stop - part.start
