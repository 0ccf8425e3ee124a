"""The table of tests/test_reruns.py: edits of a finished project, and the stages each wakes. docs/reruns.md says it in prose."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from stages.params.schema import load_params
from tests.conftest import EVAL

# Lists short enough for a test, and not what a user has made of params.yaml today.
BASE = {
    "fix_data": {"raw": "data/raw/rows.jsonl"},
    "target": {"model": "local/mine", "chat_template": "chatml.jinja"},
    "train_draft": {
        "checkpoints": {
            "e003": {"from": "e000", "epochs": 3},
            "e009": {"from": "e003", "epochs": 6},
            "dflash9": {"from": "e000", "epochs": 9, "method": "dflash", "layers": 2, "block_size": 8, "anchors": 64},
        }
    },
    "import_draft": {"checkpoints": {}},
    "replay_trees": {"checkpoints": ["e003", "e009"]},
    "benchmark": {
        "workloads": {"eval": {**EVAL, "num_prompts": 12}},
        "torch_workloads": ["eval"],
        "checkpoints": ["e003", "e009"],
        "trees": ["t5_2_8"],
    },
    "benchmark_served": {
        "engines": ["sglang", "vllm"],
        "workloads": ["eval"],
        "checkpoints": ["e009", "dflash9"],
        "trees": ["t5_1_6", "t7_1_8"],
    },
}


def sets(**sections: Any) -> Callable[[Path], None]:
    """An edit of params.yaml: what is given, merged in; a function makes the new value from the old one."""

    def merge(old: Any, new: Any, resolved: Any) -> Any:
        if isinstance(new, dict) and isinstance(resolved, dict):
            return (old or {}) | {key: merge((old or {}).get(key), new[key], resolved.get(key)) for key in new}
        return new(resolved) if callable(new) else new

    def edit(root: Path) -> None:
        yaml = YAML(typ="safe")
        path = root / "params.yaml"
        params = merge(yaml.load(path), sections, load_params(path).model_dump(by_alias=True))
        yaml.dump(params, path)
        load_params(path)

    return edit


def comments(name: str) -> Callable[[Path], None]:
    """A comment added to a file."""

    def edit(root: Path) -> None:
        with (root / name).open("a", encoding="utf-8") as file:
            file.write("# a remark\n")

    return edit


def edits(name: str) -> Callable[[Path], None]:
    """Another constant in a file of code."""

    def edit(root: Path) -> None:
        with (root / name).open("a", encoding="utf-8") as file:
            file.write("ANOTHER_CONSTANT = 1\n")

    return edit


def remarks_everywhere(root: Path) -> None:
    """A comment, a docstring and a blank line in every file of code."""
    for file in (root / "stages").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        body = text.partition('"""')[2].partition('"""')[2] if text.startswith('"""') else text
        file.write_text(f'"""Another docstring."""\n\n\n# a remark\n{body}\n# a remark\n', encoding="utf-8")


def adds_row(root: Path) -> None:
    with (root / "data/raw/rows.jsonl").open("a") as file:
        file.write("{}\n")


def replaces_weights(root: Path) -> None:
    """Other weights of the same size in a local folder, under the same name."""
    (root / "local/mine/model.safetensors").write_text("others")


def adds(name: str) -> Callable[[list[str]], list[str]]:
    return lambda names: [*names, name]


@dataclass(frozen=True)
class Row:
    edit: str
    by: Callable[[Path], None]
    runs: str  # stages, * for any; "-" before those that stay asleep all the same
    back: str | None = None  # what runs when the edit is undone; None: not tried here, to save as much time again


PUBLISHED = {"theirs": {"model": "a/draft", "revision": None, "rope_theta": None}}
E012 = {"e012": {"from": "e009", "epochs": 3}}
NGRAM = {"lookup": {"model": "builtin/ngram"}}
RERUNS = [
    Row(
        "benchmark.trees: add t8_2_16",
        sets(benchmark={"trees": adds("t8_2_16")}),
        "benchmark@*-t8_2_16 report",
        back="report",  # which depends on results/cells, and DVC leaves the cells of a stage that is gone in there
    ),
    Row(
        "e012, from e009: in train_draft.checkpoints, replay_trees.checkpoints and benchmark.checkpoints",
        sets(
            train_draft={"checkpoints": E012},
            replay_trees={"checkpoints": adds("e012")},
            benchmark={"checkpoints": adds("e012")},
        ),
        "check_overfit@* train_draft@e012 replay_trees@e012 benchmark@*-e012-* report",
        back="report",
    ),
    Row(
        "a published draft: in import_draft.checkpoints, replay_trees.checkpoints and benchmark.checkpoints",
        sets(
            import_draft={"checkpoints": PUBLISHED},
            replay_trees={"checkpoints": adds("theirs")},
            benchmark={"checkpoints": adds("theirs")},
        ),
        "import_draft@theirs replay_trees@theirs benchmark@*-theirs-* report",
        back="report",
    ),
    Row(
        "n-gram lookup: in import_draft.checkpoints and benchmark.checkpoints, a shape of its own in benchmark.trees",
        sets(import_draft={"checkpoints": NGRAM}, benchmark={"checkpoints": adds("lookup"), "trees": adds("n3_1_8")}),
        "import_draft@lookup benchmark@*-lookup-* benchmark@*-n3_1_8 report",
    ),
    Row(
        "train_draft.muon_learning_rate",
        sets(train_draft={"muon_learning_rate": lambda old: old / 2}),
        "train_draft@* replay_trees@* benchmark@* benchmark_served@* report",
        back="",
    ),
    Row(
        "benchmark.workloads: another one, in benchmark.torch_workloads too",
        sets(benchmark={"workloads": {"chat": {**EVAL, "prompts": "mt_bench"}}, "torch_workloads": adds("chat")}),
        "prepare_prompts@chat benchmark@chat-* report",
        back="report",
    ),
    Row("data/prompt_sets/gsm8k.jsonl: a row, where no workload has it", comments("data/prompt_sets/gsm8k.jsonl"), ""),
    Row("sample_target.thinking", sets(sample_target={"thinking": True}), "* -fix_data -prepare_target"),
    Row("report.title", sets(report={"title": "another"}), "report", back=""),
    Row(
        "extract_hiddens.dtype",
        sets(extract_hiddens={"dtype": "fp8"}),
        "* -fix_data -prepare_target -sample_target -prepare_prompts@* -benchmark_served_baseline@*",
    ),
    Row("data/tables/weather.yaml", comments("data/tables/weather.yaml"), "* -prepare_target"),
    Row("other weights in the local folder target.model", replaces_weights, "* -fix_data"),
    Row("fix_data.raw: another row", adds_row, "* -prepare_target"),
    Row("a comment, a docstring, a blank line in every file of stages/", remarks_everywhere, ""),
    Row(
        "stages/engine/decode.py: a constant", edits("stages/engine/decode.py"), "* -fix_data -prepare_target", back=""
    ),
    Row(
        "stages/training/ttt.py: a constant of EAGLE-3's loss",
        edits("stages/training/ttt.py"),
        "check_overfit@* train_draft@e0* replay_trees@* benchmark@* benchmark_served@*-e009-* report",
    ),
    Row(
        "stages/families/block/loss.py: a constant of block drafts' loss",
        edits("stages/families/block/loss.py"),
        "check_overfit@* train_draft@dflash9 benchmark_served@*-dflash9-* report",
    ),
    Row(
        "stages/engines/sglang.py: a constant",
        edits("stages/engines/sglang.py"),
        "benchmark_served@sglang-* benchmark_served_baseline@sglang-* report",
    ),
    Row(  # bug: no option of the servers reran a baseline, which has them all
        "benchmark_served.servers: options of vllm",
        sets(benchmark_served={"servers": {"vllm": {"mem_fraction": 0.5}}}),
        "benchmark_served@vllm-* benchmark_served_baseline@vllm-* report",
    ),
    Row("stages/params/schema.py: another check", edits("stages/params/schema.py"), ""),
]
