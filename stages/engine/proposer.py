"""The interface between the engine and the families of drafts (stages/families), which propose the trees of each cycle.

Letters: B prompts decoded together, M num_draft_tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput, VerifyOutput
from stages.params.tree_shape import TreeShape
from stages.trees.draft_tree import DraftTree


class Proposer(ABC):
    """Proposes the trees of each cycle.

    `prepare` runs on the host. `propose` and `update` are captured in a CUDA graph, so they use tensors of fixed shapes,
    and every tensor that they change besides the state and the slots' caches is in `graph_tensors`.
    """

    graph_tensors: Sequence[Tensor] = ()
    feature_layers: Sequence[int] = ()  # layers of the target whose inputs become prefill.features and state.features

    @abstractmethod
    def start(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        """Begin a prompt: it is in the slot's cache, and state.next_tokens[0, 0] is the answer's first token."""

    def prepare(self, state: DecodeState) -> None:  # noqa: B027 - most methods have no such work
        """Do the host's work before each cycle."""

    @abstractmethod
    def propose(self, slots: CacheSlots, state: DecodeState, visible_length: int) -> tuple[DraftTree, Tensor]:
        """Return trees and their tokens [B, M], the roots' first; only `visible_length` rows of a slot may be read."""

    def update(self, state: DecodeState, output: VerifyOutput) -> None:  # noqa: B027 - some keep nothing
        """Take over the result of a cycle; `state` is already advanced."""

    @abstractmethod
    def count_state_bytes(self, slots: CacheSlots) -> int:
        """Return the bytes kept between cycles."""


class DraftingMethod(ABC):
    """A way to propose trees."""

    num_steps: int  # the depth of its trees
    num_draft_tokens: int  # M

    @property
    def num_scratch_rows(self) -> int:
        """Return how many cache rows behind the verified ones a cycle may write."""
        return max(self.num_steps + 1, self.num_draft_tokens)

    @abstractmethod
    def build_proposer(self, capacity: int) -> Proposer:
        """Return a proposer for slots of `capacity` tokens."""


class Drafter(ABC):
    """A draft beside a target: what it reads, what it keeps in the slots, and the shapes that it proposes."""

    module: nn.Module | None = None  # its weights; None: it has none
    feature_layers: Sequence[int] = ()  # of the target, that it reads
    feature_width: int = 0  # of these layers together, as the draft reads them
    cache_heads: int = 0  # of a token's keys in the slots' draft cache, the layers side by side; 0: it keeps none there
    cache_head_dim: int = 0
    rope_axes: tuple[int, ...] = ()  # (3,) where its positions have three axes
    is_batched: bool = True  # False: one prompt at a time

    @abstractmethod
    def build_method(self, shape: TreeShape, draft_temperature: float | None = None) -> DraftingMethod:
        """Return the method of a shape, with drafts sampled at a temperature; greedy with None.

        Raises ValueError for a shape that the draft can't grow, and for one whose drafts can't be sampled.
        """

    def count_logits(self, shape: TreeShape) -> int:
        """Return the most logits of the draft that a prompt has at once, for the estimate of memory."""
        return 0

    def use_fused_kernels(self) -> None:  # noqa: B027 - most families have none
        """Take kernels whose shapes are fixed, on a GPU that captures cycles."""
