"""import_draft: published draft -> checkpoint, without training.   python -m stages.import_draft CHECKPOINT

Tensors are converted as engines interpret them, so replay and benchmarks measure the draft as engines run it. Engines can load
drafts/NAME/draft instead of the published files. The draft's family, EAGLE-3 or block drafts, is read from its config.json.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.draft import (
    block_checkpoint,
    checkpoint,
    eagle3_checkpoint,
    published_block_formats,
    published_eagle3_formats,
    published_files,
)
from stages.draft.block_draft import BlockDraft
from stages.draft.eagle3 import Eagle3Draft
from stages.draft.published_files import PublishedDraft
from stages.params import schema, stage_inputs
from stages.params.draft_sections import ImportedCheckpoint
from stages.params.section import get_named
from stages.runtime import atomic
from stages.target import chat_template, manifest
from stages.telemetry.run_stage import run_stage

REPORTS_FOLDER = Path("results/train")  # shared with train_draft, so that it exists in every run


@dataclass(frozen=True)
class ImportedDraft:
    """A written checkpoint, for the report; the field names are its keys."""

    method: str  # eagle3, or one of BLOCK_METHODS
    num_drafts: int | None  # of a block; None for EAGLE-3, whose trees have any depth
    draft_parameters: int
    draft_vocab_size: int


def main(name: str) -> None:
    params = stage_inputs.read_params("import_draft", name)
    item = get_named(params.import_draft.checkpoints, name, "import_draft.checkpoints")
    target_manifest = manifest.read_manifest()
    folder, commit = published_files.fetch_draft(item.model, item.revision)
    if published_files.is_block_config(published_files.read_flat_config(folder)):
        published = _read_block_draft(params, target_manifest, folder, item)
        imported = _write_block_draft(name, published)
    else:
        published = published_eagle3_formats.read_published_draft(
            folder,
            target_manifest,
            lambda: manifest.read_embedding_and_head(target_manifest),
            item.model,
            item.rope_theta,
        )
        imported = _write_eagle3_draft(name, published)
    report = {
        "checkpoint": name,
        "model": item.model,
        "commit": commit,
        **asdict(imported),
        "rope_theta": published.config["rope_theta"],
        "options": published.options,
        "notes": published.notes,
        "weights": manifest.digest_files(checkpoint.locate_checkpoint(name) / "draft", "*.safetensors"),
    }
    atomic.write_json(REPORTS_FOLDER / f"{name}.json", report)
    suffix = f" at {commit}" if commit else ""
    print(f"{name}: {imported.method}, {item.model}{suffix}, {imported.draft_parameters:,} parameters")
    for note in published.notes:
        print(f"note: {note}")


def _read_block_draft(
    params: schema.Params, target_manifest: manifest.TargetManifest, folder: Path, item: ImportedCheckpoint
) -> PublishedDraft:
    """Read a published block draft; its mask token is compared with the target's tokenizer."""
    tokenizer: Any = chat_template.load_tokenizer(
        manifest.resolve_weights_folder(target_manifest), params.target.trust_remote_code, target_manifest.chat_template
    )
    return published_block_formats.read_published_block_draft(
        folder,
        target_manifest,
        tokenizer,
        lambda: manifest.read_embedding_and_head(target_manifest),
        item.rope_theta,
    )


def _write_block_draft(name: str, published: PublishedDraft) -> ImportedDraft:
    config = block_checkpoint.parse_block_config(published.config)
    draft = BlockDraft(config)  # refuses an unsupported rope_type
    block_checkpoint.write_block_draft(checkpoint.locate_checkpoint(name), published.config, published.tensors)
    num_parameters = sum(x.numel() for x in draft.parameters())
    return ImportedDraft(config.method, config.num_drafts, num_parameters, config.vocab_size)


def _write_eagle3_draft(name: str, published: PublishedDraft) -> ImportedDraft:
    draft = Eagle3Draft.from_checkpoint(published.config, published.tensors)  # refuses an unsupported rope_type
    eagle3_checkpoint.write_eagle3_draft(checkpoint.locate_checkpoint(name), published.config, published.tensors)
    num_parameters = sum(x.numel() for x in draft.parameters())
    return ImportedDraft("eagle3", None, num_parameters, published.config["draft_vocab_size"])


if __name__ == "__main__":
    run_stage(main)
