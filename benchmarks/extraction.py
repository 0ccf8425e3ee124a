"""Extraction's speed at a real size, writing shards included.   python -m benchmarks.extraction [--dtype bfloat16 ...]

A Qwen3-8B-shaped random target in bfloat16 on a GPU, rows of 2,048 tokens (or lognormal ones: --real), through the
stage's own plan, forward and writers. The floor: 2 FLOP for each of the 6.95e9 weights of the 36 blocks and 2 * T * H *
layers (half of T seen) for attention: 14.5 GFLOP a token at 2,048; the card's bf16 peak is 989 TFLOP/s. Bytes a token
must be the formula's. Under torchrun it measures that many GPUs, shards dealt out as the stage does. Prints JSON.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import polars as pl
import torch
from torch.nn.attention import current_flash_attention_impl

from benchmarks.random_target import build_config, build_model
from stages.data import conversations
from stages.hidden_states import extraction, format, shard_plan, sources
from stages.target import packed_forward
from stages.target.feature_target import FeatureTarget

LENGTH, PEAK, LAYERS, H = 2048, 989e12, [2, 18, 33], 4096
FLOP = 2 * 6.95e9 + 2 * LENGTH * H * 36  # a token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=250_000)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=list(format.DTYPES))
    parser.add_argument("--shard-mib", type=int, default=512)
    parser.add_argument(
        "--folders", nargs="+", type=Path, default=[Path(tempfile.gettempdir())], help="of several disks"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--real", action="store_true", help="lognormal lengths, mean 850, at most 4,096")
    parser.add_argument("--profile", action="store_true", help="also the kernels of a forward")
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    if world > 1:
        torch.distributed.init_process_group("gloo")
    model = build_model(build_config("8b"), device)
    target = FeatureTarget(model, LAYERS, None, args.batch_tokens if args.compile else None)
    packed, kernel = target.supports_packing, current_flash_attention_impl() or "FA2"
    source = sources.HiddenStatesSource(
        partial(sources.fill_from_target, target, {}),
        partial(shard_plan.split_batches, args.batch_tokens, not packed),
        device,
    )
    alone = forward_rate(model, args.batch_tokens, args.profile and rank == 0) if packed else None
    for disk, name in itertools.product(args.folders, args.dtype):
        dtype = format.DTYPES[name]
        size = shard_plan.StoredRowSize(len(LAYERS), H, dtype)
        folder = disk / f"aerie-extraction-{name}"
        for tokens in (4 * args.batch_tokens * world, args.tokens):  # the first warms up
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            table = rows(tokens, args.real)
            work = shard_plan.plan_split("train", table, size, args.shard_mib << 20, folder)
            seconds = time_extraction(work, source, rank, world)
        if rank:
            continue
        count = shard_plan.count_tokens(table)
        written = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        rate = count / seconds
        found = {
            "gpus": world, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "flash_attention": kernel,
            "folder": str(disk), "dtype": name, "compile": args.compile, "packed": packed, "real": args.real, "tokens": count,
            "shards": len(work),
            "tokens_per_s": round(rate), "gb_per_s": round(written / 1e9 / seconds, 2),
            "bytes_per_token": round(written / count, 2), "formula": size.token_bytes,
        }  # fmt: skip
        if not args.real and alone:
            found |= {"mfu": mfu(rate / world), "forward_alone_tokens_per_s": round(alone), "its_mfu": mfu(alone)}
        print(json.dumps(found), flush=True)


def time_extraction(
    work: list[shard_plan.ShardTask], source: sources.HiddenStatesSource, rank: int, world: int
) -> float:
    """Return the seconds in which all ranks write their shards."""
    if world > 1:
        torch.distributed.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    extraction.extract_shards(work[rank::world], source, show=False)
    torch.cuda.synchronize()
    if world > 1:
        torch.distributed.barrier()
    return time.perf_counter() - started


def mfu(rate: float) -> float:
    """Of one GPU at `rate` tokens a second, in rows of 2,048."""
    return round(rate * FLOP / PEAK, 3)


def forward_rate(model, tokens: int, profile: bool) -> float:
    """Tokens a second of the forward on random ids, nothing kept and nothing written: what writing can cost at most."""
    lengths = [LENGTH] * (tokens // LENGTH)
    ids = torch.randint(0, 150000, (sum(lengths),), device=model.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        packed_forward.forward_documents(model, ids, lengths, packed=True)
    begin.record()
    for _ in range(8):
        packed_forward.forward_documents(model, ids, lengths, packed=True)
    end.record()
    torch.cuda.synchronize()
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            packed_forward.forward_documents(model, ids, lengths, packed=True)
            torch.cuda.synchronize()
        print(found.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=60), flush=True)
    return 8 * sum(lengths) / (begin.elapsed_time(end) / 1000)


def rows(tokens: int, real: bool) -> pl.DataFrame:
    rng = random.Random(1)
    made: list[list[int]] = []
    while sum(len(ids) for ids in made) < tokens:
        length = max(16, min(4096, round(rng.lognormvariate(6.42, 0.81)))) if real else LENGTH
        made.append([rng.randrange(150000) for _ in range(length)])
    return pl.DataFrame(
        [
            {"id": f"{i:06d}", "prompt_ids": ids[: len(ids) // 2], "answer_ids": ids[len(ids) // 2 :],
             "finish_reason": "stop", "temperature": 0.0, "top_p": None, "source_row": i, "verdict": "clean", "images": None}
            for i, ids in enumerate(made)
        ],
        schema=conversations.SAMPLED_SCHEMA,
    )  # fmt: skip


if __name__ == "__main__":
    main()
