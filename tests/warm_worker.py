"""A worker of pytest that is a fork: runs the program that execnet sends. Started by tests/warm_process.py."""

import os
import sys

if __name__ == "__main__":
    from stages.telemetry import fork_server

    del os.environ[fork_server.RANKS_VARIABLE]  # for stages only, whose ranks fork too
    for name in [name for name in sys.modules if name.partition(".")[0] == "stages"]:
        del sys.modules[name]  # as a new process begins
    exec(eval(sys.stdin.readline()))
