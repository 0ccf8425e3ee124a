"""The requests of a served cell: its prompts as an engine takes them, and later turns after the engine's own answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from stages.cells import request_record
from stages.engines import http_session, registry
from stages.engines.protocol import LoadRequest, ServerSetup, ServingEngine
from stages.measuring.load_generator import LoadResult
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.prompts import workload_prompts
from stages.prompts.workload_prompts import WorkloadPrompt
from stages.target import chat_template, manifest, vision

SECTION = "benchmark_served.server"


@dataclass
class ServedCellContext:
    """The data that every load of the cell needs."""

    params: schema.Params
    workload_name: str
    workload: Workload
    prompts: pl.DataFrame  # workload_prompts.PROMPTS_SCHEMA
    warmup_prompts: pl.DataFrame
    manifest: manifest.TargetManifest
    target_folder: Path
    setup: ServerSetup
    image_processor: vision.CachedImageProcessor | None
    simulated_answers: Mapping[tuple[str, int], int] | None = None  # tokens by prompt and length: simulated_answers.py

    @property
    def engine(self) -> ServingEngine:
        return registry.get(self.params.benchmark_served.engine)

    @cached_property
    def api_key(self) -> str | None:
        return http_session.read_api_key(self.params.benchmark_served.server.api_key_env, SECTION)

    @cached_property
    def tokenizer(self) -> Any:
        return chat_template.load_tokenizer(
            self.target_folder, self.params.target.trust_remote_code, self.manifest.chat_template
        )

    @cached_property
    def references(self) -> dict[str, str]:
        return dict(self.prompts.select("id", "reference").iter_rows())

    @property
    def served_model(self) -> str:
        return self.params.benchmark_served.server.model or str(self.target_folder)

    @property
    def longest_prompt(self) -> int:
        return int(self.prompts["prompt_ids"].list.len().max())


def make_next_requests(work: ServedCellContext, loads: list[LoadResult], length: int) -> list[LoadRequest]:
    """Return the next turn of the questions that have one and whose earlier turns were all answered."""
    turn, requests = len(loads), []
    answers = [{r.question_id: r for r in load.records if not r.failure_reason} for load in loads]
    for row in workload_prompts.list_rows(work.prompts):
        later = row.later or []
        if len(later) < turn or not all(row.id in turn_answers for turn_answers in answers):
            continue
        messages = list(row.messages or [])
        for turn_answers, question in zip(answers, later, strict=False):
            messages += [
                {"role": "assistant", "content": decode_text(work, turn_answers[row.id])},
                {"role": "user", "content": question},
            ]
        ids = chat_template.encode_prompt(work.tokenizer, messages, work.params.sample_target.thinking)
        requests.append(make_request(work, row, turn, ids, length))
    return requests


def make_request(work: ServedCellContext, row: WorkloadPrompt, turn: int, ids: list[int], length: int) -> LoadRequest:
    workload, processor = work.workload, work.image_processor
    limit, simulated = workload_prompts.compute_max_new_tokens(row.length_share, length), work.simulated_answers
    return LoadRequest(
        id=f"{row.id}#{turn}",
        prompt=ids,
        max_tokens=limit if simulated is None else simulated.get((row.id, length), limit),
        temperature=workload.temperature,
        top_p=workload.top_p,
        top_k=workload.top_k,
        ignore_eos=workload.ignore_eos or simulated is not None,
        engine_fields=_build_image_fields(processor, row.images, ids) if processor and row.images else {},
    )


def _build_image_fields(processor: vision.CachedImageProcessor, images: list[str], ids: list[int]) -> dict[str, Any]:
    """Return the images as SGLang takes them with token ids.

    SGLang repeats each image's token itself; a prompt in which it is already repeated is never answered (0.5.17).
    """
    return {
        "input_ids": vision.collapse_image_tokens(ids, processor.image_token_id, processor.count_image_tokens(images)),
        "image_data": [processor.build_data_url(path) for path in images],
    }


def decode_text(work: ServedCellContext, record: request_record.RequestRecord) -> str:
    """Return an answer without the target's special tokens, as a server would send it."""
    return work.tokenizer.decode(record.ids, skip_special_tokens=True) if record.ids else record.text
