"""When a cell has been repeated often enough: docs/workloads.md, "until"."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol, Self, TypeVar

from stages.cells import interval, metrics
from stages.cells.torch_records import PromptRow, StoppingRecord


class RepeatedWorkload(Protocol):
    """The repeats of a workload of params.yaml (stages/params/benchmark_sections.py)."""

    prompts: str

    @property
    def fewest_repeats(self) -> int: ...

    @property
    def most_repeats(self) -> int: ...

    @property
    def half_width(self) -> float | None: ...


class Answer(Protocol):
    """An answer that was decoded plainly and speculatively."""

    @property
    def row(self) -> PromptRow: ...


AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True)
class RepeatRule:
    """The repeats of a workload: `repeats` and `until` of params.yaml."""

    fewest: int
    most: int
    # Of the speedup's interval, as a share of the speedup; None: `most` repeats whatever it is.
    half_width: float | None

    @classmethod
    def of_workload(cls, workload: RepeatedWorkload) -> Self:
        return cls(workload.fewest_repeats, workload.most_repeats, workload.half_width)

    def judge(self, repeats: int, half_width: float | None, prints: bool = True) -> StoppingRecord | None:
        """Return why a measurement of this half-width ends after so many repeats; None while it goes on.

        Where the number of repeats is not fixed, a line says how far it is, unless `prints` is False.
        """
        wanted = self.half_width
        if wanted is not None and prints:
            known = "no interval yet" if half_width is None else f"speedup known to ±{half_width:.1%}"
            print(f"repeat {repeats} of at most {self.most}: {known}, wanted ±{wanted:.1%}", flush=True)
        if wanted is not None and half_width is not None and repeats >= self.fewest and half_width <= wanted:
            return StoppingRecord(repeats=repeats, rule="half_width", half_width=half_width)
        if repeats >= self.most:
            ended_by: Literal["repeats", "most_repeats"] = "repeats" if wanted is None else "most_repeats"
            return StoppingRecord(repeats=repeats, rule=ended_by, half_width=half_width)
        return None


def decode_repeats(
    workload: RepeatedWorkload, decode_repeat: Callable[[int], Sequence[AnswerT]], prints: bool = True
) -> tuple[list[AnswerT], StoppingRecord]:
    """Call `decode_repeat` with 0, 1, ... until its answers say enough; return all answers, and why there are no more.

    A repeat decodes every prompt once, both ways.
    """
    rule, repeats = RepeatRule.of_workload(workload), 0
    answers: list[AnswerT] = []
    ended: StoppingRecord | None = None
    while ended is None:
        answers += decode_repeat(repeats)
        repeats += 1
        ended = rule.judge(
            repeats, metrics.measure_answers_half_width([answer.row for answer in answers], workload.prompts), prints
        )
    return answers, ended


def measure_loads_half_width(throughputs: Sequence[float], baseline_throughputs: Sequence[float]) -> float | None:
    """Return half of the interval of a load's speedup, as a share of it; from output tokens/s of each repeat.

    None with fewer than two repeats, or where one answered nothing.
    """
    if not all(baseline_throughputs):
        return None
    speedups = [a / b for a, b in zip(throughputs, baseline_throughputs, strict=True)]
    return interval.compute_relative_half(interval.compute_mean_interval(speedups), fmean(speedups))
