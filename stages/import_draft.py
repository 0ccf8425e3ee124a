"""import_draft: published draft -> checkpoint, without training.   python -m stages.import_draft CHECKPOINT

Tensors are converted as engines interpret them, so replay and benchmarks measure the draft as engines run it. Engines can load
drafts/NAME/draft in place of the published files.
"""

from pathlib import Path

from stages.draft import checkpoint, published_formats
from stages.draft.eagle3 import Eagle3Draft
from stages.params import schema
from stages.params.section import get_named
from stages.runtime import atomic
from stages.target import manifest
from stages.telemetry.run_stage import run_stage

REPORTS_FOLDER = Path("results/train")  # shared with train_draft, so that it exists in every run


def main(name: str) -> None:
    params = schema.load_params()
    item = get_named(params.import_draft.checkpoints, name, "import_draft.checkpoints")
    schema.check_watched(
        f"import_draft.checkpoints.{name}.model", item.model, "import_draft.watch", params.import_draft.watch
    )
    target_manifest = manifest.read_manifest()
    folder, commit = published_formats.fetch_draft(item.model, item.revision)
    published = published_formats.read_published_draft(
        folder, target_manifest, lambda: manifest.read_embedding_and_head(target_manifest), item.model, item.rope_theta
    )
    draft = Eagle3Draft.from_checkpoint(published.config, published.tensors)  # refuses an unsupported rope_type
    checkpoint.write_draft(checkpoint.locate_checkpoint(name), published.config, published.tensors)
    num_parameters = sum(x.numel() for x in draft.parameters())
    report = {
        "checkpoint": name,
        "model": item.model,
        "commit": commit,
        "draft_parameters": num_parameters,
        "draft_vocab_size": published.config["draft_vocab_size"],
        "rope_theta": published.config["rope_theta"],
        "options": published.options,
        "notes": published.notes,
        "weights": manifest.digest_files(checkpoint.locate_checkpoint(name) / "draft", "*.safetensors"),
    }
    atomic.write_json(REPORTS_FOLDER / f"{name}.json", report)
    print(f"{name}: {item.model}{f' at {commit}' if commit else ''}, {num_parameters:,} parameters")
    for note in published.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    run_stage(main)
