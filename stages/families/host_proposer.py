"""Families without weights, which look up their guesses on the host: n-gram lookup, suffix decoding and lookahead decoding.

Before each cycle the host reads the tokens that the last one committed, and writes a tree of guesses to tensors of fixed
addresses. So the verify pass can be captured as a CUDA graph, but each cycle waits for one copy in each direction.

Letters: M num_draft_tokens (the root counted).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput, VerifyOutput
from stages.engine.proposer import Drafter, DraftingMethod, Proposer
from stages.families.draft_files import DraftFiles, LoadedDraft
from stages.params.tree_shape import NamedShape, TreeShape
from stages.runtime import atomic
from stages.target.manifest import TargetManifest
from stages.trees import draft_tree as trees

UNMATCHABLE_TOKEN = -1  # the expected token of a node that is never accepted


@dataclass
class GuessTree:
    """M - 1 nodes below the root, on the host; no other node attends to an unset node, and it is never accepted."""

    tokens: list[int]  # read by the target
    expected_tokens: list[int]  # the target's token for which a node is accepted, or UNMATCHABLE_TOKEN
    parents: list[int]  # node indices, the root's 0
    depths: list[int]
    ancestor_mask: Tensor  # [M, M] bool

    @classmethod
    def empty(cls, num_draft_tokens: int) -> "GuessTree":
        mask = torch.eye(num_draft_tokens, dtype=torch.bool)
        mask[:, 0] = True
        rest = num_draft_tokens - 1
        return cls([0] * rest, [UNMATCHABLE_TOKEN] * rest, [0] * rest, [1] * rest, mask)

    def add_node(self, node: int, parent: int, token: int) -> None:
        """Set `node` below `parent`, which must be set already."""
        self.tokens[node - 1] = self.expected_tokens[node - 1] = token
        self.parents[node - 1] = parent
        self.depths[node - 1] = (self.depths[parent - 1] if parent else 0) + 1
        self.ancestor_mask[node] |= self.ancestor_mask[parent]


class HostProposer(Proposer):
    """Trees come from `build_guess_tree`, on the host; no pass changes a tensor that another reads."""

    def __init__(self, num_draft_tokens: int, device: torch.device):
        nodes, integer = num_draft_tokens, {"dtype": torch.int64, "device": device}
        self.context: list[int] = []  # prompt and answer
        self.ids = torch.zeros(1, nodes - 1, **integer)
        self.target_tokens = torch.zeros(nodes, **integer)  # of the last cycle
        self.tree = trees.DraftTree(
            torch.arange(nodes - 1, device=device)[None],
            torch.full((1, nodes - 1), UNMATCHABLE_TOKEN, **integer),
            torch.zeros(1, nodes, **integer),
            torch.zeros(1, nodes, nodes, dtype=torch.bool, device=device),
            torch.zeros(1, nodes, **integer),
        )

    def start(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        self.begin_answer(prompt)

    def begin_answer(self, prompt: list[int]) -> None:
        self.context = list(prompt)

    def prepare(self, state: DecodeState) -> None:
        count, *tokens = torch.cat([state.num_verified, state.next_tokens], dim=1)[0].tolist()
        self.context += tokens[:count]
        found = self.build_guess_tree(tokens[:count])
        self.ids[0].copy_(torch.tensor(found.tokens))
        self.tree.tokens[0].copy_(torch.tensor(found.expected_tokens))
        self.tree.parents[0, 1:].copy_(torch.tensor(found.parents))
        self.tree.depths[0, 1:].copy_(torch.tensor(found.depths))
        self.tree.ancestor_mask[0].copy_(found.ancestor_mask)

    @abstractmethod
    def build_guess_tree(self, new_tokens: list[int]) -> GuessTree:
        """Return guesses of what follows `context`, which ends with `new_tokens`."""

    def propose(self, slots: CacheSlots, state: DecodeState, visible_length: int) -> tuple[trees.DraftTree, Tensor]:
        roots = state.next_tokens.gather(1, state.num_verified - 1)  # [1, 1]
        return self.tree, torch.cat([roots, self.ids], dim=1)

    def update(self, state: DecodeState, output: VerifyOutput) -> None:
        self.target_tokens.copy_(output.target_tokens[0])

    def count_state_bytes(self, slots: CacheSlots) -> int:
        """Return the bytes of device memory, and eight bytes for each token kept on the host."""
        # A tree of greedy drafts has no probabilities.
        tensors = [self.ids, self.target_tokens, *vars(self.tree).values()]
        return sum(t.nbytes for t in tensors if t is not None) + 8 * len(self.context)


class ChainProposer(HostProposer):
    """Chains of guesses that prompt and answers decide alone: a `Lookup` of stored answers too (replay/lookups.py)."""

    @abstractmethod
    def guess(self, new_tokens: list[int]) -> list[int]:
        """Return guesses of what follows `context`, which ends with `new_tokens`."""

    def build_guess_tree(self, new_tokens: list[int]) -> GuessTree:
        found = GuessTree.empty(len(self.target_tokens))
        for node, token in enumerate(self.guess(new_tokens), 1):
            found.add_node(node, node - 1, token)
        return found


class HostDrafter(Drafter):
    """A family without weights beside a target, one prompt at a time."""

    is_batched = False

    def __init__(self, make_method: Callable[..., DraftingMethod], device: torch.device):
        self.make_method, self.device = make_method, device

    def build_method(self, shape: TreeShape, draft_temperature: float | None = None) -> DraftingMethod:
        assert isinstance(shape, NamedShape), shape
        return self.make_method(*shape.numbers, self.device)


def build_drafter(
    make_method: Callable[..., DraftingMethod], draft: LoadedDraft, embedding: Tensor, head: Tensor, tree_scoring: str
) -> HostDrafter:
    """Return the drafter of a family; `make_method` takes the numbers of a shape's name, and a device."""
    return HostDrafter(make_method, embedding.device)


class HostFiles(DraftFiles):
    """The files of a family without weights: a config.json that names it."""

    def build_module(self, config: dict[str, Any], head: Tensor, logits_scale: float) -> nn.Module:
        return nn.Module()

    def list_feature_layers(self, config: dict[str, Any], target: TargetManifest) -> list[int]:
        return []

    def read_checked(self, folder: Path, made_by: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"method": self.facts.name}, {}

    def write(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        with atomic.write_folder(folder / "draft") as temporary:
            atomic.write_json(temporary / "config.json", config)
