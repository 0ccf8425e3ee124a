"""A cell of a serving engine: one server configuration under one workload, or two, with the draft and without, in turns.

The stage starts the servers and stops them, or uses running ones (`base_urls`). A workload that is a sweep has a point for each
answer length and concurrency, all measured on one server.
"""

from contextlib import AbstractContextManager
from typing import Any

from stages.cells import cell
from stages.cells.cell import CellSetting, ServerDescription
from stages.cells.record import name_draft_sampling
from stages.engines import gpu_memory
from stages.engines.cell_engine import CellContext, CellEngine, Subject
from stages.measuring import measured_server, server_setup
from stages.measuring.server_setup import ServedWorkload


class ServedCell(CellEngine):
    """A cell of a serving engine."""

    def __init__(self, context: CellContext) -> None:
        self.context, name = context, context.checkpoint
        config = server_setup.read_draft_config(context.params, name) if name else {}
        self.work = ServedWorkload(context, config)
        self.measured = measured_server.configure_server(self.work, name, context.tree)
        self.servers = [self.measured]
        if name and context.params.benchmark_served.interleave:
            self.servers.insert(0, measured_server.configure_server(self.work, None, None))
        self.gpus_before = gpu_memory.list_visible_gpus()
        self.fits_together = len(self.servers) <= self.work.count_servers_at_once()

    @property
    def subjects(self) -> list[Subject]:
        return [*self.servers]

    def list_gpus(self) -> list[int]:
        is_local = not self.measured.is_running and self.work.setup.device != "cpu"
        return list(range(self.work.settings.tp)) if is_local else []

    def explain_unsupported(self) -> str | None:
        if reason := self.measured.explain_unsupported():
            return reason
        self.work.check_positions(self.measured.num_draft_tokens)
        return None

    def open(self, subjects: list[Subject]) -> AbstractContextManager[None]:
        opened, tree = [each for each in self.servers if each in subjects], self.context.tree
        name = cell.name_cell(self.context.workload_name, self.context.checkpoint, tree.name if tree else None)
        return measured_server.open_servers(self.work, opened, name)

    def describe(self) -> CellSetting:
        hardware = self.work.describe_hardware(self.measured.name, self.gpus_before)
        version, memory = self.measured.info.get("version"), self.measured.memory
        gpu_total = round(sum(gpu.total for gpu in self.gpus_before), 2) if self.gpus_before else None
        return CellSetting(
            hardware=hardware,
            versions={self.context.engine: version} if version else {},
            fingerprint=self.work.build_fingerprint(version, hardware),
            draft_sampling=name_draft_sampling(self.measured.samples_drafts),
            server=ServerDescription(
                command=[_shorten_path(word) for word in self.measured.command],
                info={key: _shorten_path(value) for key, value in self.measured.info.items()},
            ),
            memory=memory.model_copy(update={"draft": self.measured.measure_draft_gib(), "gpu_total": gpu_total}),
        )


def _shorten_path(word: Any) -> Any:
    """Return the last two names of an absolute path, since a cell may be published; other values unchanged."""
    return "/".join(word.split("/")[-2:]) if isinstance(word, str) and word.startswith("/") else word
