"""Datasets of the Hugging Face Hub, as a small file `NAME.hub.yaml` names them, in fix_data.raw or in its folder.

DVC tracks that file, and the data changes only when its text does. Its rows are streamed: nothing is downloaded ahead.

    dataset: HuggingFaceH4/ultrachat_200k
    name: null                                           # the configuration, where it has several
    split: train_sft
    revision: 8049631c405ae6576f93f445c6b8166f76f5505a   # a commit; a branch is resolved, and its commit reported
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from stages.params.data_sections import ColumnNames
from stages.params.section import Text
from stages.runtime import foreign_paths, guarded_yaml

CHUNK_BYTES, CHUNK_ROWS = 4 << 20, 4096
STREAMED_ROWS = 64  # of a batch of a streamed dataset: a row may contain an image


class HubPin(BaseModel):
    """A dataset of the Hugging Face Hub, as a NAME.hub.yaml file has it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    dataset: Text  # id, or a local folder
    name: Text | None  # configuration, where it has several
    split: str | None
    revision: Text | None  # a commit or a branch; None: the default branch
    columns: ColumnNames | None = None  # as fix_data.columns, of this dataset; None: fix_data.columns
    rows: PositiveInt | None = None  # read no more than the first so many; None: all


@dataclass(frozen=True)
class HubRecord:
    """The revision and number of rows read from a dataset, for the report."""

    dataset: str
    name: str | None
    split: str | None
    revision: str | None
    commit: str | None  # that the revision was resolved to; None for a local folder
    rows: int


def read_hub_pin(path: Path) -> HubPin:
    """Return the pin in a NAME.hub.yaml, which names a split. Raise ValueError where its keys are not those of HubPin."""
    try:
        pin = HubPin.model_validate(guarded_yaml.read_yaml(path))
    except ValidationError as error:
        advice = "correct it (a commit in quotes); docs/data.md shows one"
        raise ValueError(guarded_yaml.explain_schema_errors(error, str(path), advice)) from None
    if not pin.split:
        raise ValueError(f"{path}: split: expected a text, found {pin.split!r}; name one, as train")
    return pin


def read_hub_dataset(
    pin: HubPin, display_name: str, source: str, hub_records: dict[str, HubRecord], folder: Path, stream: bool = False
) -> Iterator[pl.DataFrame]:
    """Yield a dataset's rows as stored: images stay bytes. `display_name` is the file or parameter that names it.

    In place of an id, to try a loader, a local folder inside `folder` is read. A dataset's card may name any file: those of its
    own folder or repository alone are read.

    With `stream`, nothing is downloaded ahead or kept; else, and with HF_HUB_OFFLINE, the rows are in the cache of the Hub's
    client, from which another reading takes them.

    Raises:
        ValueError: where the dataset is neither a local folder nor on the Hub.
    """
    import datasets  # takes two seconds, and most runs do not need it
    from huggingface_hub import HfApi

    name, commit, done = pin.dataset, pin.revision, 0
    is_local = Path(name).is_dir()
    if is_local and not foreign_paths.is_inside(Path(name), [folder]):
        raise ValueError(
            f"{display_name}: dataset {name} is a folder outside of {folder}, expected an id of the Hub or a folder there; copy "
            "it there"
        )
    options = {"streaming": True} if stream and not datasets.config.HF_HUB_OFFLINE else {}
    try:
        if not is_local and not re.fullmatch(r"[0-9a-f]{40}", commit or ""):
            commit = HfApi().dataset_info(name, revision=commit).sha
        revision = None if is_local else commit
        _check_data_files(datasets.load_dataset_builder(name, pin.name, revision=revision), name, is_local)
        rows = datasets.load_dataset(name, pin.name, split=pin.split, revision=revision, **options)
        rows = rows if pin.rows is None else rows.take(pin.rows)
        for table in _join_batches(rows.with_format("arrow").iter(batch_size=STREAMED_ROWS)):
            yield table
            done += table.height
    except Exception as error:  # the Hub, the cache, the network and dataset builders each raise their own
        words = str(error).strip().splitlines() or [""]
        read = f" after row {done}" if done else ""
        raise ValueError(
            f"{display_name}: dataset {name} (name {pin.name}, split {pin.split}, revision {pin.revision}) is "
            f"neither a folder here nor to be had from the Hub{read} ({type(error).__name__}: {words[0]}); check the "
            "spelling, the network, and HF_TOKEN if it is gated"
        ) from None
    made = None if is_local else commit
    hub_records[source] = HubRecord(name, pin.name, pin.split, pin.revision, commit=made, rows=done)


def _check_data_files(builder: Any, name: str, is_local: bool) -> None:
    """Raise ValueError where a dataset has files of this machine, or of another repository."""
    ids = {name.lower(), str(builder.repo_id).lower()}
    for file in itertools.chain.from_iterable((builder.config.data_files or {}).values()):
        inner = str(file).rsplit("::", 1)[-1]  # of an archive
        repository = inner.lower().removeprefix("hf://datasets/").split("@")[0]
        if not (foreign_paths.is_inside(Path(inner), [Path(name)]) if is_local else repository in ids):
            raise ValueError(f"its card names {file}, expected files of its own")


def _join_batches(batches: Iterable[Any]) -> Iterator[pl.DataFrame]:
    """Yield Arrow tables joined to a chunk's size."""
    waiting: list[pl.DataFrame] = []
    rows = size = 0
    for batch in batches:
        waiting.append(pl.DataFrame(pl.from_arrow(batch)))
        rows, size = rows + waiting[-1].height, size + int(waiting[-1].estimated_size())
        if rows >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield pl.concat(waiting, how="diagonal_relaxed")
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pl.concat(waiting, how="diagonal_relaxed")
