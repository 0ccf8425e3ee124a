"""Recipes: files of recipes/ with the sections and keys of params.yaml that differ for one experiment.

Their block `recipe` describes what they reproduce (stages/params/recipe.py) and is not written into params.yaml.
"""

import io
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import RoundTripRepresenter

from stages.params import schema
from stages.params.engines import find_program
from stages.params.recipe import RECIPES_FOLDER
from stages.params.section import PARAMS_FILE, Section, suggest_name
from stages.runtime import atomic, guarded_yaml

OWN = "own"  # for `aerie use`: not the keys of an experiment but a whole params.yaml, to be filled in
OWN_PARAMS = RECIPES_FOLDER / OWN / PARAMS_FILE
TO_FILL_IN = "# <-"
OWN_SECTIONS = ("target", "fix_data")  # a recipe that is used over OWN leaves them as they are
USED_FILE = Path(".scratch/used_recipe.json")  # the keys that `use_recipe` wrote last: the recipe may change or go
Sections = dict[str, dict[str, Any]]  # section -> key -> value


def list_recipes() -> list[str]:
    return sorted(file.stem for file in RECIPES_FOLDER.glob("*.yaml"))


def locate_recipe(name: str) -> Path:
    """Return the recipe's path. Raises ValueError if there is none, naming those there are."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES_FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = list_recipes()
        raise ValueError(f"there is no recipe {path}{suggest_name(path.stem, known)}; known are {', '.join(known)}")
    return path


def use_recipe(name: str, keep: bool = False, keep_own: bool = True) -> list[str]:
    """Write the committed params.yaml with the recipe's keys -> a line for each key that changed, and one on how to return.

    So recipes never mix: what an earlier one set is gone. Local edits are gone too, and named, unless `keep` sets them again.
    With `keep_own` the target and the data of a params.yaml that began as OWN stay.

    Raises:
        ValueError: there is no such recipe, or params.yaml would not be valid with it; it then stays as it was.
    """
    if name == OWN:
        if keep:
            raise ValueError(f"{OWN} is a whole {PARAMS_FILE}, expected no --keep; set your keys in it afterwards")
        return _begin_own()
    sections, own = _read_recipe(name), _read_own(name) if keep_own else {}
    edits = _find_local_edits()
    with merge_recipe(name, keep, own=own) as (file, changes):
        atomic.write_json(USED_FILE, sections | ({OWN: {}} if own else {}))
        if not changes:
            return []
        kept = keep_copy(locate_recipe(name).stem)
        os.replace(file, PARAMS_FILE)
    dropped = {line.partition(":")[0] for line in changes} & edits.keys()
    lines = [
        f"{line}  (a local edit; --keep keeps it)" if line.partition(":")[0] in dropped else line for line in changes
    ]
    lines += [
        f"kept: {path}: {_describe_value(value)}"
        for path, value in edits.items()
        if keep or (own and path.partition(".")[0] in OWN_SECTIONS)
    ]
    return [*lines, f"{PARAMS_FILE} as it was is kept in {kept}; to return to it: cp {kept} {PARAMS_FILE}"]


def _begin_own() -> list[str]:
    """Write a params.yaml for one's own target and data, without the toy's values -> the lines to fill in, and how to return."""
    kept, text = keep_copy(OWN), OWN_PARAMS.read_text(encoding="utf-8")
    with _write_temporary(text) as file:
        os.replace(file, PARAMS_FILE)
    atomic.write_json(USED_FILE, {OWN: {}})
    blanks = [line.strip() for line in text.splitlines() if TO_FILL_IN in line and not line.startswith("#")]
    return [
        f"{PARAMS_FILE} is that of a run of your own; fill in:",
        *(f"  {line}" for line in blanks),
        "then: aerie estimate, aerie run; or aerie use RECIPE, which keeps target and fix_data",
        f"{PARAMS_FILE} as it was is kept in {kept}; to return to it: cp {kept} {PARAMS_FILE}",
    ]


def keep_copy(name: str) -> Path:
    """Copy params.yaml to params.yaml.before-NAME, or -2, -3: its present content may be in no commit."""
    for number in itertools.count(1):
        kept = PARAMS_FILE.with_name(f"{PARAMS_FILE.name}.before-{name}{f'-{number}' if number > 1 else ''}")
        if kept.is_file() and kept.read_bytes() == PARAMS_FILE.read_bytes():
            return kept
        if not os.path.lexists(kept):
            break
    shutil.copy2(PARAMS_FILE, kept)
    return kept


def merge_recipe(
    name: str, keep: bool = False, anywhere: bool = False, own: Sections | None = None
) -> AbstractContextManager[tuple[Path, list[str]]]:
    """Return a context with a temporary params.yaml as `use_recipe` would write it, and a line for each change of a key.

    `anywhere`: without the keys for engines that are installed here; `own`: keys that go before the recipe's.
    """
    recipe = _read_recipe(name, anywhere)
    edits = _find_local_edits() if keep else {}
    label = f"recipe {name}{' with your local edits (--keep)' if edits else ''}"
    return _write_merged(_read_committed(), [recipe, own or {}, _nest_keys(edits)], label)


def _read_own(name: str) -> Sections:
    """Return the keys of OWN_SECTIONS that this file, the committed one or the recipe sets; {} if it did not begin as OWN."""
    if OWN not in _read_used():
        return {}
    base, blank, here = (
        _read_leaves(text) for text in (_read_committed(), OWN_PARAMS.read_text(), PARAMS_FILE.read_text())
    )
    if here.get("target.model") in (base["target.model"], blank["target.model"]):
        return {}
    paths = base | dict(_list_leaves(_read_recipe(name), schema.Params, "")) | here
    found = _resolve(PARAMS_FILE.read_text(encoding="utf-8"))
    return _nest_keys({path: found[path] for path in paths if path.partition(".")[0] in OWN_SECTIONS and path in found})


def _read_recipe(name: str, anywhere: bool = False) -> Sections:
    """Return a recipe's keys, with those for the engines of this machine."""
    about, sections = schema.read_recipe(locate_recipe(name))
    for engine, more in about.where_installed.items() if about and not anywhere else ():
        if find_program(engine):
            sections |= {section: sections.get(section, {}) | keys for section, keys in more.items()}
    return sections


def write_sections(sections: Sections) -> list[str]:
    """Write these keys into params.yaml -> a line for each that changed. Raises ValueError as `use_recipe`."""
    with _write_merged(PARAMS_FILE.read_text(encoding="utf-8"), [sections], "these parameters") as (file, changes):
        os.replace(file, PARAMS_FILE)
    return changes


# Local edits: what differs from the committed params.yaml, but for the keys of the recipe that was used last


def _read_committed() -> str:
    """Return params.yaml of git's last commit; the file as it is where git has none of it."""
    command = ["git", "show", f"HEAD:./{PARAMS_FILE}"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8") if shutil.which("git") else None
    return done.stdout if done and done.returncode == 0 else PARAMS_FILE.read_text(encoding="utf-8")


def _read_used() -> Sections:
    found: Sections = json.loads(USED_FILE.read_text(encoding="utf-8")) if USED_FILE.is_file() else {}
    return found


def _find_local_edits() -> dict[str, Any]:
    """Return the keys that neither the committed params.yaml nor the recipe used last has set as they are, with their values."""
    expected = _read_leaves(_read_committed())
    expected |= dict(_list_leaves(_read_used(), schema.Params, ""))
    current = _read_leaves(PARAMS_FILE.read_text(encoding="utf-8"))
    return {path: value for path, value in current.items() if path not in expected or expected[path] != value}


def _read_leaves(text: str) -> dict[str, Any]:
    """Return the keys of params.yaml by their path, such as target.model; a mapping with users' names is one value."""
    return dict(_list_leaves(_parse_sections(text), schema.Params, ""))


def _parse_sections(text: str) -> Sections:
    """Return the sections in a text of params.yaml. Raises ValueError for anything else."""
    try:
        found: Sections = guarded_yaml.parse_yaml(text)
        if all(isinstance(keys, dict) for keys in found.values()):
            return found
        problem = f"found {found!r:.60}"
    except (ValueError, AttributeError) as error:
        problem = str(error)
    raise ValueError(f"{PARAMS_FILE}, here or of git's last commit, is no YAML of sections: {problem}; correct it")


def _list_leaves(values: dict[str, Any], model: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and (inner := _get_section(model, name)):
            yield from _list_leaves(value, inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _nest_keys(leaves: dict[str, Any]) -> Sections:
    nested: Sections = {}
    for path, value in leaves.items():
        *sections, key = path.split(".")
        inside: dict[str, Any] = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = value
    return nested


@contextmanager
def _write_merged(base: str, layers: list[Sections], label: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield a temporary params.yaml that is `base` with these keys, and a line for each that differs from params.yaml here."""
    text, touched = _merge_sections(base, layers)
    changes = _list_changes(PARAMS_FILE.read_text(encoding="utf-8"), text, touched)
    with _write_temporary(text) as file:
        try:
            schema.load_params(file)
        except ValueError as error:
            raise ValueError(f"{label}: {str(error).replace(str(file), f'{PARAMS_FILE} with it')}") from None
        yield file, changes


@contextmanager
def _write_temporary(text: str) -> Iterator[Path]:
    """Yield a temporary params.yaml of this text beside the one here."""
    with NamedTemporaryFile("w", dir=".", prefix=".params-", suffix=".yaml", encoding="utf-8", delete=False) as file:
        file.write(text)
    shutil.copymode(PARAMS_FILE, file.name)  # a temporary file is readable by its owner alone
    try:
        yield Path(file.name)
    finally:
        Path(file.name).unlink(missing_ok=True)


class _NullRepresenter(RoundTripRepresenter):
    """Writes null as `null`. A class of its own: `add_representer` changes a class, and DVC's YAML has the other one."""


_NullRepresenter.add_representer(type(None), lambda to, _: to.represent_scalar("tag:yaml.org,2002:null", "null"))


def _merge_sections(base: str, layers: list[Sections]) -> tuple[str, list[str]]:
    """Return the text of params.yaml with these keys, its comments kept, and the paths of the keys, in their order."""
    _parse_sections(base)
    yaml = YAML()
    yaml.width = 400  # long comments and lists stay on their lines
    yaml.Representer = _NullRepresenter
    whole = yaml.load(base)
    touched = [
        path
        for keys in layers
        for key, value in keys.items()
        for path in _set_key(whole, key, value, schema.Params, "")
    ]
    text = io.StringIO()
    yaml.dump(whole, text)
    return text.getvalue(), touched


def _set_key(into: Any, key: str, new: Any, model: Any, prefix: str) -> list[str]:
    """Set a key -> the paths set. Keys of a section are set one by one; a mapping with users' names is replaced."""
    inner = _get_section(model, key)
    if isinstance(new, dict) and inner:
        if not isinstance(into.get(key), dict):
            into[key] = {}
        return [
            path for name, value in new.items() for path in _set_key(into[key], name, value, inner, f"{prefix}{key}.")
        ]
    into[key] = _lay_out_value(new)
    return [f"{prefix}{key}"]


def _get_section(model: Any, key: str) -> Any:
    """Return the section that a key of a section is; None where it is a value."""
    fields = {field.alias or name: field for name, field in getattr(model, "model_fields", {}).items()}
    inner = fields[key].annotation if key in fields else None
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def _list_changes(before: str, after: str, first: list[str]) -> list[str]:
    """Return a line for each key that differs; those of `first`, in their order, before the others."""
    old, new = _resolve(before), _resolve(after)
    paths = dict.fromkeys([*first, *old, *new])
    return [
        f"{path}: {_describe_value(old.get(path))} -> {_describe_value(new.get(path))}"
        for path in paths
        if (path in old) != (path in new) or old.get(path) != new.get(path)
    ]


def _resolve(text: str) -> dict[str, Any]:
    """Return the keys of a params.yaml by their path, with defaults where it is valid."""
    values: dict[str, Any] = _parse_sections(text)
    with suppress(ValidationError):
        values = schema.Params.model_validate(values).model_dump(by_alias=True)
    return dict(_list_leaves(values, schema.Params, ""))


def _lay_out_value(value: Any) -> Any:
    """Return the value laid out as in params.yaml: lists and mappings of plain values on one line."""
    if isinstance(value, dict):
        made: Any = CommentedMap({name: _lay_out_value(inner) for name, inner in value.items()})
        plain = not any(isinstance(inner, dict | list) for inner in value.values())
    elif isinstance(value, list):
        made, plain = CommentedSeq(map(_lay_out_value, value)), True
    else:
        return value
    if plain:
        made.fa.set_flow_style()
    return made


def _describe_value(value: Any) -> str:
    """Return a mapping's names, any other value as params.yaml has it."""
    if value is None:
        return "null"
    return ", ".join(map(str, value)) if isinstance(value, dict) and value else str(value)
