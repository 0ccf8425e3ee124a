"""The trees of benchmark and benchmark_served that a checkpoint's draft can't grow, or an engine can't run with it.

`trees` of a section is one list for all of its checkpoints. A pair that can't run is left out: its cell has the status
`unsupported` with the reason, and nothing is loaded or started for it. What is refused is a checkpoint without any tree, and a
tree without any checkpoint. The blocks of imported drafts are not known here; their cells say it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from stages.params.benchmark_sections import Benchmark, BenchmarkServed
from stages.params.block_draft_methods import BLOCK_METHODS, explain_unserved_tree
from stages.params.draft_sections import BlockSegment, Segment
from stages.params.tree_shape import TreeShape


@dataclass(frozen=True)
class LeftOutTree:
    """A tree that is not measured with a checkpoint."""

    section: str  # benchmark or benchmark_served
    checkpoint: str
    tree: str
    reason: str


def list_left_out_trees(
    torch: Benchmark, served: BenchmarkServed, trained: Mapping[str, Segment]
) -> Iterator[LeftOutTree]:
    """Yield the trees that are left out for a checkpoint; none of a section without workloads."""
    for name in torch.checkpoints if torch.torch_workloads else []:
        segment = trained.get(name)
        for tree in map(TreeShape.parse, torch.trees):
            if isinstance(segment, BlockSegment) and (reason := segment.explain_ungrown(tree)):
                yield LeftOutTree("benchmark", name, tree.name, reason)
    for name in served.checkpoints if served.workloads else []:
        segment = trained.get(name)
        block = (BLOCK_METHODS[segment.method], segment.num_drafts) if isinstance(segment, BlockSegment) else None
        for tree in map(TreeShape.parse, served.trees):
            shape = tree.num_steps, tree.topk, tree.num_draft_tokens
            if name in trained and (reason := explain_unserved_tree(served.engine, *shape, block)):
                yield LeftOutTree("benchmark_served", name, tree.name, reason)


def check_cell_trees(torch: Benchmark, served: BenchmarkServed, trained: Mapping[str, Segment]) -> None:
    """Raise ValueError for a checkpoint that no tree of its section runs with, and a tree that runs with no checkpoint.

    A tree of EAGLE-3 that an engine lacks may be listed: published tables have such cells.
    """
    left_out = list(list_left_out_trees(torch, served, trained))
    for section, names, trees in (
        ("benchmark", torch.checkpoints, torch.trees),
        ("benchmark_served", served.checkpoints, served.trees),
    ):
        pairs = {(left.checkpoint, left.tree) for left in left_out if left.section == section}
        idle = [name for name in names if trees and all((name, tree) in pairs for tree in trees)]
        if idle:
            raise ValueError(
                f"{section}.trees has {', '.join(trees)}, of which none runs with {', '.join(idle)}; expected one for each of "
                f"{section}.checkpoints, which take {_describe_drafts(idle, section, served, trained)}; add one, or take the "
                "checkpoint out"
            )
        blocks_alone = all(isinstance(trained.get(name), BlockSegment) for name in names)
        unused = [tree for tree in trees if names and all((name, tree) in pairs for name in names)]
        if unused and blocks_alone:
            raise ValueError(
                f"{section}.trees: {', '.join(unused)} can't run with any of {section}.checkpoints, which take "
                f"{_describe_drafts(names, section, served, trained)}; take it out, or raise block_size of one of these segments "
                "of train_draft.checkpoints"
            )


def describe_left_out(trees: Iterable[LeftOutTree]) -> list[str]:
    """Return a line for each tree and reason, with all checkpoints that it is left out for."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for left_out in trees:
        groups.setdefault((left_out.section, left_out.tree, left_out.reason), []).append(left_out.checkpoint)
    return [
        f"left out of {section}: {tree} with {', '.join(names)}: {reason}"
        for (section, tree, reason), names in groups.items()
    ]


def _describe_drafts(
    names: Iterable[str], section: str, served: BenchmarkServed, trained: Mapping[str, Segment]
) -> str:
    """Return each checkpoint with the trees that run with it, in words."""
    found = []
    for name in names:
        segment = trained.get(name)
        if isinstance(segment, BlockSegment):
            d = segment.num_drafts
            grown = f"num_steps of at most {d}" + (
                f" and topk of at most {segment.most_topk}" if segment.most_topk else ""
            )
            takes = f"t{d}_1_{d + 1} alone" if section == "benchmark_served" else grown
        else:
            takes = "chains" if served.engine == "vllm" else "num_draft_tokens of at least num_steps + 1"
        found.append(f"{name} {takes}")
    return ", ".join(found)
