"""python -m pipeline use RECIPE: take a recipe's keys into params.yaml, whose comments and other keys stay.

A recipe is a file of recipes/ (or any path): sections and keys as in params.yaml, only those it is about.
"""

import os
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages import params

RECIPES = Path("recipes")
USAGE = "expected: python -m pipeline use RECIPE"


def main(words: list[str]) -> None:
    try:
        if len(words) != 2 or words[0] != "use":
            raise ValueError(f"{USAGE}; found {' '.join(words) or 'nothing'}")
        for line in use(words[1]) or ["params.yaml is so already"]:
            print(line)
    except ValueError as error:
        sys.exit(f"aerie: {error}")


def use(name: str) -> list[str]:
    """Write the recipe's keys into params.yaml -> a line for each that changed.

    Raises:
        ValueError: where there is no such recipe, or params.yaml would not be valid with it; it then stays as it was.
    """
    recipe = _read(name)
    yaml = YAML()
    yaml.width = 200  # long comments and lists stay on their lines
    yaml.representer.add_representer(type(None), lambda r, _: r.represent_scalar("tag:yaml.org,2002:null", "null"))
    whole = yaml.load(params.PARAMS.read_text(encoding="utf-8"))
    changes = [(s, k, whole.get(s, {}).get(k), new) for s, keys in recipe.items() for k, new in keys.items()]
    for section, key, _, new in changes:
        whole.setdefault(section, {})[key] = new
    with NamedTemporaryFile("w", dir=".", prefix=".params-", suffix=".yaml", encoding="utf-8", delete=False) as file:
        yaml.dump(whole, file)
    try:
        params.load(Path(file.name))
        os.replace(file.name, params.PARAMS)
    except ValueError as error:
        raise ValueError(f"recipe {name}: {str(error).replace(file.name, 'params.yaml with it')}") from None
    finally:
        Path(file.name).unlink(missing_ok=True)
    return [f"{section}.{key}: {old} -> {new}" for section, key, old, new in changes if old != new]


def _read(name: str) -> dict[str, dict[str, Any]]:
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RECIPES.glob("*.yaml")))
        raise ValueError(f"there is no recipe {path}; known are {known}")
    try:
        recipe = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(recipe, dict) or not all(isinstance(keys, dict) for keys in recipe.values()):
        raise ValueError(f"{path}: expected sections with keys, as params.yaml has them; found {recipe!r:.60}")
    return recipe


if __name__ == "__main__":
    main(sys.argv[1:])
