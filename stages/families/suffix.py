"""Suffix decoding: guess what followed the longest matching suffixes of the text before (Oliaro et al. 2024, arXiv 2411.04975).

A suffix of the text is looked up in prompt and answer so far, and in the answers before this one. From its occurrences the most
frequent next token is taken, then the most frequent after that, while their estimated probability is at least MIN_PROBABILITY.
Longer suffixes may guess more tokens; of all suffixes the guesses with the highest sum of probabilities are a chain. No draft and
no training. Same guesses as Arctic Inference 0.3.0, by which vLLM's method `suffix` drafts, ties included.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from stages.engine.decode_state import CacheSlots
from stages.engine.proposer import DraftingMethod
from stages.families.host_proposer import ChainProposer

MIN_PROBABILITY = np.float32(0.1)  # vLLM's suffix_decoding_min_token_prob; numbers are float32, as there
SEPARATOR = -1  # before each text: no suffix goes across


class SuffixIndex:
    """Texts and where each token occurs; suffixes and guesses together have at most `most_tokens`."""

    def __init__(self, most_tokens: int):
        self.most_tokens = most_tokens
        self.tokens = [SEPARATOR]
        self.positions: defaultdict[int, list[int]] = defaultdict(list)  # of a token, ascending

    def begin_text(self) -> None:
        self.tokens.append(SEPARATOR)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.positions[token].append(len(self.tokens))
            self.tokens.append(token)

    def guess(self, context: Sequence[int], count: int) -> tuple[list[int], np.float32]:
        """Return at most `count` guesses of what follows `context`, and the sum of their probabilities."""
        best, best_score = list[int](), np.float32(0)
        ends = self.positions.get(context[-1], [])  # of the occurrences of a suffix
        for length in range(1, len(context)):
            if length > 1:
                ends = [end for end in ends if self.tokens[end - length + 1] == context[-length]]
            if not ends:
                break
            guesses, score = self._follow(ends, min(count, length, self.most_tokens - length))
            if score >= best_score:
                best, best_score = guesses, score
        return best, best_score

    def _follow(self, ends: list[int], count: int) -> tuple[list[int], np.float32]:
        """Return at most `count` tokens, each the most frequent after the occurrences of those before it, and their score."""
        guesses, score, probability = list[int](), np.float32(0), np.float32(1)
        while len(guesses) < count:
            occurrences = len(ends)
            ends = [end + 1 for end in ends if end + 1 < len(self.tokens) and self.tokens[end + 1] != SEPARATOR]
            if not ends:
                break
            token, times = _find_most_frequent([self.tokens[end] for end in ends])
            probability *= np.float32(times) / np.float32(occurrences)
            if probability < MIN_PROBABILITY:
                break
            guesses.append(token)
            score += probability
            ends = [end for end in ends if self.tokens[end] == token]
        return guesses, score


def _find_most_frequent(tokens: list[int]) -> tuple[int, int]:
    """Return the most frequent of some tokens in the order of their occurrences, and how often it occurs.

    Of equals it is that which the suffix tree of Arctic Inference has first: a token that becomes as frequent as those before
    it goes before the first of the next ones that it has caught up with.
    """
    (token, count), *others = Counter(tokens).most_common(2)
    if not others or others[0][1] < count:
        return token, count
    order: list[int] = []
    counts = Counter[int]()
    for token in tokens:
        if not counts[token]:
            order.append(token)
        elif (at := order.index(token)) and (before := counts[order[at - 1]]) <= counts[token] + 1:
            first = next(index for index, other in enumerate(order) if counts[other] == before)
            order.insert(first, order.pop(at))
        counts[token] += 1
    return order[0], count


class SuffixMethod(DraftingMethod):
    """Suffixes and guesses of `most_tokens` together, chains of `num_steps` guesses; what earlier prompts were answered."""

    def __init__(self, most_tokens: int, num_steps: int, device: torch.device):
        self.most_tokens, self.device = most_tokens, device
        self.num_steps, self.num_draft_tokens = num_steps, num_steps + 1
        self._prompts: set[tuple[int, ...]] = set()
        self.answers = SuffixIndex(most_tokens)

    def build_proposer(self, capacity: int) -> "SuffixProposer":
        return SuffixProposer(self)

    def begin_answer(self, prompt: list[int]) -> None:
        """Begin the answer to a prompt. One that comes again is a repeat, which would find its own answer: all are forgotten."""
        if tuple(prompt) in self._prompts:
            self._prompts, self.answers = set(), SuffixIndex(self.most_tokens)
        self._prompts.add(tuple(prompt))
        self.answers.begin_text()


class SuffixProposer(ChainProposer):
    """Chains of guesses from the text of one prompt and from the answers of all."""

    def __init__(self, method: SuffixMethod):
        super().__init__(method.num_draft_tokens, method.device)
        self.method, self.text = method, SuffixIndex(method.most_tokens)

    def begin_answer(self, prompt: list[int]) -> None:
        super().begin_answer(prompt)
        self.text = SuffixIndex(self.method.most_tokens)
        self.text.extend(prompt)
        self.method.begin_answer(prompt)

    def guess(self, new_tokens: list[int]) -> list[int]:
        context, sources = self.context[-self.method.most_tokens :], (self.text, self.method.answers)
        for source in sources:
            source.extend(new_tokens)
        (own, own_score), (others, score) = (source.guess(context, self.method.num_steps) for source in sources)
        return own if own_score >= score else others

    def count_state_bytes(self, slots: CacheSlots) -> int:
        # A token and its position, eight bytes each.
        return super().count_state_bytes(slots) + 16 * (len(self.text.tokens) + len(self.method.answers.tokens))
