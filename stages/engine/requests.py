"""Requests to decode, and the host's record of those under way."""

from dataclasses import dataclass
from typing import NamedTuple

from stages.engine.decode_state import DecodeStep
from stages.engine.sampling import SamplingParams
from stages.target.multimodal import ImagePatchesProtocol

RequestUpdate = tuple[int, DecodeStep | None]  # index of the request; None: its prefill begins


class DecodeRequest(NamedTuple):
    """A prompt, and how to answer it."""

    prompt: list[int]
    max_new_tokens: int
    images: ImagePatchesProtocol | None = None
    sampling: SamplingParams | None = None

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the prompt and the longest answer."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(eq=False)
class ActiveRequest:
    """The request that a slot is decoding."""

    request_index: int
    prompt_length: int
    max_new_tokens: int
    num_read: int = 1  # tokens that the host has read
    num_launched: int = 0  # passes launched and not read
    finished: bool = False

    @property
    def needs_pass(self) -> bool:
        """Return whether another pass may bring a token."""
        return self.num_read + self.num_launched < self.max_new_tokens


ActiveSlots = list[ActiveRequest | None]  # by slot; None: idle
