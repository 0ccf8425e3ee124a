"""Encode prompts and answers of rows that may hold images, as the target's server would."""

import copy
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.target import chat_template, manifest, template_facts, vision
from stages.target.template_facts import Messages


@dataclass(frozen=True)
class PromptEncoder:
    """A target's tokenizer, chat template and image processor. Errors name the stage's row."""

    tokenizer: Any
    eos: list[int]
    vocab_size: int  # rows of the target's embedding
    end_token: int  # closes an answer
    thinking: bool | None  # of the chat template
    image_processor: vision.CachedImageProcessor | None  # where the data has images
    date: datetime.date | None = None  # that the chat template shows

    @classmethod
    def load(
        cls,
        target: manifest.TargetManifest,
        folder: Path,
        trust_remote_code: bool,
        thinking: bool | None,
        image_processor: vision.CachedImageProcessor | None = None,
    ) -> "PromptEncoder":
        tokenizer = chat_template.load_tokenizer(folder, trust_remote_code, target.chat_template)
        template_facts.check_thinking(tokenizer, thinking)
        end_token = chat_template.find_end_token(tokenizer, target.eos_token_ids)
        date = datetime.date.fromisoformat(target.date) if target.date else None
        return cls(tokenizer, target.eos_token_ids, target.vocab_size, end_token, thinking, image_processor, date)

    @property
    def pad_token(self) -> int:
        """Return the token that stands at masked positions: any that the embedding has."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None and pad < self.vocab_size else self.eos[0]

    def encode_prompt(self, row: str, messages: Messages, tools: Messages | None, images: list[str]) -> list[int]:
        """Return the ids of a prompt, its images expanded. Raises ValueError naming the row, where it has no ids."""
        ids = chat_template.encode_prompt(self.tokenizer, messages, self.thinking, tools)
        chat_template.check_loss_mask(row, ids, [self.end_token], self.eos, complete=False)  # of the prompt only
        return self.expand_images(row, ids, images)

    def list_dated_prompts(
        self, row: str, messages: Messages, tools: Messages | None, images: list[str]
    ) -> Iterator[list[int]]:
        """Yield the prompt as a server has rendered it by its own today: of today, of each day back to the target's date, and of
        the two days around, by other time zones.
        """
        assert self.date is not None
        own, today = self.tokenizer.chat_template.split("{% endmacro %}\n", 1)[1], datetime.date.today()
        for ago in (*range((today - self.date).days + 2), -1):
            other = copy.copy(self.tokenizer)
            other.chat_template = template_facts.fix_date(own, today - datetime.timedelta(ago))
            template_facts.facts_by_tokenizer[other] = template_facts.probe_template(self.tokenizer)
            ids = chat_template.encode_prompt(other, messages, self.thinking, tools)
            yield self.expand_images(row, ids, images)

    def encode_turns(self, messages: Messages, tools: Messages | None) -> list[tuple[list[int], list[int]]]:
        """Return (prompt ids, answer ids) of each answer that the messages hold, images not expanded."""
        return chat_template.encode_turns(self.tokenizer, messages, self.eos, self.thinking, tools)

    def expand_images(self, row: str, ids: list[int], images: list[str]) -> list[int]:
        """Return a rendered prompt's ids with each image's token repeated once per image embedding."""
        processor = self.image_processor
        if processor is None:
            return ids
        try:
            return vision.expand_image_tokens(ids, processor.image_token_id, processor.count_image_tokens(images))
        except ValueError as error:
            raise ValueError(f"sample_target: row {row}: {error}") from None

    def has_image_token(self, ids: list[int]) -> bool:
        return self.image_processor is not None and self.image_processor.image_token_id in ids

    def build_image_url(self, path: str) -> str:
        """Return an image as a `data:` URL, or its path for a text target."""
        return self.image_processor.build_data_url(path) if self.image_processor else path
