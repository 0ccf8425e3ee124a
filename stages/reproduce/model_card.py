"""Write a checkpoint with its model card into a folder that can be uploaded.   aerie card CHECKPOINT [FOLDER] [--licence ID]

python -m stages.reproduce.model_card CHECKPOINT FOLDER LICENCE

The folder has the two files that engines load and README.md: what the draft is for, how it was trained, and what trees of it
accept, replayed. All numbers are of files that stages wrote; nothing is sent anywhere.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stages.cells import replay_records, training_records
from stages.cells.replay_records import GroupTau, ReplayedTree
from stages.cells.table import ResultRow
from stages.draft import checkpoint
from stages.params import schema, stage_inputs
from stages.params.families import find_family
from stages.params.section import ROOT_CHECKPOINT
from stages.reporting.stage_reports import SampleReport
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
    card = "\n".join(_write_card(params, name, config, draft, licence))
    with atomic.write_folder(out) as temporary:
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(draft / file, temporary / file)
        (temporary / "README.md").write_text(card, encoding="utf-8")
    print(f"{out}: config.json, model.safetensors and the card README.md; licence: {licence}; nothing was sent")


def _write_card(params: schema.Params, name: str, config: dict[str, Any], draft: Path, licence: str) -> Iterator[str]:
    """Yield the lines of README.md."""
    made, family = manifest.read_manifest(), find_family(config)
    yield from (
        "---",
        f"license: {licence}",
        f"base_model: {made.model}",
        "tags:",
        "- speculative-decoding",
        f"- {family.name}",
    )
    yield from ("---", "", f"# {family.title} draft of {made.model}", "")
    yield "Trained and replayed by aerie; SGLang, vLLM and llama.cpp load it as it is where they run its family."
    yield from ("", "| | |", "|---|---|", *_list_facts(params, name, config, draft), "")
    yield from _write_taus(params, name)
    yield from _write_cells(name)


def _list_facts(params: schema.Params, name: str, config: dict[str, Any], draft: Path) -> Iterator[str]:
    made, settings = manifest.read_manifest(), params.train_draft
    revision = f", revision {made.revision}" if made.revision else ""
    yield f"| target | {made.describe_model()}{revision} |"
    vocabulary = config.get("draft_vocab_size") or made.vocab_size
    size = (draft / "model.safetensors").stat().st_size / 1e6
    yield f"| form | {find_family(config).title}, draft vocabulary of {vocabulary:,} tokens, {settings.dtype}, {size:.1f} MB |"
    answers = SampleReport.read_json(Path("results/sample_report.json"), "sample_target").rows_out
    sampled = params.sample_target
    temperatures = ", ".join(f"{temperature:g}" for temperature, _ in sampled.temperature_weights)
    yield (
        f"| data | {params.fix_data.raw}: {answers:,} answers of the target, of at most {sampled.max_new_tokens} tokens, at "
        f"temperature {temperatures} |"
    )
    chain, segments = [], []
    while name != ROOT_CHECKPOINT:
        chain.append(f"artifacts/inputs/train_draft-{name}.json")
        parent = settings.checkpoints[name].from_
        segments.append(training_records.read_training(name, parent))
        name = parent
    epochs, seconds = sum(len(x.epochs) for x in segments), sum(x.seconds for x in segments)
    tokens = segments[0].epochs[0].tokens
    keys = settings.model_dump(
        include=settings.model_fields_set - {"checkpoints", "report_to", "run_name", "processes"}
    )
    changed = ", ".join(f"{key}: {value}" for key, value in sorted(keys.items()))
    but = f" but {changed}" if changed else ""
    yield f"| training | {epochs} epochs of {tokens:,} tokens, {seconds:.0f} s; train_draft's defaults{but} |"
    yield f"| digest | {_digest_inputs(chain)} of the parameters and the code that decide its weights |"


def _digest_inputs(chain: Iterable[str]) -> str:
    """Return a digest of the inputs files of all stages that the checkpoint comes from."""
    before = ("prepare_target", "fix_data", "sample_target", "extract_hiddens", f"init_draft-{ROOT_CHECKPOINT}")
    paths = [*(stage_inputs.INPUTS_FOLDER / f"{stage}.json" for stage in before), *map(Path, sorted(chain))]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(json.dumps(atomic.read_json(path, "inputs", dict), sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _write_taus(params: schema.Params, name: str) -> Iterator[str]:
    """Yield the table of tau by tree, and of the chain by set of eval answers."""
    trees = replay_records.select_temperature(replay_records.read_replay(name), 0.0)
    wanted = dict.fromkeys([CHAIN, *params.benchmark.trees])
    shown = [tree for tree in trees if tree.shape.name in wanted][:MOST_TREES] or trees[:MOST_TREES]
    groups = [group for group in replay_records.read_group_taus(name) if group.by == "source"]
    names = list(dict.fromkeys(group.group for group in groups))
    yield "Tokens that a verify cycle commits (tau) on answers that were not learned, replayed at temperature 0 (95% intervals):"
    yield from ("", f"| tree | all | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}")
    for tree in shown:
        of_tree = {group.group: group for group in groups if group.tree == tree.shape.name}
        yield f"| {tree.shape.name[1:]} | {_format_tau(tree)} | {' | '.join(_format_tau(of_tree[x]) for x in names)} |"
    yield ""


def _format_tau(row: ReplayedTree | GroupTau) -> str:
    ends = "" if row.tau_low is None else f" ({row.tau_low:.2f}-{row.tau_high:.2f})"
    return f"{row.tau:.2f}{ends}"


def _write_cells(name: str) -> Iterator[str]:
    """Yield the table of measured speedups, if cells of the checkpoint were."""
    path = Path("results/benchmark.csv")
    rows = [row for row in ResultRow.read_csv(path, "report") if row.checkpoint == name] if path.exists() else []
    measured = [row for row in rows if row.speedup is not None and not row.is_replayed]
    if measured:
        yield from ("Measured:", "", "| engine | workload | tree | tau | speedup |", "|---|---|---|---|---|")
        for row in measured:
            ends = "" if row.speedup_low is None else f" ({row.speedup_low:.2f}-{row.speedup_high:.2f})"
            yield f"| {row.engine} | {row.workload} | {row.tree} | {row.tau:.2f} | {row.speedup:.2f}{ends} |"


if __name__ == "__main__":
    run_stage(main)
