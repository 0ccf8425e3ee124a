"""Check the mask tokens of block drafts against the target's tokenizer.   python -m stages.draft.named_mask_tokens [FILE]

prepare_target does so before hours of sampling, and says which are chosen; `aerie run`, `aerie stale` and `aerie doctor` do by
this command where the target is here already. A module of its own, since no draft's weights depend on it.
"""

import sys
from pathlib import Path
from typing import Any

from stages.draft.mask_token import choose_mask_token, describe_mask_token
from stages.params import schema
from stages.params.families import BlockSegment
from stages.params.section import PARAMS_FILE
from stages.target import chat_template, manifest
from stages.target.manifest import TargetManifest


def check_mask_tokens(params: schema.Params, tokenizer: Any, target: TargetManifest) -> list[str]:
    """Return a line for each segment that starts a block draft: its mask token, or that it has none.

    Raises ValueError naming every segment whose named mask token is one of text, or outside of the target's embedding. A segment
    for which none can be chosen is refused only where no other draft is to be trained.
    """
    lines, problems, num_refused = list[str](), list[str](), 0
    for name in params.train_draft.list_fresh_drafts():
        segment = params.train_draft.checkpoints[name]
        assert isinstance(segment, BlockSegment), name
        try:
            chosen = choose_mask_token(segment.mask_token_id, tokenizer, target)
            lines.append(f"{name}: mask token {describe_mask_token(chosen, tokenizer)}")
        except ValueError as error:
            text = f"{PARAMS_FILE}: train_draft.checkpoints.{name}: {error}"
            if segment.mask_token_id is None:
                num_refused += 1
                lines.append(f"warning: {text}; other drafts are trained")
            else:
                problems.append(text)
    if num_refused == len(params.train_draft.checkpoints):
        problems += lines
    if problems:
        raise ValueError("\n  ".join(problems))
    return lines


def find_tokenizer_folder(target: TargetManifest) -> Path | None:
    """Return the folder of the target's tokenizer; None where it is not on this machine. Downloads nothing."""
    if manifest.lie_beside_manifest(target.model):
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
    print(*check_mask_tokens(params, tokenizer, target), sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"aerie: {error}")
