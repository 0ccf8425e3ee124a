"""Check params.yaml against a target that prepare_target has made, by a process that may import transformers (4 s)."""

import subprocess
import sys
from pathlib import Path

from pipeline.dvc_output import list_error_lines
from pipeline.stage_summaries import TARGET_FILE
from stages.params.draft_sections import BlockSegment
from stages.params.schema import Params
from stages.params.section import PARAMS_FILE


def check_mask_tokens(params: Params, file: Path = PARAMS_FILE) -> None:
    """Raise ValueError for a mask token that texts use, or outside of the embedding; `file` holds the parameters.

    Nothing is started where no segment names a mask token, or the target is not here yet: prepare_target then checks.
    """
    segments = params.train_draft.checkpoints.values()
    names_one = any(isinstance(segment, BlockSegment) and segment.mask_token_id is not None for segment in segments)
    if not names_one or not TARGET_FILE.exists():
        return
    command = [sys.executable, "-m", "stages.draft.named_mask_tokens", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and (said := list_error_lines(done.stderr.splitlines())):
        raise ValueError("\n".join(said))
