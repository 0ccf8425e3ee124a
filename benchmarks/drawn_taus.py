"""tau of answers that the torch engine draws, over several draws: how much of a served tau's distance from replay is chance.

    python -m benchmarks.drawn_taus PROJECT CHECKPOINT TREE [--draws 12] [--sample-drafts]

PROJECT has sampled its eval prompts above temperature 0, as the recipes do. Replay's tau there is of the stored answers, one draw
of many; an engine that is asked the same prompts makes another. Prints tau of each draw, mean, standard deviation, and replay's.
"""

import argparse
import os
import random
from pathlib import Path
from statistics import fmean, stdev

import torch

from stages.data import conversations
from stages.draft.loading import load_draft
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeStep
from stages.engine.requests import DecodeRequest
from stages.engine.sampling import SamplingParams
from stages.params import schema
from stages.params.tree_shape import TreeShape
from stages.results import replay_records
from stages.target import loading, manifest

SAMPLED = Path("data/sampled/eval_t")
SLOTS = 32  # answers decoded at once


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("project")
    takes.add_argument("checkpoint")
    takes.add_argument("tree", type=TreeShape.parse)
    takes.add_argument("--draws", type=int, default=12)
    takes.add_argument(
        "--sample-drafts", action="store_true", help="verify drawn drafts by the ratio rule; else the likeliest"
    )
    takes.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = takes.parse_args()
    os.chdir(o.project)
    torch.set_num_threads(1)
    p, target = schema.load_params(), manifest.read_manifest()
    rows = conversations.read_table(SAMPLED, conversations.SAMPLED_SCHEMA, "sample_target")
    temperature, top_p = rows["temperature"][0], rows["top_p"][0]
    folder = str(manifest.resolve_weights_folder(target))
    model = loading.load_target(folder, p.target.dtype, o.device, p.target.trust_remote_code)
    loaded = load_draft(p, o.checkpoint, o.device, model.dtype, target.num_layers)
    scoring, scale = p.replay_trees.tree_scoring, target.logits_scale
    engine = Engine(model, target.eos_token_ids, loaded.feature_layers, loaded.draft, scoring, scale)
    rng = random.Random(7)
    taus = []
    for number in range(o.draws):
        hows = [
            SamplingParams(temperature, top_p, None, rng.randrange(2**31), samples_drafts=o.sample_drafts)
            for _ in rows["top_p"]
        ]
        asked = [
            DecodeRequest(prompt.to_list(), p.sample_target.max_new_tokens, None, how)
            for prompt, how in zip(rows["prompt_ids"], hows, strict=True)
        ]
        accepted = list_accepted(engine, asked, o.tree)
        taus.append(1 + fmean(accepted))
        print(f"draw {number}: {len(accepted)} cycles, tau {taus[-1]:.4f}", flush=True)
    sampling = "sampled" if o.sample_drafts else "greedy"
    replayed = next(
        tree
        for tree in replay_records.read_replay(o.checkpoint)
        if tree.shape == o.tree and tree.temperature > 0 and tree.draft_sampling == sampling
    )
    print(
        f"{o.checkpoint}, {o.tree.name}, {sampling} drafts: tau {fmean(taus):.4f} on average, standard deviation of a draw "
        f"{stdev(taus):.4f}; replayed along the stored answers {replayed.tau:.4f}"
    )


def list_accepted(engine: Engine, asked: list[DecodeRequest], tree: TreeShape) -> list[int]:
    """Return the accepted drafts of every cycle. The first step of an answer is prefill's."""
    steps: list[list[DecodeStep]] = [[] for _ in asked]
    for updates in engine.decode_batch(asked, SLOTS, tree):
        for number, step in updates:
            if step is not None:
                steps[number].append(step)
    return [step.num_accepted for some in steps for step in some[1:]]


if __name__ == "__main__":
    main()
