"""Compare EAGLE-3, DFlash, DFlash2 and DSpark on the embedded targets, trained for the same time, by several seeds.

    python -m benchmarks.families FOLDER [--targets weather-tiny weather-tiny-moe] [--seeds 5 6 7] [--device cpu] [--small]

FOLDER gets a project for each target, a copy of this one's files; its stages run through DVC, so a second call goes on where the
first stopped. In each project:

1. Rows, hidden states, and a few epochs of every family, whose time says how many epochs of each take as long as BUDGET_EPOCHS
   of EAGLE-3: CPU time of the process on a CPU, seconds on a GPU (logs/stages.jsonl).
2. On the first seed every family is trained at each of `--rates`; its best by replayed tau of its own chain is kept.
3. Each family at its rate by each seed, replayed over a wider grid of trees, at temperature 0 and that of the training answers.
4. On the first seed the time of cycles (`time_trees`) and cells of the torch engine, one prompt at a time and several at once.

`learning_rate` and the seeds are of a whole params.yaml, so it is written anew for every rate and seed. With `--record DATE` the
figures go to docs/results/DATE-families.csv, in place of those of the same targets; `python -m
benchmarks.families_tables DATE` prints the tables of docs/families.md. `--read` only reads what FOLDER holds.
"""

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks import families_record, gpu_graph
from pipeline import processes
from stages.results import replay_records
from stages.runtime import atomic
from stages.telemetry import stage_log

TARGETS = ("weather-tiny", "weather-tiny-moe")
STORED_LAYERS = [1, 2, 3, 4, 5, 6]  # EAGLE-3's 2 3 4 and BLOCK_LAYERS
BLOCK_LAYERS = [1, 2, 4, 5, 6]
RATES = (0.001, 0.002, 0.004)
BUDGET_EPOCHS = 9  # of EAGLE-3
CALIBRATION_EPOCHS = 4
TOLERANCE = 0.1  # of a family's training time around EAGLE-3's
DFLASH2_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16}
EPOCHS_FILE = Path("epochs.json")
TRACED_TREES = ["t7_1_8", "t15_1_16", "t5_4_16", "t8_2_16"]  # whose tau is known by answer


@dataclass(frozen=True)
class Family:
    """A kind of draft: how it is trained, and which trees are measured."""

    name: str  # begins the names of its checkpoints
    title: str  # in tables
    segment: dict[str, Any]  # of train_draft.checkpoints
    chain: str  # the tree by which its rate is chosen; of a block draft the only one that engines run
    cells: tuple[str, ...]  # trees of the measured cells

    def name_checkpoint(self, seed: int, rate: float) -> str:
        return f"{self.name}_s{seed}_r{round(rate * 10_000)}"


def _describe_block(method: str, block_size: int, **more: int) -> dict[str, Any]:
    return {
        "method": method,
        "layers": 2,
        "block_size": block_size,
        "anchors": 64,
        "feature_layers": BLOCK_LAYERS,
        **more,
    }


FAMILIES = (
    Family("eagle3", "EAGLE-3", {}, "t7_1_8", ("t3_1_4", "t7_1_8", "t5_4_16")),
    Family("dflash8", "DFlash, block 8", _describe_block("dflash", 8), "t7_1_8", ("t7_1_8", "t5_4_16")),
    Family("dflash16", "DFlash, block 16", _describe_block("dflash", 16), "t15_1_16", ("t15_1_16",)),
    Family(
        "dflash2b8", "DFlash2, block 8", _describe_block("dflash2", 8, **DFLASH2_SIZES), "t7_1_8", ("t7_1_8", "t5_4_16")
    ),
    Family("dspark7", "DSpark, block 7", _describe_block("dspark", 7, markov_rank=32), "t7_1_8", ("t7_1_8",)),
)
BY_NAME = {family.name: family for family in FAMILIES}
WORKLOADS: dict[str, dict[str, Any]] = {
    "one": {"num_prompts": 16, "repeats": 2},
    "many": {"num_prompts": 64, "repeats": 3, "concurrency": [8, 32], "warmup": 8},
}


@dataclass(frozen=True)
class Settings:
    """What is compared on one target, and how much of it."""

    target: str
    seeds: Sequence[int]
    device: str
    rates: Sequence[float] = RATES
    budget_epochs: int = BUDGET_EPOCHS
    is_small: bool = False
    is_read_only: bool = False

    @property
    def is_on_gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Run:
    """One call of DVC: what params.yaml trains, replays, times and measures, at one rate and seed."""

    seed: int
    rate: float
    segments: Mapping[str, Mapping[str, Any]]  # checkpoint -> its segment
    is_wide: bool = False  # whether many trees are replayed, or the chains by which rates are chosen
    timed: Sequence[str] = ()
    trees: Sequence[str] = ("t7_1_8",)  # of the cells of the only checkpoint
    stages: Sequence[str] = field(default_factory=list)


# Arithmetic


def choose_epochs(seconds: Mapping[str, float], budget_s: float) -> dict[str, int]:
    """Return the number of epochs of each family whose time is closest to the budget, at least one."""
    return {name: max(1, round(budget_s / taken)) for name, taken in seconds.items()}


def find_unequal(seconds: Mapping[str, float], tolerance: float = TOLERANCE) -> dict[str, float]:
    """Return the families whose time is farther than `tolerance` from that of the first, as shares of it."""
    first = next(iter(seconds.values()))
    return {name: taken / first for name, taken in seconds.items() if abs(taken / first - 1) > tolerance}


def choose_rates(taus: Mapping[tuple[str, float], float]) -> dict[str, float]:
    """Return the rate of each family's highest tau; of equal ones the lowest rate. Keys of `taus` are (family, rate)."""
    best: dict[str, float] = {}
    for name, rate in sorted(taus):
        if name not in best or taus[name, rate] > taus[name, best[name]]:
            best[name] = rate
    return best


# One project


def compare_target(project: Path, settings: Settings) -> list[families_record.FamilyFigure]:
    """Make the project of one target, bring all of it up to date, and return its figures."""
    if not project.exists():
        gpu_graph.copy_project(project, Path())
        if gpu_graph.run(project, "pipeline", "use", settings.target, shown=1):
            raise SystemExit(f"{project} has no recipe {settings.target}")
    with contextlib.chdir(project), processes.preload_stages(99):
        epochs = _read_epochs(project, settings)
        first = settings.seeds[0]
        for rate in settings.rates:
            _make(project, settings, _plan_training(FAMILIES, first, rate, epochs))
        found = {(f.name, rate): read_chain_tau(f, first, rate) for f in FAMILIES for rate in settings.rates}
        rates = choose_rates(found)
        print(f"{settings.target}: tau of the chain by rate {found}, chosen {rates}", flush=True)
        for seed in settings.seeds:
            for rate, names in _group_by_rate(rates):
                families = [BY_NAME[name] for name in names]
                _make(project, settings, _plan_training(families, seed, rate, epochs, is_wide=True))
            if seed == first:
                for family in FAMILIES:
                    _make(project, settings, _plan_timing(family, seed, rates[family.name], epochs))
        drafts = [
            families_record.ComparedDraft(f.name, seed, rates[f.name], f.name_checkpoint(seed, rates[f.name]), f.chain, f.cells)
            for f in FAMILIES
            for seed in settings.seeds
        ]  # fmt: skip
        _print_unequal(drafts, settings)
        timed = {f.name: _name_timed(f, f.name_checkpoint(first, rates[f.name])) for f in FAMILIES}
        searched = [
            families_record.make_figure(settings.target, name, first, rate, "tau_by_rate", tau, tree=BY_NAME[name].chain)
            for (name, rate), tau in found.items()
        ]  # fmt: skip
        return [*searched, *families_record.read_figures(settings.target, drafts, timed, epochs)]


def _read_epochs(project: Path, settings: Settings) -> dict[str, int]:
    """Return the epochs of each family, chosen once by the time that a few of each take."""
    if not EPOCHS_FILE.exists():
        names = {family.name: f"trial_{family.name}" for family in FAMILIES}
        count = 1 if settings.is_small else CALIBRATION_EPOCHS
        segments = {names[family.name]: _fill_segment(family, count) for family in FAMILIES}
        stages = [f"train_draft@{name}" for name in segments]
        _make(project, settings, Run(settings.seeds[0], settings.rates[0], segments, stages=stages))
        seconds = {family: read_training_seconds(name, settings.is_on_gpu) / count for family, name in names.items()}
        chosen = choose_epochs(seconds, settings.budget_epochs * seconds["eagle3"])
        atomic.write_json(EPOCHS_FILE, {"seconds_per_epoch": seconds, "epochs": chosen})
    epochs: dict[str, int] = atomic.read_json(EPOCHS_FILE, made_by="train_draft")["epochs"]
    print(f"{settings.target}: epochs {epochs}", flush=True)
    return epochs


def read_training_seconds(checkpoint: str, is_on_gpu: bool) -> float:
    """Return the CPU time of the process that trained a checkpoint; on a GPU its seconds.

    Raises ValueError where the log has no such run, since DVC restored its result or another version wrote the line.
    """
    stage = f"train_draft@{checkpoint}"
    runs = [run for run in stage_log.read_log() if run.stage == stage]
    taken = (runs[-1].seconds if is_on_gpu else runs[-1].process_s) if runs else None
    if taken is None:
        raise ValueError(f"{stage_log.LOG_FILE} has no time of {stage}, expected one; compare in a new FOLDER")
    return taken


def read_chain_tau(family: Family, seed: int, rate: float) -> float:
    """Return the replayed tau, at temperature 0, of the chain by which a family's rate is chosen."""
    name = family.name_checkpoint(seed, rate)
    trees = replay_records.select_temperature(replay_records.read_replay(name), 0)
    return next(tree.tau for tree in trees if tree.shape.name == family.chain)


def _print_unequal(drafts: Sequence[families_record.ComparedDraft], settings: Settings) -> None:
    """Print the families whose training took more than TOLERANCE longer or shorter than EAGLE-3's."""
    for seed in settings.seeds:
        seconds = {d.family: read_training_seconds(d.checkpoint, settings.is_on_gpu) for d in drafts if d.seed == seed}
        for name, share in find_unequal(seconds).items():
            print(f"{settings.target}: seed {seed}: training {name} took {share:.2f} of EAGLE-3's time", flush=True)


# Runs


def _fill_segment(family: Family, epochs: int) -> dict[str, Any]:
    return {"from": "e000", "epochs": epochs, **family.segment}


def _group_by_rate(rates: Mapping[str, float]) -> Iterator[tuple[float, list[str]]]:
    groups = defaultdict[float, list[str]](list)
    for name, rate in rates.items():
        groups[rate].append(name)
    yield from sorted(groups.items())


def _plan_training(
    families: Sequence[Family], seed: int, rate: float, epochs: Mapping[str, int], is_wide: bool = False
) -> Run:
    segments = {f.name_checkpoint(seed, rate): _fill_segment(f, epochs[f.name]) for f in families}
    return Run(seed, rate, segments, is_wide, stages=[f"replay_trees@{name}" for name in segments])


def _name_timed(family: Family, checkpoint: str) -> str:
    """Return the checkpoint whose shapes are timed: e000 of EAGLE-3, as docs/cost.md has it."""
    return checkpoint if family.segment else "e000"


def _plan_timing(family: Family, seed: int, rate: float, epochs: Mapping[str, int]) -> Run:
    name = family.name_checkpoint(seed, rate)
    timed = _name_timed(family, name)
    cells = [f"benchmark@{workload}-{name}-{tree}" for workload in WORKLOADS for tree in family.cells]
    stages = [f"time_trees@{timed}", *cells]
    return Run(seed, rate, {name: _fill_segment(family, epochs[family.name])}, True, [timed], family.cells, stages)


def _make(project: Path, settings: Settings, run: Run) -> None:
    if settings.is_read_only:
        return
    edit_params(project, settings, run)
    if gpu_graph.run(project, "pipeline.checked_dvc", "repro", *run.stages, shown=3):
        raise SystemExit(f"{project}: a stage failed; its output is above. Mend it and run again: what is made is kept")


def edit_params(project: Path, settings: Settings, run: Run) -> None:
    """Write the keys of one call of DVC into the project's params.yaml."""
    yaml, path, is_small = YAML(typ="safe"), project / "params.yaml", settings.is_small
    p = yaml.load(path.read_text())
    names = list(run.segments)
    # One thread: two would wait for each other beside other programs, and count that as CPU time.
    p["target"] |= {"device": settings.device, "num_threads": 1, "feature_layers": STORED_LAYERS}
    p["sample_target"] |= {"train_rows": 40, "eval_rows": 12} if is_small else {"train_rows": 220, "eval_rows": 150}
    p["init_draft"]["seed"] = run.seed  # of EAGLE-3's first weights; those of a block draft are by train_draft.seed
    p["check_overfit"] |= {"steps": 60, "min_tau": 1.0 if is_small else 1.5}  # 200 take longer than an epoch
    p["train_draft"] |= {"checkpoints": {k: dict(v) for k, v in run.segments.items()}}
    p["train_draft"] |= {"seed": run.seed, "learning_rate": run.rate}
    p["replay_trees"] |= {
        "checkpoints": names,
        "num_steps": [1, 3, 5, 7, 8] if run.is_wide else [7],
        "topk": [1, 2, 4] if run.is_wide else [1],
        "num_draft_tokens": [8, 16, 32],
        "trace_trees": TRACED_TREES if run.is_wide else [],
    }
    p["time_trees"] |= {
        "checkpoints": list(run.timed) or ["e000"],
        "num_steps": [1, 3, 7, 8] if not is_small else [1, 3, 7],
        "topk": [1, 2, 4],
        "num_draft_tokens": [8, 16, 32],
        "repeats": 1 if is_small else 3,
        "batches": [1, 8, 32],
    }
    plain = {**p["benchmark"]["workloads"].get("eval", {}), **p["benchmark"]["workloads"].get("one", {})}
    few = {"num_prompts": 4, "repeats": 2, "max_new_tokens": 20} if is_small else {}
    p["benchmark"] |= {
        "workloads": {name: {**plain, **keys, **few} for name, keys in WORKLOADS.items()},
        "torch_workloads": list(WORKLOADS),
        "checkpoints": names[:1],
        "trees": list(run.trees),
    }
    p["benchmark_methods"]["workload"] = "one"
    yaml.dump(p, path)


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("folder", type=Path)
    takes.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    takes.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    takes.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), help="learning rates tried on the first seed"
    )
    takes.add_argument("--device", default="cpu", help="of target.device: cpu, cuda or cuda:N")
    takes.add_argument("--small", action="store_true", help="few rows, one epoch and one rate: tries the script")
    takes.add_argument("--read", action="store_true", help="run nothing, read the figures that FOLDER holds")
    takes.add_argument("--record", metavar="DATE", help="write docs/results/DATE-families.csv")
    o = takes.parse_args()
    home = Path.cwd()
    more: dict[str, Any] = {"rates": o.rates, "is_read_only": o.read}
    more |= {"rates": RATES[:1], "budget_epochs": 1, "is_small": True} if o.small else {}
    figures = [
        figure
        for target in o.targets
        for figure in compare_target(o.folder.absolute() / target, Settings(target, o.seeds, o.device, **more))
    ]
    place = families_record.locate_record(home, o.record) if o.record else o.folder.absolute() / "families.csv"
    families_record.write_figures(place, figures)
    print(f"{len(figures)} figures -> {place}")


if __name__ == "__main__":
    main()
