"""A project of a tiny random target of text, with its tokenizer and an eval split: what asking it needs, and no more."""

from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from stages import init_draft
from stages.draft import checkpoint, supported_targets
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.params import schema
from stages.params.data_sections import PromptSet
from stages.prompts import prompt_sets
from stages.prompts.prompt_sets import PromptProblem
from stages.target import manifest
from stages.toy import text_targets
from tests.conftest import EVAL, ROOT, edit_params
from tests.sampled_rows import sampled_row, write_sampled

SETS = ("mt_bench", "gsm8k", "humaneval", "alpaca", "math500")
EVAL_ROWS = 12
LAYERS = 4  # of the embedded target's seven: as many as have three different ones to tap
TREES = ["t3_1_4", "t3_2_6"]
WORKLOADS: dict[str, dict[str, Any]] = {
    "eval": {**EVAL, "num_prompts": 5, "max_new_tokens": 12},
    **{name: {**EVAL, "prompts": name, "num_prompts": 3, "max_new_tokens": 12} for name in SETS},
}


def make(project: Path) -> None:
    """Every file that prepare_prompts and benchmark read, but params.yaml's own prompts."""
    (project / "data").mkdir()
    (project / "data/prompt_sets").symlink_to(ROOT / "data/prompt_sets")
    (project / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    edit_params(project, {
        "target": {"model": "tiny", "num_threads": 1, "feature_layers": [1, 2, 3]},
        "benchmark": {"workloads": WORKLOADS, "torch_workloads": list(WORKLOADS), "checkpoints": ["e003"], "trees": TREES},
    })  # fmt: skip
    tokenizer = text_targets.build_tokenizer(iter(read_questions()))
    tokenizer.save_pretrained(project / "tiny")
    model = text_targets.build_model(tokenizer, 0)
    del model.model.layers[LAYERS:]
    model.config.num_hidden_layers, model.config.layer_types = LAYERS, model.config.layer_types[:LAYERS]
    model.save_pretrained(project / "tiny")
    with chdir(project):
        made = supported_targets.describe_target("tiny", None, AutoConfig.from_pretrained("tiny"), Path("tiny"), None)
        Path("artifacts/target").mkdir(parents=True)
        manifest.write_manifest(Path("artifacts/target"), made)
        edit_params(project, {"init_draft": {"draft_vocab_size": None}})
        draft, layers = init_draft._build_fresh_draft(
            schema.load_params(), made, torch.ones(made.vocab_size, dtype=torch.int64)
        )
        config = init_draft.build_config_json(draft.config, layers, made)
        eagle3_checkpoint.ROOT_FILES.write(checkpoint.locate_checkpoint("e003"), config, dict(draft.state_dict()))
        rows = [_eval_row(tokenizer, number, text) for number, text in enumerate(read_questions()[:EVAL_ROWS])]
        write_sampled("eval", rows)


def read_questions() -> list[str]:
    """Texts of the samples."""
    return [turn for name in SETS for problem in read_set(name) for turn in problem.turns]


def read_set(name: str) -> list[PromptProblem]:
    """Return a shipped sample."""
    file = str(ROOT / f"data/prompt_sets/{name}.jsonl")
    return prompt_sets.read_prompt_set(PromptSet.model_validate({"from": file, "format": name}))


def _eval_row(tokenizer: Any, number: int, text: str) -> dict[str, Any]:
    ids = tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    return sampled_row(f"row{number}.0", number, ids, [7, 8])
