"""The sections that list trees: replay_trees, time_cycles."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field

from stages.params.engines import CellEngine, is_in_process
from stages.params.section import Count, Grid, Name, Names, Positive, Section, _check_unique
from stages.params.tree_shape import SGLANG_SCORING, ScoringName, TreeShape, count_candidates, parse_shape

MIN_TIMED_TREES = 8  # points of a timing grid: a fit without prompts of other requests has up to seven terms


TreeNames = Annotated[
    list[str],
    AfterValidator(lambda names: [TreeShape.parse(name).name for name in names]),
    AfterValidator(_check_unique),
]
ShapeNames = Annotated[
    list[str], AfterValidator(lambda names: [parse_shape(name).name for name in names]), AfterValidator(_check_unique)
]
DraftTokens = Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]


class TreeGrid(Section):
    """Lists of numbers, whose combinations are trees, and the checkpoints whose drafts grow them."""

    checkpoints: Names  # []: none
    num_steps: Grid
    topk: Grid
    num_draft_tokens: DraftTokens

    def list_trees(self, num_drafts: int | None = None) -> list[TreeShape]:
        """Return every tree of the grid that can be built, ordered by topk, num_steps, num_draft_tokens.

        With `num_drafts`, those of a block draft: a block of so many drafts grows no deeper tree, and the chain of all of
        them, which serving engines run, is always among them.
        """
        found = [
            TreeShape(s, k, m)
            for k in sorted(set(self.topk))
            for s in sorted(set(self.num_steps))
            if num_drafts is None or s <= num_drafts
            for m in ([s + 1] if k == 1 else sorted(set(self.num_draft_tokens)))
            if m - 1 <= count_candidates(s, k)
        ]
        whole = TreeShape(num_drafts, 1, num_drafts + 1) if num_drafts else None
        if whole is None or whole in found:
            return found
        return sorted([*found, whole], key=lambda tree: (tree.topk, tree.num_steps, tree.num_draft_tokens))


class ReplayTrees(TreeGrid):
    num_steps: Grid = Field(default_factory=lambda: list(range(1, 11)))
    topk: Grid = Field(default_factory=lambda: [1, 2, 3, 4])
    # at topk 1 always num_steps + 1
    num_draft_tokens: DraftTokens = Field(default_factory=lambda: [4, 6, 8, 12, 16, 20, 24, 32, 48])
    # how nodes are scored; sglang: products of probabilities; eagle: sums of logarithms
    tree_scoring: ScoringName = SGLANG_SCORING
    # trees with statistics of every cycle (docs/trees.md); null: the longest chain and the largest tree of the grid
    trace_trees: TreeNames | None = None
    # memory of rows and nodes processed at once, besides the draft; tens of GiB are faster on a GPU
    memory_gib: Positive = 4.0

    def list_conflicts(self) -> Iterator[str]:
        if not self.list_trees():
            yield "no tree of num_steps, topk and num_draft_tokens can be built; write smaller num_draft_tokens"

    def list_traced_trees(self, grid: list[TreeShape]) -> list[TreeShape]:
        """Return the trees of `trace_trees`, which may be outside the grid, or those that null stands for."""
        if self.trace_trees is not None:
            return [TreeShape.parse(name) for name in self.trace_trees]
        chains = [tree for tree in grid if tree.topk == 1]
        largest = max(grid, key=lambda tree: (tree.num_draft_tokens, tree.num_steps, -tree.topk))
        return list(dict.fromkeys([*chains[-1:], largest]))


class TimeCycles(TreeGrid):
    """The timing grids of engines: docs/cost.md."""

    engines: Annotated[list[CellEngine], AfterValidator(_check_unique)]  # each times all of the drafts; []: none
    # a draft of each shape: its weights cost nothing, so e000 stands for every EAGLE-3 draft that is trained from it
    checkpoints: Names
    # of benchmark.workloads; of engines that serve, with ignore_eos or prompts: eval, and several of concurrency
    workload: Name
    # of the torch engine, as the next five: costs are predicted for trees within this grid
    num_steps: Grid = Field(default_factory=lambda: [1, 3, 6, 10])
    topk: Grid = Field(default_factory=lambda: [1, 2, 4])
    # at topk 1 always num_steps + 1
    num_draft_tokens: DraftTokens = Field(default_factory=lambda: [2, 4, 8, 16, 32, 64])
    context: Count = 1024  # tokens in the KV cache before the first timed cycle
    warmup: Annotated[int, Field(ge=0)] = 1  # untimed cycles of each tree in each repeat
    cycles: Count = 2  # timed cycles of each tree in each repeat
    repeats: Count = 5  # rounds over all trees at most (docs/cost.md); a tree's cost is the median of its cycles
    # sequences at once; [1, 4, 16, 64]: predicts speedups at these loads
    batches: Grid = Field(default_factory=lambda: [1])
    # of engines that serve, which leave out what they can't run: the extremes of what you would launch, and others
    trees: TreeNames = Field(default_factory=lambda: ["t3_1_4", "t8_1_9", "t3_4_8", "t5_4_16", "t8_3_32"])
    # tokens that such an engine is told to accept in each cycle, the bonus token among them
    accept_length: Annotated[float, Field(gt=1)] = 3.0

    @property
    def served_engines(self) -> list[str]:
        """Return the engines whose servers are timed."""
        return [engine for engine in self.engines if self.checkpoints and not is_in_process(engine)]

    def list_timed_trees(self, num_drafts: int | None = None) -> list[TreeShape]:
        """Return the trees of the torch engine's grid, as `list_trees`. Raises ValueError where they are too few for a fit."""
        trees = self.list_trees(num_drafts)
        if len(trees) < MIN_TIMED_TREES:
            which = f" no deeper than the {num_drafts} drafts of a block" if num_drafts else ""
            raise ValueError(
                f"time_cycles.num_steps, topk and num_draft_tokens make {len(trees)} trees{which}, expected {MIN_TIMED_TREES}"
            )
        return trees
