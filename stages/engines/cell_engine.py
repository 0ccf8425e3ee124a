"""The Protocol by which a cell is measured on any engine, in this process or on servers: what it asks, and what it gets."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from stages.cells.cell import CellSetting
from stages.cells.request_record import RequestRecord
from stages.grading import grade
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.section import get_named
from stages.params.tree_shape import Load, TreeShape
from stages.prompts import workload_prompts
from stages.prompts.workload_prompts import WorkloadPrompt
from stages.target import chat_template, manifest


@dataclass(frozen=True)
class QuestionTurn:
    """A turn of a conversation, ready to decode."""

    question: WorkloadPrompt
    number: int  # from 0
    messages: list[dict[str, str]] | None  # of the prompt; None for random prompts
    ids: list[int]  # of the prompt

    @property
    def id(self) -> str:
        """Return the id of the turn's record."""
        return f"{self.question.id}#{self.number}"


@dataclass(frozen=True)
class CellContext:
    """A cell's prompts, draft and tree, as its engine gets them."""

    params: schema.Params
    engine: str
    workload_name: str
    workload: Workload
    checkpoint: str | None  # None, as the tree: without a draft
    tree: TreeShape | None
    prompts: pl.DataFrame  # workload_prompts.PROMPTS_SCHEMA
    warmup_prompts: pl.DataFrame
    manifest: manifest.TargetManifest
    target_folder: Path

    @cached_property
    def tokenizer(self) -> Any:
        trust = self.params.target.trust_remote_code
        return chat_template.load_tokenizer(self.target_folder, trust, self.manifest.chat_template)

    @cached_property
    def references(self) -> dict[str, str]:
        """Return what first answers are graded by; {} where they are not."""
        return dict(self.prompts.select("id", "reference").iter_rows()) if self.workload.grade else {}

    @property
    def longest_prompt(self) -> int:
        """Return the tokens of the longest prompt of a first turn."""
        return max(int(rows["prompt_ids"].list.len().max() or 0) for rows in (self.prompts, self.warmup_prompts))

    def list_first_turns(self, prompts: pl.DataFrame) -> list[QuestionTurn]:
        rows = workload_prompts.list_rows(prompts)
        return [QuestionTurn(row, 0, row.messages, row.prompt_ids) for row in rows]

    def build_next_turn(self, turn: QuestionTurn, answer: RequestRecord) -> QuestionTurn | None:
        """Return the turn that follows the answer of `turn`; None after the last turn."""
        later = turn.question.later or []
        if turn.messages is None or turn.number >= len(later):
            return None
        answer_message = {"role": "assistant", "content": self.decode_text(answer)}
        messages = [*turn.messages, answer_message, {"role": "user", "content": later[turn.number]}]
        ids = chat_template.encode_prompt(self.tokenizer, messages, self.params.sample_target.thinking)
        return QuestionTurn(turn.question, turn.number + 1, messages, ids)

    def decode_text(self, answer: RequestRecord) -> str:
        """Return an answer without the target's special tokens, as a server would send it."""
        return self.tokenizer.decode(answer.ids, skip_special_tokens=True) if answer.ids else answer.text


def build_context(
    params: schema.Params, engine: str, workload_name: str, checkpoint: str | None, tree: TreeShape | None
) -> CellContext:
    """Return what a cell asks. Raises ValueError for a workload that can't be graded, or prompts that are missing."""
    workload = get_named(params.benchmark.workloads, workload_name, "benchmark.workloads")
    target = manifest.read_manifest()
    prompts, warmup = workload_prompts.read_prompts(workload_name)
    if workload.grade:
        workload_prompts.check_references(workload_name, prompts)
        grade.check_programs(prompts["reference"], workload_name, params.benchmark.run_generated_code)
    folder = manifest.resolve_weights_folder(target).absolute()
    return CellContext(
        params=params,
        engine=engine,
        workload_name=workload_name,
        workload=workload,
        checkpoint=checkpoint,
        tree=tree,
        prompts=prompts,
        warmup_prompts=warmup,
        manifest=target,
        target_folder=folder,
    )


@dataclass
class LoadResult:
    """The measurements of one turn of a load."""

    records: list[RequestRecord]  # in the order of the requests
    counting_errors: list[str] = field(default_factory=list)  # why accepted drafts could not be counted
    engine_figures: dict[str, Any] = field(default_factory=dict)  # the engine's own, by its names


RepeatResults = list[list[LoadResult]]  # repeat -> turn
ResultsByKind = dict[str, dict[Load, RepeatResults]]  # PLAIN or SPECULATIVE -> load


class Subject(Protocol):
    """A party of a measurement, in turns with others: a server, with a draft or without, or the torch engine itself."""

    name: str  # in logs
    context: CellContext
    results: ResultsByKind  # filled by the loop of measuring/repeats.py
    is_first: bool = True  # of the processes that measure together: the one that tells of it
    simulates: bool = False  # whether acceptance is simulated: the engine accepts as many drafts as configured

    def run_turn(self, turns: list[QuestionTurn], load: Load, repeat: int) -> dict[str, LoadResult]:
        """Answer a turn of each question, by kind of decoding; what comes next follows the answers of the first kind.

        Raises NotMeasuredError for a draft of which no token is accepted, ValueError where nothing is answered.
        """

    def list_warnings(self, load: Load, results: list[LoadResult]) -> list[str]:
        """Return what is to be known of a load, as sentences."""
        return []

    def list_figures(self, results: list[LoadResult]) -> dict[str, Any]:
        """Return the engine's own accept lengths, by its names."""
        return {}

    def measure_process_share(self, load: Load) -> float | None:
        """Return CPU time / wall time of decoding in this process; None on a GPU, and of a server."""
        return None


class CellEngine(Protocol):
    """An engine with the draft, the tree and the workload of one cell."""

    context: CellContext
    in_turns: bool = False  # whether prompts are decoded one at a time, both ways in turns; else in loads
    fits_together: bool = True  # whether all subjects can be open at once
    is_first: bool = True  # whether this process writes the cell

    @property
    def subjects(self) -> list[Subject]: ...

    def list_gpus(self) -> list[int]:
        """Return the GPUs whose energy counts, as indices into CUDA_VISIBLE_DEVICES."""

    def explain_unsupported(self) -> str | None:
        """Return why the engine can't run the cell; None if it can. Nothing is loaded or started."""

    def launch(self) -> bool:
        """Measure in several processes where that is asked for; return whether they have. Raises ValueError if one fails."""
        return False

    def group_loads(self) -> list[list[Load]]:
        """Return the loads of the workload; those of a group have their repeats in turns, and end together."""
        return [self.context.workload.list_loads()]

    def open(self, subjects: list[Subject]) -> AbstractContextManager[None]:
        """Make subjects ready to be measured in the block.

        Raises NotMeasuredError where the engine can't run them, ValueError where they would measure something else.
        """

    def describe(self) -> CellSetting:
        """Return where the cell was measured, after all are closed."""
