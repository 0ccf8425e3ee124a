"""params.yaml, typed and strict: one section, one frozen class (stages/params). No torch.

`load_params()` checks the *whole* file: DVC silently drops keys that are not strings, so a misspelt section would otherwise
vanish from the graph. A stage depends on the values that it declares (stage_inputs.py), not on this package, but for
tree_shape.py, which computes.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from stages.params.benchmark_sections import Benchmark, BenchmarkServed, Workload
from stages.params.data_sections import OWN_PROMPTS, FixData, PreparePrompts, SampleTarget
from stages.params.draft_sections import CheckOverfit, ImportDraft, InitDraft, TrainDraft
from stages.params.engines import TORCH, is_in_process
from stages.params.families import SEGMENT_TAG, SHAPES, TRAINABLE, DraftKind
from stages.params.recipe import Recipe
from stages.params.schedule import Schedule
from stages.params.section import (
    NAME,
    PACKAGE_NAME,
    PACKAGE_VERSION,
    PARAMS_FILE,
    ROOT_CHECKPOINT,
    RUN_PARAMS,
    Section,
    Text,
    get_named,
    suggest_name,
)
from stages.params.target_sections import ExtractHiddens, PrepareTarget, Target
from stages.params.tree_sections import MIN_TIMED_TREES, ReplayTrees, TimeCycles
from stages.params.tree_shape import TreeShape, parse_shape
from stages.runtime import guarded_yaml

SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True)
class LeftOutTree:
    """A tree of a section that is not measured with one of its checkpoints: that cell is `unsupported`, and says why."""

    section: str  # benchmark or benchmark_served
    engine: str
    checkpoint: str
    tree: str
    reason: str


class Report(Section):
    title: Text = "aerie"
    # begins the names of the files in results/answers, as AngelSlim's; null: the target's name
    model_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None = None
    analysis: bool = True  # false: no summary beside them, as with its --no-metrics


class Params(Section):
    OLD_KEYS = dict.fromkeys(
        ("time_trees", "serving_costs"),
        "time_trees and serving_costs are one section now; write time_cycles: {engines: [torch], checkpoints: [e000], "
        "workload: eval} and their other keys in its place (docs/cost.md)",
    )

    target: Target
    prepare_target: PrepareTarget = Field(default_factory=lambda: PrepareTarget())
    fix_data: FixData
    sample_target: SampleTarget = Field(default_factory=lambda: SampleTarget())
    extract_hiddens: ExtractHiddens = Field(default_factory=lambda: ExtractHiddens())
    init_draft: InitDraft
    check_overfit: CheckOverfit = Field(default_factory=lambda: CheckOverfit())
    train_draft: TrainDraft
    import_draft: ImportDraft
    replay_trees: ReplayTrees
    time_cycles: TimeCycles
    prepare_prompts: PreparePrompts = Field(default_factory=lambda: PreparePrompts())
    benchmark: Benchmark
    benchmark_served: BenchmarkServed
    report: Report = Field(default_factory=lambda: Report())
    schedule: Schedule = Field(default_factory=lambda: Schedule())

    @model_validator(mode="after")
    def training_computes_as_the_target(self) -> "Params":
        """Write the dtype of training where it is null: float32 on a GPU takes ten times the time of bfloat16."""
        if self.train_draft.dtype is None:
            dtype = "float32" if self.target.dtype == "float32" else "bfloat16"
            self.__dict__["train_draft"] = self.train_draft.model_copy(update={"dtype": dtype})
        return self

    def list_conflicts(self) -> Iterator[str]:
        """Yield what several sections contradict each other in."""
        yield from self._list_training_conflicts()
        yield from self._list_checkpoint_conflicts()
        yield from self._list_workload_conflicts()
        yield from self._list_draft_conflicts()
        yield from self._list_timed_conflicts()

    def _list_checkpoint_conflicts(self) -> Iterator[str]:
        """Yield names that are made twice, or listed without being made or by a list that has no use for them."""
        trained, imported = self.train_draft.checkpoints, self.import_draft.checkpoints
        for name in imported:
            if name in trained or name == ROOT_CHECKPOINT:
                yield f"import_draft.checkpoints.{name} is made by another stage; choose another name"
        made, named = [*trained, *imported], self._list_named_checkpoints()
        timeable = [*self.init_draft.checkpoints, *made]  # e000 costs what a trained one does
        listed = [
            (key, name, timeable if key.startswith("time_cycles") else made)
            for key, names in named.items()
            for name in names
        ]
        starts = [
            (f"train_draft.checkpoints.{name}.from", segment.from_, [ROOT_CHECKPOINT, *trained])
            for name, segment in trained.items()
        ]
        for key, name, known in listed + starts:
            if name not in known:
                yield f"{key}: no checkpoint {name!r}{suggest_name(name, known)}, expected one of {', '.join(known)}"
        for key, name, _ in listed:
            family = self.drafts.get(name, DraftKind()).family
            is_served = key == "benchmark_served.checkpoints" and family.served_by in self.benchmark_served.engines
            is_lookup = family.is_replayed and not family.is_timed and key == "replay_trees.checkpoints"
            if key != "benchmark.checkpoints" and not (family.is_timed or is_lookup or is_served):
                served = f", or benchmark_served's with engines [{family.served_by}]" if family.served_by else ""
                yield (
                    f"{key}: {name!r} is of {family.name}, expected EAGLE-3 or block drafts; put it into benchmark's{served}"
                )
            elif is_lookup and not any(tree.startswith(family.shapes) for tree in self.benchmark.trees):
                wanted = SHAPES[family.shapes]
                yield f"{key}: {name!r} is replayed at shapes of benchmark.trees, expected {wanted}, found none; add one there"

    def _list_named_checkpoints(self) -> dict[str, list[str]]:
        """Return the names of checkpoints by the key that has them; a list without a workload is not used."""
        served, timed = self.benchmark_served, self.time_cycles
        return {
            "replay_trees.checkpoints": self.replay_trees.checkpoints,
            "benchmark.checkpoints": self.benchmark.checkpoints,
            "benchmark_served.checkpoints": served.checkpoints if served.workloads else [],
            "time_cycles.checkpoints": timed.checkpoints if timed.engines else [],
        }

    def _list_training_conflicts(self) -> Iterator[str]:
        """Yield where a draft is trained without the initial one, from no rows, or to a tau that can't be reached."""
        initial, trained = self.init_draft.checkpoints, self.train_draft.checkpoints
        if trained and not initial:
            yield f"init_draft.checkpoints is [], expected [e000], from which {', '.join(trained)} start"
        if initial and self.sample_target.train_rows == 0:
            yield "sample_target.train_rows is 0 and init_draft.checkpoints [e000], expected training rows, or []"
        if (self.check_overfit.min_tau or 1) > self.train_draft.ttt_steps + 1:
            yield (
                f"check_overfit.min_tau {self.check_overfit.min_tau} can't be reached, expected at most ttt_steps + 1"
            )

    def _list_workload_conflicts(self) -> Iterator[str]:
        """Yield workloads that no engine or prompt set fits."""
        if self.benchmark.num_gpus_per_model > 1 and not self.target.device.startswith("cuda"):
            yield f"benchmark.num_gpus_per_model is {self.benchmark.num_gpus_per_model}, expected 1 on a CPU"
        if not self.benchmark.torch_workloads and not self.benchmark_served.workloads:
            yield "benchmark.torch_workloads and benchmark_served.workloads are both [], expected a workload"
        for name, workload in self.benchmark.workloads.items():
            known = [*sorted(OWN_PROMPTS), *self.prepare_prompts.sets]
            if workload.prompts not in known:
                yield (
                    f"benchmark.workloads.{name}.prompts is {workload.prompts!r}{suggest_name(workload.prompts, known)}, "
                    f"expected one of {', '.join(known)}; correct it, or add the set to prepare_prompts.sets"
                )
            prompt_set = self.prepare_prompts.sets.get(workload.prompts)
            if workload.grade and not (prompt_set and prompt_set.can_be_graded):
                yield (
                    f"benchmark.workloads.{name}.grade is true, expected prompts with references (gsm8k, humaneval, math500)"
                )
        for name in self.benchmark_served.workloads:
            get_named(self.benchmark.workloads, name, "benchmark.workloads")

    def _list_timed_conflicts(self) -> Iterator[str]:
        """Yield drafts of the same shapes, too few trees for a fit, and loads that say nothing of a cycle."""
        timed, drafts = self.time_cycles, self.drafts
        if len(set(map(self.find_first_of_shapes, timed.checkpoints))) < len(timed.checkpoints):
            yield f"time_cycles.checkpoints is {timed.checkpoints}, expected drafts of different shapes"
        for depth in {drafts[name].depth if name in drafts else None for name in timed.checkpoints}:
            timed.list_timed_trees(depth)
        workload = get_named(self.benchmark.workloads, timed.workload, "benchmark.workloads")
        if timed.served_engines:
            yield from self._list_load_conflicts(workload)

    def _list_load_conflicts(self, workload: Workload) -> Iterator[str]:
        """Yield a workload whose cycles can't be timed with simulated acceptance, or for too few of them."""
        timed = self.time_cycles
        key, caps = f"time_cycles.workload: benchmark.workloads.{timed.workload}", workload.list_concurrencies()
        has_end = workload.ignore_eos or workload.prompts == "eval"
        if not has_end or workload.request_rate != "inf" or workload.grade:
            yield (
                f"{key} has ignore_eos {workload.ignore_eos}, request_rate {workload.request_rate} and grade {workload.grade}, "
                "expected true (or prompts: eval), inf and false: simulated answers have no end and no meaning, and a batch "
                "would follow arrivals; name another workload"
            )
        if any(cap is None or caps.count(cap) > 1 or (workload.limit_prompts(cap) or cap) < cap for cap in caps):
            yield (
                f"{key} sends {workload.num_prompts} prompts at concurrency {caps}, expected different numbers, as many prompts"
            )
        for engine, name in product(timed.served_engines, timed.checkpoints):
            kind, shapes = self.drafts.get(name, DraftKind()), map(TreeShape.parse, timed.trees)
            pairs = len(caps) * sum(kind.explain_unserved(engine, shape) is None for shape in shapes)
            if pairs < MIN_TIMED_TREES:
                yield (
                    f"time_cycles.trees has {pairs} pairs of a tree that {engine} runs with {name} and a concurrency of "
                    f"{timed.workload}, expected at least {MIN_TIMED_TREES} for a fit; name more"
                )

    def _list_draft_conflicts(self) -> Iterator[str]:
        """Yield checkpoints that no tree is left of, and sampled drafts of a family that has none."""
        drafts, torch = self.drafts, self.benchmark
        yield from self._list_idle_checkpoints()
        for name in torch.checkpoints if torch.samples_drafts else []:
            if name in drafts and not drafts[name].family.samples_drafts:
                yield (
                    f"benchmark.checkpoints: {name} is of {drafts[name].title}, expected block drafts, or draft_sampling: greedy"
                )

    @property
    def drafts(self) -> dict[str, DraftKind]:
        """Return what is known of each checkpoint's draft; nothing of published ones, whose files say it."""
        known: dict[str, DraftKind] = {name: DraftKind() for name in self.init_draft.checkpoints}
        known |= {name: segment.draft for name, segment in self.train_draft.checkpoints.items()}
        known |= {n: replace(x, depth=self.train_draft.ttt_steps) for n, x in known.items() if x.family.measures_steps}
        imported = self.import_draft.checkpoints.items()
        return known | {name: DraftKind(source.builtin) for name, source in imported if source.builtin}

    def list_served_engines(self) -> list[str]:
        """Return the engines whose servers a stage measures: of benchmark_served and time_cycles, which start the same ones."""
        served = self.benchmark_served
        return list(dict.fromkeys([*(served.engines if served.workloads else ()), *self.time_cycles.served_engines]))

    def list_left_out_trees(self) -> Iterator[LeftOutTree]:
        """Yield the trees that a checkpoint's draft can't draft, or an engine can't run with it, of sections with workloads.

        The sizes of imported drafts are not known here; their cells say it.
        """
        torch, served, drafts = self.benchmark, self.benchmark_served, self.drafts
        for name in torch.checkpoints if torch.torch_workloads else []:
            for tree in map(parse_shape, torch.trees):
                if name in drafts and (reason := drafts[name].explain_ungrown(tree)):
                    yield LeftOutTree("benchmark", TORCH.name, name, tree.name, reason)
        for engine, name in product(served.engines, served.checkpoints if served.workloads else []):
            for tree in map(parse_shape, served.trees):
                if name in drafts and (reason := drafts[name].explain_unserved(engine, tree)):
                    yield LeftOutTree("benchmark_served", engine, name, tree.name, reason)

    def _list_idle_checkpoints(self) -> Iterator[str]:
        """Yield a line for each checkpoint that no tree of its section runs with."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for left_out in self.list_left_out_trees():
            reasons.setdefault((left_out.section, left_out.checkpoint), []).append(left_out.reason)
        served = self.benchmark_served
        for (section, name), found in reasons.items():
            is_torch = section == "benchmark"
            trees, engines = (self.benchmark.trees, 1) if is_torch else (served.trees, len(served.engines))
            if len(found) == len(trees) * engines:
                yield f"{section}.trees has {', '.join(trees)}, of which none runs with {name}; expected one ({found[0]})"

    def group_served_cells(self, stages: Iterable[str]) -> list[list[str]]:
        """Return those of `stages` that are served cells, in groups whose servers one GPU holds; none where that is one cell."""
        groups = list[list[str]]()
        for engine in self.benchmark_served.engines if self.target.gpus() else []:
            starts = tuple(f"benchmark_served{kind}@{engine}-" for kind in ("", "_baseline"))
            cells = [name for name in stages if name.startswith(starts)]
            at_once = self.benchmark_served.count_cells_at_once(engine)
            if at_once > 1 and len(cells) > 1:
                groups += [cells[start : start + at_once] for start in range(0, len(cells), at_once)]
        return groups

    def describe_left_out_trees(self) -> Iterator[str]:
        """Yield a line for each tree that is left out and each reason, with all checkpoints that it is left out for."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for left_out in self.list_left_out_trees():
            where = left_out.section if is_in_process(left_out.engine) else f"{left_out.section}, {left_out.engine}"
            groups.setdefault((where, left_out.tree, left_out.reason), []).append(left_out.checkpoint)
        for (where, tree, reason), names in groups.items():
            yield f"left out of {where}: {tree} with {', '.join(names)}: {reason}"

    def list_unused_checkpoints(self) -> list[str]:
        """Return the checkpoints that are trained or imported and that nothing replays, measures or trains from."""
        used = {name for names in self._list_named_checkpoints().values() for name in names}
        used |= {segment.from_ for segment in self.train_draft.checkpoints.values()}
        return [name for name in [*self.train_draft.checkpoints, *self.import_draft.checkpoints] if name not in used]

    def get_making_stage(self, checkpoint: str) -> str:
        """Return the stage that makes a checkpoint's draft."""
        if checkpoint == ROOT_CHECKPOINT:
            return f"init_draft@{ROOT_CHECKPOINT}"
        return f"{'import' if checkpoint in self.import_draft.checkpoints else 'train'}_draft@{checkpoint}"

    def find_first_of_shapes(self, name: str) -> str:
        """Return the checkpoint whose draft fixed the shapes of a checkpoint's: e000 those of all EAGLE-3 drafts trained from it,
        an imported one its own, and of another method the first segment of a chain.
        """
        trained = self.train_draft.checkpoints
        while name in trained and (trained[name].from_ in trained or trained[name].family.has_root):
            name = trained[name].from_
        return name


def load_params(path: Path = PARAMS_FILE, edited: bool = False) -> Params:
    """Read params.yaml and check the whole file. In a stage that DVC runs, read what `inputs` found in it when the run began.

    With `edited` read the file as it is now there too.

    Raises:
        ValueError: naming the file, every wrong key, what was expected and what to do.
    """
    if path == PARAMS_FILE and not edited and "DVC_STAGE" in os.environ and RUN_PARAMS.exists():
        return _validate_model(Params, json.loads(RUN_PARAMS.read_bytes()), RUN_PARAMS)
    return _validate_model(Params, _read_sections(path, "run from the project's root, the folder of dvc.yaml"), path)


def read_recipe(path: Path) -> tuple[Recipe | None, dict[str, dict[str, Any]]]:
    """Return a recipe's block `recipe`, None if it has none, and its sections of params.yaml.

    Raises:
        ValueError: naming the file, what was expected and what to do.
    """
    found = _read_sections(path, "correct its name", path.parent)
    if not all(isinstance(keys, dict) for keys in found.values()):
        raise ValueError(f"{path}: expected sections with keys, as params.yaml has them; found {found!r:.60}")
    about = found.pop("recipe", None)
    return None if about is None else _validate_model(Recipe, about, path, "recipe."), found


def _read_sections(path: Path, if_missing: str, root: Path | None = None) -> dict[str, Any]:
    """Return the sections of a file of parameters. Raises ValueError where it is missing or has none."""
    try:
        found = guarded_yaml.read_yaml(path, root)
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{path} not found; {if_missing}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected the sections {', '.join(Params.model_fields)}; found {found!r:.60}")
    return found


def _validate_model(model: type[SectionT], found: Any, path: Path, prefix: str = "") -> SectionT:
    try:
        return model.model_validate(found)
    except ValidationError as error:
        lines = "\n".join(map(_explain_error, error.errors(include_url=False))).split("\n")
        problems = "\n".join(f"  {prefix}{line}" for line in dict.fromkeys(lines))
        raise ValueError(f"{path} has {len(dict.fromkeys(lines))} problem(s) to correct:\n{problems}") from None


# Parts of pydantic's locations that are not keys of the file.
UNION_TAGS = {"[key]", "a number", "a list", "a text", *(SEGMENT_TAG.format(name) for name in TRAINABLE)}
EXPECTED = {  # by the type of error or the pattern of text; else pydantic's "Input should be greater than 0" says it
    "string_type": "text",
    "dict_type": "a section",
    NAME: "a name (a letter, then letters, digits and _)",
    r"^[^/]+$": "the file's name without its folder",
    r"^[^-]": "an id or a path, which does not begin with - as a flag does",
    PACKAGE_NAME: "the name of a package, without a URL or an option",
    PACKAGE_VERSION: 'the version of a package, as "1.0.3"',
}


def _explain_error(error: Any) -> str:
    """Explain one pydantic error as "key: expected, found, what to do"."""
    key = ".".join(str(part) for part in error["loc"] if part not in UNION_TAGS)
    kind, message, given = error["type"], error["msg"].removeprefix("Value error, "), error["input"]
    if kind == "value_error":  # raised by our validators: already complete
        return "\n".join(f"{key}: {line}" if key else line for line in message.split("\n"))
    if kind == "missing":
        return f"{key}: missing, and it has no default; write it (docs/params.yaml says what it is)"
    if kind == "union_tag_invalid":  # of a segment
        key, given = f"{key}.method", str(given.get("method"))
        message = f"Input should be {', '.join(map(repr, TRAINABLE))}"
    pattern = (error.get("ctx") or {}).get("pattern")
    # "List should have at least 1 item after validation, not 0"
    plain = re.sub(r"^\w+ should (be|have) | after validation.*", "", message)
    expected = EXPECTED.get(pattern or kind, f"text matching {pattern}" if pattern else plain)
    text = f"{key}: expected {expected}, found {given!r:.200}"
    if kind in ("literal_error", "union_tag_invalid"):
        text += suggest_name(str(given), re.findall(r"'([^']*)'", message))
    if isinstance(given, int | float) and not isinstance(given, bool) and kind in ("string_type", "literal_error"):
        text += "; YAML reads 8_2_16 as the number 8216, so begin a name with a letter (t8_2_16) or put text in quotes"
    return text
