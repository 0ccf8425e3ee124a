"""import_draft: a published draft -> a checkpoint like our own, without training.   python -m stages.import_draft CHECKPOINT

What engines would make of the draft is what is replayed and benchmarked; drafts/NAME/draft serves in their place.
"""

from pathlib import Path

from stages.draft import checkpoint, published_formats
from stages.draft.eagle3 import Eagle3Draft
from stages.params import schema
from stages.params.section import get_named
from stages.runtime import atomic
from stages.target import manifest
from stages.telemetry import stage_record

REPORTS_FOLDER = Path("results/train")  # a folder that is there whether drafts are trained, imported or both


def main(name: str) -> None:
    p = schema.load_params()
    item = get_named(p.import_draft.checkpoints, name, "import_draft.checkpoints")
    schema.check_watched(
        f"import_draft.checkpoints.{name}.model", item.model, "import_draft.watch", p.import_draft.watch
    )
    made = manifest.read_manifest()
    folder, commit = published_formats.fetch_draft(item.model, item.revision)
    found = published_formats.read_published_draft(
        folder, made, lambda: manifest.read_embedding_and_head(made), item.model, item.rope_theta
    )
    draft = Eagle3Draft.from_checkpoint(found.config, found.tensors)  # what we couldn't run, a kind of RoPE say, is refused here
    checkpoint.write_draft(checkpoint.locate_checkpoint(name), found.config, found.tensors)
    parameters = sum(x.numel() for x in draft.parameters())
    report = {
        "checkpoint": name,
        "model": item.model,
        "commit": commit,
        "draft_parameters": parameters,
        "draft_vocab_size": found.config["draft_vocab_size"],
        "rope_theta": found.config["rope_theta"],
        "options": found.options,
        "notes": found.notes,
        "weights": manifest.digest_files(checkpoint.locate_checkpoint(name) / "draft", "*.safetensors"),
    }
    atomic.write_json(REPORTS_FOLDER / f"{name}.json", report)
    print(f"{name}: {item.model}{f' at {commit}' if commit else ''}, {parameters:,} parameters")
    for note in found.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    schema.run_stage(stage_record.record_stage(main, "import_draft"))
