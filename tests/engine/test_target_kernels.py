"""The target in few kernels: against transformers' own forward, and the kernels against torch, interpreted on the CPU."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from stages.engine import kernels_torch as plain
from stages.engine.kv_cache import KVCache, probe_kv_shapes
from stages.engine.target_kernels import FusedDecoder
from stages.families.block.kernels import FusedBlockExpansion
from stages.trees.draft_tree import Candidates
from tests.engine.test_block_proposer import make

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 90, "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_THE_BUILD = {
    "llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**SIZES), "qwen3": Qwen3Config(**SIZES),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, **MOE),
}  # fmt: skip
OTHERS = {
    "olmo": OlmoConfig(**SIZES, eos_token_id=2),  # norms without weights
    "granite": GraniteConfig(**SIZES, residual_multiplier=0.5),  # the same names: only its numbers tell
}
TREE = [0, 0, 0, 1, 2, 3]  # parents


def made(config: Any) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            weight.data += 0.3 * torch.randn_like(weight)
    return model


def tree_of(parents: list[int]) -> tuple[Tensor, Tensor]:
    """Who sees whom [M, M], and depths [M]."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent]
    return mask, mask.sum(1) - 1


@pytest.mark.parametrize("name", OF_THE_BUILD)
def test_a_tree_behind_a_prompt_is_as_each_of_its_paths_alone(name: str) -> None:
    """Hidden states and streams of every node, against transformers' forward of prompt and path without any cache."""
    model = made(OF_THE_BUILD[name])
    store = KVCache(probe_kv_shapes(model), 32, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        blocks = FusedDecoder.build_if_supported(model, store)
        assert blocks is not None
        prompt, nodes = torch.randint(90, (11,)), torch.randint(90, (len(TREE),))
        causal = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
        model.model(
            input_ids=prompt[None],
            attention_mask=causal,
            past_key_values=store.bind(torch.arange(11), 11),
            use_cache=True,
        )
        tree_mask, depths = tree_of(TREE)
        rows = 11 + torch.arange(len(TREE))
        hidden, streams = blocks.forward(
            nodes, 11 + depths, tree_mask[None], torch.tensor([11]), rows, store, [0, 1, 3]
        )
        for node in range(len(TREE)):
            path = torch.cat([prompt, nodes[tree_mask[node]]])
            out = model.model(input_ids=path[None], output_hidden_states=True)
            torch.testing.assert_close(hidden[node], out.last_hidden_state[0, -1], rtol=1e-4, atol=1e-4)
            for stream, layer in zip(streams, [0, 1, 3], strict=True):
                torch.testing.assert_close(stream[node], out.hidden_states[layer][0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_build_is_left_to_its_own_modules(name: str) -> None:
    model = made(OTHERS[name])
    assert (
        FusedDecoder.build_if_supported(model, KVCache(probe_kv_shapes(model), 8, torch.float32, torch.device("cpu")))
        is None
    )


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The kernels, where there is a GPU, or Triton and TRITON_INTERPRET=1, which must be set before it is imported."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        pytest.skip("no GPU; TRITON_INTERPRET=1 runs kernels without one")
    from stages.engine import kernels_triton

    return kernels_triton


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("width", [48, 256])
def test_norm_and_gate(gpu: Any, width: int) -> None:
    x, more, weight = draw(5, width), draw(5, width, seed=1), draw(width, seed=2)
    for added in (None, more):
        for mine, theirs in zip(
            gpu.add_rms_norm(x, weight, 1e-6, added), plain.add_rms_norm(x, weight, 1e-6, added), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(gpu.silu_and_mul(x), plain.silu_and_mul(x))


@pytest.mark.parametrize("normed", [True, False])
def test_turn(gpu: Any, normed: bool) -> None:
    """Into a cache by heads and into one by rows."""
    for by_rows in (False, True):
        caches = [torch.zeros(2, 9, 16, device=DEVICE) for _ in range(4)]
        if by_rows:
            caches = [torch.zeros(9, 2, 16, device=DEVICE).transpose(0, 1) for _ in range(4)]
        norms = (draw(16, seed=3), draw(16, seed=4), 1e-6) if normed else None
        given = draw(3, (6 + 2 + 2) * 16), norms, draw(3, 16, seed=5), draw(3, 16, seed=6)
        rows = torch.tensor([7, 2, 5], device=DEVICE)
        torch.testing.assert_close(
            gpu.rotate_and_cache(*given, *caches[:2], rows), plain.rotate_and_cache(*given, *caches[2:], rows)
        )
        for mine, theirs in zip(caches[:2], caches[2:], strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("length", [0, 1, 70, 300])
@pytest.mark.parametrize(("count", "nodes"), [(1, 1), (6, 6), (4, 11), (40, 40)])
def test_attend(gpu: Any, length: int, count: int, nodes: int) -> None:
    keys, values = (draw(2, 360, 32, seed=seed) for seed in (1, 2))
    keys[:, length + nodes :] = torch.nan  # what lies behind is nobody's
    values[:, length + nodes :] = torch.nan
    tree_mask = draw(count, nodes, seed=3) > 0
    tree_mask[:, 0] = True
    n, first = torch.tensor([length], device=DEVICE), (torch.arange(count, device=DEVICE) % 4) * (length // 5)
    found = gpu.attend_tree(draw(count, 6, 32), keys, values, n, tree_mask[None], first, 0.2)
    end = length + nodes
    expected = plain.attend_tree(draw(count, 6, 32), keys[:, :end], values[:, :end], n, tree_mask[None], first, 0.2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("count", "nodes"), [(1, 1), (11, 11), (4, 9)])
def test_several_prompts_attend_as_each_alone(gpu: Any, count: int, nodes: int) -> None:
    lengths, each = [3, 61, 0], 80
    keys, values = (draw(2, 3 * each, 32, seed=seed) for seed in (1, 2))
    tree_mask = draw(3, count, nodes, seed=3) > 0
    tree_mask[:, :, 0] = True
    query, first = draw(3 * count, 6, 32), (torch.arange(3 * count, device=DEVICE) % 4)
    n = torch.tensor(lengths, device=DEVICE)
    for kernels in (gpu, plain):
        found = kernels.attend_tree(query, keys, values, n, tree_mask, first, 0.2, each).split(count)
        for slot in range(3):
            rows, own = slice(slot * each, (slot + 1) * each), slice(slot * count, (slot + 1) * count)
            own_keys, own_values = keys[:, rows].contiguous(), values[:, rows].contiguous()
            expected = plain.attend_tree(
                query[own], own_keys, own_values, n[slot : slot + 1], tree_mask[slot : slot + 1], first[own], 0.2
            )
            torch.testing.assert_close(found[slot], expected, rtol=1e-4, atol=1e-5)


def test_mix(gpu: Any) -> None:
    table, states = draw(20, 48), draw(3, 48, seed=1)
    tokens, slots = (torch.tensor(x, device=DEVICE) for x in ([4, 19, 0, 7], [2, 0, 0, 1]))
    weights = draw(48, seed=2), draw(48, seed=3)
    for mine, theirs in zip(
        *(k.mix_inputs(table, tokens, states, slots, weights, 1e-6) for k in (gpu, plain)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("tree_scoring", ["sglang", "eagle"])
@pytest.mark.parametrize(("size", "topk"), [(5, 3), (1100, 10), (3000, 1)])
def test_best(gpu: Any, size: int, topk: int, tree_scoring: str) -> None:
    """Logits of a few values only, so that most are ties; among them infinities, and scores of either sign."""
    logits = (draw(4, size) * 2).round()
    logits[2, 1] = -torch.inf
    probabilities, ids = gpu.select_topk(logits, topk, tree_scoring)
    expected, indices = plain.select_topk(logits, topk, tree_scoring)
    torch.testing.assert_close(probabilities, expected)
    assert torch.equal(ids, indices)


@pytest.mark.parametrize("tree_scoring", ["sglang", "eagle"])
def test_best_of_few_finite_logits(gpu: Any, tree_scoring: str) -> None:
    """Bug: a part of the vocabulary without a finite logit, as a candidate selector leaves most, made every score NaN."""
    logits = torch.full((3, 5000), -torch.inf, device=DEVICE)
    logits[:, [4, 1030, 4999]] = draw(3, 3)
    for mine, theirs in zip(*(k.select_topk(logits, 3, tree_scoring) for k in (gpu, plain)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("tree_scoring", ["sglang", "eagle"])
@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_block_is_expanded_alike(gpu: Any, method: str, prompts: int, tree_scoring: str) -> None:
    draft, found = make(method).to(DEVICE), []
    states, anchors = draw(prompts, 5, 64), torch.arange(prompts, device=DEVICE)
    logits = draw(prompts, 5, draft.config.vocab_size, seed=1)
    for kernels in (gpu, plain):
        expansion = FusedBlockExpansion(draft, torch.zeros(draft.config.vocab_size, dtype=torch.int64, device=DEVICE))
        expansion.kernels = kernels
        found.append(expansion.expand(logits, states, anchors, 4, tree_scoring))
    torch.testing.assert_close(found[0].scores, found[1].scores)
    assert torch.equal(found[0].tokens, found[1].tokens) and torch.equal(found[0].parents, found[1].parents)


@pytest.mark.parametrize("tree_scoring", ["sglang", "eagle"])
@pytest.mark.parametrize("topk", [1, 3, 10])
@pytest.mark.parametrize("prompts", [1, 3])
def test_join(gpu: Any, prompts: int, topk: int, tree_scoring: str) -> None:
    """Two steps of beams, with ties among the products."""
    steps, found = 4, []
    for k in (gpu, plain):
        count = topk + (steps - 1) * topk * topk
        candidates = Candidates(
            *(torch.zeros(prompts, count, dtype=t, device=DEVICE) for t in (torch.float32, *2 * [torch.int64]))
        )
        numbers = torch.arange(topk, device=DEVICE).repeat(prompts, 1)
        tree_mask = plain.extend_tree_mask(
            torch.zeros(prompts, topk, (steps - 1) * topk, dtype=torch.bool, device=DEVICE), 0
        )
        beam = (draw(prompts, topk).sigmoid() * 4).round() / 4
        d2t, got = torch.arange(30, device=DEVICE) % 7, []
        for step in (1, 2, 3):
            probabilities, ids = plain.select_topk(
                (draw(prompts * topk, 30, seed=step) * 2).round(), topk, tree_scoring
            )
            beam, numbers, tree_mask, tokens, slots = k.extend_beam(
                step, beam, numbers, tree_mask, probabilities, ids, d2t, candidates, tree_scoring
            )
            got += [beam, numbers, tree_mask.clone(), tokens, slots]
        found.append([*got, candidates.scores, candidates.tokens, candidates.parents])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 40, 70), (5, 64, 34), (60, 96, 64)])
def test_products_with_a_stream_of_weights(gpu: Any, rows: int, width: int, outputs: int) -> None:
    """In half precision on a GPU, as the engine uses it; float32 in Triton's interpreter. Both against float32 products."""
    dtype, close = (torch.float16, 4e-3) if DEVICE == "cuda" else (torch.float32, 2e-3)
    x, w = draw(rows, width).to(dtype), draw(outputs, width, seed=1).to(dtype)
    for gated, reference in ((False, plain.matmul), (True, plain.gated_matmul)):
        got = gpu.stream_matmul(x, w, gated, 16, 32, 4, 2).float()
        torch.testing.assert_close(got, reference(x.float(), w.float()), rtol=close, atol=close)
