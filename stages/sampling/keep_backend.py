"""Keep the data's own answers, as the target's tokenizer and chat template render them."""

from stages.data.requests import TargetRequest, UnusableRequestError
from stages.data.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import chat_template
from stages.target.answer_token_ids import SampledAnswer

NO_ANSWER = (
    "the data has no answer to keep; set sample_target.backend: transformers or server, and the target writes answers"
)
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
