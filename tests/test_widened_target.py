"""The widened target computes what the embedded one does, through its file too."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import random_target, widened_target


@pytest.fixture(scope="module")
def small() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(widened_target.SOURCE, dtype=torch.float32).eval()


@pytest.mark.parametrize("queries", [2, 4])
def test_logits_are_the_embedded_targets(queries: int, small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more query heads for a key-value head than the embedded one has, as Qwen3-8B."""
    hidden, intermediate, blocks, _, groups, *rest = random_target.SHAPES["small"]
    monkeypatch.setitem(random_target.SHAPES, "small", (hidden, intermediate, blocks, queries * groups, groups, *rest))
    widened_target.write_target(tmp_path, "small", "cpu", torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(small.config.vocab_size, (3, 80), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = small(ids).logits, wide(ids).logits
    own = small.config.vocab_size
    torch.testing.assert_close(found[..., :own], expected, rtol=1e-4, atol=1e-4)
    assert not found[..., own:].any() and found[..., :own].max(-1).values.min() > 1, (
        "no further token is ever the likeliest"
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == wide.config.eos_token_id == wide.generation_config.eos_token_id
    assert wide.config.hidden_size == random_target.SHAPES["small"][0]
