"""The double itself, where its engine fails."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.serving import engine_double


def fail_after_one_step(*_: object) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(tokens=[5], num_accepted=0)
    raise ValueError("the draft reads three of six stored layers")


def test_a_request_fails_where_the_engine_does() -> None:
    """Bug: the request waited for ever, and a rehearsal of a plan with block drafts with it."""
    double = engine_double.Double(engine_double.parse_arguments(["serve", "--model-path", "target", "--port", "1"]))
    double.engine = SimpleNamespace(decode_plain=fail_after_one_step)

    async def ask() -> list[list[int]]:
        return [tokens async for tokens, _, _ in double.decode([1, 2], 8)]

    for _ in range(2):
        with pytest.raises(ValueError, match="three of six"):
            asyncio.run(asyncio.wait_for(ask(), 10))
