"""The trees of benchmark and benchmark_served that a checkpoint's draft can't draft, or an engine can't run with it.

`trees` of a section is one list for all of its checkpoints. A pair that can't run is left out: its cell has the status
`unsupported` with the reason, and nothing is loaded or started for it. What is refused is a checkpoint without any tree. The
sizes of imported drafts are not known here; their cells say it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from stages.params.benchmark_sections import Benchmark, BenchmarkServed
from stages.params.engines import TORCH, is_in_process
from stages.params.families import DraftKind
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


def list_idle_checkpoints(torch: Benchmark, served: BenchmarkServed, drafts: Mapping[str, DraftKind]) -> Iterator[str]:
    """Yield a line for each checkpoint that no tree of its section runs with."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for left_out in list_left_out_trees(torch, served, drafts):
        reasons.setdefault((left_out.section, left_out.checkpoint), []).append(left_out.reason)
    for (section, name), found in reasons.items():
        trees, engines = (torch.trees, 1) if section == "benchmark" else (served.trees, len(served.engines))
        if len(found) == len(trees) * engines:
            yield f"{section}.trees has {', '.join(trees)}, of which none runs with {name}; expected one ({found[0]})"


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
