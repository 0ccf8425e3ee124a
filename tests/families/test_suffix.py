"""Suffix decoding: the guesses are Arctic Inference's; answers to earlier prompts are looked up too."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stages.families.suffix import SuffixIndex, SuffixMethod, SuffixProposer

# Steps of [text, tokens added to it, most guesses, the guesses then], by the C++ of Arctic Inference 0.3.0's SuffixTree.
SCRIPTS = json.loads((Path(__file__).parent / "suffix_arctic.json").read_text())
UNREAD = cast(Any, SimpleNamespace())  # of a slot, a prefill and a state


@pytest.mark.parametrize("script", SCRIPTS, ids=["two tokens", "three", "twelve"])
def test_guesses_are_those_of_arctic_inference(script: dict[str, Any]) -> None:
    """Of few tokens most are ties."""
    index, text = SuffixIndex(script["most_tokens"]), list[int]()
    for (before, *_), (number, added, count, guesses) in pairwise([[None], *script["steps"]]):
        if number != before:
            index.begin_text()
            text = []
        text += added
        index.extend(added)
        assert index.guess(text[-script["most_tokens"] :], count)[0] == guesses


def _answer(proposer: SuffixProposer, prompt: list[int], answer: list[int]) -> list[list[int]]:
    """Return what is guessed before each token of an answer but the first."""
    proposer.start(UNREAD, prompt, UNREAD, UNREAD)
    guesses = []
    for token in answer:
        proposer.context.append(token)
        guesses.append(proposer.guess([token]))
    return guesses


def test_answers_to_earlier_prompts_are_looked_up_until_a_prompt_comes_again() -> None:
    method = SuffixMethod(24, 4, torch.device("cpu"))
    proposer = method.build_proposer(100)
    answer = [5, 6, 7, 8, 9, 10]
    assert _answer(proposer, [1, 2], answer) == [[]] * 6, "nothing came before"
    again = _answer(proposer, [3, 4], answer)
    assert again[1:5] == [[7, 8], [8, 9, 10], [9, 10], [10]], (
        "as many guesses as the suffix has tokens, none before it has two"
    )
    assert _answer(proposer, [1, 2], answer) == [[]] * 6, "a repeat begins"
    assert _answer(proposer, [9, 3, 5, 6, 3, 5], [6])[0], "of the prompt itself"


def test_no_suffix_begins_before_the_prompt() -> None:
    """Bug: the last token counted as the one before the first, so that 5 5 was found at the beginning."""
    assert _answer(SuffixMethod(24, 4, torch.device("cpu")).build_proposer(100), [5, 9, 2, 5], [5]) == [[9]]
