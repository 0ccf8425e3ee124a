"""Check the mask tokens that params.yaml names against the target's tokenizer.   python -m stages.draft.named_mask_tokens [FILE]

prepare_target does so before hours of sampling; `aerie run`, `aerie stale` and `aerie doctor` do by this command where the target
is here already. A module of its own, since no draft's weights depend on it.
"""

import sys
from pathlib import Path
from typing import Any

from stages.draft.mask_token import choose_mask_token
from stages.params import schema
from stages.params.draft_sections import BlockSegment
from stages.params.section import PARAMS_FILE
from stages.target import chat_template, manifest
from stages.target.manifest import TargetManifest


def check_named_mask_tokens(params: schema.Params, tokenizer: Any, target: TargetManifest) -> None:
    """Raise ValueError naming every segment whose mask token is one of text, or outside of the target's embedding."""
    problems = []
    for name, segment in params.train_draft.checkpoints.items():
        if isinstance(segment, BlockSegment) and segment.mask_token_id is not None:
            try:
                choose_mask_token(segment.mask_token_id, tokenizer, target)
            except ValueError as error:
                problems.append(f"{PARAMS_FILE}: train_draft.checkpoints.{name}: {error}")
    if problems:
        raise ValueError("\n".join(problems))


def find_tokenizer_folder(target: TargetManifest) -> Path | None:
    """Return the folder of the target's tokenizer; None where it is not on this machine. Downloads nothing."""
    if target.model.startswith("builtin/"):
        return manifest.TARGET_FOLDER
    if Path(target.model).is_dir():
        return Path(target.model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(target.model, revision=target.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def main(file: str = str(PARAMS_FILE)) -> None:
    params = schema.load_params(Path(file))
    try:
        target = manifest.read_manifest()
        folder = find_tokenizer_folder(target)
        if target.model != params.target.model or folder is None:
            return
        tokenizer = chat_template.load_tokenizer(folder, params.target.trust_remote_code, target.chat_template)
    except ValueError:  # a broken target, which prepare_target makes again
        return
    check_named_mask_tokens(params, tokenizer, target)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"aerie: {error}")
