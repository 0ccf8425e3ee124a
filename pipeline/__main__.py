"""What is stale, recipes, and workspaces of runs, from the command line.

python -m pipeline stale                         which stages the next run wakes, and what changed; exits with 1 where any
python -m pipeline pull STAGE                    fetch what it reads and isn't here, from the remote
python -m pipeline use RECIPE                    take its keys into params.yaml, whose comments and other keys stay
python -m pipeline reproduce RECIPE              that, run the graph, and lay the results beside what was published
python -m pipeline reproduce RECIPE --dry-run    what would run, how large, how long; changes and runs nothing
python -m pipeline reproduce RECIPE --compare    only lay what is there beside what was published
python -m pipeline promote RUN                   take the parameters and results of a run's own workspace for ours
python -m pipeline drop RUN                      remove that workspace
"""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator

from pipeline import graph, versions
from pipeline.recipes import use
from pipeline.reproduce import compare, dry_run, reproduce
from pipeline.workspace import drop, promote

TOLD = 3  # changes of a line


def stale() -> Iterator[str]:
    """In the order of the graph, those of the same changes on one line. Raises SystemExit(1) after the last."""
    why = graph.why_stale()
    yield from versions.warnings()
    if not why:
        yield "nothing is stale"
        return
    reasons: dict[str, list[str]] = {}
    for name in filter(why.get, graph.stages()):
        reasons.setdefault(_brief(why[name]), []).append(name)
    for reason, names in reasons.items():
        yield f"stale: {', '.join(names)} ({reason})"
    sys.exit(1)


def _brief(changes: list[str]) -> str:
    """All of them are in the stage's log and in Prefect's pages."""
    if any(
        change.endswith("not in cache") for change in changes
    ):  # as in a new clone, where there is nothing else to say
        return "its results are not here"
    more = [f"{len(changes) - TOLD} more"] if len(changes) > TOLD else []
    return "; ".join([*changes[:TOLD], *more])


WAYS: dict[tuple[str, ...], Callable[..., Iterable[str]]] = {
    ("stale",): stale,
    ("pull",): graph.pull,
    ("use",): use,
    ("reproduce",): reproduce,
    ("reproduce", "--dry-run"): dry_run,
    ("reproduce", "--compare"): compare,
    ("promote",): promote,
    ("drop",): drop,
}


def main(words: list[str]) -> None:
    try:
        flags = [word for word in words[1:] if word.startswith("-")]
        names = [word for word in words[1:] if not word.startswith("-")]
        way = WAYS.get((*words[:1], *flags))
        if way is None or len(names) != (way is not stale):
            usage = (
                "python -m pipeline stale, pull STAGE, use RECIPE,"
                " reproduce RECIPE [--dry-run | --compare], promote RUN, or drop RUN"
            )
            raise ValueError(f"expected: {usage}; found {' '.join(words) or 'nothing'}")
        for line in way(*names):
            print(line, flush=True)
    except ValueError as error:
        sys.exit(f"aerie: {error}")


if __name__ == "__main__":
    # A kill as an exception, like Ctrl-C, so that the stage at work is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main(sys.argv[1:])
