"""Run a stage from the command line: its arguments, its line in the log, its errors as one message.

This module is no dependency of any stage (runtime/stage_code.py leaves the folder out): it moves no result.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from stages.params import stage_inputs
from stages.params.schema import load_params
from stages.runtime import scratch
from stages.telemetry import fork_server, stage_log
from stages.telemetry.interruption import INTERRUPTED, escape_controls, filter_terminal, watch_ctrl_c
from stages.telemetry.machine_errors import explain_machine_error


def run_stage(main: Callable[..., None], list_gpus: Callable[[], list[int] | None] = list) -> None:
    """Run a stage's `main` with the words of the command line and log the run.

    `list_gpus` gives the GPUs whose energy is counted, as indices into CUDA_VISIBLE_DEVICES; None for all. An error that the
    user can correct is printed as one message, and the process exits with 1; after Ctrl-C with 130. It leaves when the error is
    gone, and with it the arrays that it kept alive: out of memory, what runs at the exit would else end in a traceback too.
    """
    filter_terminal()
    _keep_compiled_code()
    started, stage, status = time.time(), _name_stage(sys.argv), ""
    with watch_ctrl_c() as interrupted:
        try:
            _run_main(main, list_gpus, stage)
            return
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, KeyboardInterrupt) or interrupted.is_set():
                if os.environ.get("RANK") is None:  # the process that has started the ranks says it for them
                    resumed = scratch.list_notes(started).get(stage) or "from its beginning"
                    print(f"aerie: {stage} stopped; run again to go on {resumed}", file=sys.stderr)
            elif problem := explain_machine_error(error, stage) or (isinstance(error, ValueError) and str(error)):
                status = escape_controls(f"aerie: {problem}")
            else:
                raise
    sys.exit(status or INTERRUPTED)


def _run_main(main: Callable[..., None], list_gpus: Callable[[], list[int] | None], stage: str) -> None:
    """Run `main` with the words of the command line, with its note of unfinished work and its line in the log."""
    signature = inspect.signature(main)
    words = split_stage_name(sys.argv[1:])
    try:
        signature.bind(*words)
    except TypeError:
        wanted = " ".join(name.upper() for name in signature.parameters) or "no arguments"
        raise ValueError(f"expected {wanted}, found {' '.join(words) or 'none'}") from None
    is_stage = Path(sys.argv[0]).parent.name == "stages"  # stages/reproduce is started like one and is none
    with ExitStack() as watched:
        if is_stage:
            if os.environ.get("DVC_STAGE", "inputs") != "inputs" and "RANK" not in os.environ:
                stage_inputs.check_inputs(os.environ["DVC_STAGE"])
                if stage_inputs.RUN_MARK_VARIABLE not in os.environ and (dvc := stage_inputs.identify_dvc()):
                    fork_server.start_for_dvc(stage, int(dvc.split()[0]))
            if stage != "inputs":  # of `aerie stale` too, beside a run
                watched.enter_context(scratch.lock_stage(stage))
            watched.enter_context(scratch.keep_note(stage))
            watched.enter_context(stage_log.log_run(stage, words, list_gpus()))
        main(*words)


def _keep_compiled_code() -> None:
    """Let torch.compile keep its code with the user, for every later stage and run of this machine.

    Its own default is a folder of TMPDIR: another one for a stage with a TMPDIR of its own, emptied by the system, and in a
    shared TMPDIR one that anybody can make first, with pickles that torch loads.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    with suppress(OSError, RuntimeError):  # no home, or none that can be written to: torch's default
        folder = Path.home() / ".cache" / "aerie" / "torchinductor"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def split_stage_name(words: list[str]) -> list[str]:
    """Return the arguments of a stage; for one word such as `benchmark@eval-e003-t5_1_6`, the parts behind the @.

    dvc.yaml passes that name by the environment variable DVC_STAGE, so that no shell parses what params.yaml names.

    Raises:
        ValueError: where params.yaml is not valid: a name with a `-` would be split at the wrong dash.
    """
    if len(words) != 1 or "@" not in words[0]:
        return words
    load_params()
    return words[0].rpartition("@")[2].split("-")


def _name_stage(argv: list[str]) -> str:
    """Return the stage's name in dvc.yaml, whether the command line gives that name or its parts."""
    if len(argv) == 2 and "@" in argv[1]:
        return argv[1]
    return "@".join(filter(None, [Path(argv[0]).stem, "-".join(argv[1:])]))
