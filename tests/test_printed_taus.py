"""Given weights have the same tau everywhere: the shipped target and a draft of it, by the torch engine and by replay.

Training rounds differently on each kind of CPU, decoding must not show it in a printed digit. The taus in
tests/shipped_draft/taus.json were recorded on an AMD EPYC; docs/LOG.md says where else this test has passed.

    python -m tests.test_printed_taus drafts/e009 data/sampled/eval     # records again, from a run of the default parameters
"""

import json
import shutil
import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from stages import extract_hiddens, import_draft, prepare_target, replay_trees
from stages.cells import replay_records
from stages.cells.replay_records import ReplayedTree
from stages.data import conversations
from stages.engine.decode import Engine
from stages.families import family
from stages.params import schema
from stages.params.tree_shape import TreeShape
from stages.target import loading as target_loading
from stages.target import manifest
from stages.trees.accept_length import compute_tau
from tests.built_engines import build_engine
from tests.conftest import ROOT, edit_params
from tests.sampled_rows import sampled_row, write_sampled

SHIPPED = ROOT / "tests/shipped_draft"
TREES = ["t8_1_9", "t5_1_6", "t5_2_8", "t8_2_16", "t8_3_16", "t5_4_16", "t10_2_32", "t10_3_32"]
NUM_PROMPTS = 2
MAX_NEW_TOKENS = 120


def measure(project: Path, prompts: list[list[int]]) -> dict[str, list[str]]:
    """Return each tree's tau of the engine and of replay, as tables print them."""
    shutil.copy(ROOT / "params.yaml", project)
    shutil.copytree(ROOT / "data/targets", project / "data/targets")
    (project / "data/raw").mkdir()
    (project / "data/raw/weather_toon.jsonl").touch()
    shutil.copytree(SHIPPED, project / "shipped")
    edit_params(project, {
        "train_draft": {"checkpoints": {}},
        "import_draft": {
            "checkpoints": {"shipped": {"model": "shipped", "revision": None, "rope_theta": None}},
        },
        "replay_trees": {
            "checkpoints": ["shipped"], "num_steps": [5, 8, 10], "num_draft_tokens": [8, 16, 32], "trace_trees": [],
        },
        "benchmark": {"checkpoints": ["shipped"], "trees": TREES},
        "benchmark_served": {"checkpoints": ["shipped"]},
    })  # fmt: skip
    with chdir(project):
        prepare_target.main()
        import_draft.main("shipped")
        params, made = schema.load_params(), manifest.read_manifest()
        torch.set_num_threads(params.target.num_threads)
        draft = family.load_draft(params, "shipped", made, torch.empty(0), torch.float32).module
        model = target_loading.load_target(str(manifest.resolve_weights_folder(made)), "float32", "cpu")
        engine = build_engine(model, made.eos_token_ids, made.feature_layers, draft)
        answers = [
            [token for step in engine.decode_plain(ids, MAX_NEW_TOKENS) for token in step.tokens] for ids in prompts
        ]
        write_answers(prompts, answers, made.eos_token_ids)
        extract_hiddens.main()
        replay_trees.main("shipped")
        replayed = {tree.shape: tree.tau for tree in replay_records.select_temperature(ReplayedTree.read("shipped"), 0)}
        shapes = {name: TreeShape.parse(name) for name in TREES}
        decoded = {name: decoded_tau(engine, shape, prompts, answers) for name, shape in shapes.items()}
        return {name: [f"{decoded[name]:.2f}", f"{replayed[shape]:.2f}"] for name, shape in shapes.items()}


def write_answers(prompts: list[list[int]], answers: list[list[int]], end: list[int]) -> None:
    rows = [
        sampled_row(f"row{number}.0", number, ids, answer, finish_reason="stop" if answer[-1] in end else "length")
        for number, (ids, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    for split, chosen in (("train", rows), ("eval", rows), ("eval_t", [])):
        write_sampled(split, chosen)


def decoded_tau(engine: Engine, tree: TreeShape, prompts: list[list[int]], answers: list[list[int]]) -> float:
    cycles, accepted = [], []
    for ids, answer in zip(prompts, answers, strict=True):
        steps = list(engine.decode_speculative(ids, MAX_NEW_TOKENS, tree))
        assert [token for step in steps for token in step.tokens] == answer
        cycles.append(len(steps) - 1)
        accepted.append(sum(step.num_accepted for step in steps))
    return compute_tau(np.array(accepted), np.array(cycles))


def test_taus_are_the_recorded_ones_to_the_printed_digit(tmp_path: Path) -> None:
    recorded = json.loads((SHIPPED / "taus.json").read_text())
    assert measure(tmp_path, recorded["prompts"]) == recorded["taus"]


def record(draft: Path, answers: Path) -> None:
    """Keep a draft in half of its bytes, and what it accepts."""
    tensors = load_file(draft / "draft/model.safetensors")
    halved = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in tensors.items()}
    save_file(halved, SHIPPED / "model.safetensors", {"format": "pt"})
    shutil.copy(draft / "draft/config.json", SHIPPED)
    table = conversations.read_table(answers, conversations.SAMPLED_SCHEMA, "sample_target")
    prompts = table["prompt_ids"].to_list()[:NUM_PROMPTS]
    with TemporaryDirectory() as folder:
        found = {"prompts": prompts, "taus": measure(Path(folder), prompts)}
    (SHIPPED / "taus.json").write_text(json.dumps(found) + "\n")
    print(found["taus"])


if __name__ == "__main__":
    record(*map(Path, sys.argv[1:]))
