"""N-gram lookup, known as prompt lookup: guess the continuation of an earlier occurrence (https://github.com/apoorvumang/prompt-lookup-decoding).

The longest n-gram at the end of the text that occurred before is looked up, and its last earlier occurrence; the tokens after
that are a chain of guesses. No draft and no training; the only memory is an index of the text.
"""

import torch

from stages.engine.decode_state import CacheSlots
from stages.engine.proposer import DraftingMethod
from stages.families.host_proposer import ChainProposer


class PromptLookupMethod(DraftingMethod):
    """N-grams of `max_ngram` to `min_ngram` tokens, chains of `num_steps` guesses."""

    def __init__(self, max_ngram: int, min_ngram: int, num_steps: int, device: torch.device):
        self.max_ngram, self.min_ngram, self.device = max_ngram, min_ngram, device
        self.num_steps, self.num_draft_tokens = num_steps, num_steps + 1

    def build_proposer(self, capacity: int) -> "PromptLookupProposer":
        return PromptLookupProposer(self)


class PromptLookupProposer(ChainProposer):
    """Chains of guesses and the index of n-grams behind them."""

    def __init__(self, method: PromptLookupMethod):
        super().__init__(method.num_draft_tokens, method.device)
        self.method = method
        self.followers: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self.num_indexed = 0  # tokens of the context that are indexed as followers

    def begin_answer(self, prompt: list[int]) -> None:
        super().begin_answer(prompt)
        self.followers, self.num_indexed = {}, 0

    def guess(self, new_tokens: list[int]) -> list[int]:
        context, sizes = self.context, range(self.method.min_ngram, self.method.max_ngram + 1)
        for index in range(self.num_indexed, len(context)):
            for size in sizes:
                if size <= index:
                    self.followers[tuple(context[index - size : index])] = index
        self.num_indexed = len(context)
        matches = [self.followers.get(tuple(context[-size:])) for size in reversed(sizes) if size <= len(context)]
        first = next((index for index in matches if index is not None), len(context))
        return context[first : first + self.method.num_steps]

    def count_state_bytes(self, slots: CacheSlots) -> int:
        return super().count_state_bytes(slots) + sum(8 * (len(ngram) + 1) for ngram in self.followers)
