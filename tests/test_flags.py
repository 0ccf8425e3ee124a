"""docs/flags.md: what it names is there."""

import re
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from stages.params.schema import Params
from stages.params.tree_shape import TreeShape
from stages.published import comparison
from stages.published.tables import METRICS
from tests.conftest import ROOT

TEXT = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
SPANS = re.findall(r"`([^`]+)`", TEXT)
KEYS = sorted(
    {span.partition(":")[0] for span in SPANS if span.partition(".")[0] in Params.model_fields and "." in span}
)
DOCUMENTED = (  # in the seeds
    "--base-model-path", "--eagle-model-path", "--model-id", "--bench-name", "--mode", "--output-dir", "--temperature",
    "--max-new-token", "--total-token", "--depth", "--top-k", "--num-gpus-per-model", "--num-gpus-total",
    "--max-gpu-memory", "--seed", "--question-begin", "--question-end", "--no-metrics", "DATA_NAME_OR_PATH", "OUTPUT_DIR",
    "DATA_FORMAT", "DATA_SHARD_SIZE", "BASE_PORT", "TARGET_MODEL_NAME_OR_PATH", "DRAFT_MODEL_CONFIG_PATH",
    "TRAIN_DATA_PATH", "EVAL_DATA_PATH", "TRAIN_HIDDEN_PATH", "EVAL_HIDDEN_PATH", "MODEL_MAX_LENGTH", "CHAT_TEMPLATE_TYPE",
    "LM_HEAD_KEY", "RUN_NAME", "run_vllm_server.sh", "generate_data_for_target_model.sh", "train_eagle3_online.sh",
    "train_eagle3_vlm_online.sh", "train_eagle3_offline.sh", "train_eagle3_vlm_offline.sh", "tools/spec_benchmark.py",
    "fix_toon_data.py", "run_weather.sh", "epoch_3", "test_sclang_withbenchmark.py", "speculative-num-steps",
    "speculative-eagle-topk", "speculative-num-draft-tokens",
)  # fmt: skip


def section_inside(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """(the section an annotation holds, whether under names of the user's own), through dict[...], | None, Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for inner in get_args(annotation):
        model, _ = section_inside(inner)
        if model:
            return model, getattr(annotation, "__origin__", None) is dict
    return None, False


@pytest.mark.parametrize("key", KEYS)
def test_every_key_it_names_exists(key: str) -> None:
    model: type[BaseModel] | None = Params
    free = False
    for part in key.split("."):
        if free:
            free = False
            continue
        assert model is not None, key
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        assert part in fields, f"{key}: there is no {part}, only {', '.join(fields)}"
        model, free = section_inside(fields[part].annotation)


@pytest.mark.parametrize("flag", DOCUMENTED)
def test_every_documented_flag_has_a_row(flag: str) -> None:
    assert any(flag in line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| "))


def test_trees_measures_recipes_and_pages_it_names_are_there() -> None:
    trees = {name for span in SPANS for name in re.findall(r"t\d+_\d+_\d+", span)}
    assert {TreeShape.parse(name).name for name in trees} == trees and "t6_10_60" in trees
    assert {"tau_of_questions", "speedup_of_questions"} <= set(comparison.MEASURES)
    assert {"prefill_latency_s", "accept_rate", "e2e_latency_s", "tau", "output_tok_s"} <= set(METRICS)
    assert all((ROOT / "recipes" / f"{name}.yaml").exists() for name in ("angelslim-qwen3-8b", "qwen3-vl-2b-weather"))
    assert all((ROOT / "docs" / page).exists() for page in re.findall(r"\]\((\w+\.md)\)", TEXT))
