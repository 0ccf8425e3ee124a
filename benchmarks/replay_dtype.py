"""Replay with the draft in float32 and in bfloat16: how much of a served tau is the draft's own rounding?

    python3 -m benchmarks.replay_dtype [CHECKPOINT]

Where the graph has made hidden states and drafts. Prints tau of every tree of replay_trees in both, and their ratio.
"""

import sys

import torch

from stages import params, replay_trees
from stages.drafting import acceptance
from stages.drafting.draft import Draft
from stages.formats import checkpoint, hiddens, manifest


def main(name: str) -> None:
    p = params.load()
    embedding, _ = manifest.tables(manifest.read())
    config, tensors = checkpoint.read_draft(checkpoint.folder(name), p.made_by(name))
    rows = sorted(hiddens.read(replay_trees.HIDDENS), key=lambda r: len(r.ids))
    grid = p.replay_trees.trees()
    taus = []
    for dtype in (torch.float32, torch.bfloat16):
        draft = Draft.of(config, tensors).to(p.target.device, dtype).requires_grad_(False)
        table = embedding.to(p.target.device, dtype)
        accepted, cycles, *_ = replay_trees._replay(draft, table, rows, grid, p.replay_trees)
        taus.append([acceptance.tau(accepted[:, g], cycles[:, g]) for g in range(len(grid))])
    for tree, exact, rounded in zip(grid, *taus, strict=True):
        print(f"{tree.name:10} float32 {exact:.4f}  bfloat16 {rounded:.4f}  {rounded / exact - 1:+.2%}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["e009"]))
