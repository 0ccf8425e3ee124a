"""Checkpoints that can be trained, imported, replayed and measured, and chains of segments of one draft."""

import pytest

from tests.params.params_edits import SECOND, edit_params_text, list_problems


@pytest.mark.parametrize(("old", "section"), [("[e003, e009]", "replay_trees"), ("time_trees|[e000]", "time_trees")])
def test_what_servers_do_not_run_is_not_replayed_or_timed(old: str, section: str) -> None:
    heads = "heads: {from: e000, epochs: 2, method: medusa, heads: 4}"
    edit_params_text((SECOND, f"{SECOND}\n    {heads}"), (old, "[heads]"))
    (line,) = list_problems()
    assert line.startswith(
        f"{section}.checkpoints: 'heads' is of medusa, expected checkpoints of EAGLE-3 or block drafts"
    )
