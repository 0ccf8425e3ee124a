"""The interface of methods that propose trees in place of the engine's own draft (stages/methods).

Letters: M num_draft_tokens.
"""

from typing import Protocol

from torch import Tensor

from stages.engine.decode_state import DecodeState, PrefillOutput, VerifyOutput
from stages.trees.draft_tree import DraftTree


class Proposer(Protocol):
    """Proposes the tree of each cycle, for one prompt at a time.

    `prepare` runs on the host. `propose` and `update` are captured in a CUDA graph, so they use tensors of fixed shapes,
    and every tensor that they change is in `graph_tensors`.
    """

    graph_tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes kept between cycles."""
        ...

    def start(self, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        """Begin a prompt: it is in the cache, and state.next_tokens[0] is the answer's first token."""

    def prepare(self, state: DecodeState) -> None:
        """Do the host's work before each cycle."""

    def propose(self, state: DecodeState, visible_length: int) -> tuple[DraftTree, Tensor]:
        """Return a tree and its tokens [M], the root's first; only `visible_length` cache rows may be read."""
        ...

    def update(self, state: DecodeState, output: VerifyOutput) -> None:
        """Take over the result of a cycle; `state` is already advanced."""


class DraftingMethod(Protocol):
    """A way to propose trees."""

    num_steps: int  # the depth of its trees
    num_draft_tokens: int  # M
    weight_bytes: int  # without the target's
    num_parameters: int  # trained

    def build_proposer(self, capacity: int) -> Proposer:
        """Return a proposer for a slot of `capacity` tokens."""
        ...
