"""The stages after sampling, on a tiny random target that sees: hidden states with pictures, and a draft trained on them."""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stages import (
    benchmark,
    benchmark_served,
    check_overfit,
    init_draft,
    prepare_prompts,
    replay_trees,
    time_cycles,
    train_draft,
)
from stages.cells.cell import Cell
from stages.draft import supported_targets
from stages.hidden_states import reader
from stages.target import loading, manifest
from stages.target.vision import CachedImageProcessor
from tests.built_engines import build_engine
from tests.conftest import EVAL, ROOT, edit_params
from tests.engines.engine_double import FORK_VARIABLE
from tests.opened.declared import undeclared
from tests.opened.watch import opening
from tests.sampled_rows import sampled_row, write_sampled
from tests.target.multimodal_documents import DOCUMENTS, TAPPED, TOKEN, alone, document
from tests.target.test_target_forward import H, save_random_model
from tests.test_extract_hiddens import files, run
from tests.torch_cells import read_line

ROOM = 12
SMALL: dict[str, Any] = {
    "target": {"model": "tiny", "num_threads": 1},
    "extract_hiddens": {"max_length": 100, "batch_tokens": 60, "shard_mib": 1},
    "init_draft": {"draft_vocab_size": 60},
    "check_overfit": {"steps": 60, "min_tau": 1.5},
    "train_draft": {"ttt_steps": 3, "batch_tokens": 120, "checkpoints": {"e003": {"from": "e000", "epochs": 3}}},
    "replay_trees": {
        "checkpoints": ["e003"],
        "num_steps": [1, 3],
        "topk": [1, 2],
        "num_draft_tokens": [4, 6],
        "trace_trees": ["t3_2_6"],
    },
    "time_cycles": {
        "num_steps": [1, 3],
        "topk": [1, 2, 3],
        "num_draft_tokens": [2, 4, 6],
        "context": 20,
        "warmup": 0,
        "cycles": 1,
        "repeats": 2,
    },
    "benchmark": {
        "workloads": {"eval": {**EVAL, "num_prompts": 8, "max_new_tokens": ROOM}},
        "checkpoints": ["e003"],
        "trees": ["t3_1_4", "t3_2_6"],
    },
    "benchmark_served": {
        "checkpoints": ["e003"],
        "trees": ["t3_2_6"],
        "workloads": ["eval"],
        "servers": {"sglang": {"command": [sys.executable, "-m", "tests.engines.engine_double", "serve"]}},
    },
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sampled_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project up to its sampled rows: answers of noise to train on, the target's own to evaluate."""
    project = tmp_path_factory.mktemp("pictured")
    (project / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    edit_params(project, SMALL)
    save_random_model(project / "tiny", "qwen3 vl", False)
    sizes = {"shortest_edge": 64, "longest_edge": 64 * 64}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=sizes).save_pretrained(project / "tiny")
    with chdir(project):
        described = supported_targets.describe_target(
            "tiny", None, AutoConfig.from_pretrained("tiny"), Path("tiny"), None
        )
    for folder in ("artifacts/target", "data/sampled", "data/fixed/images", "results"):
        (project / folder).mkdir(parents=True)
    manifest.write_manifest(project / "artifacts/target", described)
    model, eyes = (
        loading.load_target(str(project / "tiny"), "float32", "cpu"),
        CachedImageProcessor(str(project / "tiny"), False),
    )
    rng = random.Random(0)
    for split, count in {"train": 14, "eval": 8, "eval_t": 0}.items():
        rows = [one_row(project, split, n, rng) for n in range(count)]
        if split == "train":
            # The same question about another picture; and an answer that names a picture there is none of.
            rows += [
                {**rows[0], "id": "train.other", "images": [draw(project / "data/fixed/images/other.png", (2, 3), 99)]}
            ]
            rows += [{**rows[1], "id": "train.names", "answer_ids": [7, TOKEN, 8]}]
        else:
            for row in rows:
                seen = eyes.load_patches([str(project / path) for path in row["images"]]) if row["images"] else None
                decoding = build_engine(model, [5], TAPPED).decode_plain(row["prompt_ids"], ROOM, seen)
                row["answer_ids"] = [token for step in decoding for token in step.tokens]
        write_sampled(split, rows, project)
    return project


def one_row(project: Path, split: str, number: int, rng: random.Random) -> dict[str, Any]:
    shape = DOCUMENTS[number % len(DOCUMENTS)]
    ids, _ = document(shape, rng.randrange(10**6))
    paths = [
        draw(project / f"data/fixed/images/{split}-{number}-{i}.png", size, rng.randrange(10**6))
        for i, size in enumerate(shape[0])
    ]
    answer = [rng.randrange(7, 80) for _ in range(rng.randrange(5, 14))]
    return sampled_row(f"{split}.{number}", number, ids.tolist(), answer, finish_reason="stop", images=paths or None)


def draw(path: Path, pieces: tuple[int, int], seed: int) -> str:
    """A picture of noise, of so many rows and columns of pieces, 8 points each."""
    noise = np.random.default_rng(seed).integers(0, 256, (8 * pieces[0], 8 * pieces[1], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return f"data/fixed/images/{path.name}"


@contextmanager
def declared(stage: str) -> Iterator[None]:
    """Assert that what is opened in the block is declared in dvc.yaml, the pictures among it.

    Bug: the pictures were a dependency of sample_target alone, and six other stages read them.
    """
    with opening(Path()) as opened:
        yield
    real = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"][stage]
    assert not undeclared(opened, real.get("do", real), ["tiny"]), stage
    SAW[stage] = any(file.startswith("data/fixed/images/") for file in opened)


SAW: dict[str, bool] = {}  # stage -> whether it opened a picture


@pytest.fixture(scope="module")
def extracted_files(sampled_project: Path) -> dict[str, bytes]:
    with chdir(sampled_project), declared("extract_hiddens"):
        run(sampled_project)
    return files(sampled_project)


@pytest.fixture
def project(sampled_project: Path, tmp_path: Path) -> Path:
    for name in ("artifacts", "tiny"):
        (tmp_path / name).symlink_to(sampled_project / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/fixed").symlink_to(sampled_project / "data/fixed")
    (tmp_path / "data/sampled").symlink_to(sampled_project / "data/sampled")
    (tmp_path / "params.yaml").write_text((sampled_project / "params.yaml").read_text())
    (tmp_path / "results").mkdir()
    return tmp_path


def sampled(project: Path, split: str) -> dict[str, dict[str, Any]]:
    table = pl.read_parquet(project / f"data/sampled/{split}/*.parquet")
    return {row["id"]: row for row in table.to_dicts()}


def test_rows_are_those_of_transformers_alone(sampled_project: Path, extracted_files: dict[str, bytes]) -> None:
    model, eyes = (
        loading.load_target(str(sampled_project / "tiny"), "float32", "cpu"),
        CachedImageProcessor(str(sampled_project / "tiny"), False),
    )
    for split in ("train", "eval"):
        sampled_rows = sampled(sampled_project, split)
        rows = list(reader.read_rows(sampled_project / "data/hiddens" / split))
        assert sorted(r.id for r in rows) == sorted(set(sampled_rows) - {"train.names"})
        for row in rows:
            one = sampled_rows[row.id]
            assert row.ids.tolist() == one["prompt_ids"] + one["answer_ids"]
            seen = eyes.load_patches([str(sampled_project / path) for path in one["images"]]) if one["images"] else None
            expected = alone(model, row.ids.long(), seen)
            torch.testing.assert_close(row.features, expected["features"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(row.last, expected["last"], rtol=1e-5, atol=1e-5)
            assert row.image_token_mask is not None and torch.equal(row.image_token_mask, row.ids == TOKEN)
            assert row.image_embeddings is not None
            torch.testing.assert_close(
                row.image_embeddings, expected["embeds"][row.image_token_mask], rtol=1e-5, atol=1e-5
            )
            assert row.positions is not None and int(row.positions.max()) < len(row.ids)
    report = json.loads((sampled_project / "results/hiddens_report.json").read_text())
    assert report["dropped"] == {"longer than max_length": 0, "a picture's token in the answer": 1}
    assert report["rows_in"] == 24 and report["rows_out"] == 23
    size = sum(len(data) for name, data in extracted_files.items() if name.endswith(".safetensors"))
    pieces = sum(
        int((r.ids == TOKEN).sum())
        for s in ("train", "eval")
        for r in reader.read_rows(sampled_project / "data/hiddens" / s)
    )
    by_hand = report["tokens"] * (4 * H * 4 + 4 + 12 + 2 / 8) + pieces * H * 4
    assert report["bytes"] == pytest.approx(by_hand, abs=1) and size == pytest.approx(by_hand, abs=2 * 1000)


def test_our_own_folder_is_imported(project: Path, sampled_project: Path, extracted_files: dict[str, bytes]) -> None:
    """To the bit, pictures and all, also of two rows whose tokens are alike; rounded as extraction itself rounds."""
    run(project, dtype="fp8", **{"import": str(sampled_project / "data/hiddens")})
    imported = files(project)
    run(project, dtype="fp8", **{"import": None})
    assert files(project) == imported != extracted_files


@pytest.fixture(scope="module")
def trained_project(sampled_project: Path, extracted_files: dict[str, bytes]) -> Path:
    with chdir(sampled_project):
        with declared("init_draft"):
            init_draft.main()
        with declared("check_overfit"):
            check_overfit.main()
        with declared("train_draft"):
            train_draft.main("e003")
    return sampled_project


def test_a_draft_is_trained_replayed_and_decoded(
    trained_project: Path, torch_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage to the benchmarks; what is decoded live, by a server too, is what replay says, and what the target says."""
    with chdir(trained_project):
        config = json.loads(Path("drafts/e000/draft/config.json").read_text())
        assert config["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        with declared("replay_trees"):
            replay_trees.main("e003")
        with declared("prepare_prompts"):
            prepare_prompts.main("eval")
        replayed = pl.read_csv("results/replay/e003.csv")
        for tree, (steps, topk, tokens) in {"t3_1_4": (3, 1, 4), "t3_2_6": (3, 2, 6)}.items():
            with declared("benchmark"):
                benchmark.main("eval", "e003", tree)
            line = read_line("eval", "e003", tree)
            assert line.row.identical_share == 1.0
            (known,) = replayed.filter(num_steps=steps, topk=topk, num_draft_tokens=tokens).to_dicts()
            assert known["accepted"] == sum(r.accepted for r in line.point.requests)
            assert known["cycles"] == sum(r.cycles for r in line.point.requests)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the double's
        monkeypatch.setenv(FORK_VARIABLE, torch_server)
        with declared("benchmark_served"):
            benchmark_served.main("sglang", "eval", "e003", "t3_2_6")
        (point,) = Cell.read("sglang", "eval", "e003", "t3_2_6").points
        assert not any(r["failed"] for r in point["requests"])
        assert [point["acceptance"][k] for k in ("cycles", "accepted")] == [known[k] for k in ("cycles", "accepted")]
        inside = pl.read_csv("results/replay/e003.inside.csv", infer_schema_length=None).filter(by="row")
        assert [inside[k].sum() for k in ("cycles", "accepted")] == [known[k] for k in ("cycles", "accepted")]
        with declared("time_cycles"):
            time_cycles.main("torch", "e000")
        assert len(json.loads(Path("results/cost/torch-e000.json").read_text())["grids"][0]["grid"]) == 11
    log = json.loads((trained_project / "results/train/e003.json").read_text())["epochs"]
    assert log[-1]["loss"] < log[0]["loss"]
    assert {stage for stage, saw in SAW.items() if saw} == {"extract_hiddens", "benchmark", "benchmark_served"}


def test_a_block_draft_is_trained_replayed_and_decoded(
    project: Path, sampled_project: Path, extracted_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its positions have one axis: they count tokens, those of pictures too."""
    monkeypatch.chdir(project)
    (project / "data/hiddens").mkdir()
    for split, learned in {"train": "eval", "eval": "eval", "eval_t": "eval_t"}.items():  # else it learns noise
        (project / "data/hiddens" / split).symlink_to(sampled_project / "data/hiddens" / learned)
    block = {"from": "e000", "epochs": 20, "method": "dflash", "layers": 1, "block_size": 4, "anchors": 16}
    edit_params(project, {
        "train_draft": {"learning_rate": 0.01, "checkpoints": {"e003": {"from": "e000", "epochs": 3}, "f003": block}},
        "replay_trees": {"checkpoints": ["f003"]}, "benchmark": {"checkpoints": ["f003"]},
    })  # fmt: skip
    for stage in (init_draft, check_overfit):
        stage.main()
    train_draft.main("f003")
    assert "mrope_section" not in json.loads(Path("drafts/f003/draft/config.json").read_text())["rope_parameters"]
    replay_trees.main("f003")
    prepare_prompts.main("eval")
    benchmark.main("eval", "f003", "t3_1_4")
    line = read_line("eval", "f003", "t3_1_4")
    (known,) = pl.read_csv("results/replay/f003.csv").filter(num_steps=3, topk=1, num_draft_tokens=4).to_dicts()
    assert known["accepted"] == sum(r.accepted for r in line.point.requests) > 0 and line.row.identical_share == 1.0
    assert known["cycles"] == sum(r.cycles for r in line.point.requests)


def test_online_the_trainer_shows_the_pictures_itself(project: Path, trained_project: Path) -> None:
    """Nothing of training rows is stored but tokens, and the draft learns the same, but for how sums round."""
    learned = load_file(trained_project / "drafts/e003/draft/model.safetensors")
    tau = json.loads((trained_project / "results/train/e000.overfit.json").read_text())["tau"]
    run(project, online=True)
    assert not any(row.features.shape[1] for row in reader.read_rows(project / "data/hiddens/train"))
    with chdir(project):
        init_draft.main()
        with declared("check_overfit"):
            check_overfit.main()
        with declared("train_draft"):
            train_draft.main("e003")
    assert SAW["train_draft"]
    assert json.loads((project / "results/train/e000.overfit.json").read_text())["tau"] == pytest.approx(tau, rel=0.1)
    for name, tensor in load_file(project / "drafts/e003/draft/model.safetensors").items():
        assert (tensor.float() - learned[name].float()).norm() <= 1e-3 * learned[name].float().norm(), name
