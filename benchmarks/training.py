"""Training's speed at a real size, reading from disk included.   python -m benchmarks.training [--scenario dense ...]

A draft for a Qwen3-8B-shaped target with a vocabulary of 32,000 (or smaller, by --hidden), random hidden states in
bfloat16 written as extract_hiddens would, then epochs of train_draft's own loop. The floor, at 8B shape and 7 steps: 14.6
GFLOP a token of dense 2,048-token rows (16.46 with a trained head); the card's bf16 peak is 989 TFLOP/s by its datasheet,
about 790 by a large matrix product. MFU is counted against 989, and only for `dense`.

    dense     rows of 2,048 tokens, all of them supervised
    real      lognormal lengths, mean 850, at most 4,096, the last 60% of each row supervised
    long      one row of 32,768 tokens

`--method dflash dspark` trains block drafts (training_blocks.py): five layers, blocks of 16 or 7, 512 anchors a pack of 4,096
tokens, four packs a step, 1.05e9 weights (DSpark 1.13e9); their floor is counted from the packs that were trained on.

With torchrun it measures that many GPUs. `--online` stores no hidden states: a random target of 8B shape makes them,
14.5 GFLOP a token more. Prints JSON.
"""

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.engine import go_on_after_failure
from benchmarks.extraction import FLOP as TARGET_FLOP
from benchmarks.random_target import build_config, build_model
from benchmarks.training_blocks import BLOCK_SIZES, FEATURE_LAYERS, CountedObjective, build_block_draft, describe_work
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.families.block import objective as block_training
from stages.families.eagle3.training import MOST_SMALL_TOKENS
from stages.hidden_states import format, writer
from stages.hidden_states.reader import HiddenStatesReader
from stages.params.draft_sections import TrainDraft
from stages.params.families import BLOCKS
from stages.runtime import distributed
from stages.target.feature_target import FeatureTarget
from stages.training import ttt
from stages.training.packs import OnlinePacks
from stages.training.trainer import Trainer, TrainingProgress

DENSE_FLOP, PEAK = 14.6e9, 989e12  # a token at 8B shape; a second
LENGTHS = {
    "dense": lambda rng: 2048,
    "real": lambda rng: max(16, min(4096, round(rng.lognormvariate(6.42, 0.81)))),  # mean 850
    "long": lambda rng: 32768,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", nargs="+", default=["eagle3"], choices=["eagle3", *BLOCK_SIZES])
    parser.add_argument(
        "--scenario", nargs="+", choices=LENGTHS, help="default: dense and real; for block drafts dense"
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--tokens", type=int, help="of the data on disk; default: 200,000, for block drafts 131,072")
    parser.add_argument("--batch-tokens", type=int, help="default: 16,384, for block drafts 4,096")
    parser.add_argument("--packs-per-step", type=int, help="default: 1, for block drafts 4")
    parser.add_argument("--anchors", type=int, default=512, help="blocks of a pack")
    parser.add_argument("--layers", type=int, default=5, help="of a block draft")
    parser.add_argument("--epochs", type=int, default=2, help="measured, after one that warms up")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--drop-caches", action="store_true", help="read from the disk, not from memory (needs root)")
    parser.add_argument("--online", action="store_true", help="hidden states by a random 8B target, in the trainer")
    parser.add_argument("--compile", action="store_true", help="that target's blocks")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="of small packs")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with distributed.join_process_group(args.device) as group:
        for method in args.method:
            # Of several ranks one alone can't go on.
            with go_on_after_failure() if group.world == 1 else nullcontext():
                for scenario in args.scenario or (["dense"] if method in BLOCK_SIZES else ["dense", "real"]):
                    _measure(choose_sizes(args, method), scenario, group)


def choose_sizes(args: argparse.Namespace, method: str) -> argparse.Namespace:
    """Return the arguments for one method, with its defaults for those that were not given."""
    own = {"tokens": 131_072, "batch_tokens": 4096, "packs_per_step": 4, "layer_ids": FEATURE_LAYERS}
    if method not in BLOCK_SIZES:
        own = {"tokens": 200_000, "batch_tokens": 16384, "packs_per_step": 1, "layer_ids": (2, 18, 33)}
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**own | given | {"method": method})


def _store_rows(args: argparse.Namespace, scenario: str, group: distributed.RankContext) -> Path:
    """Return the folder of the scenario's hidden states, which the first rank writes where there is none."""
    kind = f"{scenario}{'-online' if args.online else ''}-{len(args.layer_ids)}"
    folder = Path(tempfile.gettempdir()) / f"aerie-training-{kind}-{args.hidden}-{args.vocab}-{args.tokens}"
    if group.first and not folder.exists():
        half = folder.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        writer.write_rows(half, rows(args, scenario), torch.bfloat16, 1 << 30)
        half.rename(folder)
    while not folder.exists():
        time.sleep(0.5)
    return folder


def _measure(args: argparse.Namespace, scenario: str, group: distributed.RankContext) -> None:
    folder = _store_rows(args, scenario, group)
    args.batch_tokens = max(args.batch_tokens, 32768) if scenario == "long" else args.batch_tokens
    started, store, run = time.perf_counter(), HiddenStatesReader(folder), start(args, group)
    assert store.online == args.online
    if args.online:
        compile_tokens = args.batch_tokens if args.compile else None
        run.online_packs = OnlinePacks(
            FeatureTarget(build_model(build_config("8b"), group.device), list(args.layer_ids), None, compile_tokens), {}
        )
    with tqdm(disable=True) as bar:
        for entry in run.train_epochs(store, 1 + args.epochs, bar):
            run.marks.append([])
            if entry.epoch == 1 and group.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            if args.drop_caches and group.first:
                Path("/proc/sys/vm/drop_caches").write_text("1")
    if not group.first:
        return
    rates = [round(e.tokens / e.seconds) for e in run.log[1:]]
    found = {
        "method": args.method, "scenario": scenario, "gpus": group.world, "parallel": args.parallel,
        "batch_tokens": run.settings.batch_tokens,
        "packs_per_step": args.packs_per_step, "rows": len(store), "tokens": sum(store.lengths), "steps": run.step,
        "tokens_per_s": rates, "first_step_s": round(run.first_step - started, 1),
        "first_epoch_s": run.log[0].seconds,
        "loss": [round(e.loss, 3) for e in run.log], "drop_caches": args.drop_caches,
        "online": args.online, "compile": args.compile,
    }  # fmt: skip
    if group.device != "cpu":
        found["device"], found["torch"] = torch.cuda.get_device_name(), torch.__version__
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if scenario == "dense" and args.hidden == 4096 and args.method == "eagle3":
            flop = DENSE_FLOP + (TARGET_FLOP if args.online else 0)
            found["mfu"] = [round(r * flop / PEAK / group.world, 3) for r in rates]
    step_seconds = run.list_step_seconds()
    steps = [seconds for epoch in step_seconds[1:] for seconds in epoch]  # without what is between epochs
    if steps:
        tokens_per_step = sum(store.lengths) * len(run.log) / run.step
        found["steady_tokens_per_s"] = round(tokens_per_step * len(steps) / sum(steps))
    if isinstance(run.objective, CountedObjective):
        found |= describe_work(run, store, step_seconds, PEAK)
    print(json.dumps(found), flush=True)
    if args.profile:
        profile(run, store, tqdm(disable=True))


def rows(args: argparse.Namespace, scenario: str):
    """Random rows of bfloat16 hidden states, `args.tokens` of them in all."""
    rng, made, device = random.Random(1), 0, "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    while made < args.tokens:
        length = LENGTHS[scenario](rng)
        supervised = torch.arange(length) >= (0 if scenario != "real" else round(0.4 * length))
        hidden = 0 if args.online else args.hidden
        split = len(args.layer_ids) * hidden
        features = torch.randn(length, split + hidden, device=device, dtype=torch.bfloat16).cpu()
        ids = torch.randint(0, args.vocab, (length,), dtype=torch.int32)
        yield format.HiddenStatesRow(
            str(made), ids, supervised, int((~supervised).sum()), "stop",
            features=features[:, :split].contiguous(), last=features[:, split:].contiguous(),
        )  # fmt: skip
        made += length


class TimedTrainer(Trainer):
    """A trainer that knows when its steps were done."""

    first_step = 0.0  # by perf_counter

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.marks: list[list[Any]] = [[]]  # of each step of each epoch: an event, or seconds on a CPU

    def train_step(self, packs: list) -> torch.Tensor:
        sums = super().train_step(packs)
        if not self.first_step:
            sums.cpu()  # waits
            self.first_step = time.perf_counter()
        if self.ranks.device == "cpu":
            self.marks[-1].append(time.perf_counter())
        else:
            self.marks[-1].append(torch.cuda.Event(enable_timing=True))
            self.marks[-1][-1].record()
        return sums

    def list_step_seconds(self) -> list[list[float]]:
        """Return the seconds from step to step of each epoch: one fewer than it has steps."""
        if self.ranks.device == "cpu":
            return [[b - a for a, b in itertools.pairwise(marks)] for marks in self.marks]
        torch.cuda.synchronize()
        return [[a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)] for marks in self.marks]


def start(args: argparse.Namespace, group: distributed.RankContext) -> TimedTrainer:
    torch.manual_seed(2)
    with torch.device(group.device):
        draft: Any = build_eagle3_draft(args) if args.method == "eagle3" else build_block_draft(args)
        for weight in draft.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.02)
        tables = torch.randn(2, args.vocab, args.hidden, dtype=torch.bfloat16) * 0.02
    settings = TrainDraft(
        checkpoints={}, dtype=args.dtype, schedule="constant", batch_tokens=args.batch_tokens,
        packs_per_step=args.packs_per_step, parallel=args.parallel,
    )  # fmt: skip
    if args.method == "eagle3":
        draft.lm_head.weight.requires_grad_(False)
        objective: Any = ttt.TrainingObjective.of_settings(settings, settings.ttt_steps, 1.0)
        objective = replace(objective, small_packs=args.graphs and args.batch_tokens <= MOST_SMALL_TOKENS)
        learn: Any = ttt.compute_loss
    else:
        loss = BLOCKS[args.method].loss
        objective = CountedObjective(draft.config.num_drafts, args.anchors, settings.seed, loss)
        learn = block_training.compute_loss
    return TimedTrainer(draft, tables[0], tables[1], objective, learn, settings, group, TrainingProgress({}))


def build_eagle3_draft(args: argparse.Namespace) -> Eagle3Draft:
    h, heads = args.hidden, args.hidden // 128
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    sizes = h, 3 * h, heads, max(1, heads // 4), 128, args.vocab, args.draft_vocab, 40960, 1e-6
    draft = Eagle3Draft(DraftConfig(*sizes, rope))
    draft.t2d[: args.draft_vocab] = True
    return draft


def profile(run: Trainer, store: HiddenStatesReader, bar: tqdm) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        list(run.train_epochs(store, run.epoch + 1, bar))
    run.log.pop()
    print(
        found.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70), flush=True
    )


if __name__ == "__main__":
    main()
