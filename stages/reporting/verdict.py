"""The verdict: what to launch at each load, or not to speculate, in one line that a reader can act on.

The page, the terminal's table and results/metrics.json, which `pipeline` reads, have it from here. It rests on intervals: a
speedup counts only where the low end of its interval is above 1. What was measured goes before what was predicted: a prediction
decides only where no tree was measured, else it is named as what to measure next.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Literal

from stages.cells.prediction import LaunchAdvice, PredictedSpeedup, SpeedupConditions, can_tell
from stages.cells.replay_records import GroupTau, ReplayedTree, select_temperature
from stages.cells.table import ResultRow
from stages.cells.training_records import TrainingReport
from stages.params.engines import is_in_process
from stages.params.tree_shape import parse_shape
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
NOTHING_TIMED = (
    "No speedup is known: no tree was timed or predicted; list trees in benchmark.trees, or a checkpoint in "
    "time_cycles.checkpoints"
)
NOTHING_SURE = "No speedup is known: no tree was measured, and the times that predictions rest on are doubtful"
NOTHING_SERVED = "No speedup is known of what a serving engine runs; list other trees in benchmark.trees"
NOTHING_ACCEPTED = "no draft token was accepted; is it this target's draft, vocabulary and chat template?"
UNDERTRAINED = 0.35  # share of right first drafts; e003 of the embedded target, a third of its training, has more


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
    def short_advice(self) -> str:
        if self.kind == "launch":
            return f"{format_tree(self.chosen.tree)}, {self.chosen.checkpoint}"
        return {"plain": "do not speculate", "noisy": "too noisy to say", "unknown": "not sure"}[self.kind]


@dataclass(frozen=True)
class GroupLine:
    """A tree on a part of the eval answers: its replayed tau, and the speedup that this gives where one is known."""

    checkpoint: str
    tau: GroupTau
    per_tau: float | None  # speedup of the tree over its tau

    def estimate_speedup(self, tau: float | None) -> float | None:
        return None if tau is None or self.per_tau is None else tau * self.per_tau

    @property
    def speedup(self) -> float | None:
        return self.estimate_speedup(self.tau.tau)

    def __str__(self) -> str:
        name = self.tau.group if self.tau.by == "source" else f"contexts of {self.tau.group} tokens"
        return f"{name} ({self.speedup or 0:.2f}x, tau {self.tau.tau:.2f})"


@dataclass(frozen=True)
class SetTable:
    """Measured speedups over several sets of prompts: drafts and trees by set, and the advice for each set."""

    lines: dict[str, VerdictLine]  # by the name of the set
    rows: list[tuple[str, str, list[SpeedupEvidence | None]]]  # tree, checkpoint, and the speedup on each set

    def format_lines(self) -> list[str]:
        """Return the terminal's lines."""
        body = [
            (f"{format_tree(tree)}, {name}", *("–" if found is None else str(found) for found in speedups))
            for tree, name, speedups in self.rows
        ]
        advice = [line.short_advice for line in self.lines.values()]
        return align_columns([("measured speedup", *self.lines), *body, ("advice", *advice)])


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
    groups: tuple[GroupLine, ...] = ()
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
        rows = [
            (tau.group, str(tau.answers), f"{tau.tau:.2f}", format_interval(tau.tau_low, tau.tau_high, ONE_PROMPT))
            for tau in (part.tau for part in found)
        ]
        title = f"{format_tree(found[0].tau.tree)} with {found[0].checkpoint} by source" if found else ""
        return ["", *align_columns([(title, "answers", "tau, replayed", "95% interval"), *rows])] if found else []

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

    def is_served(row: ResultRow | PredictedSpeedup) -> bool:
        is_plain = isinstance(row, ResultRow) and row.tree is None
        return is_plain or row.checkpoint not in families or families[str(row.checkpoint)].is_served(row.shape)

    doubted = frozenset(remark.stage for remark in remarks)
    guesses = collect_predicted(launch, filter(is_served, predicted))
    judged, left_out = (
        collect_measured((row for row in rows if is_served(row) == can), doubted) for can in (True, False)
    )
    lines = judge_loads(guesses, judged, replayable)
    told_as_one = groupby(lines, key=lambda line: (line.kind, line.advice, line.conditions.workload_suffix))
    groups = [list(group) for _, group in told_as_one]
    prompts = {line.conditions.workload for line in lines if not line.conditions.max_new_tokens} - {None}
    texts = [_format_group(group, len(prompts) > 1) for group in groups[:MAX_LINES]]
    if len(groups) > MAX_LINES:
        texts.append(
            f"{len(groups) - MAX_LINES} more groups of loads are in results/benchmark.csv and results/launch.json"
        )
    first = lines[0] if lines else None
    lookups = {n: trees for n, trees in replays.items() if n in families and not families[n].family.is_timed}
    drafted = {name: trees for name, trees in replays.items() if name not in lookups}
    parts = _judge_groups(first, replayable, replays, group_taus or {})
    if first and first.kind != "launch" and (untrained := _describe_undertrained(drafted, trained or {})):
        texts.insert(0, untrained)
    unsupported = dict.fromkeys(
        f"{row.tree or 'plain decoding'} on {row.engine}" for row in rows if not row.is_measured
    )
    refused = [f"Left out: {list_first(list(unsupported), MAX_NAMES)}; the tables say why"] if unsupported else []
    return Verdict(
        kind=first.kind if first else "unknown",
        headline=texts[0] if texts else NOTHING_SERVED if left_out else NOTHING_SURE if remarks else NOTHING_TIMED,
        details=(
            *_describe_groups(first, parts),
            *_compare_with_lookups(chain(*lookups.values()), chain(*drafted.values()), group_taus or {}),
            *texts[1:],
            *_describe_torch_only(left_out, judged, guesses, replayable, families),
            *refused,
        ),
        warnings=(*sample_warnings, *_warn_of_drafts(rows, replays)),
        remarks=tuple(remarks),
        doubted=doubted,
        checkpoint=first.chosen.checkpoint if first else None,
        groups=parts,
        sets=_build_set_table(judged, lines),
    )


def judge_loads(guesses: Predictions, measured: Measurements, replayable: Collection[str]) -> list[VerdictLine]:
    """Return a line for each measured load, and for each predicted one that was not measured.

    Where sets of prompts were measured, a prediction of none of them says what to measure, not what to launch.
    """
    sets = {(conditions.engine, conditions.workload) for conditions in measured}
    sets |= {(engine, None) for engine, workload in sets if is_in_process(engine) and workload in replayable}
    keys = {conditions: conditions.find_predicted(replayable) for conditions in measured}
    lines = [judge_load(conditions, guesses.get(keys[conditions]), found) for conditions, found in measured.items()]
    for conditions, guess in guesses.items():
        if conditions not in keys.values():
            line = judge_load(conditions, guess, [])
            if line.kind == "launch" and sets and (conditions.engine, conditions.workload) not in sets:
                line = replace(line, kind="unknown", advice=f"Measure {line.chosen.name}")
            lines.append(line)
    return lines


def _build_set_table(measured: Measurements, lines: list[VerdictLine]) -> SetTable | None:
    """Return the table of the measured loads; None where engines have one set of prompts each, or it has too many columns."""
    shown = [line for line in lines if line.conditions in measured]
    counts = Counter((line.conditions.engine, line.conditions.workload) for line in shown)
    engines = Counter(engine for engine, _ in counts)
    if max(engines.values(), default=0) < 2 or len(shown) > MAX_SETS:
        return None
    names = []
    for c in (line.conditions for line in shown):
        engine = f"{c.engine}, " if len(engines) > 1 else ""
        load = f", {c.max_new_tokens} x {_format_limit(c, False)}" if counts[c.engine, c.workload] > 1 else ""
        names.append(f"{engine}{c.workload}{load}")
    columns = [{(tree.checkpoint, tree.tree): tree for tree in measured[line.conditions]} for line in shown]
    trees = dict.fromkeys(tree for found in measured.values() for tree in ((t.checkpoint, t.tree) for t in found))
    rows = [(tree, name, [column.get((name, tree)) for column in columns]) for name, tree in trees]
    return SetTable(dict(zip(names, shown, strict=True)), rows)


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
    if faster:
        return VerdictLine(conditions, "launch", f"Launch {chosen.name}", f"{how} {chosen}", next_step, chosen)
    kind: VerdictKind = "noisy"
    advice, detail = "Timings are too noisy to say", "raise time_cycles.repeats"
    if all(tree.low is None for tree in known) or (best.speedup <= 1 and best.low is None):
        kind, advice, detail = "unknown", "No speedup is sure", next_step or "ask more prompts, or take three repeats"
    elif (best.speedup <= 1 and can_tell(best.low, best.high)) or all(t.high is not None and t.high < 1 for t in known):
        kind, advice, detail = "plain", "Do not speculate", next_step
    elif conditions.workload:
        more = f"raise benchmark.workloads.{conditions.workload}.num_prompts"
        detail = f"dvc repro -fs {best.stage} on an idle machine, or {more}"
    return VerdictLine(conditions, kind, advice, f"the best {how}, {best.name}, is {best}", detail, best)


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
    line: VerdictLine | None,
    replayable: Collection[str],
    replays: Mapping[str, list[ReplayedTree]],
    group_taus: Mapping[str, list[GroupTau]],
) -> tuple[GroupLine, ...]:
    """Return the first line's tree by source, the slowest first, and by context; none of which there is one.

    Where that was not replayed, the tree with the highest replayed tau. A cycle costs the same on all questions, so the speedup
    goes with tau; it is left open for other prompts and temperatures. With longer contexts plain decoding costs more too.
    """
    trees = [tree for found in replays.values() for tree in select_temperature(found, 0)]
    advised = (line.chosen.checkpoint, line.chosen.tree) if line else None
    tree = max(trees, key=lambda tree: ((tree.checkpoint, tree.shape.name) == advised, tree.tau), default=None)
    if tree is None:
        return ()
    per_tau = None
    if line and (tree.checkpoint, tree.shape.name) == advised and not line.conditions.temperature:
        is_replayed = line.conditions.workload is None or line.conditions.workload in replayable
        per_tau = line.chosen.speedup / tree.tau if is_replayed else None
    rows = [row for row in group_taus.get(tree.checkpoint, ()) if row.tree == tree.shape.name]
    by_source, by_context = ([row for row in rows if row.by == by] for by in ("source", "context"))
    by_source.sort(key=lambda row: row.tau)
    shown = [row for group in (by_source, by_context) if len(group) > 1 for row in group]
    return tuple(GroupLine(tree.checkpoint, row, per_tau) for row in shown)


# Words


def _describe_groups(line: VerdictLine | None, groups: Sequence[GroupLine]) -> list[str]:
    """Return where the advised tree loses, or an unadvised one would pay: a mean over all answers hides either."""
    if line is None:
        return []
    if line.kind == "launch":
        losing = [str(group) for group in groups if (group.estimate_speedup(group.tau.tau_high) or 1) < 1]
        return [f"It loses on {list_first(losing, MAX_NAMES)}: do not launch it for these"] if losing else []
    paying = [str(group) for group in reversed(groups) if (group.estimate_speedup(group.tau.tau_low) or 0) > 1]
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


def _warn_of_drafts(rows: list[ResultRow], replays: Mapping[str, list[ReplayedTree]]) -> Iterator[str]:
    """Yield warnings of drafts that accept nothing, and of measurements of which every one is slower than plain decoding."""
    drafted = [row for row in rows if not row.is_plain]
    if idle := list(dict.fromkeys(f"{r.workload}-{r.checkpoint}-{r.tree}" for r in drafted if r.tau == 1)):
        others = " and others" if len(idle) > 3 else ""
        yield f"tau is exactly 1.00 in {', '.join(idle[:3])}{others}: {NOTHING_ACCEPTED}"
    speedups = [row.speedup for row in drafted if row.speedup is not None]
    if speedups and max(speedups) < 1:
        yield f"no measured tree is faster than plain decoding, the best at {max(speedups):.2f}x"
    for name, trees in replays.items():
        if all(tree.tau == 1 for tree in trees):
            yield f"tau of {name} is exactly 1.00 in every replayed tree: {NOTHING_ACCEPTED}"


def _compare_with_lookups(
    looked_up: Iterable[ReplayedTree], drafted: Iterable[ReplayedTree], group_taus: Mapping[str, list[GroupTau]]
) -> Iterator[str]:
    """Yield at which costs of a cycle training pays, by replayed tau at temperature 0; nothing without trees of both."""
    best = [max(select_temperature(trees, 0), key=lambda t: t.tau, default=None) for trees in (looked_up, drafted)]
    if best[0] and best[1]:
        words, taus = [], []
        for tree in filter(None, best):
            ends = format_interval(tree.tau_low, tree.tau_high, ONE_PROMPT)
            words.append(
                f"{format_tree(tree.tree)} with {tree.checkpoint} commits {tree.tau:.2f} tokens a cycle ({ends})"
            )
            rows = group_taus.get(tree.checkpoint, ())
            taus.append({row.group: row.tau for row in rows if (row.by, row.tree) == ("source", tree.tree)})
        ahead = [source for source, tau in taus[0].items() if tau > taus[1].get(source, tau)]
        more = f"; on {list_first(ahead, MAX_NAMES)} the former commits more" if ahead and len(taus[0]) > 1 else ""
        yield (
            f"Without training {words[0]}, replayed; trained, {words[1]}: training pays where a cycle of the latter takes less "
            f"than {best[1].tau / best[0].tau:.2f} times as long{more}"
        )


def _describe_undertrained(
    replays: Mapping[str, list[ReplayedTree]], trained: Mapping[str, TrainingReport]
) -> str | None:
    """Return that the best checkpoint's first drafts, of chains at temperature 0, are too seldom right; None if they are not."""
    known: dict[str, float] = {}
    for tree in (tree for trees in replays.values() for tree in trees):
        if tree.topk == 1 and tree.temperature == 0 and tree.acceptance:
            known.setdefault(tree.checkpoint, float(tree.acceptance.split()[0]))
    best = max(known, key=lambda name: known[name], default=None)
    if best is None or known[best] >= UNDERTRAINED:
        return None
    told = trained[best].few_steps if best in trained else None
    advice = told or "train longer, or on more rows, before you judge speculation by it"
    right = f"{known[best]:.0%} of its first drafts are right, where drafts of use have 60 to 80%"
    return f"{best} is undertrained: {right}; {advice}"
