"""The verdict: what to launch at each load, or not to speculate, in one line that a reader can act on.

The page, the terminal's table and results/metrics.json, which `pipeline` reads, have it from here. It rests on intervals: a
speedup counts only where the low end of its interval is above 1. What was measured goes before what was predicted: a prediction
decides only where no tree was measured, else it is named as what to measure next.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from stages.cells.prediction import LaunchAdvice, PredictedSpeedup, SpeedupConditions, can_tell
from stages.cells.replay_records import GroupTau, ReplayedTree, select_temperature
from stages.cells.table import ResultRow
from stages.cells.training_records import TrainingReport
from stages.params.engines import is_in_process
from stages.params.tree_shape import TreeShape, parse_shape
from stages.params.units import list_first
from stages.reporting.evidence import Measurements, Predictions, SpeedupEvidence, collect_measured, collect_predicted
from stages.reporting.families import Families
from stages.reporting.text import ONE_PROMPT, align_columns, format_interval, format_tree
from stages.reporting.timing_noise import TimingRemark, summarise_remarks

VerdictKind = Literal["launch", "plain", "noisy", "unknown"]
MAX_WARNINGS = 5  # shown outright
MAX_LINES = 6  # groups of loads; further ones are counted
MAX_NAMES = 4  # of trees that can't run
MAX_SETS = 8  # columns of the table of sets
MAX_SOURCES = 20  # in the terminal
NOTHING_TIMED = (
    "No speedup is known: no tree was timed or predicted; list trees in benchmark.trees, or a checkpoint in "
    "time_cycles.checkpoints"
)
NOTHING_SURE = "No speedup is known: no tree was measured, and the times that predictions rest on are doubtful"
NOTHING_SERVED = "No speedup is known of what a serving engine runs; list other trees in benchmark.trees"
NOTHING_ACCEPTED = "no draft token was accepted; is it this target's draft, vocabulary and chat template?"
UNDERTRAINED = 0.35  # share of right first drafts; e003 of the embedded target, a third of its training, has more
NOISY = "Timings are too noisy to say"
SHORT_ADVICE = {"plain": "do not speculate", "noisy": "too noisy to say", "unknown": "not sure"}  # by kind


@dataclass(frozen=True)
class VerdictLine:
    """The advice under the same conditions."""

    conditions: SpeedupConditions
    kind: VerdictKind
    advice: str  # "Launch t8_2_16 with e009", "Do not speculate"
    evidence: str
    detail: str  # further evidence, or what to run
    chosen: SpeedupEvidence  # the tree that it is about

    @property
    def group(self) -> tuple[str, str, str]:
        """Return what lines that are told as one share."""
        return self.kind, self.advice, self.conditions.workload_suffix


@dataclass(frozen=True)
class GroupLine:
    """A tree on a part of the eval answers: its replayed tau, and the speedup that this gives where one is known."""

    checkpoint: str
    tau: GroupTau
    speedup: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        name = self.tau.group if self.tau.by == "source" else f"contexts of {self.tau.group} tokens"
        return f"{name} ({self.speedup or 0:.2f}x, tau {self.tau.tau:.2f})"


@dataclass(frozen=True)
class SetTable:
    """Measured speedups over several sets of prompts: drafts and trees by set, and the advice for each set."""

    sets: list[str]
    advice: list[str]  # for each set
    rows: list[tuple[str, str, list[SpeedupEvidence | None]]]  # tree, checkpoint, and the speedup on each set
    chosen: list[SpeedupEvidence]  # the tree that each set's advice is about

    def format_lines(self) -> list[str]:
        """Return the terminal's lines."""
        body = [
            (f"{format_tree(tree)}, {name}", *("–" if found is None else str(found) for found in speedups))
            for tree, name, speedups in self.rows
        ]
        return align_columns([("measured speedup", *self.sets), *body, ("advice", *self.advice)])


@dataclass(frozen=True)
class Verdict:
    """The answer of a run."""

    kind: VerdictKind
    headline: str
    details: tuple[str, ...]  # other loads and engines
    warnings: tuple[str, ...]  # of results
    remarks: tuple[TimingRemark, ...]  # of times
    doubted: frozenset[str]  # stages whose times are odd
    checkpoint: str | None = None  # that the headline is about
    # of the headline's tree; without one, of the tree with the highest replayed tau
    groups: tuple["GroupLine", ...] = ()
    sets: SetTable | None = None  # where several sets of prompts were measured

    def list_lines(self) -> list[str]:
        """Return the terminal's lines."""
        num_hidden = len(self.warnings) - MAX_WARNINGS
        shown = [*self.warnings[:MAX_WARNINGS], *([f"and {num_hidden} more, on the page"] if num_hidden > 0 else [])]
        warnings = [f"! {line}" for line in [*shown, *summarise_remarks(self.remarks)]]
        sets = self.sets.format_lines() if self.sets else []
        return [self.headline, *self.details, *sets, *warnings, *self._list_sources()]

    def _list_sources(self) -> list[str]:
        """Return a table of tau by source; no line where there is one source."""
        found = [part for part in self.groups if part.tau.by == "source"]
        if not found:
            return []
        title = f"{format_tree(found[0].tau.tree)} with {found[0].checkpoint} by source"
        rows = [
            (tau.group, str(tau.answers), f"{tau.tau:.2f}", format_interval(tau.tau_low, tau.tau_high, ONE_PROMPT))
            for tau in (part.tau for part in found[:MAX_SOURCES])
        ]
        more = len(found) - MAX_SOURCES
        rest = [f"and {more} more sources, on the page"] if more > 0 else []
        return ["", *align_columns([(title, "answers", "tau, replayed", "95% interval"), *rows]), *rest]

    def list_warnings(self) -> list[str]:
        """Return the page's warnings."""
        return [*self.warnings, *map(str, self.remarks)]


def build_verdict(
    launch: list[LaunchAdvice],
    predicted: list[PredictedSpeedup],
    rows: list[ResultRow],
    remarks: list[TimingRemark],
    replayable: Collection[str],
    replays: Mapping[str, list[ReplayedTree]],
    families: Families,
    sample_warnings: Sequence[str] = (),
    group_taus: Mapping[str, list[GroupTau]] | None = None,
    trained: Mapping[str, TrainingReport] | None = None,
) -> Verdict:
    """Return the verdict. `sample_warnings` are those of sample_target, on what all results are of; `group_taus` by checkpoint.

    `replays` are by checkpoint; `replayable` are the workloads whose prompts were replayed: predictions hold for these. Trees
    that no serving engine runs (DraftKind.is_served) are never advised.
    """

    def is_served(checkpoint: str | None, tree: TreeShape) -> bool:
        return checkpoint is None or checkpoint not in families or families[checkpoint].is_served(tree)

    doubted = frozenset(remark.stage for remark in remarks)
    guesses = collect_predicted(launch, [row for row in predicted if is_served(row.checkpoint, row.shape)])
    served = [row.tree is None or is_served(row.checkpoint, row.shape) for row in rows]
    judged = collect_measured((row for row, can in zip(rows, served, strict=True) if can), doubted)
    left_out = collect_measured((row for row, can in zip(rows, served, strict=True) if not can), doubted)
    lines = judge_loads(guesses, judged, replayable)
    groups = [list(group) for _, group in groupby(lines, key=lambda line: line.group)]
    prompts = {line.conditions.workload for line in lines if not line.conditions.max_new_tokens} - {None}
    texts = [_format_group(group, len(prompts) > 1) for group in groups[:MAX_LINES]]
    if len(groups) > MAX_LINES:
        texts.append(
            f"{len(groups) - MAX_LINES} more groups of loads are in results/benchmark.csv and results/launch.json"
        )
    parts = _judge_groups(lines[:1], replayable, replays, group_taus or {})
    if texts and lines[0].kind != "launch" and (untrained := _describe_undertrained(replays, trained or {})):
        texts.insert(0, untrained)
    unsupported = dict.fromkeys(
        f"{row.tree or 'plain decoding'} on {row.engine}" for row in rows if not row.is_measured
    )
    refused = [f"Left out: {list_first(list(unsupported), MAX_NAMES)}; the tables say why"] if unsupported else []
    idle = [
        f"tau of {name} is exactly 1.00 in every replayed tree: {NOTHING_ACCEPTED}"
        for name, trees in replays.items()
        if all(tree.tau == 1 for tree in trees)
    ]
    return Verdict(
        kind=lines[0].kind if lines else "unknown",
        headline=texts[0] if texts else NOTHING_SERVED if left_out else NOTHING_SURE if remarks else NOTHING_TIMED,
        details=(
            *_describe_groups(lines[:1], parts),
            *texts[1:],
            *_describe_torch_only(left_out, judged, guesses, replayable, families),
            *refused,
        ),
        warnings=(*sample_warnings, *_warn_of_measured(rows), *idle),
        remarks=tuple(remarks),
        doubted=doubted,
        checkpoint=lines[0].chosen.checkpoint if lines else None,
        groups=parts,
        sets=_build_set_table(judged, lines),
    )


def judge_loads(guesses: Predictions, measured: Measurements, replayable: Collection[str]) -> list[VerdictLine]:
    """Return a line for each measured load, and for each predicted one that was not measured.

    Where sets of prompts were measured, a prediction of none of them says what to measure, not what to launch.
    """
    lines, used = [], set()
    sets = {(conditions.engine, conditions.workload) for conditions in measured}
    sets |= {(engine, None) for engine, workload in sets if is_in_process(engine) and workload in replayable}
    for conditions, found in measured.items():
        key = conditions.find_predicted(replayable)
        used.add(key)
        lines.append(judge_load(conditions, guesses.get(key), found))
    for conditions, guess in guesses.items():
        if conditions not in used:
            line = judge_load(conditions, guess, [])
            if line.kind == "launch" and sets and (conditions.engine, conditions.workload) not in sets:
                line = replace(line, kind="unknown", advice=f"Measure {line.chosen.name}")
            lines.append(line)
    return lines


def _build_set_table(measured: Measurements, lines: list[VerdictLine]) -> SetTable | None:
    """Return the table of the measured loads; None where engines have one set of prompts each, or it has too many columns."""
    by_conditions = {line.conditions: line for line in lines if line.conditions in measured}
    counts = Counter((conditions.engine, conditions.workload) for conditions in by_conditions)
    if max(Counter(engine for engine, _ in counts).values(), default=0) < 2 or len(by_conditions) > MAX_SETS:
        return None
    trees = dict.fromkeys((tree.checkpoint, tree.tree) for found in measured.values() for tree in found)
    columns = [{(tree.checkpoint, tree.tree): tree for tree in measured[conditions]} for conditions in by_conditions]
    return SetTable(
        sets=[_name_set(conditions, counts) for conditions in by_conditions],
        advice=[
            f"{format_tree(line.chosen.tree)}, {line.chosen.checkpoint}"
            if line.kind == "launch"
            else SHORT_ADVICE[line.kind]
            for line in by_conditions.values()
        ],
        rows=[(tree, name, [column.get((name, tree)) for column in columns]) for name, tree in trees],
        chosen=[line.chosen for line in by_conditions.values()],
    )


def _name_set(conditions: SpeedupConditions, counts: Counter[tuple[str, str | None]]) -> str:
    engine = f"{conditions.engine}, " if len({engine for engine, _ in counts}) > 1 else ""
    has_loads = counts[conditions.engine, conditions.workload] > 1
    load = f", {conditions.max_new_tokens} x {_format_limit(conditions, False)}" if has_loads else ""
    return f"{engine}{conditions.workload}{load}"


def judge_load(
    conditions: SpeedupConditions, guess: SpeedupEvidence | None, measured: list[SpeedupEvidence]
) -> VerdictLine:
    """Return what to do at a load: by what was measured, and by the prediction where nothing was.

    What another checkpoint measures as slow says nothing of the predicted one.
    """
    is_own = any(tree.is_faster or (guess and tree.checkpoint == guess.checkpoint) for tree in measured)
    known = [guess] if guess and not is_own and (guess.is_faster or not measured) else measured
    best = max(known, key=lambda tree: tree.speedup)
    faster = [tree for tree in known if tree.is_faster]
    chosen = max(faster, key=lambda tree: (not tree.is_doubted, tree.speedup), default=best)
    how, next_step = "measured" if chosen.stage else "predicted", _describe_guess(conditions, guess, chosen, measured)
    text = f"the best {how}, {best.name}, is {best}"
    if faster:
        return VerdictLine(conditions, "launch", f"Launch {chosen.name}", f"{how} {chosen}", next_step, chosen)
    if all(tree.low is None for tree in known) or (best.speedup <= 1 and best.low is None):
        advice = next_step or "ask more prompts, or take three repeats"
        return VerdictLine(conditions, "unknown", "No speedup is sure", text, advice, best)
    if (best.speedup <= 1 and can_tell(best.low, best.high)) or all(
        tree.high is not None and tree.high < 1 for tree in known
    ):
        return VerdictLine(conditions, "plain", "Do not speculate", text, next_step, best)
    again = (
        f"dvc repro -fs {best.stage} on an idle machine, or raise benchmark.workloads.{conditions.workload}.num_prompts"
    )
    return VerdictLine(
        conditions, "noisy", NOISY, text, again if conditions.workload else "raise time_cycles.repeats", best
    )


def _describe_guess(
    conditions: SpeedupConditions,
    guess: SpeedupEvidence | None,
    chosen: SpeedupEvidence,
    measured: list[SpeedupEvidence],
) -> str:
    """Return what the prediction says beside the chosen tree: of that tree, or of another that is worth measuring."""
    if guess is None:
        return ""
    if guess.name in {tree.name for tree in measured}:
        return f"predicted {guess}" if guess.name == chosen.name else f"{guess.name} was predicted {guess}"
    if not guess.is_faster or (chosen is not guess and chosen.is_faster and guess.speedup <= chosen.speedup):
        return ""
    section = "benchmark" if is_in_process(conditions.engine) else "benchmark_served"
    advice = f"measure it before you rely on it ({section}.checkpoints, workloads and trees)"
    return f"not measured here: {advice}" if guess is chosen else f"{guess.name} is predicted {guess}: {advice}"


def _judge_groups(
    lines: list[VerdictLine],
    replayable: Collection[str],
    replays: Mapping[str, list[ReplayedTree]],
    group_taus: Mapping[str, list[GroupTau]],
) -> tuple[GroupLine, ...]:
    """Return the first line's tree by source, the slowest first, and by context; none of which there is one.

    Where that was not replayed, the tree with the highest replayed tau. A cycle costs the same on all questions, so the speedup
    goes with tau; it is left open for other prompts and temperatures. With longer contexts plain decoding costs more too.
    """
    trees = [tree for found in replays.values() for tree in select_temperature(found, 0)]
    line = next(iter(lines), None)
    advised = (line.chosen.checkpoint, line.chosen.tree) if line else None
    tree = max(trees, key=lambda tree: ((tree.checkpoint, tree.shape.name) == advised, tree.tau), default=None)
    if tree is None:
        return ()
    rows = [row for row in group_taus.get(tree.checkpoint, ()) if row.tree == tree.shape.name]
    numbers, per_tau = Counter(row.by for row in rows), None
    if line and (tree.checkpoint, tree.shape.name) == advised:
        is_replayed = line.conditions.workload is None or line.conditions.workload in replayable
        per_tau = line.chosen.speedup / tree.tau if is_replayed and not line.conditions.temperature else None

    def judge(row: GroupTau) -> GroupLine:
        ends = (
            None if tau is None or per_tau is None else tau * per_tau for tau in (row.tau, row.tau_low, row.tau_high)
        )
        return GroupLine(tree.checkpoint, row, *ends)

    judged = [judge(row) for row in rows if numbers[row.by] > 1]
    by_source = sorted((part for part in judged if part.tau.by == "source"), key=lambda part: part.tau.tau)
    return (*by_source, *(part for part in judged if part.tau.by == "context"))


# Words


def _describe_groups(lines: list[VerdictLine], groups: Sequence[GroupLine]) -> list[str]:
    """Return where the advised tree loses, or an unadvised one would pay: a mean over all answers hides either."""
    if not lines:
        return []
    if lines[0].kind == "launch":
        losing = [str(group) for group in groups if group.high is not None and group.high < 1]
        return [f"It loses on {list_first(losing, MAX_NAMES)}: do not launch it for these"] if losing else []
    paying = [str(group) for group in reversed(groups) if group.low is not None and group.low > 1]
    return [f"It would pay on {list_first(paying, MAX_NAMES)} alone"] if paying else []


def _format_group(group: list[VerdictLine], names_workload: bool) -> str:
    """Return one text for lines that give the same advice; the evidence is that of the first.

    `names_workload`: answers one by one are of several workloads, whose names tell them apart.
    """
    line = group[0]
    conditions, detail = line.conditions, f"; {line.detail}" if line.detail else ""
    suffix = conditions.workload_suffix
    if names_workload and conditions.workload and not suffix:
        suffix = f" ({conditions.workload})"
    if len(group) > 1:
        has_several_workloads = len({member.conditions.workload for member in group}) > 1
        limits = [_format_limit(member.conditions, has_several_workloads) for member in group]
        loads = f"at concurrency {', '.join(limits[:-1])} and {limits[-1]}{conditions.workload_suffix}"
        return f"{line.advice} {loads}: {line.evidence} {conditions.at_concurrency}{detail}"
    if line.kind == "launch":
        return f"{line.advice}: {line.evidence} {conditions.at_concurrency}{suffix}{detail}"
    return f"{line.advice} {conditions.at_concurrency}{suffix}: {line.evidence}{detail}"


def _format_limit(conditions: SpeedupConditions, with_workload: bool) -> str:
    limit = f"{conditions.concurrency:g}" if conditions.concurrency else "no limit"
    return f"{limit} ({conditions.workload})" if with_workload and conditions.workload else limit


def _describe_torch_only(
    left_out: Measurements, judged: Measurements, guesses: Predictions, replayable: Collection[str], families: Families
) -> list[str]:
    """Return the fastest tree that no engine is started with, where it is above every tree that is advised about at its load."""
    faster: list[SpeedupEvidence] = []
    for conditions, found in left_out.items():
        guess = guesses.get(conditions.find_predicted(replayable))
        rivals = [*judged.get(conditions, ()), *([guess] if guess else [])]
        faster += [tree for tree in found if all(rival.speedup < tree.speedup for rival in rivals)]
    if not faster:
        return []
    pick = max(faster, key=lambda tree: (tree.is_faster, tree.speedup))
    where = "Faster in the torch engine" if pick.is_faster else "Left out above, of the torch engine"
    reason = families[pick.checkpoint].explain_torch_only([parse_shape(pick.tree)])
    return [f"{where}: {pick.name}, measured {pick}; {reason}"]


def _warn_of_measured(rows: list[ResultRow]) -> list[str]:
    """Return warnings of drafts that accept nothing, and of measurements of which every one is slower than plain decoding."""
    drafted, found = [row for row in rows if not row.is_plain], []
    if idle := list(dict.fromkeys(f"{r.workload}-{r.checkpoint}-{r.tree}" for r in drafted if r.tau == 1)):
        text = f"tau is exactly 1.00 in {', '.join(idle[:3])}{' and others' if len(idle) > 3 else ''}"
        found.append(f"{text}: {NOTHING_ACCEPTED}")
    speedups = [row.speedup for row in drafted if row.speedup is not None]
    if speedups and max(speedups) < 1:
        found.append(f"no measured tree is faster than plain decoding, the best at {max(speedups):.2f}x")
    return found


def _describe_undertrained(
    replays: Mapping[str, list[ReplayedTree]], trained: Mapping[str, TrainingReport]
) -> str | None:
    """Return that the best checkpoint's first drafts, of chains at temperature 0, are too seldom right; None if they are not."""
    known: dict[str, float] = {}
    for name, trees in replays.items():
        if chain := next((t.acceptance for t in trees if t.topk == 1 and t.temperature == 0 and t.acceptance), None):
            known[name] = float(chain.split()[0])
    best = max(known, key=lambda name: known[name], default=None)
    if best is None or known[best] >= UNDERTRAINED:
        return None
    told = trained[best].few_steps if best in trained else None
    advice = told or "train longer, or on more rows, before you judge speculation by it"
    right = f"{known[best]:.0%} of its first drafts are right, where drafts of use have 60 to 80%"
    return f"{best} is undertrained: {right}; {advice}"
