"""Records of the reports that stages write in results/: the keys that the page shows by name; other keys pass as they are."""

from pydantic import Field

from stages.cells.record import Record


class StageReport(Record, extra="allow"):
    """A report, or a part of one."""


class Repair(StageReport):
    origin: str
    before: str
    after: str


class HubSource(StageReport):
    dataset: str
    split: str | None
    commit: str | None


class FixReport(StageReport):
    rows_in: int
    rows_out: int
    seconds: float
    rules: dict[str, int]
    dropped_reasons: dict[str, int]
    examples: dict[str, Repair]
    formats: dict[str, int]
    hub: dict[str, HubSource]
    unread_keys: dict[str, int] = Field(default_factory=dict)


class ExtractionReport(StageReport):
    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    seconds: float


class AskedShare(StageReport):
    asked: int
    not_asked: int


class PreviewedRow(StageReport):
    id: str
    origin: str
    prompt: str
    answer: str
    prompt_tokens: int
    answer_tokens: int
    finish_reason: str


class SampleReport(ExtractionReport):
    target: str = ""
    sources: dict[str, dict[str, AskedShare]]
    preview: list[PreviewedRow]
    warnings: list[str] = Field(default_factory=list)


class VocabularyReport(StageReport):
    draft_vocab_size: int
    target_vocab_size: int
    coverage_train: float
    coverage_eval: float


class LearntRow(StageReport):
    tau: float
    perfect_tau: float
    required_tau: float


class OverfitReport(LearntRow):
    perfect_tau: float = 0.0
    min_tau: float
    steps: int
    losses: list[float]
    block_drafts: dict[str, LearntRow] = Field(default_factory=dict)
