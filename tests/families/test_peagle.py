"""P-EAGLE against a slow draft, one causal sequence for each position, nothing cached: in training, replay and the engine."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.draft import published_files
from stages.engine.decode import Engine
from stages.engines import registry as engines
from stages.engines.protocol import describe_draft
from stages.families import registry
from stages.families.peagle import replay as peagle_replay
from stages.families.peagle import training
from stages.families.peagle.decoding import PEagleDrafter
from stages.families.peagle.files import build_peagle_config
from stages.families.peagle.model import PEagleConfig, PEagleDraft
from stages.params.families import PEAGLE, DraftKind, find_family
from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayBatch
from stages.training.packed_rows import PackIndex
from stages.training.ttt import TrainingPack, build_supervision_mask
from tests.draft.slow_draft import CONFIG, scatter
from tests.draft.test_published_block_formats import TARGET
from tests.engine import conftest, test_decode
from tests.engine.test_batch_decode import make_requests, search_greedily, steps
from tests.training.test_ttt import make_row

pytestmark = pytest.mark.usefixtures("one_thread")

DEPTHS = 4
execution = conftest.execution
OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_hidden_layers": 3},
    "every option": {
        "num_hidden_layers": 2, "fc_norm": True, "norm_before_residual": True, "qk_norm": True, "own_embedding": True,
    },
}  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def make(options: dict[str, Any], scale: float = 0.4, **sizes: Any) -> tuple[PEagleDraft, Tensor]:
    """A random draft over a part of the vocabulary, and a target's embedding."""
    config = PEagleConfig(**{**vars(CONFIG), **sizes, **options, "ptd_token_id": 5})
    draft = PEagleDraft(config)
    scatter(draft, scale, 1)
    chosen = torch.randperm(config.vocab_size, generator=(generator := torch.Generator().manual_seed(2)))
    chosen = chosen[: config.draft_vocab_size].sort().values
    draft.d2t.copy_(chosen - torch.arange(len(chosen)))
    draft.t2d[chosen] = True
    return draft.requires_grad_(False), torch.randn(config.vocab_size, config.hidden_size, generator=generator)


def draft_slowly(draft: PEagleDraft, ids: Tensor, features: Tensor, embedding: Tensor, count: int) -> Tensor:
    """Logits [count, D] of the drafts after ids [p + 2], whose rows have features [p + 1, 3H]."""
    c = draft.config
    table = draft.embed_tokens.weight if draft.embed_tokens is not None else embedding
    tokens = torch.cat([ids[1:], torch.full((count - 1,), c.ptd_token_id)])
    fused = draft.fuse_features(torch.cat([features, draft.mask_hidden.expand(count - 1, -1)]))
    cos, sin = draft.compute_rope(torch.arange(len(tokens)))
    stream, x = fused, draft.build_layer_input(table[tokens], fused)
    for i in range(c.num_hidden_layers):
        layer: Any = draft.layers[str(i)] if i else draft.midlayer
        x = layer.input_layernorm(stream) if i else x
        stream = layer.hidden_norm(stream) if not i and c.norm_before_residual else stream
        heads = []
        for name in "qkv":
            y = getattr(layer.self_attn, f"{name}_proj")(x).unflatten(-1, (-1, c.head_dim))
            if name != "v":
                y = getattr(layer.self_attn, f"{name}_norm")(y) if c.qk_norm else y
                low, high = y.chunk(2, -1)
                y = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
            heads.append(y.transpose(0, 1))
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        stream = stream + layer.self_attn.o_proj(attended.transpose(0, 1).flatten(1))
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
    return draft.lm_head(draft.norm(stream[-count:]))


def test_depths_are_sampled_as_the_paper_says() -> None:
    mask = (torch.arange(400) >= 50) & (torch.arange(400) < 350)
    supervised = build_supervision_mask(mask, torch.zeros(400, dtype=torch.int64), 6, "aligned")
    kept = training.sample_depths(supervised, 0.7, 0.2, torch.Generator().manual_seed(3))
    count = int(supervised[0].sum())  # of which the first depth has all
    assert kept.sum(1).tolist() == [int((count - d) * max(0.7**d, 0.2)) for d in range(6)]
    assert not (kept & ~supervised).any() and not (kept[1:] & ~kept[:-1]).any()
    assert torch.equal(training.sample_depths(supervised, 1.0, 1.0, torch.Generator()), supervised)


@every_option
def test_the_loss_is_the_mean_over_all_that_is_trained_and_every_weight_learns(options: dict[str, Any]) -> None:
    draft, embedding = make(options)
    head = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4))
    rows = [make_row(5, 40, [(5, 38)]), make_row(1, 20, [(4, 9), (12, 20)])]
    objective = training.PEagleObjective(DEPTHS, ratio=0.7, least_ratio=0.2, seed=1)
    pack, again = (objective.build_pack(rows, PackIndex(0, 3, 0), pinned=False) for _ in range(2))
    other = objective.build_pack(rows, PackIndex(1, 3, 0), pinned=False).query_tokens
    assert torch.equal(pack.pair_state, again.pair_state) and not torch.equal(pack.query_tokens, other)
    found = training.compute_loss(draft.requires_grad_(True), pack, embedding, head, objective)
    losses, chosen = torch.zeros(DEPTHS), draft.t2d.nonzero()[:, 0]
    for depth, queries in enumerate(pack.queries_per_step):
        for token in pack.query_tokens[:queries].tolist():
            row, p = rows[int(pack.row_index[token])], int(pack.position[token])
            logits = draft_slowly(draft, row.ids[: p + 2], row.features[: p + 1], embedding, DEPTHS)[depth]
            teacher = row.last[p + 1 + depth] @ head.T
            if draft.t2d[teacher.argmax()]:
                losses[depth] += -(teacher[chosen].softmax(-1) * logits.log_softmax(-1)).sum().detach()
    assert sum(pack.queries_per_step) == sum(pack.supervised_per_step) > 100
    assert found.total_loss.item() == pytest.approx(float(losses.sum()) / sum(pack.queries_per_step), rel=1e-4)
    assert found.loss_per_step.tolist() == pytest.approx(losses.tolist(), rel=1e-4)
    found.total_loss.backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in draft.parameters())


# --- beside a target ---------------------------------------------------------------------------------------------------

FEATURES, END = (1, 2, 3), test_decode.END
TREES = [TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(5, 1, 6), TreeShape(3, 2, 6)]


@cache
def target() -> Any:
    return test_decode.model.__wrapped__()


@cache
def read_rows() -> list[Any]:
    """The prompts of `make_requests` with the target's answers and hidden states."""
    rows = []
    for ask in make_requests():
        ids = torch.tensor(ask.prompt + search_greedily(target(), ask))
        with torch.no_grad():
            states = target()(ids[None], output_hidden_states=True).hidden_states
        row = {"ids": ids, "features": torch.cat([states[i][0] for i in FEATURES], -1), "last": states[-1][0], "id": ""}
        mask = torch.arange(len(ids)) >= (start := len(ask.prompt))
        images = dict.fromkeys(("positions", "image_token_mask", "image_embeddings"))
        rows.append(SimpleNamespace(**row, mask=mask, prompt_length=start, **images))
    return rows


@cache
def replay(layers: int) -> peagle_replay.PEagleReplay:
    """A draft that has learned some of the target's answers."""
    embedding, head = (f().weight for f in (target().get_input_embeddings, target().get_output_embeddings))
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": test_decode.VOCAB,
        "draft_vocab_size": test_decode.VOCAB - 1, "max_position_embeddings": 512,
    }  # fmt: skip
    draft = make({"num_hidden_layers": layers}, 0.1, **sizes)[0].requires_grad_(True)
    pack, optimizer = TrainingPack.from_rows(read_rows(), 5, "aligned"), torch.optim.Adam(draft.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        training.compute_loss(draft, pack, embedding, head, training.PEagleObjective(5)).total_loss.backward()
        optimizer.step()
    draft.requires_grad_(False)
    return peagle_replay.PEagleReplay(draft, embedding, draft.lm_head.weight, "sglang")


BATCH = cache(lambda: ReplayBatch.collate(read_rows(), torch.device("cpu")))
every_depth = pytest.mark.parametrize("layers", [1, 2])


@every_depth
def test_answers_are_those_of_greedy_search_and_accept_lengths_those_of_replay(execution: str, layers: int) -> None:
    """Alone and together, with the shapes of a CPU and those of a GPU's graphs."""
    drafter = PEagleDrafter(replay(layers).draft, target().get_input_embeddings().weight, list(FEATURES), "sglang")
    engine, asks = Engine(target(), [END], drafter, 1.0), make_requests()
    replayed = replay(layers).replay(BATCH(), TREES, 7, [])
    for g, tree in enumerate(TREES):
        alone = [
            list(engine.decode_speculative(ask.prompt, ask.max_new_tokens, tree, None, ask.sampling)) for ask in asks
        ]
        answers = [[token for step in found for token in step.tokens] for found in alone]
        assert answers == [search_greedily(target(), ask) for ask in asks], tree
        assert steps(engine.decode_batch(asks, 3, tree), len(asks)) == alone, tree
        live = [(len(found) - 1, sum(step.num_accepted for step in found[1:])) for found in alone]
        assert live == list(zip(replayed.cycles[:, g].tolist(), replayed.accepted[:, g].tolist(), strict=True)), tree
    assert replayed.accepted[:, 2].sum() > replayed.accepted[:, 0].sum() > 20, "drafts are never right"


@every_depth
def test_a_trace_has_the_cycles_of_replay(layers: int) -> None:
    found = replay(layers).replay(BATCH(), TREES, 7, [2])
    traced = replay(layers).trace(BATCH(), found.cycle_starts[0], TREES[2], 7)
    assert len(traced.row) == int(found.cycles[:, 2].sum()) and traced.accepted.sum() == found.accepted[:, 2].sum()


# --- files and engines -------------------------------------------------------------------------------------------------


def test_a_config_tells_its_family_and_engines_run_chains_of_it_or_say_who_does() -> None:
    draft, _ = make(OPTIONS["three layers"])
    config = build_peagle_config(draft.config, [1, 2, 3], 4, [7])
    assert find_family(config) is PEAGLE and config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["ptd_token_id"]) == (3, 5)
    assert PEagleConfig.from_json(config) == draft.config
    chain, files, tensors = TreeShape(3, 1, 4), registry.get(PEAGLE).files, draft.state_dict()
    flags = engines.get("vllm").build_speculation_flags(describe_draft("drafts/p", config, chain, "EAGLE3"), config)
    told = {"method": "eagle3", "model": "drafts/p", "parallel_drafting": True, "num_speculative_tokens": 3}
    assert json.loads(flags[1]) == told and DraftKind(PEAGLE).explain_unserved("vllm", chain) is None
    refused = "SGLang runs no P-EAGLE, whose drafts come in one pass, expected vLLM 0.16 or later"
    assert DraftKind(PEAGLE).explain_unserved("sglang", chain) == refused
    assert files.find_problem(config, tensors) == ""
    assert "lacks 'ptd_token_id'" in files.find_problem(config | {"ptd_token_id": None}, tensors)
    assert "sliding_window is 4" in files.find_problem(config | {"sliding_window": 4}, tensors)
    del tensors["mask_hidden"]
    assert "missing tensors ['mask_hidden']" in files.find_problem(config, tensors)


def publish_as_aws(draft: PEagleDraft, embedding: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The form of amazon/gpt-oss-120b-p-eagle, with an embedding of its own, and norms that vLLM makes in every layer."""
    tensors = draft.state_dict() | {f"layers.{i}.hidden_norm.weight": torch.ones(16) for i in draft.layers}
    return build_peagle_config(draft.config, [1, 2, 3], 4, [7]), tensors


def publish_as_speculators(draft: PEagleDraft, embedding: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = publish_as_aws(draft, embedding)
    outer = {
        "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "mask_token_id": config.pop("ptd_token_id"),
        "draft_vocab_size": config.pop("draft_vocab_size"), "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": True, "norm_before_residual": config.pop("norm_before_residual", False),
        "transformer_layer_config": {k: v for k, v in config.items() if not k.startswith("eagle") and k != "architectures"},
    }  # fmt: skip
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    tensors |= {"mask_hidden": tensors["mask_hidden"][None], "verifier_norm.weight": torch.ones(16)}
    return outer, {"embed_tokens.weight": embedding} | tensors


@pytest.mark.parametrize("publish", [publish_as_aws, publish_as_speculators])
@every_option
def test_published_drafts_are_read_into_our_form(tmp_path: Path, publish: Any, options: dict[str, Any]) -> None:
    draft, embedding = make(options)
    config, tensors = publish(draft, embedding)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert published_files.find_published_family(published_files.read_flat_config(tmp_path)) is PEAGLE
    files: Any = registry.get(PEAGLE).files
    target = replace(TARGET, hidden_size=16, vocab_size=23, num_layers=4, feature_layers=[1, 2, 3])
    found = files.read_published_folder(tmp_path, target, lambda: (embedding, embedding))
    assert find_family(found.config) is PEAGLE and not found.notes
    read = files.build_module(found.config, torch.empty(0), 1.0)
    read.load_state_dict(found.tensors)
    assert read.config == draft.config
    row, table = make_row(7, 12, [(3, 12)]), read.choose_embedding(embedding)
    context = read.read_rows(table[row.ids[1:]], row.features[:-1])
    states = read.draft_from(context, torch.tensor([5]), table, DEPTHS)
    slow = draft_slowly(draft, row.ids[:7], row.features[:6], embedding, DEPTHS)
    torch.testing.assert_close(read.lm_head(states)[0], slow, rtol=1e-4, atol=1e-4)


def test_a_published_draft_without_one_mask_token_or_a_layer_is_refused(tmp_path: Path) -> None:
    draft, embedding = make({})
    files: Any = registry.get(PEAGLE).files
    target = replace(TARGET, hidden_size=16, vocab_size=23, num_layers=4, feature_layers=[1, 2, 3])
    save_file(
        {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}, tmp_path / "model.safetensors"
    )
    for changed, message in (
        ({"ptd_token_id": None}, "expected one, as ptd_token_id or mask_token_id or pard_token"),
        ({"mask_token_id": 21}, r"mask tokens \[5, 21\], expected one"),
        ({"num_hidden_layers": 2}, "missing tensors .*layers.1.input_layernorm.weight"),
    ):
        config = build_peagle_config(draft.config, [1, 2, 3], 4, [7]) | changed
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            files.read_published_folder(tmp_path, target, lambda: (embedding, embedding))
