"""The inputs that every backend of sample_target shares: the target, the encoder of its prompts, and where answers go."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.data import conversations
from stages.data.requests import TargetRequest, UnusableRequestError
from stages.data.sampled_split import SampledSplit
from stages.params import schema
from stages.serving.server_group import ServerGroup
from stages.target import answer_token_ids, chat_template, manifest
from stages.target.prompt_encoder import PromptEncoder
from stages.telemetry import unfinished


@dataclass
class SamplingContext:
    """The inputs of every backend."""

    p: schema.Params
    target: manifest.TargetManifest
    folder: Path  # of the target's weights
    encoder: PromptEncoder
    retries: Counter = field(default_factory=Counter)  # by reason
    local_servers: ServerGroup | None = None  # where some were started

    def check_usable(self, request: TargetRequest) -> None:
        """Decode the request's images. Raises UnusableRequestError where it can't be sampled."""
        if request.unusable_reason:
            raise UnusableRequestError(request.unusable_reason)
        if problem := self.encoder.explain_image_problem(request.messages[: request.answer_index + 1], request.images):
            raise UnusableRequestError(*problem)

    def encode_prompt(self, request: TargetRequest, history: list[dict[str, Any]]) -> list[int]:
        """Return the ids of a request's prompt, the conversation `history`. Raises UnusableRequestError where it has none."""
        self.check_usable(request)
        try:
            return self.encoder.encode_prompt(request.row, history, request.tools, request.images)
        except chat_template.TemplateRefusalError as error:
            raise UnusableRequestError("refused_by_template", str(error)) from None

    def settle_answer(
        self,
        split: SampledSplit,
        request: TargetRequest,
        temperature: float | None,
        answer: answer_token_ids.SampledAnswer,
    ) -> None:
        """Store an answer's row, or count why it is dropped. Raises ValueError for a mask without or with only trained tokens."""
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
        unfinished.note_progress(
            f"after {split.shards.num_set} of {split.selection.num_requests} answers of {split.name}"
        )
