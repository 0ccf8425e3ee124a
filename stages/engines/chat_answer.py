"""An answer of a chat completion, as servers of OpenAI's API send it."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field


@dataclass(frozen=True)
class ChatAnswer:
    text: str
    reasoning: str | None  # if the server separates it from the text
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    prompt_ids: list[int] | None  # if the server sends them
    answer_ids: list[int] | None
    stopped_at: int | str | None = None  # the token or the string that ended it, if the server says so


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None  # of SGLang
    matched_stop: Any = None  # of SGLang
    stop_reason: Any = None  # of vLLM: null for the tokenizer's own end token


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class AnswerModel(BaseModel):
    """A response with one answer."""

    model: str | None = None

    def get_answer(self) -> ChatAnswer:
        raise NotImplementedError


class ChatCompletion(AnswerModel):
    """The fields that are read of a response of `/v1/chat/completions`."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None  # of vLLM

    def get_answer(self) -> ChatAnswer:
        choice, usage = self.choices[0], self.usage or _Usage()
        message, stop = choice.message, choice.stop_reason if choice.matched_stop is None else choice.matched_stop
        return ChatAnswer(
            text=message.content or "",
            reasoning=message.reasoning_content or message.reasoning or None,
            finish_reason=choice.finish_reason or "",
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            prompt_ids=self.prompt_token_ids or choice.prompt_token_ids,
            answer_ids=choice.token_ids,
            stopped_at=stop if isinstance(stop, int | str) else None,
        )
