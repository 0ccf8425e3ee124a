"""The YAML of params.yaml and of recipes, bounded in depth."""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

MOST_LEVELS = 32  # params.yaml has four


def parse(text: str) -> Any:
    """Return what the text says, by the parser DVC uses, so that we see what DVC sees; it also refuses a key given twice.

    Raises:
        ValueError: for bytes and dates that don't exist, and for what is nested too deep: the parser composes values by
            recursion in C, and at a hundred thousand levels ends Python itself.
        YAMLError: for what is no YAML.
    """
    depth = 0
    for event in YAML(typ="safe").parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MOST_LEVELS:
            raise ValueError(
                f"line {event.start_mark.line + 1}: expected at most {MOST_LEVELS} levels of nesting, found more"
            )
    return YAML(typ="safe").load(text)
