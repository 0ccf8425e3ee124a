"""Recipes: files of recipes/ with the sections and keys of params.yaml that differ for one experiment.

Their block `recipe` describes what they reproduce (stages/params/recipe.py) and is not written into params.yaml.
"""

import io
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import RoundTripRepresenter

from stages.params import schema
from stages.params.recipe import RECIPES_FOLDER
from stages.params.section import PARAMS_FILE, Section
from stages.params.spelling import suggest_name


def list_recipes() -> list[str]:
    return sorted(file.stem for file in RECIPES_FOLDER.glob("*.yaml"))


def locate_recipe(name: str) -> Path:
    """Return the recipe's path. Raises ValueError if there is none, naming those there are."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES_FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = list_recipes()
        raise ValueError(f"there is no recipe {path}{suggest_name(path.stem, known)}; known are {', '.join(known)}")
    return path


def use_recipe(name: str) -> list[str]:
    """Write the recipe's keys into params.yaml -> a line for each that changed, and one on how to return.

    Raises:
        ValueError: there is no such recipe, or params.yaml would not be valid with it; it then stays as it was.
    """
    with merge_recipe(name) as (file, changes):
        if not changes:
            return []
        kept = keep_copy(locate_recipe(name).stem)
        os.replace(file, PARAMS_FILE)
    return [*changes, f"{PARAMS_FILE} as it was is kept in {kept}; to return to it: cp {kept} {PARAMS_FILE}"]


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


def merge_recipe(name: str) -> AbstractContextManager[tuple[Path, list[str]]]:
    """Return a context with a temporary params.yaml that has the recipe's keys, and a line for each change of a key."""
    _, recipe = schema.read_recipe(locate_recipe(name))
    return _write_merged(recipe, f"recipe {name}")


def write_sections(sections: dict[str, dict[str, Any]]) -> list[str]:
    """Write these keys into params.yaml -> a line for each that changed. Raises ValueError as `use_recipe`."""
    with _write_merged(sections, "these parameters") as (file, changes):
        os.replace(file, PARAMS_FILE)
    return changes


@contextmanager
def _write_merged(sections: dict[str, dict[str, Any]], label: str) -> Iterator[tuple[Path, list[str]]]:
    text, changes = _merge_sections(sections)
    with NamedTemporaryFile("w", dir=".", prefix=".params-", suffix=".yaml", encoding="utf-8", delete=False) as file:
        file.write(text)
    shutil.copymode(PARAMS_FILE, file.name)  # a temporary file is readable by its owner alone
    try:
        try:
            schema.load_params(Path(file.name))
        except ValueError as error:
            raise ValueError(f"{label}: {str(error).replace(file.name, 'params.yaml with it')}") from None
        yield Path(file.name), changes
    finally:
        Path(file.name).unlink(missing_ok=True)


class _NullRepresenter(RoundTripRepresenter):
    """Writes null as `null`. A class of its own: `add_representer` changes a class, and DVC's YAML has the other one."""


_NullRepresenter.add_representer(type(None), lambda to, _: to.represent_scalar("tag:yaml.org,2002:null", "null"))


def _merge_sections(recipe: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the text of params.yaml with the recipe's keys, its comments kept, and a line for each key that changed."""
    yaml = YAML()
    yaml.width = 200  # long comments and lists stay on their lines
    yaml.Representer = _NullRepresenter
    whole = yaml.load(PARAMS_FILE.read_text(encoding="utf-8"))
    changes = [line for section, keys in recipe.items() for line in _set_key(whole, section, keys, schema.Params, "")]
    text = io.StringIO()
    yaml.dump(whole, text)
    return text.getvalue(), changes


def _set_key(into: Any, key: str, new: Any, model: Any, place: str) -> list[str]:
    """Set a key -> lines on what changed. Keys of a section are set one by one; a mapping with users' names is replaced."""
    fields = {field.alias or name: field for name, field in getattr(model, "model_fields", {}).items()}
    inner = fields[key].annotation if key in fields else None
    if isinstance(new, dict) and isinstance(inner, type) and issubclass(inner, Section):
        section = into.setdefault(key, {})
        return [line for name, value in new.items() for line in _set_key(section, name, value, inner, f"{place}{key}.")]
    old, into[key] = into.get(key), _lay_out_value(new)
    return [f"{place}{key}: {_describe_value(old)} -> {_describe_value(new)}"] if old != new else []


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
    """Return a mapping's names, any other value as text."""
    return ", ".join(value) if isinstance(value, dict) and value else str(value)
