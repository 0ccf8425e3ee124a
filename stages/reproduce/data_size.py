"""The rows of a run's data and their tokens: of what the stages have written here, before that of the raw files."""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Self

from pydantic import Field, NonNegativeInt
from tokenizers import Tokenizer

from stages.cells.record import Record
from stages.data import preview, readers
from stages.params import schema
from stages.params.target_sections import Target
from stages.target import foreign_files

SAMPLED_ROWS = 100  # of each file
CHARS_A_TOKEN = 3  # where the target's tokenizer is not here: few, so that lengths are not underestimated
MOST_BYTES = 2**31  # of raw files that are read to count their rows


class EpochTokens(Record, extra="ignore"):
    tokens: NonNegativeInt


class StageCounts(Record, extra="ignore"):
    """The counts in the file of any stage that an estimate reads."""

    model: str = ""
    files: dict[str, Any] | None = None
    rows_out: NonNegativeInt = 0
    tokens: NonNegativeInt | dict[str, NonNegativeInt] = 0  # by split
    epochs: list[EpochTokens] = Field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> Self:
        """Return the counts in a file; none where the stage has not written it, or not whole."""
        with suppress(ValueError):
            return cls.read_json(Path(path), "")
        return cls()

    def count_tokens(self) -> int:
        return sum(self.tokens.values()) if isinstance(self.tokens, dict) else self.tokens


@dataclass(frozen=True)
class RawSample:
    """Counts of all rows by the first rows of the raw files."""

    conversations: int  # that are kept, by the share of these
    questions: float  # of a conversation
    prompt_tokens: float  # of a question, with the conversation before it


def apply_data(p: schema.Params) -> tuple[schema.Params, int]:
    """Return the parameters with the rows that the data has, at most those asked for, and the tokens of a row."""
    sample = _sample_raw(p)
    if (conversations := _count_conversations(p, sample)) is not None:
        questions = round(conversations * (sample.questions if sample else 1))
        evaluated = max(1, round(questions * p.fix_data.eval_share))
        asked = p.sample_target.train_rows, p.sample_target.eval_rows
        pairs = zip(asked, (questions - evaluated, evaluated), strict=True)
        train, evaluation = (had if wanted is None else min(wanted, had) for wanted, had in pairs)
        rows = {"train_rows": train, "eval_rows": evaluation}
        p = p.model_copy(update={"sample_target": p.sample_target.model_copy(update=rows)})
    return p, min(_read_row_tokens(p, sample), p.extract_hiddens.max_length)


def _count_conversations(p: schema.Params, sample: RawSample | None) -> int | None:
    """Return the conversations that fix_data has kept of these files, else those of the sample; None where neither is known."""
    report, raw = StageCounts.read("results/fix_report.json"), Path(p.fix_data.raw)
    names = [readers.name_source(file, raw) for file in readers.list_files(raw)] if raw.exists() else []
    if report.rows_out and (not names or sorted(report.files or names) == sorted(names)):
        return report.rows_out
    return sample.conversations if sample else None


def _read_row_tokens(p: schema.Params, sample: RawSample | None) -> int:
    """Return the mean length of rows: of those extracted here with this target, else of prompts and answers, had or allowed."""
    hiddens, is_of_target = StageCounts.read("results/hiddens_report.json"), is_of_target_here(p)
    if is_of_target and hiddens.rows_out:
        return math.ceil(hiddens.count_tokens() / hiddens.rows_out)
    if sample is None:
        return p.extract_hiddens.max_length
    answered, answer = StageCounts.read("results/sample_report.json"), p.sample_target.max_new_tokens
    if is_of_target and answered.rows_out:
        answer = min(answer, math.ceil(answered.count_tokens() / answered.rows_out))
    return math.ceil(sample.prompt_tokens) + answer


def is_of_target_here(p: schema.Params) -> bool:
    """Return whether the results here are of these parameters' target."""
    return StageCounts.read("artifacts/target/target.json").model == p.target.model


def _sample_raw(p: schema.Params) -> RawSample | None:
    """Return the counts by the first rows; None without the data, for much of it, for a hub's, and where fix_data refuses it."""
    raw = Path(p.fix_data.raw)
    files = readers.list_files(raw) if raw.exists() else []
    is_hub = any(readers.detect_file_kind(file) == readers.HUB_PIN_SUFFIX for file in files)
    if is_hub or sum(file.stat().st_size for file in files) > MOST_BYTES:
        return None
    counts, kept, seen = Counter[str](), Counter[str](), Counter[str]()
    count_tokens, prompts = _load_counter(p.target), list[int]()
    try:
        for row in preview.preview_rows(p.fix_data, SAMPLED_ROWS, counts):
            seen[row.source] += 1
            if not row.verdict.startswith("dropped"):
                kept[row.source] += 1
                texts = [count_tokens(text or "") for _, text in row.turns]
                prompts += [sum(texts[: n + 1]) for n, (role, _) in enumerate(row.turns) if role == "user"]
    except ValueError:
        return None
    if not prompts:
        return None
    conversations = round(sum(counts[name] * kept[name] / seen[name] for name in seen))
    return RawSample(conversations, len(prompts) / kept.total(), mean(prompts))


def _load_counter(target: Target) -> Callable[[str], int]:
    """Return what counts a text's tokens: the target's tokenizer where it is here."""
    file = target.find_file("tokenizer.json")
    if file is None:
        return lambda text: math.ceil(len(text) / CHARS_A_TOKEN)
    with foreign_files.refuse_unreadable(str(file), "a tokenizer"):
        tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text).ids)
