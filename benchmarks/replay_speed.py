"""Replay's speed and exactness without a target.   python3 -m benchmarks.replay_speed [--device cuda --dtype bfloat16 ...]

A random draft as wide as a small target (512; --small: the embedded one's shape and grid), 100 answers of about 130 tokens
after prompts of about 100, which follow the draft's own greedy chains for as long as a die says, so that walks are as long
as real ones. For a machine that has torch but not our installation. Prints what a part costs, and last:

    floor     what the distinct nodes alone would take at the card's peaks (FLOP of the layer and the head, bytes of the logits)
    cost      one topk with 10 structures and with as many as there are: the difference is what structures cost
    checked   accepted drafts and cycles of sampled structures against trees built one place at a time, by the engine's functions
"""

import argparse
import random
import resource
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.draft.eagle3 import Eagle3Draft, build_prefix_mask, compute_first_state, encode_prefix
from stages.draft.eagle3_config import DraftConfig
from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayOutput, compute_capacity, replay_answers
from stages.replay.replay_batch import ReplayBatch
from stages.results import interval
from stages.trees import acceptance, draft_tree
from stages.trees.expansion import expand_candidates

PEAK = {"float32": 67e12, "bfloat16": 989e12}  # FLOP/s of an H200 (its data sheet; float32 without TF32)
BYTES = 4.8e12  # a second


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    takes.add_argument("--device", default="cpu")
    takes.add_argument("--dtype", default="float32", choices=list(PEAK))
    takes.add_argument("--small", action="store_true", help="128 wide, 640 tokens; 40 answers; the default grid")
    takes.add_argument("--answers", type=int)
    takes.add_argument("--memory-gib", type=float, default=2.0)
    takes.add_argument("--steps", type=int, default=None, help="1 to so many")
    takes.add_argument("--topk", type=int, default=None, help="1 to so many")
    takes.add_argument("--checked", type=int, default=12, help="structures that are compared, on two answers each")
    takes.add_argument("--tree-scoring", default="sglang", choices=list(draft_tree.TREE_SCORINGS))
    o = takes.parse_args()
    width, vocab, steps, topk, answers = (128, 640, 10, 4, 40) if o.small else (512, 4096, 16, 10, 100)
    steps, topk, answers = o.steps or steps, o.topk or topk, o.answers or answers
    tokens = [4, 6, 8, 12, 16, 20, 24, 32, 48] if o.small else list(range(2, 65))
    draft, embedding = random_draft(width, vocab)
    draft, embedding = draft.to(o.device, getattr(torch, o.dtype)), embedding.to(o.device, getattr(torch, o.dtype))
    rows = make_answers(draft, embedding, answers)
    trees = grid(steps, range(1, topk + 1), tokens)
    memory = int(o.memory_gib * 2**30)

    def run(trees: Sequence[TreeShape]) -> ReplayOutput:
        return replay_answers(
            draft,
            embedding,
            rows,
            trees,
            tree_scoring=o.tree_scoring,
            positions_per_batch=compute_capacity(draft, trees, memory).positions,
        )

    places = int((rows.ends - rows.starts - 1).sum())
    name = torch.cuda.get_device_name() if o.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{name}, torch {torch.__version__}, {o.dtype}, {o.tree_scoring}: {width} wide, {vocab // 2} of {vocab} tokens, ",
        end="",
    )
    print(f"{answers} answers, {places} places, {len(trees)} structures, steps 1 to {steps}", flush=True)
    run(grid(2, [1, 2], [3, 4]))  # warms up
    header = ("topk", "structures", "seconds", "a minute", "nodes", "peak GiB", "tau from", "to")
    print("".join(f"{word:>12}" for word in header))
    for k in range(1, topk + 1):
        line(str(k), draft, run, [t for t in trees if t.topk == k])
    seconds, nodes, found = line("all", draft, run, trees)
    started = time.perf_counter()
    interval.compute_tau_intervals(
        found.accepted.cpu().numpy(), found.cycles.cpu().numpy(), [t.num_steps for t in trees]
    )
    print(f"intervals of all: {time.perf_counter() - started:.2f} s")

    if o.device == "cuda":
        print_floor(draft, nodes, float(rows.ends.float().mean()), o.dtype, seconds)
    print_cost_of_structures(draft, run, [t for t in trees if t.topk == min(4, topk)])
    check(draft, embedding, rows, trees, found, o.checked, o.tree_scoring)


def print_floor(draft: Eagle3Draft, nodes: int, tokens: float, dtype: str, seconds: float) -> None:
    """Print what the distinct nodes alone would take at the card's peaks, and how many times that `seconds` are."""
    flop, moved = floor(draft, nodes, tokens)
    limit = max(flop / PEAK[dtype], moved / BYTES)
    print(
        f"floor: {flop / 1e12:.1f} TFLOP, {moved / 1e9:.0f} GB: {limit:.2f} s; all took {seconds / limit:.1f} times that"
    )


def print_cost_of_structures(
    draft: Eagle3Draft, run: Callable[[Sequence[TreeShape]], ReplayOutput], trees: Sequence[TreeShape]
) -> None:
    """Print the seconds of ten of the deepest trees of one topk, and of all of them."""
    deepest = [t for t in trees if t.num_steps == max(tree.num_steps for tree in trees)]
    few = deepest[:: max(1, len(deepest) // 10)][:10]
    times = [min(timed(draft, run, some)[0] for _ in range(2)) for some in (few, trees)]
    print(
        f"cost of topk {trees[0].topk}: {len(few)} structures {times[0]:.2f} s, {len(trees)} structures {times[1]:.2f} s"
    )


def grid(steps: int, topks: Sequence[int], tokens: Sequence[int]) -> list[TreeShape]:
    """As ReplayTrees.list_trees: those that the candidates suffice for."""
    return [
        TreeShape(s, k, m)
        for k in topks
        for s in range(1, steps + 1)
        for m in ([s + 1] if k == 1 else tokens)
        if m - 1 <= k + (s - 1) * k * k
    ]


def random_draft(width: int, vocab: int) -> tuple[Eagle3Draft, Tensor]:
    """Heads and widths as the embedded target's; logits of a spread of 3, as a trained draft's about."""
    config = DraftConfig(
        hidden_size=width, intermediate_size=2 * width, num_attention_heads=width // 32, num_key_value_heads=width // 64,
        head_dim=32, vocab_size=vocab, draft_vocab_size=vocab // 2, max_position_embeddings=1024, rms_norm_eps=1e-6,
        rope={"rope_theta": 10000.0, "rope_type": "default"},
    )  # fmt: skip
    generator, draft = torch.Generator().manual_seed(1), Eagle3Draft(config)
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
    draft.lm_head.weight.data *= 3
    chosen = torch.randperm(vocab, generator=generator)[: vocab // 2].sort().values
    draft.d2t.copy_(chosen - torch.arange(len(chosen)))
    return draft.requires_grad_(False), torch.randn(vocab, width, generator=generator)


@torch.inference_mode()
def make_answers(draft: Eagle3Draft, embedding: Tensor, count: int) -> ReplayBatch:
    """Return answers: the draft's greedy chain, broken off, a random token, and again."""
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    c, device = draft.config, embedding.device
    prompts, wanted = [rng.randint(80, 120) for _ in range(count)], [rng.randint(90, 170) for _ in range(count)]
    lists = [[rng.randrange(c.vocab_size) for _ in range(n + 1)] for n in prompts]
    most = max(map(sum, zip(prompts, wanted, strict=True)))
    features = torch.randn(count, most + 17, 3 * c.hidden_size, generator=generator).to(device, embedding.dtype)
    while any(len(ids) < p + n for ids, p, n in zip(lists, prompts, wanted, strict=True)):
        ids = pad_sequence([torch.tensor(x) for x in lists], batch_first=True).to(device)
        fused, keys, values = encode_prefix(draft, ids, features[:, : ids.shape[1]], embedding)
        last = torch.tensor([len(x) - 2 for x in lists], device=device)[:, None]
        allowed, row = build_prefix_mask(last, ids.shape[1], None), torch.arange(count, device=device)[:, None]
        bonus = embedding[ids[row, last + 1]]
        state = compute_first_state(draft, bonus, fused[row, last], last, keys, values, allowed)
        chains = expand_candidates(draft, embedding, state, last, keys, values, allowed, 16, 1).tokens.tolist()
        for ids_of_row, chain, p, n in zip(lists, chains, prompts, wanted, strict=True):
            if len(ids_of_row) < p + n:
                ids_of_row += [*chain[: min(16, int(rng.expovariate(1 / 4)))], rng.randrange(c.vocab_size)]
    cut = [ids[: p + n] for ids, p, n in zip(lists, prompts, wanted, strict=True)]
    ids = pad_sequence([torch.tensor(x) for x in cut], batch_first=True).to(device)
    starts, ends = torch.tensor(prompts), torch.tensor([len(x) for x in cut])
    return ReplayBatch(ids, features[:, : ids.shape[1]], starts.to(device), ends.to(device))


def timed(
    draft: Eagle3Draft, run: Callable[[Sequence[TreeShape]], ReplayOutput], trees: Sequence[TreeShape]
) -> tuple[float, int, ReplayOutput]:
    """Seconds, nodes that went through the draft's layer, and what was found."""
    nodes = [0]
    counting = draft.midlayer.mlp.register_forward_hook(lambda _m, given, _o: nodes.append(given[0].shape[:-1].numel()))
    cuda = next(draft.parameters()).is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    found = run(trees)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    counting.remove()
    return seconds, sum(nodes), found


def line(
    name: str, draft: Eagle3Draft, run: Callable[[Sequence[TreeShape]], ReplayOutput], trees: Sequence[TreeShape]
) -> tuple[float, int, ReplayOutput]:
    seconds, nodes, found = timed(draft, run, trees)
    cuda = next(draft.parameters()).is_cuda
    used = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tau = (found.accepted.sum(0) / found.cycles.sum(0) + 1).tolist()
    figures = [f"{seconds:.2f}", f"{len(trees) / seconds * 60:,.0f}", f"{nodes:,}", f"{used / 2**30:.2f}"]
    figures += [f"{min(tau):.3f}", f"{max(tau):.3f}"]
    print("".join(f"{word:>12}" for word in [name, len(trees), *figures]), flush=True)
    return seconds, nodes, found


def floor(draft: Eagle3Draft, nodes: int, tokens: float) -> tuple[float, float]:
    """FLOP of the nodes' products, and bytes of their logits, written and read three times: softmax, its sum, the best."""
    c = draft.config
    weights = sum(p.numel() for name, p in draft.named_parameters() if p.ndim == 2 and name != "fc.weight")
    attention = 2 * c.num_attention_heads * c.head_dim * tokens
    return 2 * nodes * (weights + attention), nodes * c.draft_vocab_size * 4 * 4


@torch.inference_mode()
def check(
    draft, embedding, rows: ReplayBatch, trees: Sequence[TreeShape], found: ReplayOutput, count: int, tree_scoring: str
) -> None:
    """Prints how many of the sampled structures have the integers that decoding step by step gives."""
    rng, right, drafts = random.Random(3), 0, 0
    chosen = sorted(rng.sample(range(len(trees)), min(count, len(trees))))
    cases = [(g, b) for g in chosen for b in rng.sample(range(len(rows.ids)), 2)]
    for g, b in cases:
        row = ReplayBatch(*(x[b : b + 1] for x in (rows.ids, rows.features, rows.starts, rows.ends)))
        slow = step_by_step(draft, embedding, row, trees[g], tree_scoring)
        fast = int(found.accepted[b, g]), int(found.cycles[b, g])
        right, drafts = right + (slow == fast), drafts + fast[0]
        if slow != fast:
            print(f"  {trees[g].name} of answer {b}: accepted and cycles {fast}, one place at a time {slow}")
    print(
        f"checked: {right} of {len(cases)} equal one place at a time as integers, {drafts} accepted drafts among them"
    )


def step_by_step(
    draft: Eagle3Draft, embedding: Tensor, row: ReplayBatch, shape: TreeShape, tree_scoring: str
) -> tuple[int, int]:
    """Accepted drafts and cycles of one answer, each tree built where decoding stands, alone."""
    steps, topk, tokens = shape.num_steps, shape.topk, shape.num_draft_tokens
    ids, features, (start,), (end,) = row.ids, row.features, row.starts.tolist(), row.ends.tolist()
    said, accepted, cycles, bonus = ids[0].tolist(), 0, 0, start
    while bonus < end - 1:
        p = torch.tensor([[bonus - 1]], device=ids.device)
        fused, keys, values = encode_prefix(draft, ids[:, : bonus + 1], features[:, : bonus + 1], embedding)
        keys, values = keys[:, :bonus], values[:, :bonus]
        state = compute_first_state(
            draft, embedding[ids[:, bonus, None]], fused[:, bonus - 1, None], p, keys, values, None
        )
        grown = expand_candidates(draft, embedding, state, p, keys, values, None, steps, topk, tree_scoring)
        kept = draft_tree.build_tree(grown, tokens)
        choices = [said[bonus + d + 1] if bonus + d + 1 < end else -1 for d in kept.depths[0].tolist()]
        chosen = torch.tensor([choices], device=ids.device)
        depth = int(acceptance.find_accepted_path(kept, chosen, steps)[1]) - 1
        accepted, cycles, bonus = accepted + depth, cycles + 1, bonus + depth + 1
    return accepted, cycles


if __name__ == "__main__":
    main()
