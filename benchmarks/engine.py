"""The torch engine's speed at a real size, on one GPU.   python -m benchmarks.engine [--parts right speed ...]

    right    a small target with a draft that is often accepted: speculative = plain = transformers' greedy search, token for
             token in float32, and the share of identical answers in bfloat16
    drawn    the same at temperature 0.7, with and without top-p and top-k, alternating in one engine: speculative = plain =
             tokens drawn from transformers' forward by the same numbers, in float32; then with transformers' own modules,
             and with a large vocabulary
    speed    Qwen3-8B's shape, random weights, bfloat16, one prompt of 512 tokens: a plain step and cycles of three trees,
             greedy, and one tree at temperature 0.7, as a caller measures them and on the device alone; host time, memory
    kernels  the slowest kernels of a plain step and of each cycle
    products the matrix products of that target alone: weight bytes a second at the rows of each tree

The lower bound: a plain step reads 15.63 GB of weights (without the embedding), 3.56 ms at the 4.39 TB/s that an H200
reads in our measurement; a draft's forward 0.72 GB, 0.164 ms, num_steps of them a cycle. A random draft is never accepted,
which does not change a cycle's time. Results are printed as they come; after a failed part the next one runs; parts that
would start after --seconds are skipped and listed.
"""

import argparse
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.engine.cuda_graphs import AsyncReadback, time_graph_replay
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeStep
from stages.engine.sampling import SamplingParams, TokenSampler, compute_probabilities, draw_tokens, draw_uniforms
from stages.families.eagle3.decoding import Eagle3Drafter
from stages.params.tree_shape import TreeShape
from tests.built_engines import build_engine

TREES = [(5, 4, 16), (8, 2, 31), (8, 10, 60)]
GOALS = {None: 4.75, (5, 4, 16): 6.2, (8, 2, 31): 7.0, (8, 10, 60): 8.0}  # ms, issue 7
PROMPT, CYCLES = 512, 250
SMALL, ROOM, END = 16, 48, 7  # the small target's vocabulary, its answers' length and end token
SMALL_TREES = [(1, 1, 2), (5, 1, 6), (5, 4, 16), (8, 2, 31), (8, 10, 60)]
HOT = [(0.7, 1.0, None), (0.7, 0.9, None), (0.7, 0.95, 5)]  # temperature, top-p, top-k

Tree = tuple[int, int, int]


def run_parts(description: str | None, parts: Mapping[str, Callable[[argparse.Namespace], None]]) -> None:
    """Run the parts that the command line asks for, one after the other; after a failed one the next."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=170, help="no part starts later")
    args = parser.parse_args()
    warnings.showwarning = lambda message, *_more, **_named: say(f"warning: {message}")
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else args.device}")
    started = time.perf_counter()
    for name in args.parts:
        begun = time.perf_counter()
        if begun - started > args.seconds:
            say(f"-- {name}: left out, {begun - started:.0f} s have passed (--seconds)")
            continue
        say(f"== {name}")
        with go_on_after_failure():
            parts[name](args)
        say(f"-- {name}: {time.perf_counter() - begun:.1f} s")


@contextmanager
def go_on_after_failure() -> Iterator[None]:
    """Print what the block raises, so that what stands after it runs too."""
    try:
        yield
    except Exception:
        traceback.print_exc()


def say(*words: object) -> None:
    print(*words, flush=True)


# What is measured


def target(layers: int, hidden: int, heads: int, vocab: int, dtype: torch.dtype, device: str):
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), head_dim=hidden // heads, vocab_size=vocab,
        max_position_embeddings=40960, initializer_range=0.02 if hidden > 1000 else 0.1,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    return model.requires_grad_(False)


def draft_for(model, draft_vocab: int) -> Eagle3Draft:
    """A random draft of the target's shape, as EAGLE-3 has it."""
    c = model.config
    with torch.device(model.device):
        draft = Eagle3Draft(
            DraftConfig(
                c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
                c.vocab_size, draft_vocab, 40960, 1e-6, {"rope_theta": 1e6, "rope_type": "default"},
            )
        ).to(model.dtype)  # fmt: skip
        for weight in draft.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.02 if c.hidden_size > 1000 else 0.2)
    draft.t2d[:draft_vocab] = True
    return draft.requires_grad_(False)


def collect_tokens(steps: Iterator[DecodeStep]) -> list[int]:
    return [token for step in steps for token in step.tokens]


# right


def prompts() -> list[list[int]]:
    found = []
    for seed in range(6):
        draws = torch.Generator().manual_seed(seed)
        found.append(torch.randint(0, SMALL, (20 + 40 * seed,), generator=draws).tolist())
    return found


def small(args: argparse.Namespace, dtype: torch.dtype, vocab: int = SMALL) -> Engine:
    torch.manual_seed(3)
    model = target(6, 256, 8, vocab, dtype, args.device)
    return build_engine(model, [END], [2, 3, 4], draft_for(model, vocab))


def right(args: argparse.Namespace) -> None:
    asked = prompts()
    for dtype in (torch.float32, torch.bfloat16):
        engine = small(args, dtype)
        plain = [collect_tokens(engine.decode_plain(prompt, ROOM)) for prompt in asked]
        same = sum(answer == theirs(engine.model, p) for p, answer in zip(asked[:3], plain, strict=False))
        say(f"{str(dtype)[6:]}: {same} of 3 plain answers as transformers' own")
        for tree in SMALL_TREES:
            compare(tree, [list(engine.decode_speculative(prompt, ROOM, TreeShape(*tree))) for prompt in asked], plain)


def compare(name: object, runs: list[list[DecodeStep]], plain: list[list[int]]) -> None:
    same = sum(collect_tokens(iter(steps)) == answer for steps, answer in zip(runs, plain, strict=True))
    cycles = [step for steps in runs for step in steps[1:]]
    drafts = sum(step.num_accepted for step in cycles)
    ends = f"{drafts} drafts accepted in {len(cycles)} cycles, {sum(map(len, plain))} tokens"
    say(f"  {'ok   ' if same == len(plain) else 'OTHER'} {name}: {same} of {len(plain)} as plain, {ends}")


def theirs(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ROOM,
        do_sample=False,
        eos_token_id=[END],
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


# drawn


def drawn(args: argparse.Namespace) -> None:
    asked = prompts()
    engine = small(args, torch.float32)
    hows = [[SamplingParams(*how, 10 * n + i) for i in range(len(asked))] for n, how in enumerate(HOT)]
    plain = []
    for how in hows:
        plain.append(
            [collect_tokens(engine.decode_plain(p, ROOM, sampling=h)) for p, h in zip(asked, how, strict=True)]
        )
        same = sum(a == by_hand(engine.model, p, h) for p, h, a in zip(asked[:3], how, plain[-1], strict=False))
        say(f"{how[0][:3]}: {same} of 3 plain answers as the numbers say")
    for tree in SMALL_TREES:
        for how, answers in zip(hows, plain, strict=True):
            runs = [
                list(engine.decode_speculative(p, ROOM, TreeShape(*tree), sampling=h))
                for p, h in zip(asked, how, strict=True)
            ]
            compare((tree, how[0][:3]), runs, answers)
        runs = [list(engine.decode_speculative(prompt, ROOM, TreeShape(*tree))) for prompt in asked[:2]]
        compare(
            (tree, "greedy, in between"),
            runs,
            [collect_tokens(engine.decode_plain(prompt, ROOM)) for prompt in asked[:2]],
        )
    for vocab in (SMALL, 5008):
        engine = small(args, torch.float32, vocab)
        assert isinstance(engine.drafter, Eagle3Drafter)
        engine.target.fused_decoder = engine.drafter.fused_draft = None
        for one in (None, SamplingParams(0.7, 0.95, 50, 1)):
            runs = [
                list(engine.decode_speculative(prompt, ROOM, TreeShape(5, 4, 16), sampling=one)) for prompt in asked[:3]
            ]
            answers = [collect_tokens(engine.decode_plain(prompt, ROOM, sampling=one)) for prompt in asked[:3]]
            compare(f"by transformers' own modules, {vocab} tokens, {'drawn' if one else 'greedy'}", runs, answers)


@torch.inference_mode()
def by_hand(model, prompt: list[int], how: SamplingParams) -> list[int]:
    """Decode without a cache: a forward over the whole text for each token."""
    ids = list(prompt)
    for number in draw_uniforms(how.seed, ROOM).to(model.device):
        logits = model(torch.tensor([ids], device=model.device)).logits[:, -1]
        ids.append(int(draw_tokens(compute_probabilities(logits, *how[:3]), number[None])))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]


# speed


def big(args: argparse.Namespace) -> Engine:
    """Built once: it takes a while."""
    if "engine" not in BUILT:
        torch.manual_seed(0)
        model = target(args.layers, args.hidden, args.hidden // 128, 151936, torch.bfloat16, args.device)
        BUILT["engine"] = build_engine(model, [-1], [2, args.layers // 2, args.layers - 3], draft_for(model, 32000))
    return BUILT["engine"]


BUILT: dict[str, Engine] = {}


def draw_prompt(vocab_size: int) -> list[int]:
    return torch.randint(0, vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()


def decoding(
    engine: Engine, tree: Tree | None, tokens: int = CYCLES, how: SamplingParams | None = None
) -> Iterator[DecodeStep]:
    prompt = draw_prompt(engine.model.config.vocab_size)
    if tree is None:
        return engine.decode_plain(prompt, tokens, sampling=how)
    return engine.decode_speculative(prompt, tokens, TreeShape(*tree), sampling=how)


def speed(args: argparse.Namespace) -> None:
    engine = big(args)
    assert isinstance(engine.drafter, Eagle3Drafter)
    say(
        f"in few kernels: target {engine.target.fused_decoder is not None}, draft {engine.drafter.fused_draft is not None}"
    )
    hot = SamplingParams(0.7, 0.95, 50, 1)
    time_steps(engine, [*((tree, None) for tree in [None, *TREES]), (None, hot), (TREES[0], hot)])


def time_steps(engine: Engine, decodings: list[tuple[Tree | None, SamplingParams | None]]) -> None:
    """Print milliseconds a step as seen by a caller and on the device alone, host time and memory, of each tree."""
    assert engine.drafter is not None and engine.drafter.module is not None
    weights = sum(p.nbytes for model in (engine.model, engine.drafter.module) for p in model.parameters())
    cuda = engine.device.type == "cuda"
    widest = max((tree for tree, _ in decodings if tree), key=lambda tree: tree[2])
    list(decoding(engine, widest, CYCLES))  # allocates the slot that all use
    for tree, how in decodings:
        begun = time.perf_counter()
        list(decoding(engine, tree, 8, how))
        ready = time.perf_counter() - begun
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with waiting() as waits:
            times, before, steps = [], time.perf_counter(), 0
            for _ in decoding(engine, tree, how=how):
                now = time.perf_counter()
                times.append(now - before)
                before, steps = now, steps + 1
        times = times[1:]  # the first is prefill
        host = [t - w for t, w in zip(times, waits, strict=False)]
        drawn = f", drawn{' drafts too' if how.samples_drafts else ''}" if how else ""
        line = f"{tree or 'plain'}{drawn}: {1e3 * statistics.median(times):.3f} ms a step as seen"
        line += f" (goal {GOALS[tree]})" if not how and tree in GOALS else ""
        line += f", host {1e3 * statistics.median(host):.3f} ms, {steps} steps, first time {ready:.1f} s"
        if cuda:
            alone = on_device(engine, tree, how)
            peak = torch.cuda.max_memory_allocated()
            kept = sum(
                slot.target_cache.nbytes + slot.draft_keys.nbytes + slot.draft_values.nbytes
                for slot in engine.slots.idle
            )
            line += f", device alone {alone:.3f} ms; memory: peak {peak / 1e9:.3f} GB, weights {weights / 1e9:.3f}, "
            line += f"KV {kept / 1e9:.3f}, rest {100 * (peak / (weights + kept) - 1):.1f}%"
        say(line)


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Inside the block, how long each fetch waited for the device."""
    waits: list[float] = []
    start = AsyncReadback.start

    def timed(readback: AsyncReadback, values: torch.Tensor) -> Callable[[], list[int]]:
        fetch = start(readback, values)

        def wait() -> list[int]:
            before = time.perf_counter()
            found = fetch()
            waits.append(time.perf_counter() - before)
            return found

        return wait

    AsyncReadback.start = timed  # type: ignore[method-assign, assignment]
    try:
        yield waits
    finally:
        AsyncReadback.start = start  # type: ignore[method-assign]


@torch.inference_mode()
def on_device(engine: Engine, tree: Tree | None, how: SamplingParams | None) -> float:
    """Milliseconds of a recorded step, by events around 100 of them, the median of five."""
    for _ in decoding(engine, tree, 8, how):
        pass
    slot, found = engine.slots.idle[-1], []
    method = engine.get_tree_method(TreeShape(*tree), how) if tree else None
    play = slot.graphs.graphs[method, TokenSampler(how, slot.uniforms.flatten()).graph_key, slot.exceeds_window]
    state = slot.states[1 if tree is None else tree[0] + 1]
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = [tensor.clone() for tensor in state]
        start.record()
        for _ in range(20):
            play()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 20)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
    return statistics.median(found)


# kernels


def kernels(args: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    engine, count = big(args), 10
    for tree in [None, *TREES]:
        steps = decoding(engine, tree)
        for _ in range(4):
            next(steps)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            for _ in range(count):
                next(steps)
            torch.cuda.synchronize()
        table = found.key_averages()
        on_gpu = [e for e in table if e.self_device_time_total > 0 and not e.key.startswith("cuda")]
        waits = {e.key: e.count for e in table if "ynchronize" in e.key}
        copies = {e.key: e.count for e in table if e.key.startswith("Memcpy")}
        total = sum(e.self_device_time_total for e in on_gpu) / count
        launched = sum(e.count for e in on_gpu) / count
        say(
            f"{tree or 'plain'}: {launched:.0f} kernels a step, {total / 1e3:.3f} ms busy; of {count} steps {waits} {copies}"
        )
        for event in sorted(on_gpu, key=lambda e: -e.self_device_time_total)[:18]:
            us = event.self_device_time_total
            each = f"{us / count / 1e3:7.3f} ms {event.count / count:6.1f} x {us / event.count:7.2f} us"
            say(f"  {each}  {event.key[:110]}")


# products


def products(args: argparse.Namespace) -> None:
    from stages.engine import kernels_triton, matmul_triton

    h = args.hidden
    shapes = {
        "qkv": (h + h // 2, h), "o": (h, h), "gate_up": (6 * h, h), "down": (h, 3 * h), "head": (151936, h),
        "draft qkv": (h + h // 2, 2 * h), "draft head": (32000, h),
    }  # fmt: skip
    for name, (n, k) in shapes.items():
        copies = max(1, min(24, int(4e8 / (2 * n * k))))
        weights = [torch.randn(n, k, dtype=torch.bfloat16, device=args.device) for _ in range(copies)]
        for rows in (1, 16, 31, 60):
            x, gated = torch.randn(rows, k, dtype=torch.bfloat16, device=args.device), name == "gate_up"
            library = (lambda x, w: kernels_triton.silu_and_mul(F.linear(x, w))) if gated else F.linear
            found = {"library": time_graph_replay(lambda: [library(x, w) for w in weights], x.device)}  # noqa: B023 - called at once
            for t in matmul_triton.MATMUL_TILINGS:
                try:
                    alone = partial(
                        matmul_triton.stream_matmul, x, gated=gated, tile=t[0], depth=t[1], warps=t[2], stages=t[3]
                    )
                    found[str(t)] = time_graph_replay(partial(list, map(alone, weights)), x.device)
                except Exception as error:
                    say(f"  {t}: {type(error).__name__} {str(error)[:80]}")
            ranked = sorted((ms * 1e3 / copies, which) for which, ms in found.items())
            line = "; ".join(f"{which} {us:.1f} us {2 * n * k / us / 1e6:.2f} TB/s" for us, which in ranked)
            taken = (
                matmul_triton.pick_tiling(x, weights[0], gated, kernels_triton._run_cublas, kernels_triton.add_rms_norm)
                or "library"
            )
            say(f"{name:10} {n:6} x {k:5} {rows:2} rows, the engine takes {taken}: {line}")


PARTS = {"right": right, "drawn": drawn, "speed": speed, "kernels": kernels, "products": products}

if __name__ == "__main__":
    run_parts(__doc__, PARTS)
