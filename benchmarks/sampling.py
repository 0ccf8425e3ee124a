"""Backends of sample_target on a project's own rows.   python -m benchmarks.sampling PROJECT --rows N

PROJECT is a folder with params.yaml, artifacts/target and data/fixed made. Each backend answers the same `--rows` training
prompts, greedily and at the project's temperature:

    generate    transformers' generate, batches of `--batch`
    continuous  transformers' continuous batching (its attention is flash where it finds a kernel, else sdpa)
    engine      the project's engine: slots that are refilled

A server's rate is that of the stage with server.launch on the same project. Printed: seconds, output tokens/s, the share of
greedy answers that equal the first backend's, and of drawn answers that stay the same among other neighbours (the first
half of the rows alone).
"""

import argparse
import gc
import itertools
import time
import traceback
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from stages.engine.decode_state import DecodeRequest
from stages.engine.pooled_decode import PooledEngine
from stages.engine.sampling import SamplingParams
from stages.params import schema
from stages.sampling import requests, sampled_split
from stages.target import generation, loading, manifest
from stages.target.prompt_encoder import PromptEncoder

Answers = list[list[int]]


class Bench:
    """A target and the prompts of a project's training rows."""

    def __init__(self, args: argparse.Namespace):
        self.p, self.target, self.args = schema.load_params(), manifest.read_manifest(), args
        folder = manifest.resolve_weights_folder(self.target)
        encoder = PromptEncoder.load(
            self.target, folder, self.p.target.trust_remote_code, self.p.sample_target.thinking
        )
        path = Path("data/fixed/train.parquet")
        asked = itertools.chain(*requests.read_requests(path, requests.select_requests(path, args.rows)))
        self.rows = [
            (q.id, encoder.encode_prompt(q.row, q.messages[: q.answer_index], q.tools, q.images)) for q in asked
        ]
        self.pad, self.most = encoder.pad_token, args.max_new_tokens or self.p.sample_target.max_new_tokens
        dtype, device = args.dtype or self.p.target.dtype, args.device or self.p.target.device
        self.model: Any = loading.load_target(str(folder), dtype, device, self.p.target.trust_remote_code)
        self.temperature = self.p.sample_target.temperature_weights[0][0] or 0.7
        self.top_p = args.top_p or self.p.sample_target.top_p

    def generate(self, rows: list[tuple[str, list[int]]], temperature: float) -> Answers:
        found: dict[int, list[int]] = {}
        order = sorted(range(len(rows)), key=lambda number: len(rows[number][1]))
        eos = self.target.eos_token_ids
        for first in range(0, len(rows), self.args.batch):
            part = order[first : first + self.args.batch]
            prompts = [rows[number][1] for number in part]
            settings = self.most, temperature, self.top_p, eos, self.pad, first
            answers = generation.generate_answers(self.model, prompts, *settings)
            found |= {number: ids for number, (ids, _) in zip(part, answers, strict=True)}
        return [found[number] for number in range(len(rows))]

    def continuous(self, rows: list[tuple[str, list[int]]], temperature: float) -> Answers:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": self.top_p, "top_k": 0}
        config = GenerationConfig(
            max_new_tokens=self.most,
            eos_token_id=self.target.eos_token_ids,
            pad_token_id=self.pad,
            **(sampling if temperature else {"do_sample": False}),
        )
        batching = ContinuousBatchingConfig(max_requests_per_batch=self.args.slots, seed=1)
        out = self.model.generate_batch(
            [ids for _, ids in rows], generation_config=config, continuous_batching_config=batching
        )
        answers = [list(found.generated_tokens) for found in out.values()]
        if len(answers) < len(rows):
            raise RuntimeError(f"{len(answers)} of {len(rows)} answers came")
        return answers

    def engine(self, rows: list[tuple[str, list[int]]], temperature: float) -> Answers:
        engine = PooledEngine(self.model, self.target.eos_token_ids, self.top_p, self.target.logits_scale)
        asked = [
            DecodeRequest(
                ids,
                self.most,
                sampling=SamplingParams(temperature, self.top_p, None, sampled_split.make_seed(11, name))
                if temperature
                else None,
            )
            for name, ids in rows
        ]
        found = dict(engine.answer(asked, self.args.slots))
        kind = "its own kernels" if engine.target.fused_decoder else "transformers' modules"
        print(f"    {engine.num_slots} slots, {kind}", flush=True)
        return [found[number] for number in range(len(rows))]

    def time(self, answer: Callable[..., Answers], rows: list[tuple[str, list[int]]], temperature: float) -> Answers:
        """Answer the rows and print how fast."""
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        answers = answer(rows, temperature)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, tokens = time.perf_counter() - started, sum(map(len, answers))
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.model.device.type == "cuda" else 0
        print(
            f"{answer.__name__:10} T={temperature:g}: {len(rows)} rows, {tokens} tokens, {seconds:.1f} s, "
            f"{tokens / seconds:.0f} tokens/s, peak {peak:.1f} GiB",
            flush=True,
        )
        return answers


def share_equal(found: Answers, expected: Answers) -> str:
    return f"{sum(map(list.__eq__, found, expected)) / len(expected):.1%} of {len(expected)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("project")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--backends", nargs="+", default=["generate", "continuous", "engine"])
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--profile", action="store_true", help="the slowest kernels of the engine's passes")
    args = parser.parse_args()
    with chdir(args.project):
        bench = Bench(args)
        lengths = [len(ids) for _, ids in bench.rows]
        print(
            f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, {bench.model.dtype}, {bench.model.device}"
        )
        expected: Answers = []
        for name in args.backends:
            try:
                answer = getattr(bench, name)
                bench.time(answer, bench.rows[: max(2, len(lengths) // 16)], bench.temperature)  # kernels are compiled
                greedy = bench.time(answer, bench.rows, 0.0)
                expected = expected or greedy
                print(f"    greedy answers as the first backend's: {share_equal(greedy, expected)}", flush=True)
                drawn = bench.time(answer, bench.rows, bench.temperature)
                half = answer(bench.rows[: len(lengths) // 2], bench.temperature)
                print(
                    f"    drawn answers as among other neighbours: {share_equal(half, drawn[: len(half)])}", flush=True
                )
                if args.profile and name == "engine":
                    profile_engine(bench)
            except Exception:
                traceback.print_exc()


def profile_engine(bench: Bench) -> None:
    """Print where a pool of short answers spends its time, on the GPU and in Python."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if bench.model.device.type == "cuda" else []
    most, bench.most = bench.most, 32
    with torch.profiler.profile(activities=kinds) as profile:
        bench.engine(bench.rows[: bench.args.slots], bench.temperature)
    bench.most = most
    order = "self_cuda_time_total" if len(kinds) > 1 else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
