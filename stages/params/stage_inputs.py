"""The inputs of each instance of a stage besides its data, as the first stage of the graph writes them (stages/inputs.py).

    artifacts/inputs/train_draft-e003.json      the parameters that the stage declares, with defaults; digests of its code and of
                                                the files and folders that those parameters name
    artifacts/inputs/params.json                all parameters of this run, checked

DVC tracks the first as a dependency of the stage, and nothing else of params.yaml or of the code. A stage reads its parameters
by `read_params`: of the run that DVC is at, whatever is edited meanwhile, and none that it does not declare.
"""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, cast

import psutil
from pydantic import BaseModel

from stages.params.benchmark_sections import BenchmarkServer
from stages.params.checks import TEMPLATES_FOLDER
from stages.params.data_sections import SamplingServer
from stages.params.draft_sections import TrainDraft
from stages.params.engines import ENGINES, TORCH, is_in_process
from stages.params.families import FAMILIES, DraftFamily
from stages.params.schema import Params, load_params
from stages.params.section import PARAMS_FILE, RUN_PARAMS, get_named
from stages.params.tree_sections import ReplayTrees
from stages.runtime.digests import KeptDigests, digest_path
from stages.runtime.stage_code import CODE, digest_stage

INPUTS_FOLDER = RUN_PARAMS.parent
RUN_NOTE = Path(".scratch/inputs_run")
RUN_MARK_VARIABLE = "AERIE_RUN"  # as in pipeline/processes.py: set for all that a run of aerie's starts
DVC_VARIABLE = "AERIE_DVC"  # as in telemetry/fork_server.py: the process id of the DVC that a forked stage is of
ABSENT = object()
MOST_NAMED = 5  # changes in a message
Inputs = dict[str, dict[str, Any]]  # "params" by key, "code" by file, "paths" by key


@dataclass(frozen=True)
class Declared:
    """The keys of params.yaml that a stage reads; {workload} and the like stand for what the instance is of."""

    keys: tuple[str, ...]  # their values count
    free: tuple[str, ...] = ()  # who computes, who watches, what is only checked: any value gives the same result
    paths: tuple[str, ...] = ()  # of the keys, those that may name a file or folder, whose bytes count
    items: tuple[str, ...] = ()  # what an instance is of, as in its name after the @
    in_process: tuple[str, ...] = ()  # the keys in place of these, where its engine runs in the stage's own process

    def list_keys(self, instance: "Instance") -> tuple[str, ...]:
        """Return the keys whose values count for an instance."""
        return self.in_process if self.in_process and is_in_process(instance.items["engine"]) else self.keys


def _name_keys(section: str, words: str) -> tuple[str, ...]:
    """Return the keys of a section that are named in words."""
    return tuple(f"{section}.{key}" for key in words.split())


def _list_keys(section: str, model: type[BaseModel], but: str) -> tuple[str, ...]:
    """Return the others."""
    return _name_keys(section, " ".join(key for key in model.model_fields if key not in but.split()))


SERVER = "benchmark_served.servers.{engine}"
MAKERS = "import_draft.checkpoints"  # which stage makes a draft, for messages
SERVER_CONNECTION = (MAKERS, f"{SERVER}.api_key_env", f"{SERVER}.start_timeout_s")
# Keys of a server's connection and of its draft.
NOT_OF_BASELINES = "api_key_env start_timeout_s algorithm vision_patch"
CELL_WORKLOAD = ("benchmark.workloads.{workload}", "sample_target.thinking")
SERVED_WORKLOAD = ("target", *CELL_WORKLOAD, "benchmark.run_generated_code")
TORCH_KEYS = ("target", "benchmark.tree_scoring", "benchmark.num_threads")
DECLARED = {
    "fix_data": Declared(("fix_data",), paths=("fix_data.tables", "fix_data.image_folders")),
    "prepare_target": Declared(("target", "prepare_target"), paths=("target.model", "target.chat_template")),
    "sample_target": Declared(
        ("target", "sample_target", "fix_data.eval_file"),  # whose files are asked evenly
        free=_list_keys("sample_target.server", SamplingServer, but="launch launch_args model"),
    ),
    "extract_hiddens": Declared(("target", "extract_hiddens"), free=("extract_hiddens.processes", "train_draft.checkpoints")),
    "init_draft": Declared(
        ("target", "init_draft", "train_draft.ttt_steps", "extract_hiddens.max_length"),
        paths=("init_draft.from", "init_draft.draft_config_path"), items=("checkpoint",),
    ),
    "check_overfit": Declared(
        ("target", "check_overfit", *_name_keys("train_draft", "ttt_steps ttt_decay mask loss grad_clip checkpoints dtype seed")),
        items=("checkpoint",),
    ),
    "train_draft": Declared(
        (
            "target",
            "extract_hiddens.compile",  # of the target's blocks, where hidden states are made online
            "train_draft.checkpoints.{checkpoint}",
            *_list_keys("train_draft", TrainDraft, but="checkpoints horizon_epochs"),
        ),
        free=_name_keys("train_draft", "processes parallel report_to run_name"), items=("checkpoint",),
    ),
    "import_draft": Declared(
        ("target", "import_draft.checkpoints.{checkpoint}"),
        paths=("import_draft.checkpoints.{checkpoint}.model",), items=("checkpoint",),
    ),
    "replay_trees": Declared(
        (
            "target",
            *_name_keys("sample_target", "temperature top_p"),  # what the second eval set should be drawn at
            *_list_keys("replay_trees", ReplayTrees, but="checkpoints"),
            "benchmark.{lookups}",  # `trees` of families that look their guesses up, of others nothing
        ),
        free=(MAKERS,), items=("checkpoint",),
    ),
    "time_cycles": Declared(
        ("target", *CELL_WORKLOAD, *_name_keys("time_cycles", "workload trees accept_length"), SERVER),
        free=SERVER_CONNECTION, items=("engine", "checkpoint"),
        in_process=(*TORCH_KEYS, *_name_keys(
            "time_cycles", "workload num_steps topk num_draft_tokens context warmup cycles repeats batches"
        )),
    ),
    "prepare_prompts": Declared(
        ("target", "sample_target.thinking", "prepare_prompts.sets.{prompts}", *_name_keys(
            "benchmark.workloads.{workload}", "prompts num_prompts start stop turns input_tokens length_range warmup seed"
        )),
        paths=("prepare_prompts.sets.{prompts}.from",), items=("workload",),
    ),
    "benchmark": Declared(
        (*TORCH_KEYS, *CELL_WORKLOAD, *_name_keys(
            "benchmark", "mode draft_sampling num_gpus_total num_gpus_per_model max_gpu_memory run_generated_code"
        )),
        free=(MAKERS,), items=("workload", "checkpoint", "tree"),
    ),
    "benchmark_served": Declared(
        (*SERVED_WORKLOAD, "benchmark_served.interleave", SERVER),
        free=SERVER_CONNECTION, items=("engine", "workload", "checkpoint", "tree"),
    ),
    "benchmark_served_baseline": Declared(
        (*SERVED_WORKLOAD, *_list_keys(SERVER, BenchmarkServer, but=NOT_OF_BASELINES)),
        free=("benchmark_served.interleave", *_name_keys(SERVER, NOT_OF_BASELINES)), items=("engine", "workload"),
    ),
    "report": Declared(
        (
            "report", "target.model", "target.dtype",
            *_name_keys("benchmark", "workloads mode torch_workloads checkpoints trees draft_sampling"),
            "benchmark_served", "time_cycles", "import_draft.checkpoints",
            *(f"{stage}.checkpoints" for stage in ("init_draft", "train_draft", "replay_trees")),
        ),
    ),
}  # fmt: skip

# The parts of a family of drafts that a stage runs; a family that is one module has them all in it.
FAMILY_PARTS = {
    "check_overfit": ("files", "training", "overfit", "decoding"),
    "train_draft": ("files", "training"),
    "import_draft": ("files",),
    "replay_trees": ("files", "replay"),
    "time_cycles": ("files", "decoding"),
    "benchmark": ("files", "decoding"),
    "benchmark_served": ("files",),
}
# What a stage shows of its work, by code of other stages.
WATCHING_CODE = {"train_draft": {"stages/families/held_out.py"}}


@dataclass(frozen=True)
class Instance:
    """A stage of the graph, with what it is of: benchmark@eval-e003-t8_2_16."""

    stage: str
    items: dict[str, str] = field(default_factory=dict)  # by the names of Declared.items

    @property
    def name(self) -> str:
        """Return the name in dvc.yaml."""
        return "@".join(filter(None, [self.stage, "-".join(self.items.values())]))

    @property
    def file(self) -> Path:
        return INPUTS_FOLDER / f"{self.name.replace('@', '-')}.json"

    @classmethod
    def parse(cls, name: str) -> "Instance":
        stage, _, words = name.partition("@")
        return cls(stage, dict(zip(DECLARED[stage].items, words.split("-"), strict=bool(words))))


def list_instances(params: Params) -> list[Instance]:
    """Return every stage that dvc.yaml makes of these parameters, but `inputs`."""
    served, engines = params.benchmark_served, list[str](params.benchmark_served.engines)
    lists: dict[str, list[list[str]]] = {
        "init_draft": [list(params.init_draft.checkpoints)],
        "check_overfit": [list(params.init_draft.checkpoints)],
        "train_draft": [list(params.train_draft.checkpoints)],
        "import_draft": [list(params.import_draft.checkpoints)],
        "replay_trees": [params.replay_trees.checkpoints],
        "time_cycles": [list(params.time_cycles.engines), params.time_cycles.checkpoints],
        "prepare_prompts": [list(params.benchmark.workloads)],
        "benchmark": [params.benchmark.torch_workloads, params.benchmark.checkpoints, params.benchmark.trees],
        "benchmark_served": [engines, served.workloads, served.checkpoints, served.trees],
        "benchmark_served_baseline": [engines, served.workloads],
    }
    return [
        Instance(stage, dict(zip(declared.items, values, strict=True)))
        for stage, declared in DECLARED.items()
        for values in product(*lists.get(stage, []))
    ]


# What an instance reads


def read_params(stage: str, *values: str) -> Params:
    """Return the parameters of this run, without those that the stage does not declare: to read one is an AttributeError.

    Raises ValueError for a name that params.yaml does not have.
    """
    params, instance = load_params(), Instance(stage, dict(zip(DECLARED[stage].items, values, strict=True)))
    if workload := instance.items.get("workload"):
        get_named(params.benchmark.workloads, workload, "benchmark.workloads")
    maker = "init_draft" if stage == "check_overfit" else stage
    if maker in ("init_draft", "train_draft", "import_draft"):
        get_named(dict.fromkeys(getattr(params, maker).checkpoints), values[0], f"{maker}.checkpoints")
    declared = DECLARED[stage]
    keys = _fill_keys(params, instance, (*declared.list_keys(instance), *declared.free))
    return cast(Params, _restrict(params, keys))


def _restrict(value: Any, keys: list[list[str]]) -> Any:
    if [] in keys:
        return value
    inner = {first: [key[1:] for key in keys if key[0] == first] for first in dict.fromkeys(key[0] for key in keys)}
    if not isinstance(value, BaseModel):
        return {key: _restrict(value[key], rest) for key, rest in inner.items() if key in value}
    names = {info.alias or name: name for name, info in type(value).model_fields.items()}
    kept = value.model_copy()
    for key, name in names.items():
        if key in inner:
            kept.__dict__[name] = _restrict(getattr(value, name), inner[key])
        else:
            del kept.__dict__[name]
    return kept


def _fill_keys(params: Params, instance: Instance, keys: tuple[str, ...]) -> list[list[str]]:
    """Return the parts of the keys with the instance's names in their places; an engine's name may have a dot."""
    kind = params.drafts.get(instance.items.get("checkpoint", ""))
    names = {"workload": params.time_cycles.workload, **instance.items}
    names["lookups"] = "" if kind is None or kind.family.is_timed else "trees"
    if instance.stage == "prepare_prompts":
        names["prompts"] = params.benchmark.workloads[names["workload"]].prompts
    return [[part.format(**names) for part in key.split(".")] for key in keys]


# What an instance depends on


def build_inputs(params: Params, instance: Instance, kept: KeptDigests, root: Path = Path()) -> Inputs:
    """Return what an instance depends on besides its data: values of parameters, digests of code and of files they name."""
    families = list_families(params, instance)
    modules = list_family_modules(instance.stage, families)
    code = digest_stage(instance.stage, kept, modules, _list_left_out(params, instance), root)
    named = {key: digest_path(path, kept) for key, path in _list_named(params, instance)}
    facts = {f"family.{family.name}.{key}": value for family in families for key, value in family.list_facts().items()}
    return {"params": list_values(params, instance) | facts, "paths": named, "code": code}


def list_values(params: Params, instance: Instance) -> dict[str, Any]:
    """Return the values on which an instance depends by their keys: `train_draft.seed`."""
    declared, values = DECLARED[instance.stage], _dump(params)
    free = list(map(".".join, _fill_keys(params, instance, declared.free)))
    found: dict[str, Any] = {}
    for parts in _fill_keys(params, instance, declared.list_keys(instance)):
        if (value := _get_value(values, parts)) is not ABSENT:
            found |= dict(_list_leaves(".".join(parts), value))
    return {key: found[key] for key in sorted(found) if not any(f"{key}.".startswith(f"{out}.") for out in free)}


def _list_named(params: Params, instance: Instance) -> Iterator[tuple[str, Path]]:
    """Yield the keys of an instance that name files or folders, with these; of a list each under a number."""
    values = _dump(params)
    for parts in _fill_keys(params, instance, DECLARED[instance.stage].paths):
        key = ".".join(parts)
        value, folder = _get_value(values, parts), TEMPLATES_FOLDER if key == "target.chat_template" else Path()
        names = value if isinstance(value, list) else [value] if isinstance(value, str) else []
        found = [folder / name for name in names if (folder / name).exists()]  # a model's id names no file
        yield from ((f"{key}.{number}" if len(found) > 1 else key, path) for number, path in enumerate(found))


def _dump(params: Params) -> dict[str, Any]:
    return params.model_dump(mode="json", by_alias=True)


def list_sources(params: Params) -> set[Path]:
    """Return every file and folder that inputs are made of: params.yaml, the code, and what parameters name."""
    named = {path for instance in list_instances(params) for _, path in _list_named(params, instance)}
    return {PARAMS_FILE, Path(CODE)} | named


def _get_value(values: Any, parts: list[str]) -> Any:
    """Return the value at a key; ABSENT where there is none, as for prompts that are no set."""
    for part in parts:
        values = values.get(part, ABSENT) if isinstance(values, dict) else ABSENT
    return values


def _list_leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _list_leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def list_family_modules(stage: str, families: Collection[DraftFamily]) -> set[str]:
    """Return the modules of the families that a stage imports by name (stages/families/registry.py)."""
    modules = {family.module.format(part) for family in families for part in FAMILY_PARTS.get(stage, ())}
    return {f"stages/families/{module.replace('.', '/')}.py" for module in modules}


def _list_left_out(params: Params, instance: Instance) -> set[str]:
    """Return the modules that the instance imports and that change nothing of what it makes."""
    own = {file for name in _list_engines(params, instance) for file in ENGINES[name].modules}
    others = {file for engine in ENGINES.values() for file in engine.modules} - own
    return others | WATCHING_CODE.get(instance.stage, set())


def _list_engines(params: Params, instance: Instance) -> Collection[str]:
    """Return the engines whose modules an instance may run; all, where a running server says which it is."""
    if "tree" in instance.items or "engine" in instance.items:
        return {instance.items.get("engine", TORCH.name)}
    sampling = params.sample_target
    if instance.stage == "sample_target" and (sampling.backend != "server" or sampling.server.launch):
        return {sampling.server.launch} if sampling.backend == "server" and sampling.server.launch else ()
    return ENGINES


def list_families(params: Params, instance: Instance) -> list[DraftFamily]:
    """Return the families of the drafts that an instance runs; all, where published files say which."""
    if instance.stage not in FAMILY_PARTS:
        return []
    checkpoints, drafts = [instance.items.get("checkpoint", "")], params.drafts
    if instance.stage == "check_overfit":
        checkpoints += params.train_draft.list_fresh_drafts()
    every = list(FAMILIES.values())
    found = [drafts[name].family if name in drafts else None for name in checkpoints]
    return every if None in found else [family for family in every if family in found]


# Files


def render_all(params: Params) -> dict[Path, str]:
    """Return the text of every file of INPUTS_FOLDER for these parameters and the code and files as they are."""
    kept = KeptDigests.read()
    texts = {one.file: _render(build_inputs(params, one, kept)) for one in list_instances(params)}
    kept.write()
    return texts | {RUN_PARAMS: _render(params.model_dump(mode="json", by_alias=True))}


def _render(content: Any) -> str:
    return json.dumps(content, indent=1) + "\n"


def check_inputs(name: str) -> None:
    """Check that a stage which DVC runs is the one that its inputs file describes; `inputs` has written that before.

    Raises:
        ValueError: code, files or, outside a run that began with `inputs`, params.yaml have changed since.
    """
    instance, kept = Instance.parse(name), KeptDigests.read()
    recorded = json.loads(instance.file.read_text(encoding="utf-8"))
    changed = list_differences(recorded, build_inputs(load_params(), instance, kept))
    if not (changed or is_run_of_inputs()):
        changed = list_differences(recorded, build_inputs(load_params(edited=True), instance, kept))
    kept.write()
    if changed:
        raise ValueError(
            f"{name}: {'; '.join(changed[:MOST_NAMED])} since the stage `inputs` ran, expected what {instance.file} says; run "
            "`aerie run`, or `dvc repro` without --single-item, which run `inputs` first"
        )


def note_run() -> None:
    """Note which DVC runs `inputs`: the stages that it runs later belong to these inputs, whatever is edited meanwhile."""
    RUN_NOTE.parent.mkdir(exist_ok=True)
    RUN_NOTE.write_text(identify_dvc(), encoding="utf-8")


def is_run_of_inputs() -> bool:
    """Return whether this stage is of a run that began with `inputs`: one of aerie's, or of the same DVC."""
    if RUN_MARK_VARIABLE in os.environ:
        return True
    return RUN_NOTE.exists() and RUN_NOTE.read_text(encoding="utf-8") == identify_dvc()


def identify_dvc() -> str:
    """Return the process id and start of the DVC that runs this stage: the nearest above, or that of whom it is forked for."""
    forked_for = os.environ.get(DVC_VARIABLE)
    for process in [psutil.Process(int(forked_for))] if forked_for else psutil.Process().parents():
        with suppress(psutil.Error):
            if any("dvc" in word for word in process.cmdline()[:3]):
                return f"{process.pid} {process.create_time()}"
    return ""


def list_differences(before: Inputs, after: Inputs) -> list[str]:
    """Return what differs in words: `params.yaml: train_draft.seed is 6, was 5`, `stages/training/ttt.py changed`."""
    lines = []
    for key in sorted({*before["params"], *after["params"]}):
        old, new = (part["params"].get(key, "not there") for part in (before, after))
        if old != new:
            lines.append(f"{PARAMS_FILE}: {key} is {json.dumps(new)}, was {json.dumps(old)}")
    for part, words in (("paths", "{}: other files"), ("code", "{} changed")):
        names = sorted({*before[part], *after[part]})
        lines += [words.format(name) for name in names if before[part].get(name) != after[part].get(name)]
    return lines
