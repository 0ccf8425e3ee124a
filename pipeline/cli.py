"""The command line: `aerie COMMAND`, the same as `python -m pipeline COMMAND`.

Each command calls one function of `pipeline`, or replaces this process by a module of it or of `stages` (`_exec_module`).
Commands import what they need when they run: importing typer takes 0.05 s, Prefect 1 s, and torch is never imported.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from stages.telemetry.interruption import INTERRUPTED, escape_controls, filter_terminal, watch_ctrl_c

# The overview of `aerie --help`: every command, by what one wants to do.
GROUPS: dict[str, tuple[str, ...]] = {
    "Run the pipeline": ("doctor", "preview", "write-questions", "stale", "estimate", "run"),
    "Read the results": ("table", "launch", "export", "card"),
    "Use a recipe": ("use", "fetch", "reproduce"),
    "Runs started in the pages": ("ui", "promote", "drop"),
    "Several hosts": ("worker", "pull"),
}


class GroupedCommands(TyperGroup):
    """Lists its commands by GROUPS, in the order of that table."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                helps = {name: self.commands[name].get_short_help_str(formatter.width - 6 - width) for name in names}
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in helps.items()])


app = typer.Typer(
    name="aerie",
    cls=GroupedCommands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
UsageError: Any = typer.BadParameter.__mro__[1]  # click's, of which typer brings a copy

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="File of recipes/ without .yaml, or the path of a .yaml file.")
]
OptionalRecipe = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="Check this recipe instead of params.yaml as it is.")
]
OptionalEstimated = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="Estimate this recipe instead of params.yaml as it is.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep local edits of params.yaml, on top of the recipe.")]
Stage = Annotated[str, typer.Argument(metavar="STAGE", help="Stage of dvc.yaml, such as report or train_draft@e009.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of .scratch/runs.")]


@app.callback(
    epilog="params.yaml steers everything. `dvc repro` and `python -m stages.NAME` work without this program. "
    "Start with docs/guide.md."
)
def describe_program() -> None:
    """Train speculative-decoding drafts (EAGLE-3, DFlash, DFlash2, DSpark) for a target model and measure what they buy.

    The work is a graph of cached stages: DVC decides which of them are stale, and only those run. A first session is

    \b
        aerie doctor       what this machine has, and what is missing
        aerie stale        what would run
        aerie run          run it and print the table
        aerie launch       the flags of SGLang or vLLM that the results advise

    and a published experiment

    \b
        aerie reproduce angelslim-qwen3-8b --dry-run
        aerie reproduce angelslim-qwen3-8b
    """


@app.command()
def run(
    verbose: Annotated[bool, typer.Option("--verbose", help="Print all that DVC and the stages print.")] = False,
) -> None:
    """Bring every stage up to date and print the table.

    A line for each stage when it has ended; what it printed is in logs/STAGE.log, and shown if it fails. A second run in
    the same folder waits for the first. An interrupted run keeps what has finished; run again to go on.
    `make run` installs what is missing first.

    Example: aerie run after an edit of params.yaml; aerie run --verbose > run.txt keeps every line.
    """
    from pipeline import commands

    _print_lines(commands.run_graph(verbose))


@app.command()
def stale() -> None:
    """List the stages that the next run executes, and why.

    Exits with 1 if there are any. Checks params.yaml first, as a run does.

    Example: aerie stale after an edit of params.yaml, before aerie run.
    """
    from pipeline import commands

    _print_lines(commands.list_stale())


@app.command()
def preview(
    what: Annotated[Literal["data"], typer.Argument(metavar="data", help="Raw conversations, as fix_data reads them.")],
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A file or folder in place of fix_data.raw.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each file.")] = 5,
) -> None:
    """Show what each row of your data becomes, before a long run.

    The first rows of every file of `fix_data.raw`, judged as `fix_data` judges them: format, verdict, split, and the
    turns that are kept, or why the row is dropped. Writes nothing, and exits with 1 if no row is kept.

    Example: aerie preview data data/raw/support.csv --rows 20
    """
    _exec_module("stages.data.preview", str(rows), *([path] if path else []))


@app.command()
def write_questions(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A new .jsonl file.")],
    rows: Annotated[int, typer.Option(min=1, help="Questions to write; fewer are kept.")] = 1000,
    system: Annotated[list[str] | None, typer.Option(help="A system prompt in place of six general ones.")] = None,
    temperature: Annotated[float, typer.Option(min=0.01)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0)] = 0.95,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longer questions are dropped.")] = 96,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Let the target write questions, for those who have none.

    It is given its chat template up to the user's turn. What is not ended, or like an earlier one, is dropped; the last line
    has counts, lengths and scripts. Needs the target: dvc repro prepare_target.

    Example: aerie write-questions data/raw/own/written.jsonl --rows 5000, and fix_data.raw: data/raw/own
    """
    words = (rows, temperature, top_p, max_new_tokens, seed)
    _exec_module("stages.sampling.write_questions", file, *map(str, words), *(system or ()))


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A trained or imported checkpoint.")],
    folder: Annotated[str, typer.Argument(help="Where the two files go.")] = "gguf",
    type_: Annotated[str, typer.Option("--type", help="f32, bf16, q8_0, q4_0 ...; else target.dtype.")] = "",
) -> None:
    """Write a draft and its target as GGUF files for llama.cpp.

    By llama.cpp's own converter and quantiser; then llama-server loads both and answers, and the line that starts it is
    printed. Needs make serving-env ENGINE=llama.cpp.

    Example: aerie export e009 --type q8_0
    """
    _exec_module("stages.measuring.export_gguf", checkpoint, folder, type_)


@app.command()
def card(
    checkpoint: Annotated[str, typer.Argument(help="A trained checkpoint, replayed.")],
    folder: Annotated[str, typer.Argument(help="A new folder; else upload/CHECKPOINT.")] = "",
    licence: Annotated[str, typer.Option(help="Of the draft, as the Hub names it: apache-2.0.")] = "unknown",
) -> None:
    """Write a draft and its model card into a folder that can be uploaded. Nothing is sent.

    The card says what the draft was trained on and how, and what its trees accept by set of questions, replayed.

    Example: aerie card e009 --licence apache-2.0
    """
    _exec_module("stages.reproduce.model_card", checkpoint, folder, licence)


@app.command()
def use(recipe: Recipe, keep: Keep = False) -> None:
    """Write a recipe's keys into params.yaml as committed, so that recipes never mix.

    Local edits that would go are named; --keep keeps them. The previous params.yaml is kept beside it, and the last line
    says how to return to it. `own` is no recipe but a params.yaml for your own target and data, with the lines to fill in.

    Example: aerie use own; or aerie use weather-tiny-vl, then aerie run.
    """
    from pipeline import recipes

    _print_lines(recipes.use_recipe(recipe, keep))


@app.command()
def fetch(recipe: Recipe) -> None:
    """Download the files and prompt sets that a recipe needs.

    From the datasets and URLs that the recipe names, at their revisions, with checksums where they are known. What is here
    already stays. A token for gated datasets is read from HF_TOKEN.

    Example: aerie fetch angelslim-qwen3-8b, then aerie reproduce angelslim-qwen3-8b.
    """
    from pipeline import fetch as steps

    _print_lines(steps.fetch_recipe(recipe))


@app.command()
def reproduce(
    recipe: Recipe,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print stages, sizes and hours. Changes and runs nothing, needs no GPU.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Only compare results/ with the published numbers. Runs nothing.")
    ] = False,
    keep: Keep = False,
) -> None:
    """Run a published experiment and compare the results.

    Writes the recipe into params.yaml, brings every stage up to date and prints the results beside the published ones. Refuses
    before changing anything if files, an engine, GPUs or disk are missing, and names the command that gets each. If a
    stage fails, those that do not need it still run.

    Example: aerie reproduce angelslim-qwen3-8b --dry-run, then the same without --dry-run.
    """
    from pipeline import reproduce as steps

    if dry_run and compare:
        raise ValueError("expected --dry-run or --compare, found both")
    run_steps = steps.describe_dry_run if dry_run else steps.compare_recipe if compare else steps.reproduce_recipe
    _print_lines(run_steps(recipe, keep))


@app.command()
def estimate(
    recipe: OptionalEstimated = None,
    params: Annotated[
        Path | None, typer.Option("--params", metavar="FILE", help="A whole params.yaml other than the one here.")
    ] = None,
    gpu: Annotated[Literal["h200", "h100"], typer.Option(help="Rates of others were not measured.")] = "h200",
) -> None:
    """Print what a run takes: seconds, disk and GPU-hours of each stage.

    Each figure is arithmetic from FLOP, bytes and rates measured on an H200, shown below the table. Changes, downloads and
    runs nothing, needs no GPU. Replays and other stages of seconds to minutes have no time.

    Example: aerie estimate train-qwen3-8b-1gpu before aerie use of it.
    """
    from pipeline import reproduce as steps

    _print_lines(steps.describe_estimate(recipe, params, gpu))


@app.command()
def promote(name: Run) -> None:
    """Take over the parameters and results of a run.

    That is a run with a workspace of its own, as Prefect's forms start them. A sweep's names join the lists of params.yaml,
    and the rows that it did not touch stay. Refuses while a run is at work, if the run has not finished, and if params.yaml
    or another tracked file has changed since it began; a changed dvc.lock is no obstacle.

    Example: aerie promote sweep-1a2b3c4d
    """
    from pipeline import promotion

    _print_lines(promotion.promote_run(name))


@app.command()
def drop(name: Run) -> None:
    """Remove the workspace of a run.

    The DVC cache keeps its results.

    Example: aerie drop sweep-1a2b3c4d
    """
    from pipeline import workspaces

    _print_lines(workspaces.drop_run(name))


@app.command()
def pull(stage: Stage) -> None:
    """Fetch the missing inputs of a stage from the DVC remote.

    Prints their paths.

    Example: aerie pull train_draft@e009, then dvc repro --single-item train_draft@e009.
    """
    from pipeline import dvc_graph

    _print_lines(dvc_graph.pull_inputs(stage))


@app.command()
def launch() -> None:
    """Print the advised draft, tree and engine flags.

    From the results here, which also tell whether to speculate at all. Says so, on stderr, where stages are stale.

    Example: aerie launch after aerie run.
    """
    _note_outdated()
    _exec_module("stages.report", "--launch")


@app.command()
def table() -> None:
    """Print the table of the results here. Runs nothing.

    Says so, on stderr, where stages are stale.

    Example: aerie table > table.txt
    """
    from pipeline import commands

    _print_lines(commands.read_table())
    _note_outdated()


def _note_outdated() -> None:
    """Print on stderr whether what is printed is of an earlier state."""
    from pipeline import commands

    for line in commands.describe_outdated():
        print(line, file=sys.stderr)


@app.command()
def ui() -> None:
    """Start the Prefect server and its pages, until Ctrl-C.

    Serves the deployments of prefect.yaml on this machine only, on port 4200, or the one in AERIE_PORT.
    docs/scheduling.md

    Example: AERIE_PORT=4300 aerie ui, then open the address that it prints.
    """
    _exec_module("pipeline.serve")


@app.command()
def worker(limit: Annotated[int, typer.Option(min=1, help="Stages at a time.")] = 1) -> None:
    """Execute stages for runs of another host, until Ctrl-C.

    Needs PREFECT_API_URL of that host's server and its password in AERIE_PASSWORD_FILE. docs/scheduling.md

    Example: PREFECT_API_URL=http://head:4200/api AERIE_PASSWORD_FILE=password aerie worker --limit 2
    """
    _exec_module("pipeline.start_worker", "--limit", str(limit))


@app.command()
def doctor(recipe: OptionalRecipe = None) -> None:
    """Check packages, GPUs, engines, files and disk.

    Changes and downloads nothing. Exits with 1 if something that a run needs is missing.

    Example: aerie doctor, or aerie doctor angelslim-qwen3-8b before that recipe.
    """
    from pipeline import doctor as checks

    _print_lines(checks.report_findings(recipe))


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _exec_module(module: str, *words: str) -> NoReturn:
    """Replace this process by `python -m MODULE`, which then gets signals itself; its exit status is ours."""
    # Prefect's commands are found on PATH, whether the virtual environment is activated or not.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *words])


def run_command_line(words: list[str]) -> None:
    """Run one command. Raises SystemExit with a line `aerie: ...` for anything the user can correct, and after Ctrl-C."""
    started = time.time()
    filter_terminal()
    with watch_ctrl_c() as interrupted:
        try:
            command = typer.main.get_command(app)
            status = command(words or ["--help"], prog_name="aerie", standalone_mode=False)
            if not words:
                raise ValueError("expected a command, found none")
        except typer.Abort:  # how typer before 0.20 reports Ctrl-C
            status = INTERRUPTED
        except Exception as error:
            if not interrupted.is_set():
                _exit_with_line(error, words)
            status = INTERRUPTED  # and the error is what became of it
    if status == INTERRUPTED:
        from pipeline import commands

        print(f"aerie: {commands.describe_stop(words, started)}", file=sys.stderr)
    if status:
        sys.exit(status)


def _exit_with_line(error: Exception, words: list[str]) -> NoReturn:
    """Raise SystemExit with a line on what the user can correct; any other error as it is."""
    from pipeline.processes import StageError
    from stages.telemetry import machine_errors

    if isinstance(error, UsageError):
        shown = error.ctx.command_path if error.ctx else "aerie"
        problem: str | None = f"{error.format_message()} Found: {' '.join(words)}; run: {shown} --help"
    elif isinstance(error, ValueError | StageError):
        problem = str(error)
    else:
        problem = machine_errors.explain_file_error(error)
    if problem is None:
        raise error
    sys.exit(escape_controls(f"aerie: {problem}"))


def main() -> None:
    """Run the command of sys.argv: the console script `aerie`."""
    # SIGTERM as an exception, like Ctrl-C, so that a running stage is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    run_command_line(sys.argv[1:])
