"""The YAML of params.yaml and of recipes, bounded in depth."""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

MOST_LEVELS = 32  # params.yaml has four


def parse_yaml(text: str) -> Any:
    """Parse YAML with the parser that DVC uses, so that both read the same values; it also refuses duplicate keys.

    Raises:
        ValueError: for invalid bytes and dates, and for too deep nesting: the parser recurses in C, and a hundred thousand
            levels crash Python.
        YAMLError: for invalid YAML.
    """
    depth = 0
    for event in YAML(typ="safe").parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MOST_LEVELS:
            raise ValueError(
                f"line {event.start_mark.line + 1}: expected at most {MOST_LEVELS} levels of nesting, found more"
            )
    return YAML(typ="safe").load(text)
