"""The inputs that every backend of sample_target shares: the target, the encoder of its prompts, and where answers go."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.data import conversations
from stages.engines.server import ServerGroup
from stages.params import schema
from stages.runtime import scratch
from stages.sampling.answer_token_ids import SampledAnswer
from stages.sampling.requests import Messages, TargetRequest, UnusableRequestError
from stages.sampling.sampled_split import SampledSplit
from stages.target import chat_template, manifest, template_facts, vision
from stages.target.prompt_encoder import PromptEncoder

FIRST_ANSWERS = 64  # of training, after which a run warns of what its end would show hours later


@dataclass
class SamplingContext:
    """The inputs of every backend."""

    p: schema.Params
    target: manifest.TargetManifest
    folder: Path  # of the target's weights
    encoder: PromptEncoder
    sampled_by: str | None = None  # for the stage's line, where the target answers in this process
    retries: Counter = field(default_factory=Counter)  # by reason
    local_servers: ServerGroup | None = None  # where some were started

    def check_request(self, request: TargetRequest, shown: Messages, whole: Messages) -> None:
        """Raise UnusableRequestError for a request that can't be sampled; its images are decoded.

        The chat template must show all of `shown`, and have rendered none of `whole` before: that would be rendered twice.
        """
        if request.unusable_reason:
            raise UnusableRequestError(request.unusable_reason)
        tokenizer, processor = self.encoder.tokenizer, self.encoder.image_processor
        if processor is not None:
            mark = tokenizer.convert_ids_to_tokens(processor.image_token_id)
            own = request.messages[: request.answer_index + 1]
            if any(mark in json.dumps(message, ensure_ascii=False) for message in own):
                raise UnusableRequestError("picture_token_in_text")  # the target would expect an image there
            try:
                processor.count_image_tokens(request.images)
            except vision.UnreadableImageError as error:
                raise UnusableRequestError("image_unreadable", str(error)) from None
        if rendered := chat_template.explain_rendered(tokenizer, whole):
            raise UnusableRequestError("rendered_already", rendered)
        if hidden := template_facts.explain_hidden(tokenizer, shown, request.tools):
            raise UnusableRequestError("not_in_template", hidden)

    def encode_prompt(self, request: TargetRequest, history: Messages) -> list[int]:
        """Return the ids of a request's prompt, the conversation `history`. Raises UnusableRequestError where it has none."""
        self.check_request(request, history, history)
        try:
            ids = self.encoder.encode_prompt(request.row, history, request.tools, request.images)
        except chat_template.TemplateRefusalError as error:
            raise UnusableRequestError("refused_by_template", str(error)) from None
        self.check_tokens(ids)
        return ids

    def check_tokens(self, ids: list[int]) -> None:
        """Raise UnusableRequestError for a token that the target's embedding has no row for."""
        if unknown := chat_template.explain_unknown_token(self.encoder.tokenizer, ids, self.target.vocab_size):
            raise UnusableRequestError("token_beyond_embedding", unknown)

    def settle_answer(
        self,
        split: SampledSplit,
        request: TargetRequest,
        temperature: float | None,
        answer: SampledAnswer,
        message: dict[str, Any] | None = None,
    ) -> None:
        """Store an answer's row, or count why it is dropped; `message` is the answer as later turns quote it.

        Raises ValueError for a mask without or with only trained tokens.
        """
        s, eos = self.p.sample_target, self.target.eos_token_ids
        is_cut, dropped = answer.finish_reason == "length", None
        if answer.source != "template" and all(token in eos for token in answer.answer_ids):
            dropped = "empty"  # a target may end at once: nothing to learn, and no error
        elif self.encoder.has_image_token(answer.answer_ids):
            dropped = "picture_token_in_answer"  # an image token without an image
        else:
            chat_template.check_loss_mask(request.row, answer.prompt_ids, answer.answer_ids, eos, not is_cut)
        if is_cut and s.truncated == "drop":
            dropped = "truncated"
        row, counts = None, {"answers": 1, "truncated": int(is_cut)}
        if dropped:
            counts[f"dropped/{dropped}"] = 1
        else:
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
        split.shards.set_row(request.position, row, counts, message)
        scratch.note_progress(f"after {split.shards.num_set} of {split.selection.num_requests} answers of {split.name}")
        total = split.shards.counts
        if split.name == "train" and total["answers"] == FIRST_ANSWERS <= 2 * total["truncated"]:
            tqdm.write(
                f"warning: {total['truncated']} of the first {FIRST_ANSWERS} answers are cut at sample_target.max_new_tokens "
                f"{s.max_new_tokens}, and drafts learn nothing of how answers go on; raise it"
            )
