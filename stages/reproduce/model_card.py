"""Write a checkpoint with its model card into a folder that can be uploaded.   aerie card CHECKPOINT [FOLDER] [--licence ID]

python -m stages.reproduce.model_card CHECKPOINT FOLDER LICENCE

The folder has the two files that engines load and README.md: what the draft is for, how it was trained, and what trees of it
accept, replayed. All numbers are of files that stages wrote; nothing is sent anywhere.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stages.cells import replay_records, training_records
from stages.cells.table import ResultRow
from stages.draft import checkpoint
from stages.params import schema, stage_inputs
from stages.params.families import find_family
from stages.params.section import ROOT_CHECKPOINT
from stages.reporting.inputs import SampleReport
from stages.runtime import atomic
from stages.target import manifest
from stages.telemetry.run_stage import run_stage

MOST_TREES = 6
CHAIN = "t3_1_4"  # by which drafts are compared


def main(name: str, folder: str, licence: str) -> None:
    """Raises ValueError where the folder exists, or the checkpoint is not trained or not replayed."""
    params, out = schema.load_params(), Path(folder or f"upload/{name}")
    if name not in params.train_draft.checkpoints:
        trained = ", ".join(params.train_draft.checkpoints) or "none"
        raise ValueError(f"{name} is no checkpoint of train_draft.checkpoints, expected one of them: {trained}")
    if out.exists():
        raise ValueError(f"{out} exists, expected a new folder for the draft and its card; name another")
    draft = checkpoint.locate_checkpoint(name) / "draft"
    config = atomic.read_json(draft / "config.json", f"train_draft@{name}", dict)
    card = _render_card(params, name, config, draft, licence)
    with atomic.write_folder(out) as temporary:
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(draft / file, temporary / file)
        (temporary / "README.md").write_text(card, encoding="utf-8")
    print(f"{out}: config.json, model.safetensors and the card README.md; licence: {licence}; nothing was sent")


def _render_card(params: schema.Params, name: str, config: dict[str, Any], draft: Path, licence: str) -> str:
    """Return README.md."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    target, training = manifest.read_manifest(), params.train_draft
    answers = SampleReport.read_json(Path("results/sample_report.json"), "sample_target").rows_out
    chain, parent = {}, name
    while parent != ROOT_CHECKPOINT:
        chain[parent] = training_records.read_training(parent, training.checkpoints[parent].from_)
        parent = training.checkpoints[parent].from_
    keys = training.model_fields_set - {"checkpoints", "report_to", "run_name", "processes"}
    trees = replay_records.select_temperature(replay_records.ReplayedTree.read(name), 0.0)
    wanted = {CHAIN, *params.benchmark.trees}
    parts = {(row.tree, row.group): row for row in replay_records.GroupTau.read(name) if row.by == "source"}
    table = ResultRow.read_table() if ResultRow.TABLE.exists() else []
    return environment.get_template("model_card.md.j2").render(
        licence=licence,
        target=target,
        family=find_family(config),
        vocabulary=config.get("draft_vocab_size") or target.vocab_size,
        dtype=training.compute_dtype,
        megabytes=(draft / "model.safetensors").stat().st_size / 1e6,
        raw=params.fix_data.raw,
        answers=answers,
        sampling=params.sample_target,
        epochs=sum(len(segment.epochs) for segment in chain.values()),
        tokens=chain[name].epochs[0].tokens,
        seconds=sum(segment.seconds for segment in chain.values()),
        changed=training.model_dump(include=keys),
        digest=_digest_inputs(f"artifacts/inputs/train_draft-{segment}.json" for segment in chain),
        sources=list(dict.fromkeys(source for _, source in parts)),
        parts=parts,
        trees=[tree for tree in trees if tree.shape.name in wanted][:MOST_TREES] or trees[:MOST_TREES],
        measured=[row for row in table if row.checkpoint == name and row.speedup is not None and not row.is_replayed],
    )


def _digest_inputs(chain: Iterable[str]) -> str:
    """Return a digest of the inputs files of all stages that the checkpoint comes from."""
    before = ("prepare_target", "fix_data", "sample_target", "extract_hiddens", f"init_draft-{ROOT_CHECKPOINT}")
    paths = [*(stage_inputs.INPUTS_FOLDER / f"{stage}.json" for stage in before), *map(Path, sorted(chain))]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(json.dumps(atomic.read_json(path, "inputs", dict), sort_keys=True).encode())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    run_stage(main)
