"""replay_trees: cached eval hidden states + a draft -> tau of every tree.   python -m stages.replay_trees CHECKPOINT

Exact, not estimated: research/replay.md and replay/replay.py. One expansion per topk gives every smaller num_steps
and every num_draft_tokens. Answers drawn above temperature 0 (data/hiddens/eval_t, where sample_target made any) are
replayed too: what verification commits there is a draw of the target's own, so what a tree accepts of these answers is
what decoding would accept of others like them, and its interval is over conversations all the same.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from stages.data import conversations
from stages.draft import checkpoint
from stages.draft.eagle3 import Eagle3Draft, MultimodalFeatures
from stages.hidden_states import format, origin, reader
from stages.params import schema
from stages.params.tree_sections import ReplayTrees, TreeShape
from stages.replay import oracle_bounds, token_classes, tree_statistics
from stages.replay.replay import compute_capacity, replay_answers
from stages.results import clusters, interval, replay_records
from stages.target import chat_template, manifest
from stages.telemetry import stage_record
from stages.trees import acceptance
from stages.trees import draft_tree as trees

HIDDENS, SAMPLED = Path("data/hiddens"), Path("data/sampled")
SPLITS = ("eval", "eval_t")


@dataclass(frozen=True)
class AnswerSplit:
    """A split of the target's answers, and how they were drawn."""

    folder: Path
    temperature: float
    top_p: float | None  # None where nothing is drawn
    count: int

    def rows(self, dtype: torch.dtype) -> list[format.HiddenStatesRow]:
        """The shortest first."""
        return sorted(reader.read_rows(self.folder, dtype), key=lambda r: len(r.ids))


@dataclass(frozen=True)
class TreeTraces:
    """Some trees, and what happens in their cycles."""

    tallies: dict[TreeShape, tree_statistics.TreeStatistics]
    tokenizer: Any

    def rows(self) -> Iterator[dict[str, Any]]:
        return ({"tree": tree.name} | row for tree, tally in self.tallies.items() for row in tally.rows())

    def add(
        self,
        tree: TreeShape,
        cycles: tree_statistics.TreeCycles,
        batch: list[format.HiddenStatesRow],
        *rows: torch.Tensor,
    ) -> None:
        """The cycles of one tree; rows are ids [B, T], starts and ends [B]."""
        ids, starts, ends = (t.cpu() for t in rows)
        kind = token_classes.classify_tokens(self.tokenizer, ids.flatten().tolist())  # [V]
        self.tallies[tree].add(
            tree_statistics.TreeCycles(*(t.cpu() for t in cycles)), [r.id for r in batch], ids, starts, ends, kind
        )


def main(name: str) -> None:
    p = schema.load_params()
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    made = manifest.read_manifest()
    embedding, _ = manifest.read_embedding_and_head(made)
    config, tensors = checkpoint.read_draft(checkpoint.locate_checkpoint(name), p.made_by(name))
    _check_draft(name, config, made)
    settings = p.replay_trees
    for t in [*settings.trees(), *settings.watched()]:  # before any answer is read
        trees.check_tree(
            t.num_steps, t.topk, t.num_draft_tokens, config["draft_vocab_size"], config.get("sliding_window")
        )
    dtype = getattr(torch, p.target.dtype)  # engines run the draft as they run the target; scores are float32
    draft = Eagle3Draft.of(config, tensors).to(p.target.device, dtype).requires_grad_(False)
    embedding = embedding.to(p.target.device, dtype)
    splits = [answers for split in SPLITS if (answers := _open_answers(p, split, made)).count]
    tokenizer = chat_template.load_tokenizer(
        manifest.resolve_weights_folder(made), p.target.trust_remote_code, made.chat_template
    )
    inner = TreeTraces({tree: tree_statistics.TreeStatistics() for tree in settings.watched()}, tokenizer)
    found = [
        _build_replay_rows(name, draft, embedding, answers, settings, None if answers.temperature else inner)
        for answers in splits
    ]
    replay_records.write_replay(replay_records.locate_replay(name), [row for rows in found for row in rows])
    replay_records.write_tree_statistics(name, inner.rows())
    best = max(found[0], key=lambda row: row["tau"])
    sets = " and ".join(f"{answers.count} answers at temperature {answers.temperature:g}" for answers in splits)
    print(
        f"{name}: {len(found[0])} trees on {sets} in {time.perf_counter() - started:.1f} s; best at temperature 0 "
        f"t{best['steps']}_{best['topk']}_{best['tokens']}, tau {best['tau']:.3f}"
    )


def _build_replay_rows(
    name: str, draft: Eagle3Draft, embedding, answers: AnswerSplit, settings: ReplayTrees, inner: TreeTraces | None
) -> list[dict[str, Any]]:
    """Of every tree a row of the table, on these answers; what happens inside some goes to `inner`."""
    grid = settings.trees()
    every = list(dict.fromkeys([*grid, *(inner.tallies if inner else ())]))
    rows = answers.rows(embedding.dtype)
    accepted, cycles, reached, depth, oracle, adaptive = _replay_rows(draft, embedding, rows, every, settings, inner)
    names = [clusters.conversation_of(row.id) for row in rows]
    intervals = interval.of_taus(
        clusters.sums(names, accepted), clusters.sums(names, cycles), [tree.num_steps for tree in every]
    )
    cuts = dict(
        zip(sorted({t.topk for t in every}), adaptive.swapaxes(0, 1), strict=True)
    )  # [3, thresholds, steps] of a topk
    found: list[dict[str, Any]] = []
    for g, tree in enumerate(grid):
        tau = acceptance.compute_tau(accepted[:, g], cycles[:, g])
        low, high = intervals[g] or (None, None)
        found.append(
            {
                "checkpoint": name,
                "steps": tree.num_steps,
                "topk": tree.topk,
                "tokens": tree.num_draft_tokens,
                "tau": tau,
                "tau_low": low,
                "tau_high": high,
                "accept_rate": (tau - 1) / tree.num_steps,
                "cycles": int(cycles[:, g].sum()),
                "accepted": int(accepted[:, g].sum()),
                "mean_depth": float(depth[g] / max(1, cycles[:, g].sum())),
                "acceptance": _format_accept_by_depth(reached[g], int(cycles[:, g].sum()), tree.num_steps),
                "tau_oracle": acceptance.compute_tau(*oracle[:, g]),
                "tau_adaptive": oracle_bounds.interpolate_adaptive_tau(
                    cuts[tree.topk][:, :, tree.num_steps - 1], tree.num_draft_tokens
                ),
                "temperature": answers.temperature,
                "top_p": answers.top_p,
            }
        )
    return found


# Whose answers, and whose hidden states


def _check_draft(name: str, config: dict[str, Any], made: manifest.TargetManifest) -> None:
    """Raises ValueError where a draft is for a target of another shape."""
    theirs, ours = (config["vocab_size"], config["hidden_size"]), (made.vocab_size, made.hidden_size)
    if theirs != ours:
        raise ValueError(
            f"{checkpoint.locate_checkpoint(name)}/draft is for a target of {theirs[0]} tokens and width {theirs[1]}, expected "
            f"{made.model}'s {ours[0]} and {ours[1]}; train or import a draft for this target"
        )


def _open_answers(p: schema.Params, split: str, made: manifest.TargetManifest) -> AnswerSplit:
    """Raises ValueError where the hidden states are not this target's, not those of the split's answers, or where these were
    drawn otherwise than is asked.
    """
    origin.check_origin(HIDDENS / split, split, made)
    table = conversations.read_table(SAMPLED / split, conversations.SAMPLED_SCHEMA, "sample_target")
    s = p.sample_target
    heat = s.eval_temperature if split == "eval_t" else 0.0
    top_p = s.top_p if heat else None
    asked = [np.float32(value) if value is not None else None for value in (heat, top_p)]  # as the table holds them
    for drawn in table.select("temperature", "top_p").unique().sort(pl.all()).rows():
        if (split == "eval_t" and not heat) or list(drawn) != asked:
            expected = _format_sampling(heat, top_p) if heat or split == "eval" else "none above temperature 0"
            raise ValueError(
                f"{SAMPLED / split} has answers of {_format_sampling(*drawn)}, expected {expected}, as sample_target asks; run: dvc repro "
                "sample_target"
            )
    known = {row["id"]: row["prompt_ids"] + row["answer_ids"] for row in table.iter_rows(named=True)}
    count = 0
    for row in reader.read_headers(HIDDENS / split):
        if row.ids.tolist() != known.get(row.id):
            which = "is another answer than" if row.id in known else "is none of"
            raise ValueError(
                f"{HIDDENS / split}: row {row.id} {which} those in {SAMPLED / split}; run: dvc repro extract_hiddens"
            )
        count += 1
    return AnswerSplit(HIDDENS / split, heat, top_p, count)


def _format_sampling(temperature: float | None, top_p: float | None) -> str:
    return ", ".join(
        f"{name} {'null' if value is None else f'{value:g}'}"
        for name, value in (("temperature", temperature), ("top_p", top_p))
    )


def _replay_rows(
    draft: Eagle3Draft,
    embedding,
    rows: list[format.HiddenStatesRow],
    grid: list[TreeShape],
    settings: ReplayTrees,
    inner: TreeTraces | None,  # its trees are of the grid
) -> tuple[np.ndarray, ...]:
    """Accepted drafts and verify cycles of each answer and tree, [rows, trees] each; over all answers, cycles that
    accepted at least s + 1 drafts [trees, steps], and summed depths of trees [trees]; the oracle's accepted drafts and
    cycles [2, trees]; and those of adaptive trees, with their drafted nodes, [3, topks, thresholds, steps].
    """
    accepted = np.zeros((len(rows), len(grid)), dtype=np.int64)
    cycles, depth = np.zeros_like(accepted), np.zeros(len(grid), dtype=np.int64)
    steps, topks = max(t.num_steps for t in grid), {t.topk for t in grid}
    reached, oracle = np.zeros((len(grid), steps), dtype=np.int64), np.zeros((2, len(grid)), dtype=np.int64)
    adaptive = np.zeros((3, len(topks), len(oracle_bounds.PATH_PROBABILITY_THRESHOLDS), steps), dtype=np.int64)
    device, shapes = embedding.device, [(t.num_steps, t.topk, t.num_draft_tokens) for t in grid]
    looked_into = list(inner.tallies) if inner else []
    watched = [grid.index(tree) for tree in looked_into]
    fits = compute_capacity(draft, shapes, int(settings.memory_gib * 2**30))
    with tqdm(total=len(rows), desc="replay", unit="row", mininterval=2) as bar:
        for here in _batch_rows([len(r.ids) for r in rows], fits.tokens):
            batch = rows[here]
            ids = pad_sequence([r.ids.to(torch.int64) for r in batch], batch_first=True).to(device)
            features = pad_sequence([r.features for r in batch], batch_first=True).to(device)
            starts = torch.tensor([r.prompt_length for r in batch], device=device)
            ends = torch.tensor([len(r.ids) for r in batch], device=device)
            shown, grown = _collate_multimodal(batch, device), settings.semantics
            given = draft, embedding, ids, features, starts, ends
            found = replay_answers(*given, shapes, shown, grown, fits.places, watched)
            accepted[here], cycles[here] = found.accepted.cpu().numpy(), found.cycles.cpu().numpy()
            depth += found.depth.sum(0).cpu().numpy()
            reached += found.reached.sum(0).cpu().numpy()
            oracle += torch.stack([found.oracle_accepted, found.oracle_cycles]).sum(1).cpu().numpy()
            sums = torch.stack([found.adaptive.accepted, found.adaptive.cycles, found.adaptive.depth]).sum(1)
            adaptive += sums.view(adaptive.shape).cpu().numpy()
            for tree, stood in zip(looked_into, () if found.stood is None else found.stood, strict=True):
                assert inner
                shape = tree.num_steps, tree.topk, tree.num_draft_tokens
                inner.add(
                    tree, tree_statistics.trace_cycles(*given, stood, shape, shown, grown), batch, ids, starts, ends
                )
            bar.update(len(batch))
    return accepted, cycles, reached, depth, oracle, adaptive


def _batch_rows(lengths: list[int], tokens: int) -> Iterator[slice]:
    """Rows of ascending lengths, as many together as `tokens` hold where they are padded; one at least."""
    first = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - first) * lengths[end] > tokens:
            yield slice(first, end)
            first = end


def _format_accept_by_depth(reached: np.ndarray, cycles: int, steps: int) -> str:
    """The share of cycles that accepted a draft at each depth, of those that accepted one at the depth before: "0.81 0.7"."""
    before = [cycles, *reached[: steps - 1].tolist()]
    shares = [here / ahead for here, ahead in zip(reached[:steps].tolist(), before, strict=True) if ahead]
    return " ".join(f"{share:.4f}" for share in shares)


def _collate_multimodal(rows: list[format.HiddenStatesRow], device: torch.device) -> MultimodalFeatures | None:
    """What rows of a target that sees hold beside tokens; None for text."""
    positions, pictured, visual = zip(
        *((r.positions, r.image_token_mask, r.image_embeddings) for r in rows), strict=True
    )
    if positions[0] is None:
        return None
    positions, pictured = (pad_sequence(list(t), batch_first=True) for t in (positions, pictured))
    return MultimodalFeatures(positions.to(device), pictured.to(device), torch.cat(visual).to(device))


if __name__ == "__main__":
    schema.run_stage(stage_record.record_stage(main, "replay_trees", lambda: schema.load_params().target.gpus()))
