"""Error messages for wrong keys, one line each: expected, found, what to do."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import Tag

from stages.params.families import SEGMENT_TAG, TRAINABLE
from stages.params.section import PACKAGE_NAME, PACKAGE_VERSION, Section, find_nearest, suggest_name

Location = tuple[Any, ...]  # pydantic's: keys of the file, indices of lists, and tags of unions

METHOD_TAGS = {SEGMENT_TAG.format(name) for name in TRAINABLE}  # of the union whose member a key `method` chooses
# Parts of pydantic's locations that are not keys of the file.
UNION_TAGS = METHOD_TAGS | {"[key]", "a number", "a list", "a text", "one map", "a map for each file"}

PATTERNS_IN_WORDS = {
    r"^[^/]+$": "the file's name without its folder",
    r"^[^-]": "an id or a path, which does not begin with - as a flag does",
    PACKAGE_NAME: "the name of a package, without a URL or an option",
    PACKAGE_VERSION: 'the version of a package, as "1.0.3"',
}


def explain_errors(errors: Sequence[Any], root: type[Section]) -> list[str]:
    """Explain pydantic's errors of `root`, a line each; a misspelt key and the missing one that it stands for share a line."""
    errors = _leave_out_guessed(errors)
    meant = _pair_misspelt(errors)
    return [
        _explain_error(error, root, meant.get(error["loc"]))
        for error in errors
        if error["type"] != "missing" or error["loc"] not in meant.values()
    ]


def _leave_out_guessed(errors: Sequence[Any]) -> list[Any]:
    """Return the errors without those of other keys where `method` is misspelt: they were read as keys of another method."""
    misspelt = {
        error["loc"][:-1]
        for error in errors
        if _has_method(error["loc"])
        and error["type"] in ("literal_error", "extra_forbidden")
        and _is_like_method(error["loc"][-1])
    }
    return [error for error in errors if error["loc"][:-1] not in misspelt or _is_like_method(error["loc"][-1])]


def _has_method(location: Location) -> bool:
    return len(location) > 1 and location[-2] in METHOD_TAGS


def _is_like_method(key: Any) -> bool:
    return find_nearest(str(key), ["method"]) is not None


def _pair_misspelt(errors: Sequence[Any]) -> dict[Location, Location]:
    """Return the location of each unknown key with that of the missing key of the same section to which it is nearest."""
    missing = [error["loc"] for error in errors if error["type"] == "missing"]
    pairs: dict[Location, Location] = {}
    for *section, found in (error["loc"] for error in errors if error["type"] == "extra_forbidden"):
        free = {loc[-1]: loc for loc in missing if [*loc[:-1]] == section and loc not in pairs.values()}
        if nearest := find_nearest(found, free):
            pairs[(*section, found)] = free[nearest]
    return pairs


def _explain_error(error: Any, root: type[Section], meant: Location | None) -> str:
    """Explain one pydantic error of `root` as "key: expected, found, what to do"; `meant` is the missing key it stands for."""
    key_path = [str(part) for part in error["loc"] if part not in UNION_TAGS]
    key, kind, found = ".".join(key_path), error["type"], f"found {error['input']!r:.200}"
    message = error["msg"].removeprefix("Value error, ")
    if meant:
        return f"{key}: unknown key, and {meant[-1]} is missing (did you mean {meant[-1]}?); rename it"
    if kind == "value_error":  # raised by our validators: already complete
        return f"{key}: {message}" if key else message
    if kind == "union_tag_invalid":
        method = error["input"].get("method")
        nearest = suggest_name(str(method), TRAINABLE)
        return f"{key}.method: expected one of {', '.join(TRAINABLE)}, found {method!r}{nearest}"
    if kind == "extra_forbidden":
        known = _known_keys(error["loc"][:-1], root)
        known += ["method"] if _has_method(error["loc"]) and "method" not in known else []
        nearest = suggest_name(key_path[-1], known)
        return f"{key}: unknown key{nearest}; known keys are {', '.join(known)}. Correct the spelling, or leave the key out"
    if kind == "missing":
        return f"{key}: missing, and it has no default; write it (docs/params.yaml says what it is)"
    if kind in ("model_type", "dict_type"):
        known = _known_keys(error["loc"], root)
        return f"{key}: expected a section{' with ' + ', '.join(known) if known else ''}, {found}"
    if isinstance(error["input"], int | float) and not isinstance(error["input"], bool):
        found += "; YAML reads 8_2_16 as the number 8216, so begin a name with a letter (t8_2_16) or put text in quotes"
    if words := PATTERNS_IN_WORDS.get((error.get("ctx") or {}).get("pattern", "")):
        return f"{key}: expected {words}, {found}"
    if kind == "literal_error":
        found += suggest_name(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
        return f"{key}: expected {error['ctx']['expected']}, {found}"
    if kind == "invalid_key" or "[key]" in error["loc"] or key_path[-1] == "from":
        return f"{key}: expected a name (a letter, then letters, digits and _), {found}"
    if kind == "string_type":
        return f"{key}: expected text, {found}"
    if kind == "string_pattern_mismatch":
        return f"{key}: expected text matching {error['ctx']['pattern']}, {found}"
    # Pydantic's messages: "Input should be greater than 0", "List should have at least 1 item after validation, not 0".
    expected = re.sub(r"^\w+ should (be|have) ", "expected ", message)
    return f"{key}: {re.sub(' after validation.*', '', expected)}, found {error['input']!r:.200}"


def _known_keys(location: Sequence[Any], root: type[Section]) -> list[str]:
    """Return the keys of the section at a location of `root`, as written in the file; in a union, of the member named."""
    return [field.alias or name for name, field in getattr(_find_section(location, root), "model_fields", {}).items()]


def _find_section(location: Sequence[Any], root: type[Section]) -> type[Section]:
    """Return the class of the section at a location of `root`; in a union, the member named."""
    model: Any = root
    members: dict[str, type[Section]] = {}
    for part in map(str, location):
        if part in UNION_TAGS:
            model = members.get(part, model)
            continue
        field = model.model_fields.get(part)
        annotation = field.annotation if field else model
        members = dict(_list_members(annotation)) if field else members
        inner = _sections_in(annotation)
        model = inner[0] if inner else annotation if isinstance(annotation, type) else model
    found: type[Section] = model
    return found


def _list_members(annotation: Any) -> Iterator[tuple[str, type[Section]]]:
    """Yield the tag and the class of each section in an annotation's unions."""
    kinds = get_args(annotation)
    for tag in kinds[1:]:
        if isinstance(tag, Tag) and isinstance(kinds[0], type) and issubclass(kinds[0], Section):
            yield tag.tag, kinds[0]
    for kind in kinds:
        yield from _list_members(kind)


def _sections_in(annotation: Any) -> list[type[Section]]:
    """Return the section classes in an annotation, through dict[...], list[...], | and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _sections_in(inner)]
