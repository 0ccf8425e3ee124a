"""replay_trees: cached eval hidden states + a draft -> tau of every tree.   python -m stages.replay_trees CHECKPOINT

Exact, not estimated: research/replay.md and drafting/replay.py. One expansion per topk gives every smaller num_steps
and every num_draft_tokens.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from stages import params
from stages.drafting import acceptance, bounds, inside, kinds, prompt
from stages.drafting.draft import Draft, Seen
from stages.drafting.replay import replay, room
from stages.formats import checkpoint, hiddens, manifest, replays
from stages.params import Tree

HIDDENS = Path("data/hiddens/eval")


def main(name: str) -> None:
    p = params.load()
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    made = manifest.read()
    embedding, _ = manifest.tables(made)
    config, tensors = checkpoint.read_draft(checkpoint.folder(name), p.made_by(name))
    dtype = getattr(torch, p.target.dtype)  # engines run the draft as they run the target; scores are float32
    draft = Draft.of(config, tensors).to(p.target.device, dtype).requires_grad_(False)
    rows = sorted(hiddens.read(HIDDENS, dtype), key=lambda r: len(r.ids))

    settings = p.replay_trees
    grid, watched = settings.trees(), settings.watched()
    tokenizer = prompt.load_tokenizer(manifest.weights(made), p.target.trust_remote_code, made.chat_template)
    kind = kinds.kinds(tokenizer, (token for row in rows for token in row.ids.tolist()))
    every = list(dict.fromkeys([*grid, *watched]))
    tallies = {tree: inside.Tally() for tree in watched}
    accepted, cycles, reached, depth, oracle, adaptive = _replay(
        draft, embedding.to(p.target.device, dtype), rows, every, settings, tallies, kind
    )
    low, high = acceptance.interval(accepted, cycles)
    cuts = dict(
        zip(sorted({t.topk for t in every}), adaptive.swapaxes(0, 1), strict=True)
    )  # [3, thresholds, steps] of a topk
    found: list[dict[str, Any]] = []
    for g, tree in enumerate(grid):
        tau = acceptance.tau(accepted[:, g], cycles[:, g])
        found.append(
            {
                "checkpoint": name,
                "steps": tree.num_steps,
                "topk": tree.topk,
                "tokens": tree.num_draft_tokens,
                "tau": tau,
                "tau_low": float(low[g]),
                "tau_high": float(high[g]),
                "accept_rate": (tau - 1) / tree.num_steps,
                "cycles": int(cycles[:, g].sum()),
                "accepted": int(accepted[:, g].sum()),
                "mean_depth": float(depth[g] / max(1, cycles[:, g].sum())),
                "acceptance": _by_depth(reached[g], int(cycles[:, g].sum()), tree.num_steps),
                "tau_oracle": acceptance.tau(*oracle[:, g]),
                "tau_adaptive": bounds.at_width(cuts[tree.topk][:, :, tree.num_steps - 1], tree.num_draft_tokens),
            }
        )
    replays.write(replays.path(name), found)
    replays.write_inside(name, ({"tree": tree.name} | row for tree, tally in tallies.items() for row in tally.rows()))
    best = max(range(len(grid)), key=lambda g: found[g]["tau"])
    print(
        f"{name}: {len(grid)} trees on {len(rows)} answers in {time.perf_counter() - started:.1f} s; "
        f"best {grid[best].name}, tau {found[best]['tau']:.3f}"
    )


def _replay(
    draft: Draft,
    embedding,
    rows: list[hiddens.Row],
    grid: list[Tree],
    settings: params.ReplayTrees,
    tallies: dict[Tree, inside.Tally],  # of some trees of the grid: what happens inside is added to them
    kind: torch.Tensor,  # [V] of each token, as kinds.kinds gives it
) -> tuple[np.ndarray, ...]:
    """Accepted drafts and verify cycles of each answer and tree, [rows, trees] each; over all answers, cycles that
    accepted at least s + 1 drafts [trees, steps], and summed depths of trees [trees]; the oracle's accepted drafts and
    cycles [2, trees]; and those of adaptive trees, with their drafted nodes, [3, topks, thresholds, steps].
    """
    accepted = np.zeros((len(rows), len(grid)), dtype=np.int64)
    cycles, depth = np.zeros_like(accepted), np.zeros(len(grid), dtype=np.int64)
    steps, topks = max(t.num_steps for t in grid), {t.topk for t in grid}
    reached, oracle = np.zeros((len(grid), steps), dtype=np.int64), np.zeros((2, len(grid)), dtype=np.int64)
    adaptive = np.zeros((3, len(topks), len(bounds.THRESHOLDS), steps), dtype=np.int64)
    device, shapes = embedding.device, [(t.num_steps, t.topk, t.num_draft_tokens) for t in grid]
    watched = [grid.index(tree) for tree in tallies]
    fits = room(draft, shapes, int(settings.memory_gib * 2**30))
    with tqdm(total=len(rows), desc="replay", unit="row", mininterval=2) as bar:
        for here in _batches([len(r.ids) for r in rows], fits.tokens):
            batch = rows[here]
            ids = pad_sequence([r.ids.to(torch.int64) for r in batch], batch_first=True).to(device)
            features = pad_sequence([r.features for r in batch], batch_first=True).to(device)
            starts = torch.tensor([r.prompt_length for r in batch], device=device)
            ends = torch.tensor([len(r.ids) for r in batch], device=device)
            shown, grown = _seen(batch, device), settings.semantics
            given = draft, embedding, ids, features, starts, ends
            found = replay(*given, shapes, shown, grown, fits.places, watched)
            accepted[here], cycles[here] = found.accepted.cpu().numpy(), found.cycles.cpu().numpy()
            depth += found.depth.sum(0).cpu().numpy()
            reached += found.reached.sum(0).cpu().numpy()
            oracle += torch.stack([found.oracle_accepted, found.oracle_cycles]).sum(1).cpu().numpy()
            sums = torch.stack([found.adaptive.accepted, found.adaptive.cycles, found.adaptive.depth]).sum(1)
            adaptive += sums.view(adaptive.shape).cpu().numpy()
            for tree, stood in zip(tallies, () if found.stood is None else found.stood, strict=True):
                shape = tree.num_steps, tree.topk, tree.num_draft_tokens
                looked_at = inside.look(*given, stood, shape, shown, grown)
                _add(tallies[tree], looked_at, batch, ids, starts, ends, kind)
            bar.update(len(batch))
    return accepted, cycles, reached, depth, oracle, adaptive


def _batches(lengths: list[int], tokens: int) -> Iterator[slice]:
    """Rows of ascending lengths, as many together as `tokens` hold where they are padded; one at least."""
    first = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - first) * lengths[end] > tokens:
            yield slice(first, end)
            first = end


def _add(tally: inside.Tally, cycles: inside.Cycles, rows: Iterable[hiddens.Row], *others: torch.Tensor) -> None:
    ids, starts, ends, kind = (t.cpu() for t in others)
    tally.add(inside.Cycles(*(t.cpu() for t in cycles)), [r.id for r in rows], ids, starts, ends, kind)


def _by_depth(reached: np.ndarray, cycles: int, steps: int) -> str:
    """The share of cycles that accepted a draft at each depth, of those that accepted one at the depth before: "0.81 0.7"."""
    before = [cycles, *reached[: steps - 1].tolist()]
    shares = [here / ahead for here, ahead in zip(reached[:steps].tolist(), before, strict=True) if ahead]
    return " ".join(f"{share:.4f}" for share in shares)


def _seen(rows: list[hiddens.Row], device: torch.device) -> Seen | None:
    """What rows of a target that sees hold beside tokens; None for text."""
    positions, pictured, visual = zip(*((r.positions, r.pictured, r.visual) for r in rows), strict=True)
    if positions[0] is None:
        return None
    positions, pictured = (pad_sequence(list(t), batch_first=True) for t in (positions, pictured))
    return Seen(positions.to(device), pictured.to(device), torch.cat(visual).to(device))


if __name__ == "__main__":
    params.run_stage(main)
