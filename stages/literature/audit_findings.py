"""Findings of the audit of published numbers, and the look-ups that audits share."""

from collections.abc import Iterator
from dataclasses import dataclass

from stages.literature.published import MEAN_DATASET, UNKNOWN, Publication, PublishedRow, PublishedSetting
from stages.params.tree_shape import TreeShape

AGREES = "agrees"  # the arithmetic gives what is printed
DEPENDS = "depends"  # something that isn't stated could explain it: the reading says what
OPEN = "open"  # nothing known here explains it
VERDICTS = (AGREES, DEPENDS, OPEN)


@dataclass(frozen=True)
class Finding:
    """A result of arithmetic on a publication's own numbers."""

    heading: str
    verdict: str  # one of VERDICTS
    arithmetic: str  # sentences in which every number is from a row or computed from rows
    reading: str = ""  # what would explain it, or what follows
    table: tuple[tuple[str, ...], ...] = ()  # its first line is the head


@dataclass(frozen=True)
class PublishedCell:
    """Numbers of one publication under one setting, in one of its tables."""

    publication: str
    where: str
    setting: PublishedSetting
    numbers: dict[str, float]

    @property
    def name(self) -> str:
        """Return the settings that tell it from its neighbours, short enough for a table."""
        s = self.setting
        return format_setting(s, s.target, s.method, s.dataset, s.tree)

    @property
    def shape(self) -> TreeShape:
        """Return the shape of its tree. Raises ValueError where no tree is stated."""
        if not (found := self.setting.shape):
            location = f"published/{self.publication}.yaml: {self.where}: {self.name}"
            raise ValueError(f"{location}: no tree, which the audit needs; give it")
        return found

    def get_setting(self, key: str) -> float:
        """Return a setting that must be a number. Raises ValueError where it is not stated."""
        value = getattr(self.setting, key)
        if not isinstance(value, float):
            location = f"published/{self.publication}.yaml: {self.where}"
            raise ValueError(f"{location}: expected a number as {key}, found {value}; give it")
        return value


def format_setting(setting: PublishedSetting, *words: str | None) -> str:
    """Return those words that are stated, and the temperature."""
    temperature = f"T={setting.temperature:g}" if isinstance(setting.temperature, float) else UNKNOWN
    return ", ".join(word for word in (*words, temperature) if word and word != UNKNOWN)


def group_cells(publication: Publication) -> list[PublishedCell]:
    """Return the publication's rows by table and setting. Raises ValueError where a number is given twice under one setting."""
    found: dict[tuple[str, PublishedSetting], dict[str, float]] = {}
    for row in publication.rows:
        numbers = found.setdefault((row.where, row.setting), {})
        if row.metric in numbers:
            raise ValueError(
                f"published/{publication.name}.yaml: {row.where}: {row.metric} is given twice under {row.setting}; "
                "tell them apart by label, or give one of them"
            )
        numbers[row.metric] = row.value
    return [PublishedCell(publication.name, where, setting, numbers) for (where, setting), numbers in found.items()]


def select_cells(publication: Publication, *metrics: str) -> list[PublishedCell]:
    """Return the cells that print all of these metrics."""
    return [cell for cell in group_cells(publication) if all(metric in cell.numbers for metric in metrics)]


def get_number(publication: Publication, metric: str, **settings: object) -> float:
    """Return the one number of that metric under these settings. Raises ValueError where there is none, or several."""
    found = {
        row.value
        for row in publication.rows
        if row.metric == metric and all(getattr(row.setting, key) == value for key, value in settings.items())
    }
    if len(found) != 1:
        raise ValueError(
            f"published/{publication.name}.yaml: expected one {metric} with {settings}, found {sorted(found)}; "
            "restore the file, or fix the audit with it"
        )
    return found.pop()


def group_means(publication: Publication) -> Iterator[tuple[PublishedRow, list[PublishedRow]]]:
    """Yield every printed mean over data sets with the rows it is the mean of."""
    groups: dict[tuple[str, str, PublishedSetting], list[PublishedRow]] = {}
    for row in publication.rows:
        groups.setdefault((row.where, row.metric, row.setting.model_copy(update={"dataset": None})), []).append(row)
    for rows in groups.values():
        printed = [row for row in rows if row.setting.dataset == MEAN_DATASET]
        if printed:
            yield printed[0], [row for row in rows if row.setting.dataset != MEAN_DATASET]
