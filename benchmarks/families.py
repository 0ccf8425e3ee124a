"""Compare EAGLE-3, DFlash, DFlash2 and DSpark on the embedded targets, trained for the same time, by several seeds.

    python -m benchmarks.families FOLDER [--targets weather-tiny weather-tiny-moe] [--seeds 5 6 7] [--device cpu] [--small]
    python -m benchmarks.families FOLDER --device cuda --at-once 5 --parts prepare    # then each other part

FOLDER gets a project for each target, a copy of this one's files; its stages run through DVC, so a second call goes on where the
first stopped. In each project:

1. `prepare`: rows, hidden states, and every family's draft through check_overfit.
2. `calibrate`: a few epochs of every family, whose time says how many epochs of each take as long as BUDGET_EPOCHS of EAGLE-3:
   CPU time of the process on a CPU (logs/stages.jsonl); on a GPU seconds, without the first epoch, which compiles.
3. `train`: on the first seed every family is trained at each of `--rates`; its best by replayed tau of its own chain is kept.
   Then each family at its rate by each seed, replayed over a wider grid of trees, at temperature 0 and that of the training
   answers.
4. `time`: on the first seed the time of cycles (`time_trees`) and cells of the torch engine, one prompt at a time and several
   at once.

`calibrate` and `time` need the machine for themselves. Epochs are fixed between them, so families may be trained side by side,
`--at-once` of them, and both targets too.

`learning_rate` and the seeds are of a whole params.yaml, so it is written again for every rate and seed. With `--record DATE` the
figures go to docs/results/DATE-families.csv, in place of those of the same targets; `python -m
benchmarks.families_tables DATE` prints the tables of docs/families.md. `--read` only reads what FOLDER holds.
"""

import argparse
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ruamel.yaml import YAML

from benchmarks import families_record, gpu_graph
from pipeline import processes
from stages.params.section import ROOT_CHECKPOINT
from stages.results import replay_records, timing_grid, training_records
from stages.runtime import atomic
from stages.telemetry import stage_log

TARGETS = ("weather-tiny", "weather-tiny-moe")
STORED_LAYERS = [1, 2, 3, 4, 5, 6]  # EAGLE-3's 2 3 4 and BLOCK_LAYERS
BLOCK_LAYERS = [1, 2, 4, 5, 6]
RATES = (0.001, 0.002, 0.004)
BUDGET_EPOCHS = 9  # of EAGLE-3
CALIBRATION_EPOCHS = 4
PARTS = ("prepare", "calibrate", "train", "time")
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
    parts: Sequence[str] = PARTS  # none: the figures are read
    at_once: int = 1  # drafts trained side by side

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
    """Make the project of one target, bring the parts of it up to date, and return its figures; none before the last part."""
    if not project.exists():
        gpu_graph.copy_project(project, Path())
        if gpu_graph.run(project, "pipeline", "use", settings.target, shown=1):
            raise SystemExit(f"{project} has no recipe {settings.target}")
    with contextlib.chdir(project), processes.preload_stages(99):
        if "prepare" in settings.parts:
            _make(project, settings, _plan_trial(settings, stages=[f"check_overfit@{ROOT_CHECKPOINT}"]))
        if set(settings.parts) == {"prepare"}:
            return []
        calibration = _calibrate(project, settings)
        if settings.parts and set(settings.parts) <= {"prepare", "calibrate"}:
            return []
        if "train" in settings.parts:
            _train_families(project, settings, calibration.epochs)
        found = _read_chain_taus(settings)
        rates = choose_rates(found)
        print(f"{settings.target}: tau of the chain by rate {found}, chosen {rates}", flush=True)
        if "time" in settings.parts:
            for family in FAMILIES:
                _make(
                    project, settings, _plan_timing(family, settings.seeds[0], rates[family.name], calibration.epochs)
                )
        return _read_figures(settings, calibration, found)


@dataclass(frozen=True)
class Calibration:
    """How many epochs of each family take as long as BUDGET_EPOCHS of EAGLE-3, and the seconds of one; keys are families."""

    seconds_per_epoch: Mapping[str, float]
    epochs: Mapping[str, int]


def _calibrate(project: Path, settings: Settings) -> Calibration:
    """Return the calibration, made once: by the time that a few epochs of each family take, one family after another."""
    if not EPOCHS_FILE.exists():
        names = {family.name: f"trial_{family.name}" for family in FAMILIES}
        _make(project, settings, _plan_trial(settings, [f"train_draft@{name}" for name in names.values()]))
        seconds = {family: read_epoch_seconds(name, settings.is_on_gpu) for family, name in names.items()}
        chosen = choose_epochs(seconds, settings.budget_epochs * seconds["eagle3"])
        atomic.write_json(EPOCHS_FILE, {"seconds_per_epoch": seconds, "epochs": chosen})
    calibration = Calibration(**atomic.read_json(EPOCHS_FILE, made_by="families --parts calibrate"))
    print(f"{settings.target}: epochs {calibration.epochs}", flush=True)
    return calibration


def _train_families(project: Path, settings: Settings, epochs: Mapping[str, int]) -> None:
    """Train every family at each rate by the first seed, then at its best rate by each seed."""
    first, is_wide = settings.seeds[0], settings.at_once > 1  # side by side, many trees take no longer than a few
    for rate in settings.rates:
        _make(project, settings, _plan_training(FAMILIES, first, rate, epochs, is_wide))
    for rate, names in _group_by_rate(choose_rates(_read_chain_taus(settings))):
        for seed in settings.seeds:
            _make(
                project, settings, _plan_training([BY_NAME[name] for name in names], seed, rate, epochs, is_wide=True)
            )


def _read_chain_taus(settings: Settings) -> dict[tuple[str, float], float]:
    """Return the replayed tau of each family's chain by (family, rate), of the first seed."""
    first = settings.seeds[0]
    return {(f.name, rate): read_chain_tau(f, first, rate) for f in FAMILIES for rate in settings.rates}


def _read_figures(
    settings: Settings, calibration: Calibration, found: Mapping[tuple[str, float], float]
) -> list[families_record.FamilyFigure]:
    """Return the figures of one target; none where cycles were not timed yet."""
    first, rates = settings.seeds[0], choose_rates(found)
    timed = {f.name: _name_timed(f, f.name_checkpoint(first, rates[f.name])) for f in FAMILIES}
    if not all(timing_grid.locate_timing_grid("torch", name).exists() for name in timed.values()):
        return []
    drafts = [
        families_record.ComparedDraft(f.name, seed, rates[f.name], f.name_checkpoint(seed, rates[f.name]), f.chain, f.cells)
        for f in FAMILIES
        for seed in settings.seeds
    ]  # fmt: skip
    _print_unequal(drafts, settings, calibration)
    searched = [
        families_record.make_figure(settings.target, name, first, rate, "tau_by_rate", tau, tree=BY_NAME[name].chain)
        for (name, rate), tau in found.items()
    ]  # fmt: skip
    on_gpu = [
        families_record.make_figure(settings.target, f.name, first, rates[f.name], "training_gpu_s", seconds)
        for f in FAMILIES
        if settings.is_on_gpu and (seconds := calibration.seconds_per_epoch[f.name] * calibration.epochs[f.name])
    ]  # fmt: skip
    return [*searched, *on_gpu, *families_record.read_figures(settings.target, drafts, timed, calibration.epochs)]


def read_epoch_seconds(checkpoint: str, is_on_gpu: bool) -> float:
    """Return the time of one epoch of a checkpoint: CPU time of its process; on a GPU the median of its epochs but the first.

    Raises ValueError where the log has no such run, since DVC restored its result or another version wrote the line.
    """
    seconds = [epoch.seconds for epoch in training_records.read_training(checkpoint, ROOT_CHECKPOINT).epochs]
    return median(seconds[1:]) if is_on_gpu else read_process_seconds(checkpoint) / len(seconds)


def read_process_seconds(checkpoint: str) -> float:
    """Return the CPU time of the process that trained a checkpoint. Raises ValueError where the log has no such run."""
    taken = families_record.find_process_seconds(checkpoint)
    if taken is None:
        raise ValueError(f"{stage_log.LOG_FILE} has no time of train_draft@{checkpoint}; compare in a new FOLDER")
    return taken


def read_chain_tau(family: Family, seed: int, rate: float) -> float:
    """Return the replayed tau, at temperature 0, of the chain by which a family's rate is chosen."""
    name = family.name_checkpoint(seed, rate)
    trees = replay_records.select_temperature(replay_records.read_replay(name), 0)
    return next(tree.tau for tree in trees if tree.shape.name == family.chain)


def _print_unequal(
    drafts: Sequence[families_record.ComparedDraft], settings: Settings, calibration: Calibration
) -> None:
    """Print the families whose training took more than TOLERANCE longer or shorter than EAGLE-3's.

    On a GPU drafts may have been trained side by side: their time is then that of their epochs at the calibration.
    """
    for seed in settings.seeds:
        seconds = {
            d.family: calibration.seconds_per_epoch[d.family] * calibration.epochs[d.family]
            if settings.is_on_gpu
            else read_process_seconds(d.checkpoint)
            for d in drafts
            if d.seed == seed
        }
        for name, share in find_unequal(seconds).items():
            print(f"{settings.target}: seed {seed}: training {name} took {share:.2f} of EAGLE-3's time", flush=True)


# Runs


def _fill_segment(family: Family, epochs: int) -> dict[str, Any]:
    return {"from": ROOT_CHECKPOINT, "epochs": epochs, **family.segment}


def _group_by_rate(rates: Mapping[str, float]) -> Iterator[tuple[float, list[str]]]:
    groups = defaultdict[float, list[str]](list)
    for name, rate in rates.items():
        groups[rate].append(name)
    yield from sorted(groups.items())


def _plan_trial(settings: Settings, stages: Sequence[str]) -> Run:
    """Return a run of a few epochs of every family, from checkpoints trial_FAMILY."""
    epochs = 2 if settings.is_small else CALIBRATION_EPOCHS
    segments = {f"trial_{family.name}": _fill_segment(family, epochs) for family in FAMILIES}
    return Run(settings.seeds[0], settings.rates[0], segments, stages=stages)


def _plan_training(
    families: Sequence[Family], seed: int, rate: float, epochs: Mapping[str, int], is_wide: bool = False
) -> Run:
    segments = {f.name_checkpoint(seed, rate): _fill_segment(f, epochs[f.name]) for f in families}
    return Run(seed, rate, segments, is_wide, stages=[f"replay_trees@{name}" for name in segments])


def _name_timed(family: Family, checkpoint: str) -> str:
    """Return the checkpoint whose shapes are timed: e000 of EAGLE-3, as docs/cost.md has it."""
    return checkpoint if family.segment else ROOT_CHECKPOINT


def _plan_timing(family: Family, seed: int, rate: float, epochs: Mapping[str, int]) -> Run:
    name = family.name_checkpoint(seed, rate)
    timed = _name_timed(family, name)
    cells = [f"benchmark@{workload}-{name}-{tree}" for workload in WORKLOADS for tree in family.cells]
    stages = [f"time_trees@{timed}", *cells]
    return Run(seed, rate, {name: _fill_segment(family, epochs[family.name])}, True, [timed], family.cells, stages)


def _make(project: Path, settings: Settings, run: Run) -> None:
    """Bring the stages of a run up to date; drafts side by side once the calibration's gate has passed (check_overfit)."""
    edit_params(project, settings, run)
    if settings.at_once == 1 or not run.is_wide:
        commands = [["pipeline.checked_dvc", "repro", *run.stages]]
    elif run.timed:
        prompts = [f"prepare_prompts@{workload}" for workload in WORKLOADS]
        commands = [[*gpu_graph.REPRO, *prompts, *run.stages]]
    else:
        _repro(project, [*gpu_graph.REPRO, f"init_draft@{ROOT_CHECKPOINT}"])
        commands = [[*gpu_graph.REPRO, f"train_draft@{name}", f"replay_trees@{name}"] for name in run.segments]
    with ThreadPoolExecutor(settings.at_once) as pool:
        list(pool.map(lambda command: _repro(project, command), commands))


def _repro(project: Path, command: Sequence[str]) -> None:
    if gpu_graph.run(project, *command, shown=3):
        raise SystemExit(f"{project}: a stage failed; its output is above. Fix it and run again: what is made is kept")


def edit_params(project: Path, settings: Settings, run: Run) -> None:
    """Write the keys of one call of DVC into the project's params.yaml."""
    yaml, path, is_small = YAML(typ="safe"), project / "params.yaml", settings.is_small
    p = yaml.load(path.read_text())
    names = list(run.segments)
    # One thread: two would wait for each other beside other programs, and count that as CPU time.
    p["target"] |= {"device": settings.device, "num_threads": 1, "feature_layers": STORED_LAYERS}
    # As engines serve it; experts in float32 wait for the host on a GPU, and their pass is no CUDA graph.
    dtype = "bfloat16" if settings.is_on_gpu else "float32"
    p["target"]["dtype"] = p["extract_hiddens"]["dtype"] = dtype
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
        "checkpoints": list(run.timed) or [ROOT_CHECKPOINT],
        "num_steps": [1, 3, 7, 8] if not is_small else [1, 3, 7],
        "topk": [1, 2, 4],
        "num_draft_tokens": [8, 16, 32],
        "repeats": 1 if is_small else 3,
        "cycles": 10 if settings.is_on_gpu else 2,
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
    takes.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    takes.add_argument("--at-once", type=int, default=1, help="drafts trained side by side, on a GPU")
    takes.add_argument("--read", action="store_true", help="run nothing, read the figures that FOLDER holds")
    takes.add_argument("--record", metavar="DATE", help="write docs/results/DATE-families.csv")
    o = takes.parse_args()
    if o.at_once > 1 and not (o.small or o.device.startswith("cuda")):
        takes.error(
            "--at-once: on a CPU the drafts that are trained side by side take each other's time; expected --device cuda"
        )
    home = Path.cwd()
    more: dict[str, Any] = {"rates": o.rates, "parts": () if o.read else o.parts, "at_once": o.at_once}
    more |= {"rates": RATES[:1], "budget_epochs": 1, "is_small": True} if o.small else {}
    figures = [
        figure
        for target in o.targets
        for figure in compare_target(o.folder.absolute() / target, Settings(target, o.seeds, o.device, **more))
    ]
    path = families_record.locate_record(home, o.record) if o.record else o.folder.absolute() / "families.csv"
    families_record.write_figures(path, figures)
    print(f"{len(figures)} figures -> {path}")


if __name__ == "__main__":
    main()
