"""Read JSON with defects from a text, and write it as JSON: each repair has one reading, anything else is refused."""

import re
from dataclasses import dataclass, field

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.+-])")
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
_QUOTES = {"'": "'", "“": "”"}
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_START = re.compile(
    r"\{\s*(?:[\"'“}]|[A-Za-z_$][\w$]*\s*:|//|/\*|$)|\[\s*(?:[\[{\"'“\]]|$|(?:-?\d[\d.eE+-]*|true|false|null|True|False|None)\s*(?:,|\]\s*(?:$|\n)))"
)


class BrokenJsonError(Exception):
    """JSON that can't be read in one way; the argument is the reason in one word."""


class _CutError(Exception):
    """The text ends inside a value."""


@dataclass(frozen=True)
class ReadJson:
    """A JSON value as it is written after repair, and where it ends in the text that was read."""

    text: str
    end: int
    rules: list[str]


@dataclass
class _Container:
    """An open object or array."""

    closing: str
    complete: int | None = None  # length of the output after its last complete element
    is_row: bool = False  # that element is an object or array


@dataclass
class _Reader:
    text: str
    position: int
    out: list[str] = field(default_factory=list)
    rules: dict[str, None] = field(default_factory=dict)
    stack: list[_Container] = field(default_factory=list)

    def skip(self) -> bool:
        """Copy white space and leave out comments; return whether there was any."""
        start = self.position
        while True:
            space = _SPACE.match(self.text, self.position)
            assert space is not None
            self.copy(space[0])
            comment = _COMMENT.match(self.text, self.position)
            if comment is None:
                return self.position > start
            self.position = comment.end()
            self.rules["comment"] = None

    def copy(self, part: str) -> None:
        if part:
            self.out.append(part)
            self.position += len(part)

    def peek(self) -> str:
        if self.position >= len(self.text):
            raise _CutError
        return self.text[self.position]


def starts_json(text: str) -> bool:
    """Return whether a text starts with what can only be a JSON object or array; `[1]` and `{name}` of prose are none."""
    return _START.match(text) is not None


def read_json(text: str, start: int, may_be_cut: bool) -> ReadJson:
    """Return the JSON value that begins at `start`.

    Args:
        may_be_cut: the text ends where the answer ends, so an open value was cut by a token limit: its last row is removed.

    Raises:
        BrokenJsonError: where it has another defect than the rules repair, or two readings.
    """
    reader = _Reader(text, start)
    try:
        _read_value(reader)
        return ReadJson("".join(reader.out), reader.position, list(reader.rules))
    except RecursionError:
        raise BrokenJsonError("nested_too_deep") from None
    except _CutError:
        return _close(reader, may_be_cut)


def _close(reader: _Reader, may_be_cut: bool) -> ReadJson:
    """Close what is open at the end of the text. Of the outermost open array only complete elements stay."""
    stack = reader.stack
    depth = next((at for at, container in enumerate(stack) if container.closing == "]"), len(stack) - 1)
    container = stack[depth]
    is_complete = container.complete is not None and not "".join(reader.out[container.complete :]).strip()
    if container.complete is None or not container.is_row or (depth < len(stack) - 1 and container.closing == "}"):
        raise BrokenJsonError("cut")
    if not is_complete and (container.closing == "}" or not may_be_cut):
        raise BrokenJsonError("cut" if may_be_cut else "not_json")
    closings = "".join(one.closing for one in reversed(stack[: depth + 1]))
    reader.rules["brackets" if is_complete else "cut_row"] = None
    kept = "".join(reader.out[: container.complete])
    return ReadJson(kept + closings, len(reader.text), list(reader.rules))


def _read_value(reader: _Reader) -> bool:
    """Copy one value; return whether it is an object or array."""
    mark = reader.peek()
    if mark == "{":
        _read_members(reader, "}")
        return True
    if mark == "[":
        _read_members(reader, "]")
        return True
    if mark == '"' or mark in _QUOTES:
        _read_string(reader)
        return False
    if number := _NUMBER.match(reader.text, reader.position):
        if number.end() == len(reader.text):
            raise _CutError  # there may have been more digits
        reader.copy(number[0])
        return False
    word = _WORD.match(reader.text, reader.position)
    if word is not None and word[0] in _LITERALS:
        literal = _LITERALS[word[0]]
        if literal != word[0]:
            reader.rules["literals"] = None
        reader.out.append(literal)
        reader.position = word.end()
        return False
    rest = reader.text[reader.position :]
    if re.fullmatch(r"-?[\d.eE+-]*|[A-Za-z]+", rest):
        raise _CutError
    raise BrokenJsonError("not_json")


def _read_members(reader: _Reader, closing: str) -> None:
    """Copy an object or array with what it holds."""
    container = _Container(closing)
    reader.stack.append(container)
    reader.copy(reader.peek())
    reader.skip()
    while reader.peek() != closing:
        if closing == "}":
            _read_key(reader)
        container.is_row = _read_value(reader)
        container.complete = len(reader.out)
        has_space = reader.skip()
        if reader.peek() == ",":
            comma = len(reader.out)
            reader.copy(",")
            reader.skip()
            if reader.peek() == closing:
                reader.out[comma] = ""
                reader.rules["trailing_comma"] = None
        elif reader.peek() != closing:
            if not has_space or not _begins_next(reader, container):
                raise BrokenJsonError("not_json")
            reader.out.insert(container.complete, ",")
            reader.rules["missing_comma"] = None
    reader.copy(closing)
    reader.stack.pop()


def _begins_next(reader: _Reader, container: _Container) -> bool:
    """Return whether a comma is all that is missing: before an object after an object, or before a key."""
    if container.closing == "]":
        return container.is_row and reader.peek() in "{["
    return re.match(r'"(?:[^"\\\x00-\x1f]|\\.)*"\s*:', reader.text[reader.position :]) is not None


def _read_key(reader: _Reader) -> None:
    if reader.peek() == '"' or reader.peek() in _QUOTES:
        _read_string(reader)
    else:
        word = _WORD.match(reader.text, reader.position)
        if word is None:
            raise BrokenJsonError("not_json")
        if word.end() == len(reader.text):
            raise _CutError
        reader.out.append(f'"{word[0]}"')
        reader.position = word.end()
        reader.rules["bare_keys"] = None
    reader.skip()
    if reader.peek() != ":":
        raise BrokenJsonError("not_json")
    reader.copy(":")
    reader.skip()


def _read_string(reader: _Reader) -> None:
    """Copy a string; write one in single or curly quotes with double ones, where it has no such quote inside."""
    opening = reader.peek()
    if opening == '"':
        found = _STRING.match(reader.text, reader.position)
        if found is None:
            if re.fullmatch(r'"(?:[^"\\\x00-\x1f]|\\.)*\\?', reader.text[reader.position :]):
                raise _CutError
            raise BrokenJsonError("not_json")
        reader.copy(found[0])
        return
    closing = _QUOTES[opening]
    pattern = rf"{opening}((?:[^{opening}{closing}\\\x00-\x1f]|\\.)*){closing}(?=\s*(?:[,:}}\]]|$))"
    found = re.compile(pattern).match(reader.text, reader.position)
    if found is None:
        if closing not in reader.text[reader.position + 1 :]:
            raise _CutError
        raise BrokenJsonError("not_json")
    body = re.sub(r"(?<!\\)\\'", "'", found[1])
    reader.out.append('"' + re.sub(r'(?<!\\)"', r'\\"', body) + '"')
    reader.position = found.end()
    reader.rules["quotes"] = None
