"""Prompt lookup: what followed the last words when they stood there before (https://github.com/apoorvumang/prompt-lookup-decoding).

Of the n-grams that the text so far ends with, the longest that was there before is taken, and of its places the last;
what followed it is a chain of guesses. No draft, no training, no memory but an index of the text.
"""

import torch

from stages.engine.decode import DecodeState, PrefillOutput
from stages.methods.host_proposer import GuessTree, HostProposer


class PromptLookupMethod:
    """A Method: n-grams of `longest` to `shortest` tokens, `length` guesses."""

    weights = 0  # bytes
    parameters = 0

    def __init__(self, longest: int, shortest: int, length: int, device: torch.device):
        self.longest, self.shortest, self.device = longest, shortest, device
        self.steps, self.nodes = length, length + 1

    def proposer(self, size: int) -> "PromptLookupProposer":
        return PromptLookupProposer(self)


class PromptLookupProposer(HostProposer):
    def __init__(self, method: PromptLookupMethod):
        super().__init__(method.nodes, method.device)
        self.method = method
        self.after: dict[tuple[int, ...], int] = {}  # an n-gram -> where what last followed it stands
        self.read = 0  # tokens of the context that are indexed as followers

    def begin(self, prompt: list[int], begun: PrefillOutput, stand: DecodeState) -> None:
        super().begin(prompt, begun, stand)
        self.after, self.read = {}, 0

    def guess(self, new: list[int]) -> GuessTree:
        context, sizes = self.context, range(self.method.shortest, self.method.longest + 1)
        for place in range(self.read, len(context)):
            for size in sizes:
                if size <= place:
                    self.after[tuple(context[place - size : place])] = place
        self.read = len(context)
        found = GuessTree.none(self.method.nodes)
        places = [self.after.get(tuple(context[-size:])) for size in reversed(sizes) if size <= len(context)]
        known = next((place for place in places if place is not None), len(context))
        for node, token in enumerate(context[known : known + self.method.steps], 1):
            found.put(node, node - 1, token)
        return found

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(8 * (len(words) + 1) for words in self.after)
