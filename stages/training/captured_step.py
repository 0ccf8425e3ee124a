"""A pack's loss and gradients as one CUDA graph for each size of padded packs (`SupervisedPack.padded_size`).

The kernels of a pack of a few thousand tokens take less time than Python takes to launch them: of EAGLE-3's seven steps some 500,
27 ms of work launched in 58 ms (docs/results/2026-11-30-h200-training.md). Replayed as a graph they are one launch. A size is
captured when it comes for the third time; before, and for packs that are not padded, the kernels are launched one by one.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stages.training.packed_rows import SupervisedPack

RUNS_BEFORE_CAPTURE = 2  # rare sizes, such as an epoch's last, are not worth a capture
# Fields of a pack whose length is its number of tokens.
OF_TOKENS = {"ids", "features", "last", "row_index", "position"}

# The pack, and the supervised positions [L] of the step -> loss, its sum for each step [L], argmax matches [L, P]
RunPack = Callable[[SupervisedPack, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class CapturedPack:
    """A graph, the memory that it reads, and what it writes."""

    graph: torch.cuda.CUDAGraph
    pack: SupervisedPack  # its tensors are filled before each replay
    counts: Tensor  # [L], likewise
    gradients: list[Tensor]  # of the trained weights
    loss_per_step: Tensor  # [L]
    argmax_matches: Tensor  # [L, P]


class CapturedSteps:
    """Runs packs forward and backward: adds to the gradients of the trained weights."""

    def __init__(self, run_pack: RunPack, draft: nn.Module, gradient_scale: float, most_tokens: int, is_enabled: bool):
        """`most_tokens` is how many a padded pack may have; without `is_enabled` nothing is captured."""
        self._run_pack, self._gradient_scale, self._is_enabled = run_pack, gradient_scale, is_enabled
        self._weights = [weight for weight in draft.parameters() if weight.requires_grad]
        self._num_tokens = most_tokens
        self._seen: Counter[int] = Counter()
        self._captured: dict[int, CapturedPack] = {}
        self._memory = torch.cuda.graph_pool_handle() if is_enabled else None  # graphs run one after another: shared

    def run(self, pack: SupervisedPack, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss summed over the positions of each step [L], and argmax matches [L, P], valid until the next run."""
        size = None if pack.rope_positions is not None else pack.padded_size  # images have sizes of their own
        if self._is_enabled and size is not None:
            self._seen[size] += 1
            if self._seen[size] > RUNS_BEFORE_CAPTURE:
                if size not in self._captured:
                    self._captured[size] = self._capture(pack, counts)
                return self._replay(self._captured[size], pack, counts)
        loss, loss_per_step, matches = self._run_pack(pack, counts)
        (loss * self._gradient_scale).backward()
        return loss_per_step, matches

    def _replay(self, captured: CapturedPack, pack: SupervisedPack, counts: Tensor) -> tuple[Tensor, Tensor]:
        copy_pack(pack, captured.pack)
        captured.counts.copy_(counts)
        captured.graph.replay()
        for weight, gradient in zip(self._weights, captured.gradients, strict=True):
            weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient
        return captured.loss_per_step, captured.argmax_matches

    def _capture(self, pack: SupervisedPack, counts: Tensor) -> CapturedPack:
        """Capture the graph of a pack's size, after a run that compiles what its number of tokens asks for."""
        static = allocate_static(pack, self._num_tokens)
        empty = CapturedPack(torch.cuda.CUDAGraph(), static, counts.clone(), [], counts, counts)
        copy_pack(pack, static)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute_gradients(empty)
        torch.cuda.current_stream().wait_stream(side)
        # Reader threads pin memory meanwhile, which a capture of all threads' calls would not allow.
        with torch.cuda.graph(empty.graph, pool=self._memory, capture_error_mode="thread_local"):
            gradients, loss_per_step, matches = self._compute_gradients(empty)
        return replace(empty, gradients=gradients, loss_per_step=loss_per_step, argmax_matches=matches)

    def _compute_gradients(self, captured: CapturedPack) -> tuple[list[Tensor], Tensor, Tensor]:
        loss, loss_per_step, matches = self._run_pack(captured.pack, captured.counts)
        gradients = torch.autograd.grad(loss * self._gradient_scale, self._weights)
        return list(gradients), loss_per_step.detach(), matches


def allocate_static(pack: SupervisedPack, num_tokens: int) -> SupervisedPack:
    """Return memory for packs of its padded size and up to `num_tokens` tokens."""
    sizes = ((name, tensor, num_tokens if name in OF_TOKENS else len(tensor)) for name, tensor in pack.tensors())
    return replace(pack, **{name: tensor.new_zeros(size, *tensor.shape[1:]) for name, tensor, size in sizes})


def copy_pack(pack: SupervisedPack, static: SupervisedPack) -> None:
    """Copy a pack into static memory. Tokens behind it are of no row, and what else is there of them does not matter."""
    for name, tensor in pack.tensors():
        getattr(static, name)[: len(tensor)].copy_(tensor)
    static.row_index[len(pack.row_index) :] = -1
