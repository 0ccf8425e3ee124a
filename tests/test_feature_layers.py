"""One extraction for drafts of several families: K feature layers are stored, and each draft reads its own of them.

`own` is a project that stores the three layers that EAGLE-3 reads, `union` one that stores those of a block draft too. Both
have the same target and answers, so that whatever EAGLE-3 makes of them must be equal to the bit.
"""

import json
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages import check_overfit, extract_hiddens, init_draft, replay_trees, train_draft
from stages.draft import supported_targets
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.hidden_states import format, reader
from stages.params import schema
from stages.params.tree_shape import TreeShape
from stages.target import chat_template, feature_layers, manifest
from tests.built_engines import build_engine
from tests.conftest import ROOT, edit_params
from tests.draft.slow_draft import scatter, small_target
from tests.sampled_rows import sampled_row, write_sampled

V, H, LAYERS = 40, 16, 9
EAGLE3, BLOCK = [2, 4, 6], [2, 3, 5, 6, 7]  # 2, n//2, n-3; after layers 1, 2, 4, 5, 6, as DFlash spreads five over nine
UNION = [2, 3, 4, 5, 6, 7]
PROMPT, ANSWER = 9, 40
TREES = [TreeShape.parse("t3_1_4"), TreeShape.parse("t4_3_12")]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target of nine blocks and its own greedy answers."""
    project = tmp_path_factory.mktemp("sampled")
    (project / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    edit_params(project, {
        "target": {"model": "tiny", "num_threads": 1},
        "sample_target": {"temperature": 0.0},
        "extract_hiddens": {"max_length": 60, "batch_tokens": 128},
        "init_draft": {"draft_vocab_size": 30, "fc_norm": True},
        "train_draft": {
            "ttt_steps": 4, "batch_tokens": 128, "learning_rate": 0.003, "checkpoints": {"e002": {"from": "e000", "epochs": 2}},
        },
        "check_overfit": {"steps": 20, "learning_rate": 0.01, "min_tau": 1.0},
        "replay_trees": {
            "checkpoints": ["e002"], "num_steps": [3, 4], "topk": [1, 3], "num_draft_tokens": [4, 12], "trace_trees": [],
        },
        "benchmark": {"checkpoints": ["e002"]},
        "benchmark_served": {"workloads": []},
    })  # fmt: skip
    with chdir(project):
        model = small_target(V, 1, eos_token_id=0, num_layers=LAYERS)
        scatter(model, 0.5, 1)
        model.save_pretrained("tiny")
        engine, draw = build_engine(model, [], []), torch.Generator().manual_seed(0)
        for split, count in {"train": 12, "eval": 4, "eval_t": 0}.items():
            rows = []
            for n in range(count):
                ids = torch.randint(3, V, (PROMPT,), generator=draw).tolist()
                answer = [token for step in engine.decode_plain(ids, ANSWER - n) for token in step.tokens]
                rows.append(sampled_row(f"{split}{n}.0", n, ids, answer))
            write_sampled(split, rows)
        Path("results").mkdir()
    return project


def describe(project: Path, layers: list[int] | None) -> manifest.TargetManifest:
    """Set target.feature_layers and write the manifest that prepare_target would."""
    edit_params(project, {"target": {"feature_layers": layers}})
    config = AutoModelForCausalLM.from_pretrained(project / "tiny").config
    with chdir(project):
        made = supported_targets.describe_target("tiny", None, config, Path("tiny"), layers)
        manifest.write_manifest(manifest.TARGET_FOLDER, made)
    return made


def train(project: Path) -> None:
    with chdir(project):
        extract_hiddens.main()
        init_draft.main()
        check_overfit.main()
        train_draft.main("e002")


@pytest.fixture(scope="module")
def projects(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both projects, with EAGLE-3's draft trained."""
    made = {}
    for name, layers in (("own", None), ("union", UNION)):
        made[name] = shutil.copytree(sampled, tmp_path_factory.mktemp(name) / "project")
        describe(made[name], layers)
        train(made[name])
    return made


def copied(project: Path, to: Path) -> Path:
    return shutil.copytree(project, to, ignore=shutil.ignore_patterns(".scratch"))


# --- what is stored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "dtype"), [(BLOCK, "fp8"), (UNION, "float32"), ([8], "bfloat16")])
def test_stored_features_are_the_hidden_states_of_transformers(
    sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, layers: list[int]
) -> None:
    """Each layer and the last hidden by value; the bytes of a token are said before the first row is read."""
    project = copied(sampled, tmp_path / "project")
    describe(project, layers)
    edit_params(project, {"extract_hiddens": {"dtype": dtype}})
    with chdir(project):
        extract_hiddens.main()
    k, itemsize = len(layers), {"float32": 4, "bfloat16": 2, "fp8": 1}[dtype]
    token = (k + 1) * H * itemsize + (4 * (k + 1) if dtype == "fp8" else 0) + 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"a token has features of {k} layers, the streams entering blocks {layers}, and its last hidden state: "
        f"{token} bytes in {dtype}"
    )
    assert f" tokens x {token} bytes = " in lines[1]
    model = AutoModelForCausalLM.from_pretrained(project / "tiny", dtype=torch.float32).eval()
    count = 0
    for split in ("train", "eval"):
        for row in reader.read_rows(project / "data/hiddens" / split):
            with torch.inference_mode():
                states = model(row.ids.long()[None], output_hidden_states=True).hidden_states
            expected = [states[i][0] for i in layers] + [states[-1][0]]
            found = [*row.features.split(H, dim=-1), row.last]
            assert len(found) == len(expected) == k + 1
            for mine, true in zip(found, expected, strict=True):
                scale = true.abs().amax(-1, keepdim=True) / 448
                bound = {"float32": true.abs() * 0, "bfloat16": true.abs() / 256}.get(dtype)
                bound = torch.maximum(true.abs() / 16, scale / 1024) if bound is None else bound
                assert ((mine - true).abs() <= bound + 1e-4 * scale * 448).all()
            count += 1
    assert count == 16
    tensors = load_file(next((project / "data/hiddens/eval").glob("*.safetensors")))
    assert tensors["features"].shape[1] == k * H and tensors["features"].dtype == format.DTYPES[dtype]
    assert ("features_scale" in tensors) == (dtype == "fp8")
    if dtype == "fp8":
        assert tensors["features_scale"].shape[1] == k


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_a_reader_of_three_layers_gets_what_a_folder_of_three_holds(
    sampled: Path, projects: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    """To the bit in every dtype, also of rows at random and of rows whose checksum was compared before."""
    for name, layers in (("own", None), ("union", UNION)):
        project = copied(sampled, tmp_path / name)
        describe(project, layers)
        edit_params(project, {"extract_hiddens": {"dtype": dtype}})
        with chdir(project):
            extract_hiddens.main()
    folders = [tmp_path / name / "data/hiddens/train" for name in ("own", "union")]
    layer_indices = feature_layers.locate_feature_layers(UNION, EAGLE3, "a draft")
    assert layer_indices == [0, 2, 4]
    own, union = reader.HiddenStatesReader(folders[0]), reader.HiddenStatesReader(folders[1], layer_indices)
    for number in [*range(len(own)), 0, 3]:
        mine, whole = (store.read_row(number, torch.float32) for store in (own, union))
        assert torch.equal(mine.features, whole.features) and mine.features.shape[1] == 3 * H
        assert torch.equal(mine.last, whole.last) and mine.features.dtype == whole.features.dtype
    both = zip(reader.read_rows(folders[0]), reader.read_rows(folders[1], feature_indices=layer_indices), strict=True)
    assert all(torch.equal(mine.features, whole.features) for mine, whole in both)


# --- what EAGLE-3 makes of it ---------------------------------------------------------------------------------------


def test_a_draft_that_starts_from_a_published_one_reads_its_layers(projects: dict[str, Path], tmp_path: Path) -> None:
    project = copied(projects["union"], tmp_path / "project")
    edit_params(project, {"init_draft": {"feature_layers": [3, 5, 7]}})
    with chdir(project):
        init_draft.main()
        shutil.copytree("drafts/e000/draft", "theirs")
        own = {"draft_vocab_size": None, "fc_norm": False, "feature_layers": None}
        edit_params(project, {"init_draft": own | {"from": "theirs"}})
        init_draft.main()
        configs = [json.loads((Path(folder) / "config.json").read_text()) for folder in ("drafts/e000/draft", "theirs")]
        assert configs[0] == configs[1] and eagle3_checkpoint.read_feature_layers(configs[0], LAYERS) == [3, 5, 7]
        edit_params(project, {"init_draft": {"feature_layers": EAGLE3}})
        with pytest.raises(ValueError, match=r"feature_layers is \[2, 4, 6\] while from names a published draft"):
            init_draft.main()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "read", "expected"),
    [(None, None, EAGLE3), (UNION, None, EAGLE3), ([3, 5, 8], None, [3, 5, 8]), (BLOCK, [3, 5, 7], [3, 5, 7])],
)
def test_a_draft_reads(
    sampled: Path, tmp_path: Path, stored: list[int] | None, read: list[int] | None, expected: list[int]
) -> None:
    project = copied(sampled, tmp_path / "project")
    made = describe(project, stored)
    edit_params(project, {"init_draft": {"feature_layers": read}})
    with chdir(project):
        p = schema.load_params()
        layers = init_draft.choose_feature_layers(p, made)
        config = init_draft.build_config_json(init_draft.infer_config(p, made), layers, made)
    assert eagle3_checkpoint.read_feature_layers(config, LAYERS) == expected
    assert ("eagle_config" in config) == (expected != EAGLE3)


def test_a_draft_whose_layers_are_no_longer_stored_is_refused_by_its_readers(
    projects: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "load_tokenizer", lambda *_: None)
    project = copied(projects["union"], tmp_path / "project")
    describe(project, BLOCK)
    message = (
        r"the draft of {} reads the residual streams entering blocks \[2, 4, 6\], the hidden states here are those of "
        r"\[2, 3, 5, 6, 7\], without 4; set target\.feature_layers to \[2, 3, 4, 5, 6, 7\]"
    )
    with chdir(project):
        for main, name in ((train_draft.main, "e000"), (replay_trees.main, "e002")):
            with pytest.raises(ValueError, match=message.format(name)):
                main("e002")
        with pytest.raises(ValueError, match=message.format("e000")):
            check_overfit.main()
