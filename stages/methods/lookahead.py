"""Lookahead decoding: the target's own guesses at what comes later, kept as n-grams (https://arxiv.org/abs/2402.02057).

Beside the tree of guesses each pass reads a window of W columns and N - 1 rows: a column is a piece of text that may come
c tokens later, and each pass makes it one token longer by the target's own choice and forgets its first. What a column
holds then, N tokens, is kept: its last N - 1 under its first, in a pool of the G most recent ones a token.

                 position  n    n+1  n+2  n+3  n+4          W 3, N 4; r is the root, the token that is known
    row 0                  r    a    b                      `1, 2, 3` see the prefix, row 0 up to their column,
    row 1                       1    1'   1"                 and their own column above
    row 2                            2    2'   2"
    new                                   3    3'   3"      kept: r -> 1 2 3,  a -> 1' 2' 3',  b -> 1" 2" 3"
    row 0 becomes               r'   1'   1"                row 1 becomes row 2, row 2 the new ones

Guesses are what the pool has of the root's token, as a tree: what begins alike is read once. A guess that is right to its
end yields N tokens, its N - 1 and the target's next; the authors' code stops one token earlier. The window begins with
tokens of the prompt, drawn at random, in every row, and is kept of once each row but the first is the target's.

Letters: W window, N level, G guesses, M nodes.
"""

import random

import torch

from stages.engine.decode import DecodeState, PrefillOutput
from stages.methods.host_proposer import UNMATCHABLE_TOKEN, GuessTree, HostProposer

WINDOW_SEED = 0  # of what the window begins with


class LookaheadMethod:
    """A Method."""

    weights = 0  # bytes
    parameters = 0

    def __init__(self, window: int, level: int, guesses: int, device: torch.device):
        self.window, self.level, self.guesses, self.device = window, level, guesses, device
        self.seen = 1 + (window - 1) + (level - 2) * window  # nodes of root and window
        self.steps, self.nodes = level - 1, self.seen + guesses * (level - 1)
        self.sees, self.depths = self._window()

    def proposer(self, size: int) -> "LookaheadProposer":
        return LookaheadProposer(self)

    def place(self, row: int, column: int) -> int:
        """The node that stands there; that of row 0, column 0 is the root."""
        return column if row == 0 else self.window * row + column

    def _window(self) -> tuple[torch.Tensor, list[int]]:
        """Who sees whom among the first nodes, and their depths."""
        sees, depths = torch.zeros(self.seen, self.seen, dtype=torch.bool), [0] * self.seen
        for row in range(self.level - 1):
            for column in range(self.window):
                node = self.place(row, column)
                depths[node] = row + column
                sees[node, : column + 1] = True
                sees[node, [self.place(above, column) for above in range(1, row + 1)]] = True
        return sees, depths


class LookaheadProposer(HostProposer):
    def __init__(self, method: LookaheadMethod):
        super().__init__(method.nodes, method.device)
        self.method = method
        self.rows: list[list[int]] = []  # N - 1 of W tokens; row 0's first is the root
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}  # a token -> what may follow, the latest last
        self.passes = 0

    def begin(self, prompt: list[int], begun: PrefillOutput, stand: DecodeState) -> None:
        super().begin(prompt, begun, stand)
        draw, method = random.Random(WINDOW_SEED), self.method
        self.rows = [draw.choices(prompt, k=method.window) for _ in range(method.level - 1)]
        self.pool, self.passes = {}, 0

    def guess(self, new: list[int]) -> GuessTree:
        method = self.method
        if self.passes:
            self._keep(self.choices.tolist())
        self.passes += 1
        self.rows[0][0] = new[-1]
        found = GuessTree.none(method.nodes)
        window = [token for row in self.rows for token in row][1:]
        found.tokens[: len(window)] = window
        found.wanted[: len(window)] = [UNMATCHABLE_TOKEN] * len(window)
        found.depths[: len(window)] = method.depths[1:]
        found.sees[: method.seen, : method.seen] = method.sees
        self._plant(found, [*self.pool.get(new[-1], ())][::-1])
        return found

    def _keep(self, choices: list[int]) -> None:
        """The window grows by the target's choices [M] after its last row, and what it holds is kept."""
        method = self.method
        last = method.level - 2
        grown = [choices[method.place(last, column)] for column in range(method.window)]
        if self.passes >= method.level - 1:
            for column in range(method.window):
                words = *(row[column] for row in self.rows[1:]), grown[column]
                kept = self.pool.setdefault(self.rows[0][column], {})
                kept.pop(words, None)
                kept[words] = None
                if len(kept) > method.guesses:
                    del kept[next(iter(kept))]
        self.rows = [*self.rows[1:], grown]

    def _plant(self, found: GuessTree, guesses: list[tuple[int, ...]]) -> None:
        """Guesses as a tree behind the window: siblings differ."""
        there: dict[tuple[int, ...], int] = {(): 0}
        for guess in guesses:
            for end in range(1, len(guess) + 1):
                if guess[:end] not in there:
                    node = self.method.seen + len(there) - 1
                    found.put(node, there[guess[: end - 1]], guess[end - 1])
                    there[guess[:end]] = node

    @property
    def nbytes(self) -> int:
        kept = sum(1 + len(words) for some in self.pool.values() for words in some)
        return super().nbytes + 8 * (kept + sum(map(len, self.rows)))
