"""Where answers begin in the rendering of a conversation, known from others of its shape.

A template copies contents and writes something between them: headers, end tokens. What it writes follows from the
conversation's shape, which is its roles in order. So one conversation of each shape, with marks for contents, is taken
apart by rendering each of its prompts; of any other of that shape it is then enough that the same pieces with its own
contents between them are its rendering, to the letter.

That holds but for templates that look into contents (Qwen3 for "</think>"). What they look for stands in the template, so
a conversation with a content that holds it is none of ours, nor is one with more than roles and texts: `locate_answer_starts` says
None then, and prompts must be rendered.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any

from jinja2 import Environment, TemplateError, nodes

Messages = list[dict[str, Any]]
CONTENT_MARK = "\x02{}\x03"  # no white space to trim, and in no template
MAX_SHAPES = 1024  # kept for a tokenizer; a shape is some hundred bytes for each message
HARMLESS_CALLS = {"strip", "lstrip", "rstrip", "raise_exception", "strftime_now", "range"}


@dataclass(frozen=True)
class TemplateShape:
    pieces: list[str]  # before each content, and after the last
    begins: list[
        tuple[int, int]
    ]  # of each answer: the message, and how far before the end of the piece before its content


def extract_roles(messages: Messages) -> tuple[str, ...] | None:
    """The shape of a conversation, as far as a shape can be seen; None where a message is more than a role and a text."""
    found = []
    for message in messages:
        if len(message) != 2 or type(content := message.get("content")) is not str or not content.strip():
            return None
        found.append(message["role"])
    return tuple(found)


def learn_template_shape(
    shape: tuple[str, ...], render: Callable[[Messages], str], slowly: Callable[[Messages, str], list[int]]
) -> TemplateShape | None:
    """Take a conversation of marks apart; None where the template does more with contents than to copy each once."""
    messages = [{"role": role, "content": CONTENT_MARK.format(i)} for i, role in enumerate(shape)]
    try:
        text = render(messages)
        begins = slowly(messages, text)
    except (ValueError, TemplateError):
        return None
    pieces, places, at = [], [], 0
    for message in messages:
        place = text.find(message["content"], at)
        if place < 0:
            return None
        pieces.append(text[at:place])
        places.append(place)
        at = place + len(message["content"])
    pieces.append(text[at:])
    answers = [i for i, role in enumerate(shape) if role == "assistant"]
    back = [(i, places[i] - begin) for i, begin in zip(answers, begins, strict=True)]
    if any(CONTENT_MARK[0] in piece for piece in pieces) or not all(0 <= n <= len(pieces[i]) for i, n in back):
        return None
    return TemplateShape(pieces, back)


def locate_answer_starts(
    shape: TemplateShape, messages: Messages, text: str, sought: frozenset[str]
) -> list[int] | None:
    """Where in `text` each answer begins, in characters; None where `text` can't be shown to have this shape."""
    contents = [message["content"] for message in messages]
    said = "\0".join(contents)
    if any(word in said for word in sought):
        return None
    if _interleave_texts(shape.pieces, contents) != text:
        contents = [content.strip() for content in contents]
        if _interleave_texts(shape.pieces, contents) != text:
            return None
    places, at = [], 0
    for piece, content in zip(shape.pieces, contents, strict=False):
        places.append(at + len(piece))
        at = places[-1] + len(content)
    return [places[i] - back for i, back in shape.begins]


def _interleave_texts(pieces: list[str], contents: list[str]) -> str:
    return "".join(chain.from_iterable(zip_longest(pieces, contents, fillvalue="")))


@lru_cache(16)
def find_inspected_texts(template: str) -> frozenset[str] | None:
    """The texts a template may look for in a content: all it compares, calls or sets with, but for roles and types.

    Contents that hold none of them are all alike to it. None for a template in a dialect of Jinja that isn't read here.
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return None
    places = {id(node.arg) for node in tree.find_all(nodes.Getitem)}  # as in message['content']
    return frozenset(
        text.value
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Test, nodes.Assign))
        if not _concerns_roles(node)
        for text in _iterate_texts(node)
        if id(text) not in places and text.value.strip()
    )


def _concerns_roles(node: Any) -> bool:
    """Whether it compares a role or the type of a part, asks a message for a key, or only strips or reports."""
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
