"""Locate answers in a rendered conversation, by the template's output for another conversation of the same shape.

A template copies contents and writes literal text between them: headers, end tokens. The literal text follows from the
conversation's shape, its roles in order. So one conversation per shape, with marks for contents, is taken apart by rendering
each of its prompts. Any other conversation of that shape matches if the same literal texts, with its own contents between
them, equal its rendering to the letter.

Templates that inspect contents break this (Qwen3 looks for "</think>"). The texts they look for are in the template, so
`locate_answer_starts` returns None for contents that hold one, and for messages with more than a role and a text; prompts
must then be rendered.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any

from jinja2 import Environment, TemplateError, nodes

Messages = list[dict[str, Any]]
CONTENT_MARK = "\x02{}\x03"  # no white space to trim, and in no template
MAX_SHAPES = 1024  # cached per tokenizer; some hundred bytes per message
HARMLESS_CALLS = {"strip", "lstrip", "rstrip", "raise_exception", "strftime_now", "range"}


@dataclass(frozen=True)
class TemplateShape:
    """The literal text that a template writes around the contents of a conversation."""

    literal_texts: list[str]  # before each content, and after the last
    answer_offsets: list[
        tuple[int, int]
    ]  # per answer: message index, characters from the answer's start to its content


def extract_roles(messages: Messages) -> tuple[str, ...] | None:
    """Return the shape of a conversation, its roles; None where a message is more than a role and a text."""
    found = []
    for message in messages:
        if len(message) != 2 or type(content := message.get("content")) is not str or not content.strip():
            return None
        found.append(message["role"])
    return tuple(found)


def learn_template_shape(
    roles: tuple[str, ...],
    render: Callable[[Messages], str],
    find_starts: Callable[[Messages, str], list[int]],
) -> TemplateShape | None:
    """Take apart a rendered conversation of marks; None where the template does not copy each content exactly once."""
    messages = [{"role": role, "content": CONTENT_MARK.format(i)} for i, role in enumerate(roles)]
    try:
        text = render(messages)
        starts = find_starts(messages, text)
    except (ValueError, TemplateError):
        return None
    literal_texts, positions, at = [], [], 0
    for message in messages:
        position = text.find(message["content"], at)
        if position < 0:
            return None
        literal_texts.append(text[at:position])
        positions.append(position)
        at = position + len(message["content"])
    literal_texts.append(text[at:])
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    offsets = [(i, positions[i] - start) for i, start in zip(answers, starts, strict=True)]
    has_mark = any(CONTENT_MARK[0] in literal for literal in literal_texts)
    if has_mark or not all(0 <= n <= len(literal_texts[i]) for i, n in offsets):
        return None
    return TemplateShape(literal_texts, offsets)


def locate_answer_starts(
    shape: TemplateShape, messages: Messages, text: str, inspected: frozenset[str]
) -> list[int] | None:
    """Return where each answer starts in `text`, in characters; None where `text` does not provably have this shape.

    `inspected` are the texts that the template looks for (`find_inspected_texts`).
    """
    contents = [message["content"] for message in messages]
    joined = "\0".join(contents)
    if any(word in joined for word in inspected):
        return None
    if _interleave_texts(shape.literal_texts, contents) != text:
        contents = [content.strip() for content in contents]
        if _interleave_texts(shape.literal_texts, contents) != text:
            return None
    positions, at = [], 0
    for literal, content in zip(shape.literal_texts, contents, strict=False):
        positions.append(at + len(literal))
        at = positions[-1] + len(content)
    return [positions[i] - offset for i, offset in shape.answer_offsets]


def _interleave_texts(literal_texts: list[str], contents: list[str]) -> str:
    return "".join(chain.from_iterable(zip_longest(literal_texts, contents, fillvalue="")))


@lru_cache(16)
def find_inspected_texts(template: str) -> frozenset[str] | None:
    """Return the texts a template may look for in contents: the constants it compares, calls or assigns with.

    Roles and types are left out. None for a template that Jinja's parser does not read.
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return None
    keys = {id(node.arg) for node in tree.find_all(nodes.Getitem)}  # as in message['content']
    return frozenset(
        text.value
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Test, nodes.Assign))
        if not _concerns_roles(node)
        for text in _iterate_texts(node)
        if id(text) not in keys and text.value.strip()
    )


def _concerns_roles(node: Any) -> bool:
    """Return whether a node compares a role or a part's type, looks up a message's key, or only strips or reports."""
    if isinstance(node, nodes.Call):
        return getattr(node.node, "attr", getattr(node.node, "name", None)) in HARMLESS_CALLS
    if not isinstance(node, nodes.Compare):
        return False
    sides = [node.expr, *(operand.expr for operand in node.ops)]
    names = {getattr(side, "attr", getattr(getattr(side, "arg", None), "value", None)) for side in sides}
    names |= {side.name for side in sides if isinstance(side, nodes.Name)}
    return bool(names & {"role", "type", "message"})


def _iterate_texts(node: Any) -> Iterator[Any]:
    return (const for const in node.find_all(nodes.Const) if isinstance(const.value, str))
