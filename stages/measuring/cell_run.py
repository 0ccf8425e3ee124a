"""The measurement of one cell on any engine, from its context to its record."""

import time
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from stages.cells import cell, interval, points
from stages.cells.cell import PLAIN, RAN, SPECULATIVE, UNSUPPORTED, Cell, LoadPoint, NotMeasuredError, StoppingRecord
from stages.engines.cell_engine import CellContext, CellEngine, RepeatResults, Subject, build_context
from stages.grading import grade
from stages.measuring import repeats
from stages.params import schema
from stages.params.engines import is_in_process
from stages.params.tree_shape import Load, parse_shape
from stages.telemetry import gpu_energy


def measure_cell(
    params: schema.Params, engine: str, workload_name: str, checkpoint: str | None, tree_name: str | None
) -> None:
    """Measure a cell and write it; without a checkpoint and a tree, the engine alone.

    A cell that the engine can't run is of status "unsupported", and nothing is loaded or started for it; one with a draft of
    which no token is accepted of status "skipped". Raises ValueError where the engine would measure something else.
    """
    started, tree = time.perf_counter(), parse_shape(tree_name) if tree_name else None
    measured = _build_engine(build_context(params, engine, workload_name, checkpoint, tree))
    meter = gpu_energy.EnergyMeter(measured.list_gpus())
    ended: dict[Load, StoppingRecord] = {}
    status, reason = RAN, measured.explain_unsupported()
    if reason:
        status = UNSUPPORTED
    elif measured.launch():
        return
    else:
        try:
            ended = repeats.measure_repeats(measured)
        except NotMeasuredError as error:
            status, reason = error.status, error.reason
        if not measured.is_first:
            return
    results = repeats.join_results(measured) if status == RAN else {}
    found = {kind: _build_points(measured, kind, ended) for kind in results}
    plain = found.get(PLAIN, [])
    record = Cell(
        workload=workload_name,
        checkpoint=checkpoint,
        tree=tree_name,
        engine=engine,
        status=status,
        reason=reason,
        points=found.get(SPECULATIVE, []) if tree else plain,
        baseline_points=plain if tree else [],
        seconds=round(time.perf_counter() - started, 2),
        gpus=meter.names(),
        joules=meter.joules(),
        **measured.context.workload.model_dump(include=cell.SAMPLING_KEYS),
        **vars(measured.describe()),
    )
    print(f"{record.name}: {_summarise(record)} -> {record.write()}")


def _build_engine(context: CellContext) -> CellEngine:
    if is_in_process(context.engine):
        from stages.engines.torch_engine import TorchCell  # the engine's kernels, which no server needs

        return TorchCell(context)
    from stages.measuring.measured_server import ServedCell

    return ServedCell(context)


def _build_points(measured: CellEngine, kind: str, ended: Mapping[Load, StoppingRecord]) -> list[LoadPoint]:
    subject = next(one for one in measured.subjects if kind in one.results)
    both = len(repeats.join_results(measured)) > 1
    return [
        build_point(
            subject,
            kind,
            load,
            of_load,
            in_turns=repeats.pool_speedup(measured, load) if measured.in_turns and kind == SPECULATIVE else None,
            process_share=subject.measure_process_share(load),
            stopping=ended[load] if both else None,
        )
        for load, of_load in subject.results[kind].items()
    ]


def build_point(subject: Subject, kind: str, load: Load, of_load: RepeatResults, **more: Any) -> LoadPoint:
    """Return the point of a subject's load, from the results of some repeats; `more` are fields that these don't tell."""
    context, references = subject.context, subject.context.references
    results = [result for turns in of_load for result in turns]
    answers, acceptance = [record for result in results for record in result.records], None
    counted = [(record, record.counts) for record in answers if record.counts]
    if kind == SPECULATIVE and context.tree and counted:
        acceptance = points.pool_acceptance(
            [counts for _, counts in counted],
            [interval.get_cluster(context.workload.prompts, record.question_id) for record, _ in counted],
            context.tree.num_steps,
            context.tree.num_draft_tokens,
        ).model_copy(update={"engine": subject.list_figures(results)})
    if references:
        more["grade_answer"] = lambda r: grade.grade_answer(references[r.question_id], context.decode_text(r))
        more["grading"] = grade.describe_grading(next(iter(references.values())))
    return points.build_point(
        load,
        context.workload.request_rate,
        repeats.list_records(of_load),
        acceptance,
        subject.list_warnings(load, results),
        **more,
    )


def _summarise(record: Cell) -> str:
    """Return what a cell says, in words."""
    if record.reason:
        return f"{record.status}: {record.reason}"
    pairs = zip_longest(record.points, record.baseline_points)
    return "; ".join(_summarise_point(point, plain, record.temperature == 0) for point, plain in pairs)


def _summarise_point(point: LoadPoint | None, plain: LoadPoint | None, is_greedy: bool) -> str:
    told = [f"tau {point.acceptance.tau:.3f}"] if point and point.acceptance else []
    if point and plain and point.in_turns:
        share = point.share_identical(plain) if is_greedy else None
        identical = "" if share is None else f"identical {share:.0%} of "
        return f"{', '.join(told)}, speedup {point.in_turns.speedup:.2f}, {identical}{len(point.requests)} answers"
    for one, word in ((point, ""), (plain, "plain ")):
        told += [f"{word}{one.mean_throughput:.1f} output tokens/s"] if one else []
    some = point or plain
    return f"{some.load if some else ''}: {', '.join(told)}"
