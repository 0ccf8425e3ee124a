"""Lookahead decoding: n-grams of the target's own guesses at later tokens (https://arxiv.org/abs/2402.02057).

Beside the tree of guesses each pass reads a window of W columns and N - 1 rows. A column is a piece of text that may come
c tokens later; each pass extends it by the target's next token and drops its first. The N tokens of a column are then kept:
the last N - 1 under the first, in a pool of the G most recent n-grams for each token.

                 position  n    n+1  n+2  n+3  n+4          W 3, N 4; r is the root, the known token
    row 0                  r    a    b                      `1, 2, 3` attend to the prefix, row 0 up to their
    row 1                       1    1'   1"                 column, and their own column above
    row 2                            2    2'   2"
    new                                   3    3'   3"      kept: r -> 1 2 3,  a -> 1' 2' 3',  b -> 1" 2" 3"
    row 0 becomes               r'   1'   1"                row 1 becomes row 2, row 2 the new ones

The pool's n-grams under the root's token are the guesses, as a tree: common beginnings are read once. A guess that is right
to its end yields N tokens, its N - 1 and the target's next; the authors' code stops one token earlier. The window starts with
random tokens of the prompt in every row, and nothing is kept until all rows but the first are the target's.

Letters: W window_size, N ngram_size, G guess_set_size, M num_draft_tokens.
"""

import random

import torch

from stages.engine.decode_state import CacheSlots
from stages.engine.proposer import DraftingMethod
from stages.families.host_proposer import UNMATCHABLE_TOKEN, GuessTree, HostProposer

WINDOW_SEED = 0  # of the window's first tokens


class LookaheadMethod(DraftingMethod):
    """A window and guess sets of the given sizes."""

    def __init__(self, window_size: int, ngram_size: int, guess_set_size: int, device: torch.device):
        self.window_size, self.ngram_size, self.guess_set_size = window_size, ngram_size, guess_set_size
        self.device = device
        self.num_window_nodes = 1 + (window_size - 1) + (ngram_size - 2) * window_size  # the root included
        self.num_steps = ngram_size - 1
        self.num_draft_tokens = self.num_window_nodes + guess_set_size * (ngram_size - 1)
        self.window_mask, self.window_depths = self._build_window()

    def build_proposer(self, capacity: int) -> "LookaheadProposer":
        return LookaheadProposer(self)

    def get_node(self, row: int, column: int) -> int:
        """Return the node of a window cell; row 0, column 0 is the root."""
        return column if row == 0 else self.window_size * row + column

    def _build_window(self) -> tuple[torch.Tensor, list[int]]:
        """Return the ancestor mask and the depths of the window's nodes."""
        count = self.num_window_nodes
        mask, depths = torch.zeros(count, count, dtype=torch.bool), [0] * count
        for row in range(self.ngram_size - 1):
            for column in range(self.window_size):
                node = self.get_node(row, column)
                depths[node] = row + column
                mask[node, : column + 1] = True
                mask[node, [self.get_node(above, column) for above in range(1, row + 1)]] = True
        return mask, depths


class LookaheadProposer(HostProposer):
    """The window and the pool of n-grams of one prompt."""

    def __init__(self, method: LookaheadMethod):
        super().__init__(method.num_draft_tokens, method.device)
        self.method = method
        self.rows: list[list[int]] = []  # N - 1 of W tokens; row 0's first is the root
        self.ngram_pool: dict[int, dict[tuple[int, ...], None]] = {}  # token -> continuations, the latest last
        self.passes = 0

    def begin_answer(self, prompt: list[int]) -> None:
        super().begin_answer(prompt)
        draw, method = random.Random(WINDOW_SEED), self.method
        self.rows = [draw.choices(prompt, k=method.window_size) for _ in range(method.ngram_size - 1)]
        self.ngram_pool, self.passes = {}, 0

    def build_guess_tree(self, new_tokens: list[int]) -> GuessTree:
        method = self.method
        if self.passes:
            self._update_pool(self.target_tokens.tolist())
        self.passes += 1
        self.rows[0][0] = new_tokens[-1]
        found = GuessTree.empty(method.num_draft_tokens)
        window = [token for row in self.rows for token in row][1:]
        found.tokens[: len(window)] = window
        found.expected_tokens[: len(window)] = [UNMATCHABLE_TOKEN] * len(window)
        found.depths[: len(window)] = method.window_depths[1:]
        count = method.num_window_nodes
        found.ancestor_mask[:count, :count] = method.window_mask
        self._add_guesses(found, [*self.ngram_pool.get(new_tokens[-1], ())][::-1])
        return found

    def _update_pool(self, target_tokens: list[int]) -> None:
        """Extend the window's columns by the target's tokens [M] after its last row, and keep the n-grams they form."""
        method = self.method
        last = method.ngram_size - 2
        grown = [target_tokens[method.get_node(last, column)] for column in range(method.window_size)]
        if self.passes >= method.ngram_size - 1:
            for column in range(method.window_size):
                continuation = *(row[column] for row in self.rows[1:]), grown[column]
                kept = self.ngram_pool.setdefault(self.rows[0][column], {})
                kept.pop(continuation, None)
                kept[continuation] = None
                if len(kept) > method.guess_set_size:
                    del kept[next(iter(kept))]
        self.rows = [*self.rows[1:], grown]

    def _add_guesses(self, found: GuessTree, guesses: list[tuple[int, ...]]) -> None:
        """Add guesses behind the window as a tree, common beginnings once."""
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for guess in guesses:
            for end in range(1, len(guess) + 1):
                if guess[:end] not in nodes:
                    node = self.method.num_window_nodes + len(nodes) - 1
                    found.add_node(node, nodes[guess[: end - 1]], guess[end - 1])
                    nodes[guess[:end]] = node

    def count_state_bytes(self, slots: CacheSlots) -> int:
        kept = sum(1 + len(ngram) for continuations in self.ngram_pool.values() for ngram in continuations)
        return super().count_state_bytes(slots) + 8 * (kept + sum(map(len, self.rows)))
