"""The trees of benchmark and benchmark_served that a checkpoint's draft can't draft, or an engine can't run with it.

`trees` of a section is one list for all of its checkpoints. A pair that can't run is left out: its cell has the status
`unsupported` with the reason, and nothing is loaded or started for it. What is refused is a checkpoint without any tree, and a
tree without any checkpoint. The sizes of imported drafts are not known here; their cells say it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from stages.params.benchmark_sections import Benchmark, BenchmarkServed
from stages.params.engines import SERVED, TORCH, is_in_process
from stages.params.families import SHAPES, DraftKind
from stages.params.tree_shape import parse_shape


@dataclass(frozen=True)
class LeftOutTree:
    """A tree that is not measured with a checkpoint."""

    section: str  # benchmark or benchmark_served
    engine: str
    checkpoint: str
    tree: str
    reason: str


def list_left_out_trees(
    torch: Benchmark, served: BenchmarkServed, drafts: Mapping[str, DraftKind]
) -> Iterator[LeftOutTree]:
    """Yield the trees that are left out for a checkpoint; none of a section without workloads. `drafts`: the known ones."""
    for name in torch.checkpoints if torch.torch_workloads else []:
        for tree in map(parse_shape, torch.trees):
            if name in drafts and (reason := drafts[name].explain_ungrown(tree)):
                yield LeftOutTree("benchmark", TORCH.name, name, tree.name, reason)
    for engine, name in product(served.engines, served.checkpoints if served.workloads else []):
        for tree in map(parse_shape, served.trees):
            if name in drafts and (reason := drafts[name].explain_unserved(engine, tree)):
                yield LeftOutTree("benchmark_served", engine, name, tree.name, reason)


def check_cell_trees(torch: Benchmark, served: BenchmarkServed, drafts: Mapping[str, DraftKind]) -> None:
    """Raise ValueError for a checkpoint that no tree of its section runs with, and a tree that runs with no checkpoint.

    A tree of EAGLE-3 that an engine lacks may be listed: published tables have such cells.
    """
    left_out = list(list_left_out_trees(torch, served, drafts))
    for section, num_engines, names, trees in (
        ("benchmark", 1, torch.checkpoints, torch.trees),
        ("benchmark_served", len(served.engines), served.checkpoints, served.trees),
    ):
        lacking = Counter((left.checkpoint, left.tree) for left in left_out if left.section == section)
        pairs = {pair for pair, count in lacking.items() if count == num_engines}
        idle = [name for name in names if trees and all((name, tree) in pairs for tree in trees)]
        if idle:
            raise ValueError(
                f"{section}.trees has {', '.join(trees)}, of which none runs with {', '.join(idle)}; expected one for each of "
                f"{section}.checkpoints, which take {_describe_drafts(idle, section, served, drafts)}"
            )
        may_be_published = section == "benchmark_served" and any(
            name not in drafts or not drafts[name].family.is_block for name in names
        )
        unused = [tree for tree in trees if names and all((name, tree) in pairs for name in names)]
        if unused and not may_be_published:
            raise ValueError(
                f"{section}.trees: {', '.join(unused)} can't run with any of {section}.checkpoints, which take "
                f"{_describe_drafts(names, section, served, drafts)}; take it out"
            )


def describe_left_out(trees: Iterable[LeftOutTree]) -> list[str]:
    """Return a line for each tree and reason, with all checkpoints that it is left out for."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for left_out in trees:
        where = left_out.section if is_in_process(left_out.engine) else f"{left_out.section}, {left_out.engine}"
        groups.setdefault((where, left_out.tree, left_out.reason), []).append(left_out.checkpoint)
    return [
        f"left out of {where}: {tree} with {', '.join(names)}: {reason}"
        for (where, tree, reason), names in groups.items()
    ]


def _describe_drafts(
    names: Iterable[str], section: str, served: BenchmarkServed, drafts: Mapping[str, DraftKind]
) -> str:
    """Return each checkpoint with the trees that run with it, in words."""
    found = []
    for name in names:
        draft = drafts.get(name, DraftKind())
        if section == "benchmark_served" and (whole := draft.whole_block):
            takes = f"{whole.name} alone"
        elif section == "benchmark_served":
            takes = " or ".join(dict.fromkeys(SERVED[engine].runs for engine in served.engines))
        else:
            limits = [
                f"{key} of at most {most}"
                for key, most in (("num_steps", draft.depth), ("topk", draft.most_topk))
                if most
            ]
            kinds = [SHAPES[letter] for letter in draft.family.shapes]
            takes = " and ".join(limits if draft.family.is_block else [*kinds, *limits])
        found.append(f"{name} {takes}")
    return ", ".join(found)
