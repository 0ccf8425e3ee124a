"""The stages of the graph, each `python -m stages.NAME`, and what they share."""

import os

if "AERIE_FORK_SERVER" in os.environ:  # set by `aerie run` for the commands of dvc.yaml
    from stages.telemetry import fork_server

    fork_server.run_forked()
