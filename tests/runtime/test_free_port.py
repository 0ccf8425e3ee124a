"""A port for a child that binds it minutes later."""

import pytest

from stages.runtime import free_port


def test_no_outgoing_connection_takes_it() -> None:
    """Bug: ports came from the ephemeral range; a connection of another process held one when SGLang bound it after 100 s."""
    first = free_port.read_first_ephemeral()
    if first <= free_port.FIRST_PORT:
        pytest.skip(f"the ephemeral range of this machine begins at {first}")
    found = [free_port.find_free_port() for _ in range(50)]
    assert all(free_port.FIRST_PORT <= port < first for port in found) and len(set(found)) == 50
