"""Write docs/params.yaml: every key of params.yaml with its type, default and meaning, from the comments of stages/params.

python -m benchmarks.params_page
"""

import inspect
import io
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from stages.params.schema import Params
from stages.params.section import Section

PAGE = Path("docs/params.yaml")
HEAD = """\
# Every key of params.yaml with its default. `required`: the graph is made of it, so params.yaml must have it.
# Written by `python -m benchmarks.params_page` from stages/params; tests/test_house.py compares.
"""
NAMED_BY_USER = {"workloads": "NAME", "sets": "NAME", "checkpoints": "NAME", "servers": "ENGINE"}  # keys of mappings
FIELD = re.compile(r"^    (\w+): ")
WIDTH = 118


def render_page() -> str:
    lines = [line for name, field in Params.model_fields.items() for line in _render_key(name, field, "", [])]
    return HEAD + "".join(f"{line}\n" for line in lines)


def _render_key(name: str, field: FieldInfo, indent: str, comment: list[str]) -> Iterator[str]:
    """Yield the lines of a key: its comment, itself with its default, and of a section those of its keys."""
    key = field.alias or name
    if not indent:
        yield ""
    yield from (f"{indent}# {line}" for line in comment)
    section = _find_section(field.annotation)
    if section is None:
        yield f"{indent}{key}: {_render_default(field)}  # {_describe_type(field.annotation)}"
        return
    yield f"{indent}{key}:"
    if key in NAMED_BY_USER and section is not field.annotation:
        indent += "  "
        yield f"{indent}{NAMED_BY_USER[key]}:  # as many as you like"
    comments = _read_comments(section)
    for inner, inner_field in section.model_fields.items():
        yield from _render_key(inner, inner_field, f"{indent}  ", comments.get(inner, []))


def _find_section(annotation: Any) -> type[Section] | None:
    """Return the section that a key holds, itself or under names; None where it holds a value, or sections of several kinds."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) is dict:
        return _find_section(get_args(annotation)[1])
    return None


def _read_comments(section: type[Section]) -> dict[str, list[str]]:
    """Return the comments of a section's keys in its code: those above a key, and the one behind it."""
    found: dict[str, list[str]] = {}
    for base in reversed(section.__mro__):
        if not (issubclass(base, Section) and base is not Section):
            continue
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if line.startswith("    # "):
                above.append(line.removeprefix("    # "))
                continue
            if key := FIELD.match(line):
                behind = line.partition("  # ")[2]
                if above or behind:
                    found[key[1]] = [*above, *([behind] if behind else [])]
            above = []
    return found


def _render_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    yaml, text = YAML(typ="safe"), io.StringIO()
    yaml.default_flow_style, yaml.width = True, 1000
    yaml.dump(_dump(field.get_default(call_default_factory=True)), text)
    return text.getvalue().removesuffix("...\n").strip()


def _dump(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(by_alias=True)
    if isinstance(value, dict):
        return {key: _dump(inner) for key, inner in value.items()}
    return value


def _describe_type(annotation: Any) -> str:
    """Return a type in words: `int or null`, `sglang or vllm`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe_type(one) for one in inner))
    if origin is list:
        return f"list of {_describe_type(inner[0])}"
    if origin is dict:
        return "mapping"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return _describe_type(inner[0])
    return {types.NoneType: "null", str: "text"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
    print(f"{PAGE}: {len(render_page().splitlines())} lines")
