"""The target of random weights that benchmarks make."""

import random
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks import random_target


def test_any_answers_ids_follow_from_its_text(tmp_path: Path) -> None:
    """Bug: fillers were words that no text gave back, so a server that returns text alone had every answer dropped."""
    size = random_target.SHAPES["8b"][-1]
    random_target.build_tokenizer(size).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == size
    rng = random.Random(1)
    ids = [rng.randrange(size - 3) for _ in range(5000)]  # all but the special tokens
    assert len(set(ids)) > 4000
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    assert len(tokenizer.encode("The sea,\n wind.", add_special_tokens=False)) == 15
