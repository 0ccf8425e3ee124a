"""Run the graph, what is stale, recipes, and workspaces of runs, from the command line.

python -m pipeline run                           bring every stage up to date, as `make run` does
python -m pipeline stale                         which stages the next run wakes, and what changed; exits with 1 where any
python -m pipeline pull STAGE                    fetch what it reads and isn't here, from the remote
python -m pipeline use RECIPE                    take its keys into params.yaml, whose comments and other keys stay
python -m pipeline reproduce RECIPE              that, run the graph, and lay the results beside what was published
python -m pipeline reproduce RECIPE --dry-run    what would run, how large, how long; changes and runs nothing
python -m pipeline reproduce RECIPE --compare    only lay what is there beside what was published
python -m pipeline promote RUN                   take the parameters and results of a run's own workspace for ours
python -m pipeline drop RUN                      remove that workspace
"""

import inspect
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from pipeline import dvc_graph, versions, workspaces
from pipeline.recipes import use_recipe
from pipeline.reproduce import compare_recipe, describe_dry_run, reproduce_recipe

MAX_SHOWN_CHANGES = 3  # changes of a line


def run() -> Iterator[str]:
    """Bring every stage up to date by one DVC, which prints here; killed outright, this run leaves no stage at work.

    Raises:
        ValueError: where dvc.yaml or params.yaml can't be read, or dvc.lock can't be healed.
        StageError: where a stage failed.
    """
    with workspaces.one_run(partial(print, flush=True)) as held:
        why = dvc_graph.explain_stale()
        yield from _describe(why)
        if not why:
            return
        with dvc_graph.guard_run(held):
            dvc_graph.run_all_stages()


def list_stale() -> Iterator[str]:
    """Say what the next run wakes. Raises SystemExit(1) after the last line, where that is anything."""
    why = dvc_graph.explain_stale()
    yield from versions.warnings()
    yield from _describe(why)
    if why:
        sys.exit(1)


def _describe(why: dict[str, list[str]]) -> Iterator[str]:
    """Yield a line for the stages of the same changes, in the order of the graph."""
    if not why:
        yield "nothing is stale"
        return
    reasons: dict[str, list[str]] = {}
    for name in filter(why.get, dvc_graph.list_stages()):
        reasons.setdefault(_summarise_changes(why[name]), []).append(name)
    for reason, names in reasons.items():
        yield f"stale: {', '.join(names)} ({reason})"


def _summarise_changes(changes: list[str]) -> str:
    """All of them are in the stage's log and in Prefect's pages."""
    if any(
        change.endswith("not in cache") for change in changes
    ):  # as in a new clone, where there is nothing else to say
        return "its results are not here"
    more = [f"{len(changes) - MAX_SHOWN_CHANGES} more"] if len(changes) > MAX_SHOWN_CHANGES else []
    return "; ".join([*changes[:MAX_SHOWN_CHANGES], *more])


COMMANDS: dict[tuple[str, ...], Callable[..., Iterable[str]]] = {
    ("run",): run,
    ("stale",): list_stale,
    ("pull",): dvc_graph.pull_inputs,
    ("use",): use_recipe,
    ("reproduce",): reproduce_recipe,
    ("reproduce", "--dry-run"): describe_dry_run,
    ("reproduce", "--compare"): compare_recipe,
    ("promote",): workspaces.promote_run,
    ("drop",): workspaces.drop_run,
}


def main(words: list[str]) -> None:
    try:
        flags = [word for word in words[1:] if word.startswith("-")]
        names = [word for word in words[1:] if not word.startswith("-")]
        way = COMMANDS.get((*words[:1], *flags))
        if way is None or len(names) != len(inspect.signature(way).parameters):
            usage = (
                "python -m pipeline run, stale, pull STAGE, use RECIPE,"
                " reproduce RECIPE [--dry-run | --compare], promote RUN, or drop RUN"
            )
            raise ValueError(f"expected: {usage}; found {' '.join(words) or 'nothing'}")
        for line in way(*names):
            print(line, flush=True)
    except (ValueError, dvc_graph.StageError) as error:
        sys.exit(f"aerie: {error}")
    except KeyboardInterrupt:
        print("aerie: interrupted; what has finished is cached, run again to go on", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    # A kill as an exception, like Ctrl-C, so that the stage at work is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main(sys.argv[1:])
