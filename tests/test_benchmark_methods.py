"""Rivals as stages: they learn what their losses say, resume and chain as EAGLE-3 does, and a row says what was decoded."""

import json
import math
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.nn import functional as F

from stages import benchmark_methods, extract_hiddens, init_draft, prepare_prompts, train_draft
from stages.data import conversations
from stages.draft import checkpoint, eagle3_checkpoint
from stages.draft.eagle3_config import DraftConfig
from stages.hidden_states import format, reader
from stages.methods import method_checkpoint, registry
from stages.params import schema
from stages.params.methods_section import StaticRow
from stages.results import method_records
from stages.target import manifest
from stages.training import ttt
from tests.conftest import edit_params
from tests.talking import WORKLOADS

ROWS = {"train": 10, "eval": 3, "eval_t": 0}
CHECKPOINTS = {
    "eagle1": {"from": "e000", "epochs": 1, "method": "eagle"},
    "eagle3ep": {"from": "eagle1", "epochs": 2, "method": "eagle"},
    "eagle_straight": {"from": "e000", "epochs": 3, "method": "eagle"},
    "heads1": {"from": "e000", "epochs": 1, "method": "medusa", "heads": 3},
    "heads3": {"from": "heads1", "epochs": 2, "method": "medusa", "heads": 3},
    "heads_straight": {"from": "e000", "epochs": 3, "method": "medusa", "heads": 3},
    "e003": {"from": "e000", "epochs": 1},
}
ROOM = 12
DRAFTED: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "checkpoint": "e003", "tree": "t3_2_6"},
    "eagle2": {"method": "eagle2", "checkpoint": "eagle3ep", "tree": "t3_2_6"},
    "eagle": {"method": "eagle", "checkpoint": "eagle3ep", "depth": 3, "nodes": 8},
    "medusa": {"method": "medusa", "checkpoint": "heads3", "depth": 3, "nodes": 8},
}
DRAFTLESS = {
    "lookahead": {"method": "lookahead", "window": 3, "level": 3, "guesses": 3},
    "ngram": {"method": "ngram", "longest": 2, "shortest": 1, "length": 4},
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained_project(shared_talking_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with every checkpoint of CHECKPOINTS, on a tiny random target; we stand in it."""
    project = tmp_path_factory.mktemp("trained")
    for name in ("artifacts", "tiny"):
        (project / name).symlink_to(shared_talking_project / name)
    (project / "params.yaml").write_text((shared_talking_project / "params.yaml").read_text())
    (project / "data/prompt_sets").mkdir(parents=True)
    edit_params(project, {
        "extract_hiddens": {"max_length": 60},
        "init_draft": {"draft_vocab_size": 90},
        "train_draft": {"checkpoints": CHECKPOINTS, "ttt_steps": 4, "batch_tokens": 200, "warmup_steps": 0},
        "check_overfit": {"min_tau": 1.0},
        "replay_trees": {"checkpoints": ["e003"]},
        "benchmark_served": {"checkpoints": ["e003"]},
        "benchmark": {
            "workloads": {"eval": {**WORKLOADS["eval"], "num_prompts": 3, "max_new_tokens": ROOM}},
            "torch_workloads": ["eval"],
        },
        "benchmark_methods": {"with_draft": DRAFTED, "without_draft": DRAFTLESS},
    })  # fmt: skip
    with chdir(project):
        vocabulary = manifest.read_manifest().vocab_size
        draw = torch.Generator().manual_seed(0)
        for split, count in ROWS.items():
            rows = [
                {
                    "id": f"{split}{n}.0", "source_row": n, "verdict": "clean", "temperature": 0.0, "top_p": None,
                    "prompt_ids": torch.randint(3, vocabulary, (9,), generator=draw).tolist(),
                    "answer_ids": (torch.randint(3, 40, (20 + n,), generator=draw)).tolist(),
                    "finish_reason": "length", "images": None,
                }
                for n in range(count)
            ]  # fmt: skip
            path = Path("data/sampled") / split / conversations.name_shard(0)
            conversations.write_table(
                path, pl.DataFrame(rows, schema=conversations.SAMPLED_SCHEMA), conversations.SAMPLED_SCHEMA
            )
        Path("results").mkdir()
        extract_hiddens.main()
        init_draft.main()
        for name in CHECKPOINTS:
            train_draft.main(name)
        prepare_prompts.main("eval")
        yield project


@pytest.fixture
def tables(trained_project: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return manifest.read_embedding_and_head(manifest.read_manifest())


def loaded(name: str, method: str, head: torch.Tensor) -> Any:
    return registry.build_draft(
        *method_checkpoint.read_method_draft(checkpoint.locate_checkpoint(name), method, "a test"), head, 1.0
    )


def rows() -> list[format.HiddenStatesRow]:
    return list(reader.read_rows(Path("data/hiddens/train")))


def layer(eagle: Any, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """EAGLE's layer over a row [T, H], as its authors' LlamaDecoderLayer without its first norm."""
    c, attention = eagle.config, eagle.midlayer.self_attn
    x = eagle.fc(torch.cat([embeds, hidden], dim=-1))
    cos, sin = eagle.compute_rope(torch.arange(len(x)))  # [T, 1, E/2]
    q, k, v = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (-1, c.head_dim)) for n in "qkv")

    def turned(y: torch.Tensor) -> torch.Tensor:
        low, high = y.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).transpose(0, 1)

    out = F.scaled_dot_product_attention(
        turned(q), turned(k), v.transpose(0, 1), is_causal=True, enable_gqa=True
    )  # fmt: skip
    x = x + attention.o_proj(out.transpose(0, 1).flatten(1))
    return x + eagle.midlayer.mlp(eagle.midlayer.post_attention_layernorm(x))


def cross_entropy(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def test_eagles_loss_is_smooth_l1_and_a_tenth_of_the_soft_cross_entropy(tables: Any) -> None:
    embedding, head = tables
    eagle = loaded("eagle1", "eagle", head)
    pack = ttt.TrainingPack.from_rows(rows(), 1, "aligned")
    found = registry.TRAINABLE_METHODS["eagle"].compute_loss(
        eagle, pack, embedding, head, ttt.TrainingObjective(1), None
    )
    near, soft, hits, supervised = 0.0, 0.0, 0, 0
    for row in rows():
        ids = row.ids.long()
        guessed = layer(eagle, embedding[ids[1:]], row.last[:-1])  # of position p, for p + 1
        for p in range(len(ids) - 2):
            if row.mask[p + 2] and row.mask[p + 1]:
                near += F.smooth_l1_loss(guessed[p], row.last[p + 1]).item()
                logits, teacher = guessed[p] @ head.T, row.last[p + 1] @ head.T
                soft += cross_entropy(logits, teacher).item()
                hits += int(logits.argmax() == teacher.argmax())
                supervised += 1
    assert supervised == pack.supervised_per_step[0] > 100
    assert found.total_loss.item() == pytest.approx((near + 0.1 * soft) / supervised, rel=1e-4)
    assert float(found.loss_per_step[0]) == pytest.approx(near + 0.1 * soft, rel=1e-4)
    assert int(found.argmax_matches.sum()) == hits
    found.total_loss.backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in eagle.parameters())


def test_medusas_loss_is_each_heads_cross_entropy_weighed_by_decay(tables: Any) -> None:
    """Over the draft's vocabulary, where the target's likeliest token is in it, as EAGLE-3 learns it."""
    embedding, head = tables
    heads = loaded("heads1", "medusa", head)
    draft_vocab = heads.t2d.nonzero()[:, 0]
    pack = ttt.TrainingPack.from_rows(rows(), 3, "aligned")
    found = registry.TRAINABLE_METHODS["medusa"].compute_loss(
        heads, pack, embedding, head, ttt.TrainingObjective(3, 0.8), None
    )
    losses, counts = torch.zeros(3), torch.zeros(3)
    for row in rows():
        for p in range(len(row.ids)):
            for k in range(3):
                span = row.mask[p + 1 : p + 3 + k]
                if p + 2 + k < len(row.ids) and bool(span.all()):
                    counts[k] += 1
                    teacher = row.last[p + 1 + k] @ head.T
                    h = row.last[p]
                    logits = heads.outs[k](h + F.silu(heads.blocks[k](h)))
                    if heads.t2d[teacher.argmax()]:
                        losses[k] += cross_entropy(logits, teacher[draft_vocab]).item()
    assert counts.tolist() == pack.supervised_per_step and counts.min() > 100
    assert found.loss_per_step.tolist() == pytest.approx(losses.tolist(), rel=1e-4)
    means = losses / counts
    assert found.total_loss.item() == pytest.approx(sum(0.8**k * float(x) for k, x in enumerate(means)), rel=1e-4)
    found.total_loss.backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in heads.parameters())


def test_untrained_heads_say_what_the_targets_head_says(tables: Any) -> None:
    head = tables[1]
    config, tensors = eagle3_checkpoint.read_eagle3_draft(checkpoint.locate_checkpoint("e000"), "init_draft")
    method_config = method_checkpoint.build_method_config("medusa", DraftConfig.from_json(config), "float32", 3)
    heads = registry.TRAINABLE_METHODS["medusa"].initialise(
        registry.DraftInputs(method_config, head, 1.0, tensors["d2t"], tensors["t2d"])
    )
    hidden = rows()[0].last[5:6]
    expected = (hidden @ head.T)[0, tensors["t2d"]]
    assert all(torch.allclose(logits, expected, atol=1e-5) for logits in heads.logits(hidden))


@pytest.mark.parametrize(("chained", "straight"), [("eagle3ep", "eagle_straight"), ("heads3", "heads_straight")])
def test_a_chain_of_segments_is_bit_for_bit_one_straight_run(
    trained_project: Path, chained: str, straight: str
) -> None:
    for file in ("draft/model.safetensors", "draft/config.json", "state/optimizer.safetensors", "state/progress.json"):
        assert (Path("drafts") / chained / file).read_bytes() == (Path("drafts") / straight / file).read_bytes()
    log = json.loads(Path(f"results/train/{straight}.json").read_text())["epochs"]
    assert log[-1]["loss"] < log[0]["loss"]
    assert {len(epoch["step_accuracy"]) for epoch in log} == {1 if "eagle" in straight else 3}


def test_rank_accuracies_are_shares_of_the_rows_own_tokens(tables: Any) -> None:
    embedding, head = tables
    for name, method in (("eagle1", "eagle"), ("heads1", "medusa")):
        config, _ = method_checkpoint.read_method_draft(checkpoint.locate_checkpoint(name), method, "a test")
        module, accuracy = loaded(name, method, head), config["rank_accuracy"]
        assert len(accuracy) == (4 if method == "eagle" else 3) and {len(ranks) for ranks in accuracy} == {10}
        for k, ranks in enumerate(accuracy):
            hits, num_tokens = torch.zeros(10), 0
            for row in rows():
                ids = row.ids.long()
                for p in range(len(ids) - 2 - k):
                    if not bool(row.mask[p + 1 : p + 3 + k].all()):
                        continue
                    if method == "medusa":
                        state = row.last[p] + F.silu(module.blocks[k](row.last[p]))
                        best = module.t2d.nonzero()[:, 0][(module.outs[k](state)).topk(10).indices]
                    else:  # its own guesses of the hidden states after p, one after the other
                        hidden = row.last[: p + 1]
                        for n in range(k + 1):
                            state = layer(module, embedding[ids[1 : p + 2 + n]], hidden)[-1]
                            hidden = torch.cat([hidden, state[None]])
                        best = (state @ head.T).topk(10).indices
                    hits += (best == ids[p + 2 + k]).float()
                    num_tokens += 1
            assert num_tokens > 50
            assert ranks == pytest.approx((hits / num_tokens).tolist(), abs=1.5 / num_tokens), (name, k)


@pytest.mark.parametrize("name", [*DRAFTED, *DRAFTLESS])
def test_a_row_says_what_was_decoded(trained_project: Path, name: str) -> None:
    benchmark_methods.main(name)
    found = method_records.read_method_cell(name, "a stage")
    assert found["metrics"]["identical_share"] == 1.0
    assert len(found["prompts"]) == 3 and found["mixture"] is False
    cycles, accepted = (sum(row[k] for row in found["prompts"]) for k in ("cycles", "accepted"))
    assert found["metrics"]["tau"] == (cycles + accepted) / cycles
    assert (
        sum(n * count for n, count in enumerate(found["histogram"])) == accepted and sum(found["histogram"]) == cycles
    )
    assert found["metrics"]["accept_rate"] == pytest.approx(
        (found["metrics"]["tau"] - 1) / (len(found["histogram"]) - 1)
    )
    for row in found["prompts"]:
        assert row["output_tokens"] == row["baseline_output_tokens"] <= ROOM
        assert row["cycles"] + row["accepted"] in (
            row["output_tokens"] - 1,
            row["output_tokens"],
        )  # less the first; no bonus
    seconds = [sum(row[k] for row in found["prompts"]) for k in ("e2e_latency_s", "baseline_e2e_latency_s")]
    assert found["metrics"]["speedup"] == pytest.approx(seconds[1] / seconds[0])
    checkpoint = found["checkpoint"]
    assert checkpoint == DRAFTED.get(name, {}).get("checkpoint")
    if checkpoint is None:
        assert found["memory"]["weights"] == found["parameters"] == 0
        return
    weights = pl.Series([t.numel() for t in _tensors(checkpoint).values() if t.is_floating_point()]).sum()
    assert found["parameters"] == weights
    other_bytes = sum(t.nbytes for t in _tensors(checkpoint).values() if not t.is_floating_point())
    assert found["memory"]["weights"] == 4 * weights + other_bytes
    assert found["memory"]["state"] > 0


def _tensors(name: str) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(checkpoint.locate_checkpoint(name) / "draft/model.safetensors", "a test")


def test_a_row_of_drawn_answers_says_what_plain_decoding_says(trained_project: Path) -> None:
    params_text = Path("params.yaml").read_text()
    workload = {**WORKLOADS["eval"], "num_prompts": 3, "max_new_tokens": ROOM, "temperature": 0.8, "top_p": 0.95}
    try:
        edit_params(Path(), {"benchmark": {"workloads": {"eval": workload}}})
        for name in ("medusa", "ngram"):
            benchmark_methods.main(name)
            assert method_records.read_method_cell(name, "a stage")["metrics"]["identical_share"] == 1.0
    finally:
        Path("params.yaml").write_text(params_text)


def test_a_row_repeats_until_its_speedup_is_known(trained_project: Path) -> None:
    """Bug: `until` and `repeats` of the workload were ignored; each prompt was decoded once."""
    params_text = Path("params.yaml").read_text()
    workload = {**WORKLOADS["eval"], "num_prompts": 3, "max_new_tokens": ROOM}
    found = {}
    try:
        for name, keys in (
            ("once", {}),
            ("twice", {"repeats": 2}),
            ("spent", {"until": {"half_width": 1e-6, "most_repeats": 4}}),
        ):
            edit_params(Path(), {"benchmark": {"workloads": {"eval": workload | keys}}})
            benchmark_methods.main("ngram")
            found[name] = method_records.read_method_cell("ngram", "a stage")
    finally:
        Path("params.yaml").write_text(params_text)
    ended = {name: (cell.stopping and (cell.stopping.rule, cell.stopping.repeats)) for name, cell in found.items()}
    assert ended == {"once": ("repeats", 1), "twice": ("repeats", 2), "spent": ("most_repeats", 4)}
    spent = found["spent"]
    assert [row.repeat for row in spent.prompts] == [n for n in range(4) for _ in range(3)] and len(spent.repeats) == 4
    assert spent.histogram == [4 * n for n in found["once"].histogram]  # greedy repeats accept the same
    speeds = spent.metrics
    assert speeds.speedup_low is not None and speeds.speedup_high is not None and spent.stopping is not None
    half = (speeds.speedup_high - speeds.speedup_low) / 2 / speeds.speedup
    assert spent.stopping.half_width == pytest.approx(half, rel=1e-12)


def test_a_static_tree_follows_the_checkpoints_accuracies(trained_project: Path) -> None:
    settings = schema.load_params().get_method_row("medusa")
    assert isinstance(settings, StaticRow)
    accuracy = [[0.9, 0.05], [0.8, 0.1], [0.7, 0.2]]
    static = benchmark_methods._build_static_tree(settings, accuracy, torch.device("cpu"))
    assert static.paths[:2] == [(0,), (1,)] and (0, 0, 0) in static.paths and static.num_draft_tokens == 8
    worth = {p: math.prod(accuracy[d][r] for d, r in enumerate(p)) for p in static.paths}
    assert min(worth.values()) >= 0.9 * 0.1 * 0.2


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_not_there_is_named_with_what_to_run(trained_project: Path) -> None:
    Path("drafts/heads3").rename("drafts/elsewhere")
    try:
        with pytest.raises(
            ValueError, match=r"drafts/heads3/draft/config\.json not found; run: dvc repro train_draft@heads3"
        ):
            benchmark_methods.main("medusa")
    finally:
        Path("drafts/elsewhere").rename("drafts/heads3")


def test_another_methods_checkpoint_is_refused(trained_project: Path) -> None:
    with pytest.raises(ValueError, match="is of the method eagle, expected medusa"):
        method_checkpoint.read_method_draft(checkpoint.locate_checkpoint("eagle1"), "medusa", "train_draft@eagle1")
    with pytest.raises(ValueError, match="is of the method eagle3, expected eagle"):
        method_checkpoint.read_method_draft(checkpoint.locate_checkpoint("e003"), "eagle", "train_draft@e003")
    with pytest.raises(ValueError, match="is no EAGLE-3 draft"):
        eagle3_checkpoint.read_eagle3_draft(checkpoint.locate_checkpoint("heads1"), "train_draft@heads1")


def test_a_misshapen_checkpoint_is_named_tensor_by_tensor(trained_project: Path, tmp_path: Path) -> None:
    config, tensors = method_checkpoint.read_method_draft(checkpoint.locate_checkpoint("heads1"), "medusa", "a test")
    find_problem = method_checkpoint.find_method_draft_problem
    cut = {**tensors, "outs.1.weight": tensors["outs.1.weight"][:-1]}
    assert "outs.1.weight is (89, 128), expected (90, 128)" in find_problem(config, cut)
    lacking = {k: t for k, t in tensors.items() if k != "blocks.0.bias"}
    assert "missing tensors ['blocks.0.bias']" in find_problem(config, lacking)
    assert "lacks 'heads'" in find_problem({k: v for k, v in config.items() if k != "heads"}, tensors)


def test_a_row_that_is_not_listed_is_named(trained_project: Path) -> None:
    with pytest.raises(
        ValueError, match="benchmark_methods has no 'hydra'; it has eagle3, eagle2, eagle, medusa, lookahead"
    ):
        benchmark_methods.main("hydra")
