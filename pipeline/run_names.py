"""Names of runs in Prefect's pages, by what they do.

The pages propose a name of random words for each run, which says nothing; a name that a person typed stays.
"""

import re
from collections.abc import Iterator, Sequence
from uuid import UUID

from prefect import get_client, runtime

from pipeline.forms import Changes, Sweep

GREEK = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi psi
omega"""
# Prefect's server makes two words, as phenomenal-wombat; its pages a letter and more, as xi3-kianira-band.
RANDOM_NAME = re.compile(rf"[a-z]+-[a-z]+|({'|'.join(GREEK.split())})\d*(-[A-Za-z0-9']+)+")
MAX_NAMES = 3
NIGHTLY = "nightly"  # the deployment of prefect.yaml that a clock starts


def name_sweep(cells: Sweep) -> str:
    """Return a name such as `sweep t4_2_8 at e009`: trees, and what else the form names."""
    name = f"sweep {join_names(cells.trees, 'trees')}"
    if cells.checkpoints:
        name += f" at {join_names(cells.checkpoints, 'checkpoints')}"
    if cells.workloads:
        name += f" on {join_names(cells.workloads, 'workloads')}"
    return f"{name}, served" if cells.engine == "served" else name


def name_build(changes: Changes) -> str:
    """Return `build`, and what differs from params.yaml."""
    word = NIGHTLY if runtime.deployment.name == NIGHTLY else "build"
    return f"{word} {', '.join(parts)}" if (parts := list(_describe_changes(changes))) else word


def _describe_changes(changes: Changes) -> Iterator[str]:
    if changes.trees:
        yield join_names(changes.trees, "trees")
    if changes.epochs:
        yield f"epochs {', '.join(map(str, changes.epochs))}"
    if changes.workloads:
        yield f"on {join_names(changes.workloads, 'workloads')}"
    keys = [f"{key} {value}" for key, value in changes.other.items()]
    if keys:
        yield join_names([text if len(text) <= 60 else text.partition(" ")[0] for text in keys], "keys")


def join_names(names: Sequence[str], plural: str) -> str:
    """Return the names, or their number if they would fill the line."""
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} {plural}"


def rename_run(name: str) -> str:
    """Give this run the name, unless a person has named it -> its name."""
    now = str(runtime.flow_run.name)
    if not RANDOM_NAME.fullmatch(now):
        return now
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(str(runtime.flow_run.id)), name=name)
    return name
