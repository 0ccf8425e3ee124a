"""params.yaml, typed and strict: one section, one frozen class (stages/params). No torch, no defaults.

    python -m stages.params.schema        # check the whole file, as `make run` does before anything starts

Every stage reads its parameters through `load_params()`, which checks the *whole* file: DVC drops keys that are not
strings without a word, so a misspelt section would otherwise vanish from the graph (research/dvc_prefect.md, 1).
This file and the sections are in no stage's `deps`: DVC tracks the values, and the code below holds none.
"""

import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator
from ruamel.yaml.error import YAMLError

from stages.params import yaml_text
from stages.params.benchmark_sections import Benchmark, BenchmarkServed
from stages.params.data_sections import OWN_PROMPTS, FixData, PreparePrompts, SampleTarget
from stages.params.draft_sections import CheckOverfit, ImportDraft, InitDraft, TrainDraft
from stages.params.error_messages import explain_error, explain_old_keys, explain_yaml
from stages.params.methods_section import BenchmarkMethods, DynamicRow, MethodRow, StaticRow
from stages.params.recipe import Recipe
from stages.params.schedule import Schedule
from stages.params.section import PARAMS_FILE, ROOT_CHECKPOINT, Section, Text, get_named
from stages.params.target_sections import ExtractHiddens, PrepareTarget, Target
from stages.params.tree_sections import ReplayTrees, TimeTrees, TreeShape


class Report(Section):
    title: Text


class Params(Section):
    target: Target
    prepare_target: PrepareTarget
    fix_data: FixData
    sample_target: SampleTarget
    extract_hiddens: ExtractHiddens
    init_draft: InitDraft
    check_overfit: CheckOverfit
    train_draft: TrainDraft
    import_draft: ImportDraft
    replay_trees: ReplayTrees
    time_trees: TimeTrees
    prepare_prompts: PreparePrompts
    benchmark: Benchmark
    benchmark_served: BenchmarkServed
    benchmark_methods: BenchmarkMethods
    report: Report
    schedule: Schedule

    @model_validator(mode="after")
    def sections_agree(self) -> "Params":
        trained, imported = self.train_draft.checkpoints, self.import_draft.checkpoints
        if taken := [name for name in imported if name in trained or name == ROOT_CHECKPOINT]:
            raise ValueError(f"import_draft.checkpoints.{taken[0]} is made by another stage; choose another name")
        lists = {
            "replay_trees.checkpoints": self.replay_trees.checkpoints,
            "benchmark.checkpoints": self.benchmark.checkpoints,
            "benchmark_served.checkpoints": self.benchmark_served.checkpoints
            if self.benchmark_served.workloads
            else [],
        }
        for key, names in {**lists, "time_trees.checkpoints": self.time_trees.checkpoints}.items():
            for name in names:
                if name in trained and (rival := trained[name].rival):
                    raise ValueError(
                        f"{key}: {name!r} is of {rival}, expected checkpoints of EAGLE-3; name it in benchmark_methods.with_draft"
                    )
        for key, names in lists.items():
            for name in names:
                if name not in trained and name not in imported:
                    known = ", ".join([*trained, *imported])
                    raise ValueError(
                        f"{key}: {name!r} is not trained, expected some of {known}; "
                        "correct it, or add it to train_draft.checkpoints or import_draft.checkpoints"
                    )
        for name in self.time_trees.checkpoints:
            if name not in (timeable := [ROOT_CHECKPOINT, *trained, *imported]):
                raise ValueError(
                    f"time_trees.checkpoints: {name!r} is none, expected some of {', '.join(timeable)}; correct it. "
                    f"{ROOT_CHECKPOINT} costs what every trained checkpoint does"
                )
        for name in self.benchmark_served.workloads:
            if name not in self.benchmark.workloads:
                raise ValueError(
                    f"benchmark_served.workloads: {name!r} is none, expected some of {', '.join(self.benchmark.workloads)}; "
                    "correct it, or add it to benchmark.workloads"
                )
        if self.benchmark.num_gpus_per_model > 1 and not self.target.device.startswith("cuda"):
            raise ValueError(
                f"benchmark.num_gpus_per_model is {self.benchmark.num_gpus_per_model} with target.device {self.target.device}, "
                "expected 1: only GPUs hold a part of a target each; set target.device to cuda"
            )
        if not self.benchmark.torch_workloads and not self.benchmark_served.workloads:
            raise ValueError(
                "benchmark.torch_workloads and benchmark_served.workloads are both [], expected a workload in one of them: there would "
                "be nothing to report"
            )
        for name, workload in self.benchmark.workloads.items():
            if workload.prompts not in OWN_PROMPTS | set(self.prepare_prompts.sets):
                known = ", ".join([*sorted(OWN_PROMPTS), *self.prepare_prompts.sets])
                raise ValueError(
                    f"benchmark.workloads.{name}.prompts is {workload.prompts!r}, expected one of {known}; correct it, or add "
                    "the set to prepare_prompts.sets"
                )
            asked = self.prepare_prompts.sets.get(workload.prompts)
            if workload.grade and not (asked and asked.can_be_graded):
                raise ValueError(
                    f"benchmark.workloads.{name}.grade is true with prompts: {workload.prompts}, expected a set of format gsm8k, "
                    "humaneval or math500: no other says what is right. Set grade to false"
                )
        self._rows_agree()
        if self.check_overfit.min_tau > self.train_draft.ttt_steps + 1:
            raise ValueError(
                f"check_overfit.min_tau {self.check_overfit.min_tau} can't be reached: a chain of train_draft.ttt_steps = "
                f"{self.train_draft.ttt_steps} drafts accepts at most {self.train_draft.ttt_steps + 1}; lower it"
            )
        deepest = max(
            self.train_draft.ttt_steps,
            *self.replay_trees.num_steps,
            *self.time_trees.num_steps,
            *(
                TreeShape.parse(tree).num_steps
                for tree in [
                    *self.replay_trees.trace_trees,
                    *self.benchmark.trees,
                    *self.benchmark_served.trees,
                    *(row.tree for row in self.benchmark_methods.with_draft.values() if isinstance(row, DynamicRow)),
                ]
            ),
        )
        if self.init_draft.sliding_window is not None and self.init_draft.sliding_window < deepest:
            raise ValueError(
                f"init_draft.sliding_window is {self.init_draft.sliding_window}, expected at least the most steps asked for, {deepest}: a step "
                "would not see its own first; raise it (thousands are usual)"
            )
        return self

    def _rows_agree(self) -> None:
        """Of the table of methods: raises ValueError where a row names what isn't there, or another method's."""
        table, trained = self.benchmark_methods, self.train_draft.checkpoints
        rows = {**table.with_draft, **table.without_draft}
        if rows and table.workload not in self.benchmark.torch_workloads:
            raise ValueError(
                f"benchmark_methods.workload is {table.workload!r}, expected one of benchmark.torch_workloads, "
                f"{', '.join(self.benchmark.torch_workloads) or 'which is []'}; correct it, or add it there"
            )
        lengths = self.benchmark.workloads[table.workload].max_new_tokens if rows else None
        if isinstance(lengths, list):
            raise ValueError(
                f"benchmark_methods.workload is {table.workload!r}, whose max_new_tokens is a sweep, {lengths}; expected one "
                "number: methods answer each question once; name a workload with one, or write it so"
            )
        if twice := sorted(set(table.with_draft) & set(table.without_draft)):
            raise ValueError(f"benchmark_methods: {twice[0]} is in with_draft and in without_draft; rename one")
        for name, row in table.with_draft.items():
            key = f"benchmark_methods.with_draft.{name}"
            wanted = "eagle" if row.method == "eagle2" else row.method
            kinds = {c: segment.rival or "eagle3" for c, segment in trained.items()}
            kinds |= dict.fromkeys([ROOT_CHECKPOINT, *self.import_draft.checkpoints], "eagle3")
            if kinds.get(row.checkpoint) != wanted:
                known = ", ".join(c for c, kind in kinds.items() if kind == wanted) or "none yet"
                found = f"of {kinds[row.checkpoint]}" if row.checkpoint in kinds else "no checkpoint"
                more = "" if wanted == "eagle3" else f" {{from: {ROOT_CHECKPOINT}, epochs: 9, method: {wanted}, ...}}"
                raise ValueError(
                    f"{key}.checkpoint {row.checkpoint!r} is {found}, expected one of {wanted} ({known}); correct it, or add "
                    f"one to train_draft.checkpoints{more}"
                )
            if isinstance(row, StaticRow):
                deepest = (row.checkpoint in trained and trained[row.checkpoint].width) or self.train_draft.ttt_steps
                if row.depth > deepest:
                    what = f"the heads of {row.checkpoint}" if row.method == "medusa" else "train_draft.ttt_steps"
                    raise ValueError(
                        f"{key}.depth is {row.depth}, expected at most {deepest}, {what}: deeper guesses are not measured; "
                        "lower it"
                    )

    def method_row(self, name: str) -> MethodRow:
        """Of the table of methods. Raises ValueError naming those that there are."""
        table = self.benchmark_methods
        return get_named({**table.with_draft, **table.without_draft}, name, "benchmark_methods")

    def made_by(self, checkpoint: str) -> str:
        """The stage that makes a checkpoint's draft."""
        if checkpoint == ROOT_CHECKPOINT:
            return "init_draft"
        return f"{'import' if checkpoint in self.import_draft.checkpoints else 'train'}_draft@{checkpoint}"

    def alike(self, one: str, other: str) -> bool:
        """Whether two checkpoints' drafts have the same shapes: all that training makes of e000 have its own."""
        return one == other or not {one, other} & set(self.import_draft.checkpoints)


def read_recipe(path: Path) -> tuple[Recipe | None, dict[str, dict[str, Any]]]:
    """A recipe's block about itself, where it has one, and its sections of params.yaml.

    Raises:
        ValueError: naming the file, what was expected and what to do.
    """
    try:
        found = yaml_text.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} not found; correct its name") from None
    except (YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(keys, dict) for keys in found.values()):
        raise ValueError(f"{path}: expected sections with keys, as params.yaml has them; found {found!r:.60}")
    about = found.pop("recipe", None)
    _check_no_old_keys(path, found)
    try:
        return None if about is None else Recipe.model_validate(about), found
    except ValidationError as error:
        problems = "\n".join(f"  recipe.{explain_error(e, Recipe)}" for e in error.errors(include_url=False))
        raise ValueError(f"{path} has {error.error_count()} problem(s) to correct:\n{problems}") from None


def _check_no_old_keys(path: Path, sections: dict[str, Any]) -> None:
    """Raise ValueError naming every key of an earlier version, and its new name."""
    if renamed := explain_old_keys(sections):
        problems = "\n".join(f"  {line}" for line in renamed)
        raise ValueError(f"{path} has {len(renamed)} key(s) of an earlier version:\n{problems}")


def load_params(path: Path = PARAMS_FILE) -> Params:
    """The whole of params.yaml, checked.

    Raises:
        ValueError: naming the file, every wrong key, what was expected and what to do.
    """
    if not path.is_file():
        raise ValueError(f"{path} not found; run from the project's root, where dvc.yaml lies")
    try:
        raw = yaml_text.parse(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError) as error:  # ValueError: bytes that are no UTF-8, dates that don't exist
        raise ValueError(f"{path} is not valid YAML: {explain_yaml(error)}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected the sections {', '.join(Params.model_fields)}; found {raw!r:.60}")
    _check_no_old_keys(path, raw)
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        problems = "\n".join(f"  {explain_error(e, Params)}" for e in error.errors(include_url=False))
        raise ValueError(f"{path} has {error.error_count()} problem(s) to correct:\n{problems}") from None


def check_raw_exists(params: Params) -> None:
    """Raises ValueError where the raw conversations are not there, before any stage spends a minute."""
    fix = params.fix_data
    raw, evaluation = Path(fix.raw), fix.eval_path()
    if not raw.exists():
        raise ValueError(
            f"{PARAMS_FILE}: fix_data.raw is {raw}, which does not exist; give a file or a folder (docs/data.md)"
        )
    if evaluation is not None and (not evaluation.is_file() or (raw.is_file() and evaluation != raw)):
        raise ValueError(
            f"{PARAMS_FILE}: fix_data.eval_file is {fix.eval_file}, expected a file in the folder fix_data.raw, or "
            f"the name of that file itself, found neither under {raw}; DVC tracks fix_data.raw, so put it there"
        )


def check_watched(key: str, model: str | None, watch_key: str, watch: str) -> None:
    """Raise ValueError where `model` is a local folder that DVC does not watch: replaced weights would go unnoticed.

    DVC watches `watch`, a dependency of the stage that reads `model`; a Hugging Face id is pinned by its commit instead.
    """
    if model is None or not Path(model).is_dir():
        return
    if not Path(model).resolve().is_relative_to(Path(watch).resolve()):
        raise ValueError(
            f"{PARAMS_FILE}: {key} is the local folder {model}, expected {watch_key} to be that folder or one around it, found "
            f"{watch}: DVC would not notice other weights in {model}; set {watch_key}: {model}"
        )


def check_draft_vocab(params: Params, vocab_size: int) -> None:
    """Raises ValueError where the draft's vocabulary would be larger than the target's."""
    wanted = params.init_draft.draft_vocab_size
    if wanted is not None and wanted > vocab_size:
        raise ValueError(
            f"{PARAMS_FILE}: init_draft.draft_vocab_size is {wanted}, but {params.target.model} has {vocab_size} tokens; "
            f"use at most {vocab_size}, or null for all"
        )


def main() -> None:
    params = load_params()
    check_raw_exists(params)
    check_watched("target.model", params.target.model, "target.watch", params.target.watch)
    b, served = params.benchmark, params.benchmark_served
    cells = len(b.torch_workloads) * len(b.checkpoints) * len(b.trees)
    cells += len(served.workloads) * (1 + len(served.checkpoints) * len(served.trees))
    cells += len(params.benchmark_methods.with_draft) + len(params.benchmark_methods.without_draft)
    print(
        f"{PARAMS_FILE} is valid: target {params.target.model}, {len(params.train_draft.checkpoints)} checkpoints, {cells} cells"
    )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"aerie: {error}")
