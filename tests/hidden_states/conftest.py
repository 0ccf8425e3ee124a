"""A folder of hidden states, for tests of what reads it."""

from pathlib import Path

import pytest
import torch

from stages.hidden_states import writer
from tests.hidden_states.made_up_rows import made_up


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder of rows in three shards or so."""
    writer.write_rows(tmp_path, made_up(), torch.float32, shard_bytes=1_500)
    return tmp_path
