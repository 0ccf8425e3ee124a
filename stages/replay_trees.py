"""replay_trees: cached eval hidden states and a draft -> tau of every tree.   python -m stages.replay_trees CHECKPOINT

Exact, not estimated (stages/replay/replay.py; by family in stages/families). One expansion per topk gives every
smaller num_steps and every num_draft_tokens. Answers sampled above temperature 0 (data/hiddens/eval_t, if sample_target made
any) are replayed too: target-only verification commits samples of the target itself, so the tau of these answers is an
unbiased estimate of that of decoding, with an interval over conversations. The chains of a block draft are replayed there once
more with sampled drafts, which are verified by the ratio of both probabilities (families/block/sampled_replay.py).

A family without weights looks its guesses up in the answers alone (stages/replay/lookups.py), at the shapes of benchmark.trees
and the same at each num_steps.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from tqdm import tqdm

from stages.cells import group_taus, interval
from stages.cells.record import DraftSampling
from stages.cells.replay_records import GroupTau, ReplayedTree, TreeBucket
from stages.data import conversations, row_lengths
from stages.draft import checkpoint
from stages.families import registry
from stages.families.draft_replay import DraftReplay, ExpectedCounts
from stages.families.family import check_draft_fits, find_family, load_draft
from stages.hidden_states import format, reader
from stages.params import schema, stage_inputs
from stages.params.tree_sections import ReplayTrees
from stages.params.tree_shape import TreeShape, parse_shape
from stages.prompts.workload_prompts import hash_prompt
from stages.replay import oracle_bounds, tree_statistics
from stages.replay.lookups import Lookup, replay_lookups
from stages.replay.replay import ReplayBatch, ReplayOutput
from stages.target import chat_template, manifest
from stages.target.feature_layers import locate_feature_layers
from stages.telemetry.run_stage import run_stage
from stages.trees import accept_length
from stages.trees.draft_tree import check_tree

HIDDENS, SAMPLED = Path("data/hiddens"), Path("data/sampled")
SPLITS = ("eval", "eval_t")


@dataclass(frozen=True)
class AnswerSplit:
    """A split of the target's answers, and how they were sampled."""

    folder: Path
    temperature: float
    top_p: float | None  # None at temperature 0
    answers: list[format.RowHeader]  # in the order in which a workload asks their prompts
    feature_indices: list[int]  # of the layers that the draft reads, among those stored

    def read_rows(self, dtype: torch.dtype) -> list[format.HiddenStatesRow]:
        """Return the rows, shortest first."""
        return sorted(reader.read_rows(self.folder, dtype, self.feature_indices), key=lambda r: len(r.ids))


@dataclass(frozen=True)
class TreeTraces:
    """Statistics of the cycles of some trees, and the taus of all by source and context, of answers at temperature 0."""

    statistics: dict[TreeShape, tree_statistics.TreeStatistics]
    tokenizer: Any
    groups: list[GroupTau] = field(default_factory=list)  # of all trees

    def list_buckets(self, checkpoint: str) -> list[TreeBucket]:
        return [
            TreeBucket(checkpoint=checkpoint, tree=tree.name, **asdict(bucket))
            for tree, counted in self.statistics.items()
            for bucket in counted.list_buckets()
        ]

    def add_batch(self, tree: TreeShape, cycles: tree_statistics.TreeCycles, batch: ReplayBatch) -> None:
        """Count the cycles of one tree in a batch of rows."""
        ids = batch.ids.cpu()
        classes = tree_statistics.classify_tokens(self.tokenizer, ids.flatten().tolist())  # [V]
        cycles = tree_statistics.TreeCycles(*(t.cpu() for t in cycles))
        self.statistics[tree].add(cycles, batch.names, ids, batch.starts.cpu(), batch.ends.cpu(), classes)


class ReplayCounts(NamedTuple):
    """Counts of a split's answers by tree; those without a dimension of rows are summed over all answers."""

    accepted: np.ndarray  # [rows, trees] drafts
    cycles: np.ndarray  # [rows, trees] verify cycles
    cycles_reaching_depth: np.ndarray  # [trees, steps] cycles that accepted at least s + 1 drafts
    summed_tree_depth: np.ndarray  # [trees] of every cycle
    by_context: np.ndarray  # [2, rows, trees, contexts] accepted drafts and cycles
    oracle: np.ndarray | None = None  # [2, trees] the oracle's accepted drafts and cycles; None of lookups, as the next
    # [3, topks, thresholds, steps] threshold trees' accepted drafts, cycles and drafted nodes
    adaptive: np.ndarray | None = None


class TauBounds(NamedTuple):
    """Tau of other trees from the same candidates; None where drafts are sampled, and of lookups, which have no candidates."""

    oracle: float | None = None
    adaptive: float | None = None


class TreeCounts(NamedTuple):
    """Counts of one tree, expected ones where drafts are sampled."""

    accepted: np.ndarray  # [rows] drafts
    cycles: np.ndarray  # [rows]
    cycles_reaching_depth: np.ndarray  # [steps]


def main(name: str) -> None:
    p = stage_inputs.read_params("replay_trees", name)
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    made = manifest.read_manifest()
    replayed = _load_replayed(p, name, made)
    settings = p.replay_trees
    layer_indices = locate_feature_layers(made.feature_layers, replayed.feature_layers, f"the draft of {name}")
    splits = [answers for split in SPLITS if (answers := _open_answers(p, split, made, layer_indices)).answers]
    tokenizer = chat_template.load_tokenizer(
        manifest.resolve_weights_folder(made), p.target.trust_remote_code, made.chat_template
    )
    traces = TreeTraces({tree: tree_statistics.TreeStatistics() for tree in replayed.traced}, tokenizer)
    tables = [
        _build_replay_rows(name, replayed, answers, settings, None if answers.temperature else traces)
        for answers in splits
    ]
    tables += [_build_sampled_rows(name, replayed, answers, settings) for answers in splits if answers.temperature]
    ReplayedTree.write_csv(ReplayedTree.locate(name), [row for table in tables for row in table])
    TreeBucket.write_csv(TreeBucket.locate(name), traces.list_buckets(name))
    GroupTau.write_csv(GroupTau.locate(name), traces.groups)
    best = max(tables[0], key=lambda tree: tree.tau)
    sets = " and ".join(f"{len(answers.answers)} answers at temperature {answers.temperature:g}" for answers in splits)
    print(
        f"{name}: {len(tables[0])} trees on {sets} in {time.perf_counter() - started:.1f} s; best at temperature 0 "
        f"{best.shape.name}, tau {best.tau:.3f}"
    )


# The draft


@dataclass(frozen=True)
class Replayed(ABC):
    """A checkpoint, ready to be replayed."""

    grid: list[TreeShape]
    traced: list[TreeShape]
    feature_layers: list[int]  # of the target, that it reads

    @abstractmethod
    def count_cycles(
        self, answers: AnswerSplit, trees: list[TreeShape], settings: ReplayTrees, traces: TreeTraces | None
    ) -> tuple[Sequence[format.RowHeader], ReplayCounts]:
        """Replay the trees on all rows, which are returned in the order of the counts; `traces`: of some of the trees."""


@dataclass(frozen=True)
class ReplayedDraft(Replayed):
    """A trained draft."""

    replay: DraftReplay
    samples_drafts: bool  # its chains are replayed with sampled drafts too
    dtype: torch.dtype
    device: torch.device

    def count_cycles(
        self, answers: AnswerSplit, trees: list[TreeShape], settings: ReplayTrees, traces: TreeTraces | None
    ) -> tuple[Sequence[format.RowHeader], ReplayCounts]:
        rows = answers.read_rows(self.dtype)
        return rows, _replay_rows(self, rows, trees, settings, traces)


@dataclass(frozen=True)
class ReplayedLookup(Replayed):
    """A family without weights, which looks its guesses up in the answers; none of its chains is traced."""

    build: Callable[[TreeShape], Lookup]

    def count_cycles(
        self, answers: AnswerSplit, trees: list[TreeShape], settings: ReplayTrees, traces: TreeTraces | None
    ) -> tuple[Sequence[format.RowHeader], ReplayCounts]:
        built = tqdm(map(self.build, trees), "replay", len(trees), unit="shape", mininterval=2)
        most_steps = max(shape.num_steps for shape in trees)
        found, by_context = replay_lookups(built, answers.answers, most_steps)
        counts = ReplayCounts(
            found.accepted.numpy(),
            found.cycles.numpy(),
            found.cycles_reaching_depth.sum(0).numpy(),
            found.summed_tree_depth.sum(0).numpy(),
            torch.stack(by_context).numpy(),
        )
        return answers.answers, counts


def _load_replayed(p: schema.Params, name: str, made: manifest.TargetManifest) -> Replayed:
    """Load a checkpoint's draft. Raises ValueError for one that does not fit the target, or can't grow a tree."""
    facts = find_family(checkpoint.locate_checkpoint(name), p.get_making_stage(name))
    if not facts.is_timed:
        return _load_lookup(p, name, made)
    dtype = getattr(torch, p.target.dtype)  # engines run the draft as they run the target; scores are float32
    embedding, head = (t.to(p.target.device) for t in manifest.read_embedding_and_head(made))
    draft, settings = load_draft(p, name, made, head, dtype), p.replay_trees
    check_draft_fits(f"{checkpoint.locate_checkpoint(name)}/draft", draft, made.model, embedding)
    build_replay = registry.get(facts).build_replay
    assert build_replay is not None, name
    replay = build_replay(draft, embedding.to(dtype), head.to(dtype), made, settings.tree_scoring)
    grid = settings.list_trees(replay.most_steps)
    traced = settings.list_traced_trees(grid)
    if replay.most_steps is not None:
        traced = _select_traced(name, traced, replay.most_steps)
    for tree in [*grid, *traced]:
        check_tree(tree, replay.num_tokens, replay.sliding_window)
    return ReplayedDraft(grid, traced, draft.feature_layers, replay, facts.samples_drafts, dtype, embedding.device)


def _load_lookup(p: schema.Params, name: str, made: manifest.TargetManifest) -> ReplayedLookup:
    """Load a family without weights, as the torch engine decodes with it."""
    no_table = torch.empty(0)
    draft = load_draft(p, name, made, no_table, no_table.dtype)
    drafter = registry.get(draft.family).build_drafter(draft, no_table, no_table, p.replay_trees.tree_scoring)

    def build(shape: TreeShape) -> Lookup:
        proposer = drafter.build_method(shape).build_proposer(0)
        assert isinstance(proposer, Lookup), name
        return proposer

    return ReplayedLookup(_list_chains(p, draft.family.shapes), [], [], build)


def _list_chains(p: schema.Params, letters: str) -> list[TreeShape]:
    """Return the chains of benchmark.trees whose kind is one of `letters`, each at every num_steps too that its numbers allow."""
    found: dict[str, TreeShape] = {}
    for named in (parse_shape(name) for name in p.benchmark.trees if name[0] in letters):
        for length in sorted({*p.replay_trees.num_steps, named.num_steps}):
            with suppress(ValueError):  # guesses as long as all that is looked up
                shape = parse_shape(f"{named.name.rpartition('_')[0]}_{length}")
                found[shape.name] = shape
    return list(found.values())


def _select_traced(name: str, trees: list[TreeShape], most_steps: int) -> list[TreeShape]:
    """Return the trees of at most so many steps, and print which others are left out."""
    if deeper := [tree.name for tree in trees if tree.num_steps > most_steps]:
        print(
            f"note: {name} has no statistics inside {', '.join(deeper)} (replay_trees.trace_trees), deeper than the "
            f"{most_steps} drafts of its block"
        )
    return [tree for tree in trees if tree.num_steps <= most_steps]


# Tables


def _build_replay_rows(
    name: str, replayed: Replayed, answers: AnswerSplit, settings: ReplayTrees, traces: TreeTraces | None
) -> list[ReplayedTree]:
    """Replay every tree on a split's answers -> table rows; statistics inside some trees go to `traces`."""
    grid = replayed.grid
    trees = list(dict.fromkeys([*grid, *(traces.statistics if traces else ())]))
    rows, counts = replayed.count_cycles(answers, trees, settings, traces)
    names = [interval.get_conversation(row.id) for row in rows]
    sums = interval.sum_by_cluster(names, counts.accepted), interval.sum_by_cluster(names, counts.cycles)
    intervals = interval.compute_tau_intervals(*sums, [tree.num_steps for tree in trees])
    if traces:
        traces.groups.extend(group_taus.list_by_source(grid, names, (counts.accepted, counts.cycles)))
        traces.groups.extend(group_taus.list_by_context(grid, names, row_lengths.CONTEXT_EDGES, counts.by_context))
    bounds = _compute_bounds(counts, trees)
    found: list[ReplayedTree] = []
    for g, tree in enumerate(grid):
        accepted, cycles = counts.accepted[:, g], counts.cycles[:, g]
        found.append(
            _build_row(
                name,
                answers,
                tree,
                TreeCounts(accepted, cycles, counts.cycles_reaching_depth[g]),
                intervals[g],
                mean_depth=float(counts.summed_tree_depth[g] / max(1, cycles.sum())),
                bounds=bounds[g],
                draft_sampling="greedy",
            )
        )
    return found


def _compute_bounds(counts: ReplayCounts, trees: list[TreeShape]) -> list[TauBounds]:
    """Return the bounds of each tree; none of lookups."""
    if counts.oracle is None or counts.adaptive is None:
        return [TauBounds()] * len(trees)
    topks = sorted({tree.topk for tree in trees})
    threshold_sums = dict(zip(topks, counts.adaptive.swapaxes(0, 1), strict=True))  # topk -> [3, thresholds, steps]
    found = []
    for tree, oracle in zip(trees, counts.oracle.T, strict=True):
        sums = threshold_sums[tree.topk][:, :, tree.num_steps - 1]
        adaptive = oracle_bounds.interpolate_adaptive_tau(sums, tree.num_draft_tokens)
        found.append(TauBounds(accept_length.compute_tau(*oracle), adaptive))
    return found


def _build_sampled_rows(
    name: str, replayed: Replayed, answers: AnswerSplit, settings: ReplayTrees
) -> list[ReplayedTree]:
    """Replay the chains of the grid with sampled drafts on a split sampled above temperature 0; none of a family without."""
    if not isinstance(replayed, ReplayedDraft) or not replayed.samples_drafts:
        return []
    chains = [tree for tree in replayed.grid if tree.topk == 1]
    rows = answers.read_rows(replayed.dtype)
    assert answers.top_p is not None, "an answer above temperature 0 has a top-p"
    found: list[ExpectedCounts] = []
    for _, batch, num_positions in _collate_batches(replayed, rows, chains, settings, keeps_last=True):
        found.append(replayed.replay.replay_sampled(batch, answers.temperature, answers.top_p, num_positions))
    accepted, cycles, reaching = (
        torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True)
    )  # [rows, D, ...]
    names = [interval.get_conversation(row.id) for row in rows]
    sums = interval.sum_by_cluster(names, accepted), interval.sum_by_cluster(names, cycles)
    intervals = interval.compute_tau_intervals(*sums, range(1, accepted.shape[1] + 1))
    built: list[ReplayedTree] = []
    for tree in chains:
        g = tree.num_steps - 1
        counts = TreeCounts(accepted[:, g], cycles[:, g], reaching[:, g].sum(0))
        built.append(
            _build_row(
                name,
                answers,
                tree,
                counts,
                intervals[g],
                mean_depth=float(tree.num_steps) if cycles[:, g].any() else 0.0,
                bounds=TauBounds(),
                draft_sampling="sampled",
            )
        )
    return built


def _build_row(
    name: str,
    answers: AnswerSplit,
    tree: TreeShape,
    counts: TreeCounts,
    ends: interval.Interval | None,  # of tau
    *,
    mean_depth: float,
    bounds: TauBounds,
    draft_sampling: DraftSampling,
) -> ReplayedTree:
    tau, cycles = accept_length.compute_tau(counts.accepted, counts.cycles), counts.cycles.sum().item()
    low, high = ends or (None, None)
    return ReplayedTree(
        checkpoint=name,
        tree=tree.name,
        num_steps=tree.num_steps,
        topk=tree.topk,
        num_draft_tokens=tree.num_draft_tokens,
        tau=tau,
        tau_low=low,
        tau_high=high,
        accept_rate=(tau - 1) / tree.num_steps,
        cycles=cycles,
        accepted=counts.accepted.sum().item(),
        mean_depth=mean_depth,
        acceptance=_format_accept_by_depth(counts.cycles_reaching_depth, cycles, tree.num_steps),
        tau_oracle=bounds.oracle,
        tau_adaptive=bounds.adaptive,
        temperature=answers.temperature,
        top_p=answers.top_p,
        draft_sampling=draft_sampling,
    )


# Checks of answers and hidden states


def _open_answers(
    p: schema.Params, split: str, made: manifest.TargetManifest, feature_indices: list[int]
) -> AnswerSplit:
    """Open a split. Raises ValueError for hidden states of another target or of other answers, and for answers that were
    sampled with other settings than sample_target's.
    """
    reader.check_origin(HIDDENS / split, split, made)
    table = conversations.read_table(SAMPLED / split, conversations.SAMPLED_SCHEMA, "sample_target")
    s = p.sample_target
    temperature = s.eval_temperature if split == "eval_t" else 0.0
    top_p = s.top_p if temperature else None
    requested = [
        np.float32(value) if value is not None else None for value in (temperature, top_p)
    ]  # as the table has them
    for sampling in table.select("temperature", "top_p").unique().sort(pl.all()).rows():
        if (split == "eval_t" and not temperature) or list(sampling) != requested:
            is_sampled = temperature or split == "eval"
            expected = _format_sampling(temperature, top_p) if is_sampled else "none above temperature 0"
            raise ValueError(
                f"{SAMPLED / split} has answers of {_format_sampling(*sampling)}, expected {expected}, as sample_target asks; "
                "run: dvc repro sample_target"
            )
    return AnswerSplit(HIDDENS / split, temperature, top_p, _read_answers(split, table), feature_indices)


def _read_answers(split: str, table: pl.DataFrame) -> list[format.RowHeader]:
    """Return the stored rows in the order of a workload. Raises ValueError where one is not of an answer there.

    With `longer_rows: truncate` extract_hiddens stores the longest rows without the end of their answers: all have one length.
    So a stored row that is the longest and ended by length may be the beginning of its answer.
    """
    rows = sorted(table.iter_rows(named=True), key=lambda row: hash_prompt(row["prompt_ids"], row["images"]))
    known = {row["id"]: row["prompt_ids"] + row["answer_ids"] for row in rows}
    longest = int(reader.read_index(HIDDENS / split)["length"].max() or 0)
    found: dict[str, format.RowHeader] = {}
    for row in reader.read_headers(HIDDENS / split):
        is_cut = row.finish_reason == "length" and len(row.ids) == longest
        ids = known.get(row.id)
        if ids is None or row.ids.tolist() != (ids[:longest] if is_cut else ids):
            which = "is not among" if ids is None else "is another answer than"
            raise ValueError(
                f"{HIDDENS / split}: row {row.id} {which} those in {SAMPLED / split}; run: dvc repro extract_hiddens"
            )
        found[row.id] = row
    return [found[name] for name in known if name in found]


def _format_sampling(temperature: float | None, top_p: float | None) -> str:
    return ", ".join(
        f"{name} {'null' if value is None else f'{value:g}'}"
        for name, value in (("temperature", temperature), ("top_p", top_p))
    )


def _replay_rows(
    replayed: ReplayedDraft,
    rows: list[format.HiddenStatesRow],
    trees: list[TreeShape],
    settings: ReplayTrees,
    traces: TreeTraces | None,  # of some of the trees
) -> ReplayCounts:
    """Replay the trees on all rows, batch by batch, and count."""
    num_steps, topks = max(tree.num_steps for tree in trees), {tree.topk for tree in trees}
    num_contexts = 1 + int(row_lengths.assign_contexts(torch.tensor(max(len(row.ids) for row in rows))))
    counts = ReplayCounts(
        np.zeros((len(rows), len(trees)), dtype=np.int64),
        np.zeros((len(rows), len(trees)), dtype=np.int64),
        np.zeros((len(trees), num_steps), dtype=np.int64),
        np.zeros(len(trees), dtype=np.int64),
        np.zeros((2, len(rows), len(trees), num_contexts), dtype=np.int32),
        np.zeros((2, len(trees)), dtype=np.int64),
        np.zeros((3, len(topks), len(oracle_bounds.PATH_PROBABILITY_THRESHOLDS), num_steps), dtype=np.int64),
    )
    traced = list(traces.statistics) if traces else []
    for batch_rows, batch, num_positions in _collate_batches(replayed, rows, trees, settings):
        found = replayed.replay.replay(batch, trees, num_positions, [trees.index(tree) for tree in traced])
        _add_batch_counts(counts, batch_rows, found)
        for tree, starts in zip(traced, () if found.cycle_starts is None else found.cycle_starts, strict=True):
            assert traces
            traces.add_batch(tree, replayed.replay.trace(batch, starts, tree, num_positions), batch)
    return counts


def _collate_batches(
    replayed: ReplayedDraft,
    rows: list[format.HiddenStatesRow],
    trees: list[TreeShape],
    settings: ReplayTrees,
    keeps_last: bool = False,
) -> Iterator[tuple[slice, ReplayBatch, int]]:
    """Yield (rows, their batch, positions at once) of all rows, as many as fit into the memory of `settings`, with progress."""
    capacity = replayed.replay.compute_capacity(trees, int(settings.memory_gib * 2**30))
    with tqdm(total=len(rows), desc="replay", unit="row", mininterval=2) as bar:
        for batch_rows in row_lengths.split_ascending([len(r.ids) for r in rows], capacity.tokens):
            yield batch_rows, ReplayBatch.collate(rows[batch_rows], replayed.device, keeps_last), capacity.positions
            bar.update(len(rows[batch_rows]))


def _add_batch_counts(counts: ReplayCounts, rows: slice, found: ReplayOutput) -> None:
    counts.accepted[rows], counts.cycles[rows] = found.accepted.cpu().numpy(), found.cycles.cpu().numpy()
    counts.summed_tree_depth[:] += found.summed_tree_depth.sum(0).cpu().numpy()
    counts.cycles_reaching_depth[:] += found.cycles_reaching_depth.sum(0).cpu().numpy()
    assert counts.oracle is not None and counts.adaptive is not None
    counts.oracle[:] += torch.stack([found.oracle_accepted, found.oracle_cycles]).sum(1).cpu().numpy()
    by_context = torch.stack(found.by_context).cpu().numpy()  # [2, B, trees, contexts of this batch]
    counts.by_context[:, rows, :, : by_context.shape[3]] = by_context
    adaptive = found.adaptive
    sums = torch.stack([adaptive.accepted, adaptive.cycles, adaptive.summed_tree_depth]).sum(1)
    counts.adaptive[:] += sums.view(counts.adaptive.shape).cpu().numpy()


def _format_accept_by_depth(cycles_reaching_depth: np.ndarray, cycles: float, num_steps: int) -> str:
    """Format the share of cycles that accepted a draft at each depth, of those that did at the depth before: "0.81 0.7"."""
    reaching = cycles_reaching_depth[:num_steps].tolist()
    shares = [here / before for here, before in zip(reaching, [cycles, *reaching[:-1]], strict=True) if before]
    return " ".join(f"{share:.4f}" for share in shares)


if __name__ == "__main__":
    run_stage(main, lambda: schema.load_params().target.gpus())
