"""import_draft: published draft -> checkpoint, without training.   python -m stages.import_draft CHECKPOINT

Tensors are converted as engines interpret them, so replay and benchmarks measure the draft as engines run it. Engines can load
drafts/NAME/draft instead of the published files. The draft's family is read from its config.json; builtin/ngram,
suffix and lookahead name families without weights.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from stages.draft import checkpoint, published_files
from stages.draft.published_files import PublishedDraft
from stages.families import registry
from stages.params import stage_inputs
from stages.params.families import DraftFamily, find_family
from stages.params.section import get_named
from stages.runtime import atomic
from stages.target import manifest
from stages.telemetry.run_stage import run_stage

REPORTS_FOLDER = Path("results/train")  # shared with train_draft, so that it exists in every run


@dataclass(frozen=True)
class ImportedDraft:
    """A written checkpoint, for the report; the field names are its keys."""

    method: str  # its family (params/families.py)
    num_drafts: int | None  # of a block; None for EAGLE-3, whose trees have any depth
    draft_parameters: int
    draft_vocab_size: int


def main(name: str) -> None:
    params = stage_inputs.read_params("import_draft", name)
    item = get_named(params.import_draft.checkpoints, name, "import_draft.checkpoints")
    target_manifest, folder = manifest.read_manifest(), checkpoint.locate_checkpoint(name)
    if item.builtin:
        published, commit = PublishedDraft({}, {}, {}, []), None
        imported = ImportedDraft(item.builtin.name, None, 0, target_manifest.vocab_size)
        registry.get(item.builtin).files.write(folder, {"method": item.builtin.name}, {})
    else:
        source, commit = published_files.fetch_draft(item.model, item.revision)
        family = published_files.find_published_family(published_files.read_flat_config(source))
        published = registry.get(family).files.read_published(source, item, params, target_manifest)
        imported = _write_draft(folder, find_family(published.config), published)
    report = {
        "checkpoint": name,
        "model": item.model,
        "commit": commit,
        **asdict(imported),
        "rope_theta": published.config.get("rope_theta"),
        "options": published.options,
        "notes": published.notes,
        "weights": manifest.digest_files(folder / "draft", "*.safetensors"),
    }
    atomic.write_json(REPORTS_FOLDER / f"{name}.json", report)
    suffix = f" at {commit}" if commit else ""
    print(f"{name}: {imported.method}, {item.model}{suffix}, {imported.draft_parameters:,} parameters")
    for note in published.notes:
        print(f"note: {note}")


def _write_draft(folder: Path, family: DraftFamily, published: PublishedDraft) -> ImportedDraft:
    """Write a published draft. Its buffers, as the maps of its vocabulary, are no parameters."""
    files, config = registry.get(family).files, published.config
    files.write(folder, config, published.tensors)
    num_parameters = sum(tensor.numel() for tensor in published.tensors.values() if tensor.is_floating_point())
    vocabulary = config.get("draft_vocab_size", config["vocab_size"])
    return ImportedDraft(family.name, files.describe(config).depth, num_parameters, vocabulary)


if __name__ == "__main__":
    run_stage(main)
