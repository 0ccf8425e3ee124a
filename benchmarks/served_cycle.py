"""A cycle of SGLang beside a cycle of the torch engine: the same target and drafts of random weights, one GPU, one hour.

    python3 -m benchmarks.served_cycle FOLDER [--shape 8b] [--drafts plain eagle3 dflash dspark] [--parts sglang torch]
    python3 -m benchmarks.served_cycle FOLDER --small   # on a CPU, in a project of big_graph --small: the double reads its target

FOLDER gets the target (benchmarks/random_target.py) and the drafts, as aerie exports them: EAGLE-3 with tree t5_4_16, DFlash with
blocks of 16 and DSpark with blocks of 7, five layers each. One prompt of 512 tokens, greedy. A cycle's time is that of the cycles
between answers of SHORT and of LONG tokens, so that prefill, HTTP and the first cycle cancel out; random drafts are accepted
seldom, which changes no cycle. SGLang on machines without a package registry: a kit in /tmp/kit (shared/gpu).

The lower bound, at 8B shape on an H200 (4.39 TB/s): a plain step reads 15.63 GB, 3.56 ms; EAGLE-3's five forwards 3.6 GB more,
0.82 ms; a block draft's forward 2.1 GB and the head's 1.24 GB once more, 0.76 ms.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import engine, engine_kit, random_target
from benchmarks.engine import say, time_steps
from benchmarks.engine_blocks import draw_draft
from benchmarks.training_blocks import FEATURE_LAYERS
from stages.draft import block_checkpoint, eagle3_checkpoint
from stages.draft.block_draft import BlockDraft
from stages.draft.eagle3 import Eagle3Draft
from stages.engine.decode import Engine
from stages.params.tree_shape import TreeShape
from stages.runtime import free_port
from stages.serving import engine_flags, server
from stages.serving.engine_flags import ServedDraft, ServerSetup
from stages.target import feature_layers, loading

SHORT, LONG, REPEATS = 16, 272, 5
EAGLE3_TREE = TreeShape(5, 4, 16)
NAMES = ("plain", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class DraftOnDisk:
    """A draft in `folder`/draft, the tree that engines verify with it, and the target's layers that it reads."""

    folder: Path
    draft: Eagle3Draft | BlockDraft
    config: dict[str, Any]  # config.json
    tree: TreeShape
    layers: list[int]


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("folder", type=Path)
    takes.add_argument("--shape", default="8b", choices=random_target.SHAPES)
    takes.add_argument("--drafts", nargs="+", default=NAMES, choices=NAMES)
    takes.add_argument("--parts", nargs="+", default=["sglang", "torch"], choices=["sglang", "torch"])
    takes.add_argument("--small", action="store_true")
    o = takes.parse_args()
    if o.small:
        o.shape = "tiny"
    device = "cpu" if o.small else "cuda"
    dtype = torch.float32 if o.small else torch.bfloat16
    target = o.folder.absolute() / "target"
    if not target.exists():
        begun = time.perf_counter()
        half = target.with_suffix(".half")
        random_target.write_target(half, o.shape, 0, device, dtype)
        half.rename(target)
        say(f"target of shape {o.shape} written in {time.perf_counter() - begun:.0f} s")
    model = loading.load_target(str(target), str(dtype)[6:], device)
    drafts = {name: write_draft(target.parent / name, name, model) for name in o.drafts if name != "plain"}
    if "torch" in o.parts:
        run_torch(model, drafts)
    vocab_size = model.config.vocab_size
    del model
    if device == "cuda":
        for each in drafts.values():
            each.draft.cpu()
        torch.cuda.empty_cache()
    if "sglang" in o.parts:
        for name in o.drafts:
            with engine.go_on_after_failure():
                run_sglang(target, name, drafts.get(name), engine.draw_prompt(vocab_size), o.small)


def write_draft(folder: Path, name: str, model) -> DraftOnDisk:
    """Draw a draft and write it as aerie exports it."""
    torch.manual_seed(5)
    blocks, dtype = model.config.num_hidden_layers, str(model.dtype)[6:]
    if name == "eagle3":
        layers = feature_layers.default_eagle3_feature_layers(blocks)
        eagle3 = engine.draft_for(model, min(32000, model.config.vocab_size))
        config = eagle3_checkpoint.build_eagle3_config(
            eagle3.config, layers, blocks, [model.config.eos_token_id], dtype
        )
        eagle3_checkpoint.write_eagle3_draft(folder, config, eagle3.state_dict())
        return DraftOnDisk(folder, eagle3, config, EAGLE3_TREE, layers)
    layers = [layer for layer in FEATURE_LAYERS if layer < blocks - 1]
    draft = draw_draft(model, name, 5, layers, 0.02)
    config = block_checkpoint.build_block_config(draft.config, blocks, dtype)
    block_checkpoint.write_block_draft(folder, config, draft.state_dict())
    drafts = draft.config.num_drafts
    return DraftOnDisk(folder, draft, config, TreeShape(drafts, 1, drafts + 1), layers)


def run_torch(model, drafts: dict[str, DraftOnDisk]) -> None:
    """Print the steps of plain decoding and of each draft's tree."""
    for name, each in drafts.items():
        say(f"torch engine, {name}")
        tree = (each.tree.num_steps, each.tree.topk, each.tree.num_draft_tokens)
        plain = [(None, None)] if each is next(iter(drafts.values())) else []
        with engine.go_on_after_failure():
            time_steps(Engine(model, [-1], each.layers, each.draft), [*plain, (tree, None)])


def run_sglang(target: Path, name: str, drafted: DraftOnDisk | None, prompt: list[int], small: bool) -> None:
    """Serve the target with a draft, or without one, and print the milliseconds of a cycle."""
    setup = ServerSetup(
        engine="sglang", folder=str(target), dtype="float32" if small else "bfloat16", device="cpu" if small else "cuda",
        trust_remote_code=False, tp=1, mem_fraction=0.6, max_total_tokens=20_000, max_batch=1, context_length=None,
        torch_compile=False, more=() if small else tuple(engine_kit.KIT_FLAGS["sglang"]),
    )  # fmt: skip
    port = free_port.find_free_port()
    line = engine_flags.build_setup_command(setup, port, engine_kit.build_sglang_command("" if small else "/tmp/kit"))
    if drafted:
        algorithm = engine_flags.choose_algorithm(drafted.config, "EAGLE3")
        tree = drafted.tree
        served = ServedDraft(str(drafted.folder / "draft"), algorithm, tree.num_steps, tree.topk, tree.num_draft_tokens)
        line += engine_flags.build_speculation_flags("sglang", served, drafted.config)
    log = target.parent / f"{name}.log"
    with server.ServerProcess("sglang", line, port, log, 600) as running, httpx.Client(timeout=600) as http:
        ask(http, running.base_url, prompt, LONG)  # compiles
        times = []
        for _ in range(REPEATS):
            short_s, short_cycles = ask(http, running.base_url, prompt, SHORT)
            long_s, cycles = ask(http, running.base_url, prompt, LONG)
            times.append(1e3 * (long_s - short_s) / (cycles - short_cycles))
        tau = (LONG - 1) / cycles
        of = f"{statistics.median(times):.3f} ms a cycle ({min(times):.3f} to {max(times):.3f}), tau {tau:.2f}"
        say(f"sglang, {name} {drafted.tree.name if drafted else ''}: {of}")


def ask(http: httpx.Client, url: str, prompt: list[int], tokens: int) -> tuple[float, int]:
    """Return the seconds of an answer of `tokens` tokens and its cycles; plain decoding has one a token."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    asked = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    begun, last = time.perf_counter(), ""
    with http.stream("POST", f"{url}/generate", json=asked) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            last = line if line.startswith("data: {") else last
    told = json.loads(last.removeprefix("data: "))["meta_info"]
    return time.perf_counter() - begun, told.get("spec_verify_ct") or told["completion_tokens"] - 1


if __name__ == "__main__":
    main()
