"""The shape of what a draft proposes in a cycle, from params.yaml to the kernels, by its name:

    t8_2_16   a dynamic tree: num_steps 8, topk 2, num_draft_tokens 16 (the root counted, as in SGLang)
    s6_16     a static tree, at most 6 deep and of 16 nodes, the root counted: EAGLE and Medusa
    n3_1_8    a chain of 8 tokens that followed the same 3- to 1-gram before: n-gram lookup
    l5_4_5    lookahead decoding with a window of 5, n-grams of 4 and 5 guesses
    x24_8     a chain of at most 8 tokens by suffixes, which with it have at most 24: suffix decoding

Stages depend on this module and on no other of this folder (stages/runtime/stage_code.py): it computes with parameters. It
imports no pydantic, so that engine and replay run without it.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

ScoringName = Literal["sglang", "eagle"]  # how the nodes of a tree are scored (trees/draft_tree.py)
NOTATIONS = {"s": "s<depth>_<nodes>", "n": "n<longest>_<shortest>_<length>", "l": "l<window>_<level>_<guesses>",
             "x": "x<tokens>_<length>"}  # fmt: skip
SGLANG_SCORING: ScoringName = "sglang"  # the default: products of probabilities


def count_candidates(num_steps: int, topk: int) -> int:
    """Return how many candidates an expansion records: k + (num_steps - 1) * k**2 (SGLang 0.5.17 to 0.5.23), 0 for no step."""
    return topk + (num_steps - 1) * topk * topk if num_steps else 0


@dataclass(frozen=True)
class TreeShape:
    """The shape of a draft tree: `t8_2_16` is num_steps 8, topk 2, num_draft_tokens 16 (the root counted, as in SGLang)."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    @property
    def name(self) -> str:
        return f"t{self.num_steps}_{self.topk}_{self.num_draft_tokens}"

    @property
    def letter(self) -> str:
        """Return the kind of the shape, with which its name begins."""
        return self.name[0]

    @property
    def label(self) -> str:
        """Return the name without the letter of trees, as published tables write it.

        Such tables name a chain without counting its root, so that name follows in brackets: 8_1_9 (8_1_8).
        """
        older = f" ({self.num_steps}_1_{self.num_steps})" if self.topk == 1 else ""
        return f"{self.name[1:]}{older}"

    @property
    def num_candidates(self) -> int:
        """How many candidates its expansion records."""
        return count_candidates(self.num_steps, self.topk)

    @classmethod
    def parse(cls, name: str) -> "TreeShape":
        """Parse a name. Raises ValueError for one that names no tree, or a tree that can't be built."""
        match = re.fullmatch(r"t?([0-9]+)_([0-9]+)_([0-9]+)", name)
        if not match:
            raise ValueError(f"{name!r} is not a tree; write t<num_steps>_<topk>_<num_draft_tokens>, as t8_2_16")
        tree = cls(*map(int, match.groups()))
        if tree.topk == 1 and tree.num_steps and tree.num_draft_tokens != tree.num_steps + 1:
            raise ValueError(
                f"{name}: at topk 1 a tree is a chain and the root; write t{tree.num_steps}_1_{tree.num_steps + 1}"
            )
        tree.check()
        if tree.name != name:  # a tree has one name: it is part of paths
            raise ValueError(f"{name!r} is not the name of a tree; write {tree.name}")
        return tree

    def check(self) -> None:
        """Raise ValueError for a tree that can't be built with any draft."""
        if min(self.num_steps, self.topk) < 1 or self.num_draft_tokens < 2:
            raise ValueError(
                f"{self.name}: expected num_steps and topk of 1 or more, and num_draft_tokens of 2 or more"
            )
        if self.num_draft_tokens - 1 > self.num_candidates:
            raise ValueError(
                f"{self.name} has {self.num_draft_tokens - 1} nodes under the root, expected at most the {self.num_candidates} "
                f"candidates of its expansion; use at most t{self.num_steps}_{self.topk}_{self.num_candidates + 1}"
            )


@dataclass(frozen=True)
class NamedShape(TreeShape):
    """A shape of another kind: static, of n-grams, suffixes or windows. topk is the most that a node may have below it."""

    notation: str
    numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.notation

    @property
    def label(self) -> str:
        return self.notation


def parse_shape(name: str) -> TreeShape:
    """Parse the name of a shape of any kind. Raises ValueError for one that names none, or one that can't be built."""
    match = re.fullmatch(r"([snlx])([1-9][0-9]*(?:_[1-9][0-9]*)*)", name)
    if not match:
        return TreeShape.parse(name)
    numbers = tuple(map(int, match[2].split("_")))
    match match[1], numbers:
        case "s", (depth, nodes):
            sizes, expected = (depth, nodes - 1, nodes), f"more than {depth} nodes, the root counted, at depth {depth}"
            is_possible = nodes > depth
        case "n", (longest, shortest, length):
            sizes, expected = (length, 1, length + 1), f"a shortest n-gram of at most the longest, {longest} tokens"
            is_possible = shortest <= longest
        case "x", (most_tokens, length):
            sizes, expected = (length, 1, length + 1), f"more tokens together with the suffix than {length}"
            is_possible = most_tokens > length
        case "l", (window, level, guesses):
            # The window's nodes, the root among them, and the guesses, all of which a pass verifies.
            sizes = (level - 1, guesses, (level - 1) * (window + guesses))
            expected = "n-grams (level) of 2 tokens or more"
            is_possible = level >= 2
        case kind, _:
            raise ValueError(f"{name!r} is no shape; write {NOTATIONS[kind]}")
    if not is_possible:
        raise ValueError(f"{name}: expected {expected}, found {', '.join(map(str, numbers))}")
    return NamedShape(*sizes, name, numbers)


class Load(NamedTuple):
    """A load of an engine: the only one of a workload, or one of a sweep."""

    max_new_tokens: int
    concurrency: int | None  # None: no limit

    @property
    def sort_key(self) -> tuple[int, float]:
        """Return the key by which loads are ordered: the longest answers last, of these no limit last."""
        return self.max_new_tokens, math.inf if self.concurrency is None else self.concurrency

    def __str__(self) -> str:
        """Return the load as logs, labels and headings name it: "200 tokens, concurrency 64"."""
        concurrency = "unlimited concurrency" if self.concurrency is None else f"concurrency {self.concurrency}"
        return f"{self.max_new_tokens} tokens, {concurrency}"

    def shorten(self) -> str:
        """Return the load as tables name it: "200 x 64"."""
        return f"{self.max_new_tokens} x {'no limit' if self.concurrency is None else self.concurrency}"
