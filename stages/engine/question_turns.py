"""The turns of a question, of which each but the first has the earlier answers in its prompt."""

from dataclasses import dataclass

from stages.data.workload_prompts import WorkloadPrompt
from stages.engine.cell_context import TorchCellContext
from stages.target import chat_template


@dataclass(frozen=True)
class QuestionTurn:
    """A turn, ready to decode."""

    question: WorkloadPrompt
    number: int  # from 0
    messages: list[dict[str, str]] | None  # of the prompt; None for random prompts
    ids: list[int]  # of the prompt


def get_first_turn(question: WorkloadPrompt) -> QuestionTurn:
    return QuestionTurn(question, 0, question.messages, question.prompt_ids)


def build_next_turn(work: TorchCellContext, turn: QuestionTurn, answer: list[int]) -> QuestionTurn | None:
    """Return the turn that follows the answer of `turn`, which is given as token ids; None after the last turn."""
    later = turn.question.later or []
    if turn.messages is None or turn.number >= len(later):
        return None
    answer_message = {"role": "assistant", "content": decode_text(work, answer)}
    messages = [*turn.messages, answer_message, {"role": "user", "content": later[turn.number]}]
    ids = chat_template.encode_prompt(work.tokenizer, messages, work.params.sample_target.thinking)
    return QuestionTurn(turn.question, turn.number + 1, messages, ids)


def decode_text(work: TorchCellContext, ids: list[int]) -> str:
    """Return an answer without the target's special tokens, as a server would send it."""
    text: str = work.tokenizer.decode(ids, skip_special_tokens=True)
    return text
