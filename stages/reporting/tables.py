"""The tables of results, a workload on an engine with a checkpoint each: in the terminal, and what the page needs for its own.

Where prompts were decoded one by one, trees that were replayed and not measured have a line too, with the tau of replay and the
predicted speedup. Tables of loads have, load by load, trees and the fastest plain decoding. docs/metrics.md defines the columns.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stages.cells.cell import Cell
from stages.cells.table import ResultRow, TableLine
from stages.params.engines import TORCH, is_in_process
from stages.params.families import DraftKind
from stages.params.tree_shape import Load
from stages.params.units import format_bytes
from stages.reporting.families import Families
from stages.reporting.text import (
    ONE_PROMPT,
    ONE_REPEAT,
    align_columns,
    format_column,
    format_number,
    format_tree,
    mark_times,
)

MAX_TABLE_LINES = 40  # a longer table is folded on the page, and left to the CSV by the terminal
NO_INTERVAL = "no interval"  # of a prediction: docs/cost.md says when
REPLAYED_MARK = " *"
TORCH_ONLY_MARK = " +"
DOUBTED_MARK, DOUBTED_NOTE = " !", "! doubtful timings, as the lines at the top say"
REPLAYED_NOTE = (
    "* not measured: tau replayed over the eval split (measured: over the workload's prompts), speedup predicted"
)
CHAIN_NOTE = "in brackets: a chain's older name, which leaves the root out of the number of draft tokens"


@dataclass(frozen=True)
class ResultGroup:
    """One table."""

    workload: str
    engine: str
    checkpoint: str | None  # None where only plain decoding was served
    in_turns: bool  # prompt by prompt
    rows: list[ResultRow]
    cells: list[Cell] = field(default_factory=list)  # none if the trees were only replayed
    loads: list[Load] = field(default_factory=list)  # of a table of loads
    # prompt by prompt: fields of plain decoding, medians over cells
    plain: dict[str, float] = field(default_factory=dict)

    @property
    def first(self) -> ResultRow:
        return self.rows[0]

    @property
    def title(self) -> str:
        return format_title(self.workload, self.checkpoint)

    @property
    def top_tau(self) -> float | None:
        return max((row.tau for row in self.rows if row.tau is not None), default=None)

    @property
    def prompt_count(self) -> str:
        """Return how many prompts were answered, and how often where that was more than once."""
        points = [cell.points[0] for cell in self.cells]
        prompts = len({row.id for point in points for row in point.requests})
        repeats = sorted({len(point.loads) for point in points})
        more = f", {' to '.join(map(str, dict.fromkeys((repeats[0], repeats[-1]))))} repeats" if repeats[-1] > 1 else ""
        return f"{prompts} prompts{more}"

    @property
    def plain_columns(self) -> dict[str, str]:
        """Return the texts of the columns that plain decoding has, prompt by prompt, by field."""
        known = {"tau": 1.0, "speedup": 1.0} | self.plain
        texts = {
            name: format_number(known[name], column.decimals, column.factor) + column.suffix if name in known else ""
            for name, column in ResultRow.list_view(in_turns=True, on_page=True).items()
        }
        return mark_times(texts)


def format_title(workload: str, checkpoint: str | None) -> str:
    return f"{workload}, checkpoint {checkpoint}" if checkpoint else workload


def describe_decoding(row: ResultRow) -> str:
    """Return the tree of a line, or "plain decoding"."""
    return "plain decoding" if row.tree is None or row.is_plain else format_tree(row.tree)


# Groups


def group_in_turns(lines: Iterable[TableLine], replayed: Iterable[ResultRow] = ()) -> list[ResultGroup]:
    """Return a table for each workload and checkpoint that was decoded prompt by prompt, or only replayed."""
    found, in_turns, unmeasured = [], [line for line in lines if line.row.in_turns], list(replayed)
    for names in dict.fromkeys((line.row.workload, line.row.checkpoint) for line in in_turns):
        group = [line for line in in_turns if (line.row.workload, line.row.checkpoint) == names]
        rows, cells = [line.row for line in group], [line.cell for line in group]
        found.append(ResultGroup(names[0], TORCH.name, names[1], True, rows, cells, plain=_average_plain(group)))
    for names in dict.fromkeys((row.workload, row.checkpoint) for row in unmeasured):
        rows = [row for row in unmeasured if (row.workload, row.checkpoint) == names]
        found.append(ResultGroup(names[0], TORCH.name, names[1], True, rows))
    return found


def _average_plain(lines: list[TableLine]) -> dict[str, float]:
    """Return the medians of what the cells measured of plain decoding, which one disturbed cell does not move."""
    measured = [ResultRow.read_sources(line.baseline_point) for line in lines if line.baseline_point]
    names = ("ttft_mean_s", "e2e_mean_s", "output_throughput")
    return {name: median(found[name] for found in measured) for name in names if measured}


def group_loads(rows: list[ResultRow]) -> list[ResultGroup]:
    """Return a table for each workload, engine and checkpoint that was measured in loads.

    A table has, load by load, its trees and the fastest plain decoding; at its end what the engine can't run.
    """
    found, loaded = [], [row for row in rows if not row.in_turns]
    for names in dict.fromkeys((row.workload, row.engine) for row in loaded):
        members = [row for row in loaded if (row.workload, row.engine) == names]
        plain, unrun = select_best_plain(members), [row for row in members if not row.is_measured]
        for checkpoint in dict.fromkeys(row.checkpoint for row in members if not row.is_plain) or [None]:
            trees = [row for row in members if row.is_measured and not row.is_plain and row.checkpoint == checkpoint]
            loads = sorted({row.load for row in trees} | set(plain), key=lambda load: load.sort_key)
            lines: list[ResultRow] = []
            for load in loads:
                lines += [*(row for row in trees if row.load == load), *([plain[load]] if load in plain else [])]
            lines += [row for row in unrun if not row.is_plain and row.checkpoint == checkpoint]
            lines += [row for row in unrun if row.is_plain]
            found.append(ResultGroup(*names, checkpoint, in_turns=False, rows=lines, loads=loads))
    return found


def select_best_plain(rows: list[ResultRow]) -> dict[Load, ResultRow]:
    """Return the fastest plain decoding of each load, measured by the baseline or in turns with a cell."""
    best: dict[Load, ResultRow] = {}
    for row in rows:
        if row.is_plain and row.is_measured:
            best[row.load] = max(best.get(row.load, row), row, key=lambda r: r.output_throughput or 0.0)
    return best


# The terminal


def format_tables(
    lines: list[TableLine],
    replayed: list[ResultRow],
    best_checkpoint: str | None,
    families: Families,
    doubted: Collection[str] = (),
) -> list[str]:
    """Return the terminal's lines, a table per group. `doubted` are stages whose times are odd."""
    groups = group_in_turns(lines, replayed)
    compares_memory = any(not draft.family.is_timed for draft in families.values())
    text = []
    for group in groups:
        family = families[str(group.checkpoint)]
        mark = ", the best checkpoint by replayed tau" if group.checkpoint == best_checkpoint else ""
        sizes = [row for row in group.rows if row.weights_bytes is not None and row.state_bytes is not None]
        name = family.title
        if sizes and compares_memory:
            state = max(row.state_bytes or 0 for row in sizes)
            name += f": weights {format_bytes(sizes[0].weights_bytes or 0)}, state {format_bytes(state)}"
        name = f" ({name})" if compares_memory or not family.family.has_root else ""
        text += [f"{group.title}{name}{mark}", *_align_in_turns(group, family, doubted)]
        if group.plain:
            speed = group.plain["output_throughput"]
            text.append(f"plain decoding: {speed:.1f} tokens/s, the median of the measured rows")
        if any(row.stage in doubted for row in group.rows):
            text.append(DOUBTED_NOTE)
        if reason := family.explain_torch_only(row.shape for row in group.rows):
            text.append(f"{TORCH_ONLY_MARK.strip()} {reason}")
        text += [*([REPLAYED_NOTE] if not group.cells else []), ""]
    if any(row.topk == 1 for group in groups for row in group.rows):
        text[-1:] = [CHAIN_NOTE, ""]
    for group in group_loads([line.row for line in lines]):
        text += [*_format_load_group(group), ""]
    return text


def _align_in_turns(group: ResultGroup, family: DraftKind, doubted: Collection[str]) -> list[str]:
    texts = []
    for row in group.rows:
        marks = REPLAYED_MARK * row.is_replayed + DOUBTED_MARK * (not row.is_replayed and row.stage in doubted)
        marks += TORCH_ONLY_MARK * (not family.is_served(row.shape))
        texts.append((format_tree(str(row.tree)) + marks, *format_columns(row).values()))
    return align_columns([*_list_heads([("tree", "")], in_turns=True), *texts])


def _list_heads(first: list[tuple[str, str]], in_turns: bool) -> list[tuple[str, ...]]:
    headings = [column.heading or ("", "") for column in ResultRow.list_view(in_turns).values()]
    return list(zip(*first, *headings, strict=True))


def _format_load_group(group: ResultGroup) -> list[str]:
    is_torch = is_in_process(group.engine)
    text = [f"{group.title}, {'by the torch engine' if is_torch else f'served by {group.engine}'}"]
    measured = [row for row in group.rows if row.is_measured]
    if 0 < len(measured) <= MAX_TABLE_LINES:
        heads = _list_heads([("tree", ""), ("tokens", "x concurrency")], in_turns=False)
        shown = [(describe_decoding(row), row.load.shorten(), *format_columns(row).values()) for row in measured]
        text += align_columns([*heads, *shown])
    elif measured:
        text.append(f"{len(measured)} lines: {ResultRow.TABLE}")
    for row in measured:
        failed = (row.requests or 0) - (row.completed or 0)
        remarks = row.remark, explain_tau_gap(row), failed and f"{failed} of {row.requests} requests failed"
        text += [f"! {describe_decoding(row)}, {row.load.shorten()}: {remark}" for remark in remarks if remark]
    return text + [
        f"! {describe_decoding(row)}: {describe_unsupported(row)}" for row in group.rows if not row.is_measured
    ]


# Columns and remarks of a line


def format_columns(row: ResultRow, on_page: bool = False) -> dict[str, str]:
    """Return the texts of the columns that are shown, by field."""
    shown = ResultRow.list_view(row.in_turns, on_page).items()
    if row.in_turns:
        missing = NO_INTERVAL if row.is_replayed else ONE_PROMPT
        return {name: format_column(row, name, column, missing) for name, column in shown}
    if row.is_plain:
        row = row.model_copy(update={"speedup": 1.0})
    reasons = {"tau_low": ONE_PROMPT}
    texts = {name: format_column(row, name, column, reasons.get(name, ONE_REPEAT)) for name, column in shown}
    return texts | ({"speedup_low": ""} if row.is_plain else {})


def describe_unsupported(row: ResultRow) -> str:
    replayed = "" if row.replay_tau is None else f"; replayed, its tau is {row.replay_tau:.2f}"
    return f"{row.remark}{replayed}"


def explain_tau_gap(row: ResultRow) -> str:
    """Return why a served tau away from the replayed one matters; nothing where they agree or needn't."""
    if row.replay_agrees != "no" or row.replay_tau is None:
        return ""
    few_prompts = " But its interval holds the replayed tau: so few prompts may explain it; ask more."
    low, high = row.tau_low, row.tau_high
    within_interval = low is not None and high is not None and low <= row.replay_tau <= high
    return (
        f"tau {row.tau:.2f} is {row.replay_ratio:.2f} of the replayed {row.replay_tau:.2f}. A replay accepts exactly "
        "what this draft and tree accept on these prompts, so the engine drafts from something else than was trained: other "
        "weights or some it skipped, other feature layers, positions, a chat template or a map of the vocabulary. Until that "
        f"is found, this line says nothing of the draft.{few_prompts if within_interval else ''}"
    )


# results/metrics.json


def summarise_loads(rows: list[ResultRow]) -> dict[str, Any]:
    """Return what results/metrics.json has of loads; the best is one whose interval lies above 1, or null."""
    loaded = [row for row in rows if not row.in_turns]
    measured = [row for row in loaded if not row.is_plain and row.is_measured]
    joined = [row for row in measured if row.speedup is not None]
    best = max((row for row in joined if row.is_faster), key=lambda row: row.speedup or 0.0, default=None)
    load = ("engine", "workload", "checkpoint", "tree", "max_new_tokens", "concurrency")
    names = (*load, "tau", "speedup", "speedup_low", "speedup_high")
    return {
        "points": len(measured),
        "plain_points": sum(row.is_plain and row.is_measured for row in loaded),
        "unsupported": sum(not row.is_measured for row in loaded),
        "not_compared": len(measured) - len(joined),
        "off_replay": sum(row.replay_agrees == "no" for row in measured),
        "best_by_speedup": best and {k: best[k] for k in names},
    }
