"""Block drafts through train_draft: the slow draft's loss, segments that chain and resume to the bit, files that engines load."""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import extract_hiddens, init_draft, train_draft
from stages.data import row_lengths
from stages.draft import checkpoint
from stages.families.block import mask_token
from stages.families.block import objective as block_training
from stages.families.block.config import parse_block_config
from stages.families.block.files import Files
from stages.families.block.model import BlockDraft
from stages.families.block.objective import BlockTrainingObjective
from stages.hidden_states import reader
from stages.params import schema
from stages.params.families import BLOCKS, BlockSegment
from stages.runtime.distributed import RankContext
from stages.target import manifest
from stages.target.feature_layers import locate_feature_layers
from stages.training.packs import PackLoader, plan_epoch
from stages.training.trainer import Trainer, TrainingProgress
from tests.conftest import edit_params
from tests.draft.slow_block_draft import Document, block_losses
from tests.sampled_rows import sampled_row, write_sampled
from tests.target import chat_templates

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash", "layers": 2, "block_size": 4, "anchors": 5},
    "dflash2": {
        "method": "dflash2", "layers": 1, "block_size": 4, "anchors": 5, "conv_kernel_size": 3, "conv_group_size": 4,
        "selector_rank": 8, "selector_top_k": 6,
    },
    "dspark": {
        "method": "dspark", "layers": 1, "block_size": 3, "anchors": 6, "markov_rank": 8, "feature_layers": [1, 3], "decay": 2.0,
        "sliding_window": 8,
    },
}  # fmt: skip
CHECKPOINTS = {
    name: {**keys, "from": start if start == "e000" else f"{method}{start}", "epochs": epochs}
    for method, keys in METHODS.items()
    for name, start, epochs in (
        (f"{method}1", "e000", 1), (f"{method}8", "1", 7), (f"{method}_straight", "e000", 8),
    )
}  # fmt: skip
RESULTS = ("draft/model.safetensors", "draft/config.json", "state/optimizer.safetensors", "state/progress.json")


@pytest.fixture(scope="module")
def trained_project(shared_talking_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with every checkpoint of CHECKPOINTS, on a tiny random target; we stand in it."""
    project = tmp_path_factory.mktemp("blocks")
    for name in ("artifacts", "tiny"):
        (project / name).symlink_to(shared_talking_project / name)
    (project / "params.yaml").write_text((shared_talking_project / "params.yaml").read_text())
    edit_params(project, {
        "extract_hiddens": {"max_length": 60},
        "init_draft": {"draft_vocab_size": 90},
        "train_draft": {
            "checkpoints": {**CHECKPOINTS, "e003": {"from": "e000", "epochs": 1}}, "batch_tokens": 120, "packs_per_step": 3,
            "warmup_steps": 0, "learning_rate": 0.006, "horizon_epochs": 8,
        },
        "replay_trees": {"checkpoints": ["e003"]},
        "benchmark_served": {"checkpoints": ["e003"]},
        "check_overfit": {"min_tau": 1.0},
    })  # fmt: skip
    with chdir(project):
        vocabulary = manifest.read_manifest().vocab_size
        draw = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, vocabulary, (9,), generator=draw).tolist() for _ in range(14)]
        rows = [
            sampled_row(f"train{n}.0", n, prompt, (torch.arange(20 + n) * (1 + n % 3) % 37 + 3).tolist())
            for n, prompt in enumerate(prompts)
        ]
        for split, split_rows in {"train": rows, "eval": rows[:2], "eval_t": []}.items():
            write_sampled(split, split_rows)
        Path("results").mkdir()
        extract_hiddens.main()
        init_draft.main()
        for name in CHECKPOINTS:
            train_draft.main(name)
        yield project


@pytest.fixture
def copy(trained_project: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the project, to be in and to train in."""
    project = tmp_path / "copy"
    shutil.copytree(trained_project, project, symlinks=True)
    with chdir(project):
        yield project


def read_log(name: str) -> list[dict[str, Any]]:
    return json.loads(Path(f"results/train/{name}.json").read_text())["epochs"]


def read_files(name: str) -> dict[str, bytes]:
    return {part: (Path("drafts") / name / part).read_bytes() for part in RESULTS}


@pytest.mark.parametrize("method", METHODS)
def test_segments_are_one_run_to_the_bit_and_the_loss_falls(trained_project: Path, method: str) -> None:
    assert read_files(f"{method}8") == read_files(f"{method}_straight") != read_files(f"{method}1")
    log = read_log(f"{method}_straight")
    losses = [entry["loss"] for entry in log]
    assert max(losses[-3:]) < losses[0] - 0.25  # little: the random target's head is small and frozen
    assert {len(entry[key]) for entry in log for key in ("step_loss", "step_accuracy")} == {3}
    chained = [entry["loss"] for name in (f"{method}1", f"{method}8") for entry in read_log(name)]
    assert chained == losses


def build_trainer(name: str, dtype: str) -> tuple[Trainer, reader.HiddenStatesReader]:
    """A trainer as the stage's, of a draft with weights so large that each matters."""
    params, target = schema.load_params(), manifest.read_manifest()
    settings = params.train_draft.model_copy(update={"dtype": dtype})
    segment = settings.checkpoints[name]
    assert isinstance(segment, BlockSegment)
    config, _ = Files(BLOCKS["dflash"]).read_checked(checkpoint.locate_checkpoint(name), "a test")
    draft = BlockDraft(parse_block_config(config))
    draw = torch.Generator().manual_seed(8)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = 1 + 0.1 * noise if parameter.ndim == 1 and len(parameter) > 1 else 0.1 * noise
    layer_indices = locate_feature_layers(target.feature_layers, draft.config.feature_layers, "a test")
    objective = BlockTrainingObjective.of_segment(segment, draft.config.num_drafts, settings.seed)
    tables = manifest.read_embedding_and_head(target)
    ranks = RankContext(0, 1, "cpu")
    trainer = Trainer(draft, *tables, objective, block_training.compute_loss, settings, ranks, TrainingProgress({}))
    return trainer, reader.HiddenStatesReader(reader.TRAIN_FOLDER, layer_indices)


@pytest.mark.parametrize("method", METHODS)
def test_a_steps_loss_and_every_gradient_equal_the_slow_drafts(
    trained_project: Path, method: str, monkeypatch: Any
) -> None:
    """From stored rows through the loader and the trainer, whose optimizer is stopped before it updates."""
    trainer, hidden_states = build_trainer(f"{method}8", "float64")
    monkeypatch.setattr(row_lengths, "SHORTEST_CONTEXT", 4)  # or these short rows have one context
    plan = plan_epoch(hidden_states.lengths, trainer.settings, 0)[:1]
    loader = PackLoader(hidden_states, trainer.objective, trainer.ranks, trainer.dtype)
    (step,) = loader.load_steps([(0, plan)])
    packs = step.packs
    assert step.num_rows == sum(map(len, plan[0])) and step.ends_epoch
    assert len(packs) == 3 and any(len(pack.lengths) > 1 for pack in packs)
    trainer.schedule = SimpleNamespace(get_share=lambda step: 0.0)  # type: ignore[assignment]
    monkeypatch.setattr(trainer.optimizer, "step", lambda rate, clip: None)
    loss, matches, counts, candidates = trainer.train_step(packs)
    assert candidates.tolist() == [sum(pack.num_candidates for pack in packs)] * 3 and candidates[0] > counts[0]

    draft, objective = trainer.draft, trainer.objective.loss
    embedding, head = trainer.training_step.tables
    slow, by_context = [], defaultdict(list)
    for numbers, pack in zip(plan[0], packs, strict=True):
        rows = [hidden_states.read_row(n, torch.float32) for n in numbers]
        starts = [sum(pack.lengths[:n]) for n in range(len(rows))]
        assert len(pack.anchors) == METHODS[method]["anchors"]
        for anchor in pack.anchors.tolist():
            n = max(n for n, start in enumerate(starts) if start <= anchor)
            row = Document(rows[n].ids, rows[n].mask, rows[n].features.double(), rows[n].last.double())
            slow.append(block_losses(draft, embedding, head, row, anchor - starts[n], objective))
            by_context[max(0, (anchor - starts[n] + 1).bit_length() - 4)].append(slow[-1][0].is_match)
    total = sum(x.weight * x.loss for block in slow for x in block) / sum(x.weight for block in slow for x in block)
    gradients = torch.autograd.grad(total, list(draft.parameters()))
    for d in range(3):
        of_draft = [block[d] for block in slow if len(block) > d]
        assert counts[d] == len(of_draft) and matches[d] == sum(x.is_match for x in of_draft)
        assert float(loss[d]) == pytest.approx(float(sum(x.loss.detach() for x in of_draft)), rel=1e-9)
    found = {n: tuple(sums) for n, sums in enumerate(trainer.by_context[:, :-1].T.tolist()) if sums[1]}
    assert found == {n: (sum(matching), len(matching)) for n, matching in by_context.items()} and len(found) > 1
    means = (loss / counts).tolist()
    assert trainer.objective.combine_losses(means, counts.tolist()) == pytest.approx(float(total.detach()), rel=1e-9)
    for (name, _), gradient in zip(draft.named_parameters(), gradients, strict=True):
        found = trainer.optimizer.master_weights[name].grad  # summed over packs, in float32
        assert gradient.abs().max() > 0, name
        assert (found - gradient).norm() < 1e-6 * gradient.norm(), name


def test_a_run_stopped_after_an_epoch_goes_on_to_the_same_bits(copy: Path, monkeypatch: Any, capsys: Any) -> None:
    shutil.rmtree("drafts/dspark_straight")
    train_step = Trainer.train_step

    def stop(self: Trainer, packs: Any) -> Any:
        if self.epoch == 2:
            raise KeyboardInterrupt
        return train_step(self, packs)

    monkeypatch.setattr(Trainer, "train_step", stop)
    with pytest.raises(KeyboardInterrupt):
        train_draft.main("dspark_straight")
    assert not Path("drafts/dspark_straight").exists()
    monkeypatch.setattr(Trainer, "train_step", train_step)
    train_draft.main("dspark_straight")
    assert "resumed after epoch 2" in capsys.readouterr().out
    assert read_files("dspark_straight") == read_files("dspark8")


@pytest.mark.usefixtures("forked_stages")
def test_two_sharded_processes_learn_what_one_does(copy: Path) -> None:
    single = load_file("drafts/dspark1/draft/model.safetensors")
    (single_log,) = read_log("dspark1")
    shutil.rmtree("drafts/dspark1")
    edit_params(copy, {"train_draft": {"processes": 2, "parallel": "fsdp"}})
    command = [sys.executable, "-m", "stages.train_draft", "dspark1"]
    env = os.environ | {"PYTHONPATH": str(Path(train_draft.__file__).parents[1])}
    completed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (joint_log,) = read_log("dspark1")
    assert joint_log["loss"] == pytest.approx(single_log["loss"], rel=1e-4)
    assert joint_log["step_accuracy"] == pytest.approx(single_log["step_accuracy"], abs=0.02)
    joint = load_file("drafts/dspark1/draft/model.safetensors")
    assert joint.keys() == single.keys()
    for key, tensor in single.items():
        assert (joint[key] - tensor).norm() <= 2e-3 * tensor.norm() + 1e-4, key


class Tokens(SimpleNamespace):
    """A tokenizer that uses the ids below `size` but for `holes`."""

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(self.size) if i not in self.holes}

    def convert_ids_to_tokens(self, i: int) -> str:
        return f"t{i}"


def tokens(size: int, holes: tuple[int, ...] = (), pad: int | None = None, mask: int | None = None) -> Any:
    return Tokens(size=size, holes=holes, pad_token_id=pad, mask_token_id=mask, added_tokens_decoder={})


TARGET: Any = SimpleNamespace(vocab_size=20, eos_token_ids=[2, 3])


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (tokens(17, pad=0), 17),  # the first unused row, as Qwen3's 151669
        (tokens(20, (5, 9), pad=0), 5),
        (tokens(20, pad=0), 0),
        (tokens(20, pad=0, mask=7), 7),
    ],
)
def test_the_mask_token_is_one_that_no_text_uses(tokenizer: Any, expected: int) -> None:
    assert mask_token.choose_mask_token(tokenizer, TARGET) == expected


def test_a_target_without_a_spare_row_has_a_special_token_that_no_text_uses() -> None:
    """Bug: of SmolLM2, whose pad ends answers, no block draft could be trained, and its unused special tokens were refused."""
    tokenizer, eos = chat_templates.tokenizer("qwen2.5")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<repo_name>", "<|reserved_3|>", "<file_sep>"]})
    target: Any = SimpleNamespace(vocab_size=len(tokenizer), eos_token_ids=eos, image_token_id=None)
    names = ("<|reserved_3|>", "<file_sep>", "<repo_name>")
    reserved, last, other = map(tokenizer.convert_tokens_to_ids, names)
    assert mask_token.choose_mask_token(tokenizer, target) == reserved
    assert mask_token.choose_mask_token(tokenizer, target, held={reserved}) == last  # a training row has it
    with pytest.raises(ValueError, match="needs a mask token"):  # the chat template writes all others
        mask_token.choose_mask_token(tokenizer, target, held={reserved, last, other})


def test_blocks_that_reach_beyond_the_positions_of_the_draft_are_refused(copy: Path) -> None:
    edit_params(copy, {"train_draft": {"checkpoints": {
        "dflash1": {**CHECKPOINTS["dflash1"], "block_size": 3000}, "e003": {"from": "e000", "epochs": 1},
    }}})  # fmt: skip
    with pytest.raises(
        ValueError, match="blocks of rows of 42 tokens reach position 3042, expected at most e000's max"
    ):
        train_draft.main("dflash1")
