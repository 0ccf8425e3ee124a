"""Results of replay on disk; docs/metrics.md defines the columns.

`results/replay/<checkpoint>.csv`: a row for each tree on the target's answers at temperature 0, then a row for each tree on
answers sampled above it, and there one more for each chain of a block draft, with sampled drafts. `<checkpoint>.inside.csv`:
statistics of the cycles of some trees at temperature 0, a row a bucket. `<checkpoint>.groups.csv`: each tree at temperature 0 on
the questions of each file of fix_data.raw, and in each range of context lengths.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal, Self

from stages.cells.record import GREEDY, DraftSampling, Record, limit_draft_sampling
from stages.params.tree_shape import TreeShape, parse_shape
from stages.runtime import atomic

REPLAY_FOLDER = Path("results/replay")


class ReplayRecord(Record):
    """A row of a table of a checkpoint's replay."""

    SUFFIX: ClassVar[str] = ""  # of the file

    @classmethod
    def locate(cls, checkpoint: str) -> Path:
        return REPLAY_FOLDER / f"{checkpoint}{cls.SUFFIX}.csv"

    @classmethod
    def read(cls, checkpoint: str) -> list[Self]:
        """Return the rows of a checkpoint. Raises ValueError naming the file and the stage to run."""
        return cls.read_csv(cls.locate(checkpoint), f"replay_trees@{checkpoint}")


class ReplayedTree(ReplayRecord):
    """A tree on a checkpoint's eval answers of one temperature."""

    checkpoint: str
    tree: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    tau: float
    tau_low: float | None  # None if one conversation was replayed, as `tau_high`
    tau_high: float | None
    accept_rate: float
    cycles: int | float  # expected ones, and expected accepted drafts, where drafts are sampled
    accepted: int | float
    mean_depth: float
    acceptance: str | None
    tau_oracle: float | None  # None where drafts are sampled and of lookups, as `tau_adaptive`
    tau_adaptive: float | None
    temperature: float
    top_p: float | None  # None at temperature 0
    draft_sampling: DraftSampling = GREEDY  # sampled: verified by the ratio of both probabilities

    @classmethod
    def read(cls, checkpoint: str) -> list[Self]:
        rows, path = super().read(checkpoint), cls.locate(checkpoint)
        if not rows:
            raise atomic.BrokenArtifactError(
                f"{path} holds no trees", atomic.format_rerun_hint(f"replay_trees@{checkpoint}")
            )
        return rows

    @property
    def shape(self) -> TreeShape:
        return parse_shape(self.tree)


class TreeBucket(ReplayRecord):
    """Some cycles, or nodes, of a traced tree."""

    SUFFIX = ".inside"
    checkpoint: str
    tree: str
    by: str
    bucket: str
    cycles: int | None  # None where the grouping has no such count
    nodes: int | None
    expected_accepted: float | None
    accepted: int


class GroupTau(ReplayRecord):
    """A tree on a part of the eval answers at temperature 0."""

    SUFFIX = ".groups"
    by: Literal["source", "context"]
    group: str  # a file of fix_data.raw, or a range of the tokens before the drafts, "128-256"
    answers: int
    tree: str
    cycles: int
    tau: float
    tau_low: float | None  # None if one conversation was replayed, as `tau_high`
    tau_high: float | None


def select_temperature(
    trees: Iterable[ReplayedTree], temperature: float, draft_sampling: DraftSampling = GREEDY
) -> list[ReplayedTree]:
    """Return the trees on answers of one temperature, their drafts greedy or sampled; at temperature 0 all are greedy."""
    wanted = temperature, limit_draft_sampling(draft_sampling, temperature)
    return [tree for tree in trees if (tree.temperature, tree.draft_sampling) == wanted]


def select_sampled_alike(
    trees: Iterable[ReplayedTree], temperature: float, top_p: float, top_k: int | None, draft_sampling: DraftSampling
) -> list[ReplayedTree]:
    """Return the trees on answers sampled so: at temperature 0, or above it with the same top-p and without top-k."""
    alike = select_temperature(trees, temperature, draft_sampling)
    return [tree for tree in alike if not temperature or (tree.top_p == top_p and top_k is None)]
