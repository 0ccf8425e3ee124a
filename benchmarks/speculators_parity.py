"""Is an imported block draft the one that speculators trained?   python -m benchmarks.speculators_parity FOLDER

FOLDER holds the unpacked wheel of speculators (seen with 0.9.0: `pip download --no-deps speculators`), which is no dependency of
aerie. Its DFlash, DFlash2 and DSpark models get random weights and are saved by their own `save_pretrained`; import_draft's
reader reads the files. Compared in float32 on a CPU, over all positions of a row that can be an anchor:

    hidden     states of all slots, its `_backbone_forward` against `forward_pack`
    logits     of every drafting slot after the row's own tokens: its head with DSpark's Markov head, or DFlash2's selector
               among the same candidates

Prints the largest difference beside the largest value, and exits with 1 where one is over 1e-5 of it.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from stages.draft.block_checkpoint import parse_block_config
from stages.draft.block_draft import BlockDraft
from stages.draft.published_block_formats import read_published_block_draft
from stages.params.block_draft_methods import BLOCK_METHODS
from stages.target.manifest import TargetManifest

HIDDEN, VOCAB, LAYERS, BLOCK, ROW, TARGET_LAYERS = 16, 23, 2, 4, 12, 8
FEATURES = (2, 3, 5, 7)
TOLERANCE = 1e-5
OWN_SIZES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
    "dspark": {"markov_rank": 6},
}
TARGET = TargetManifest(
    model="a/target", revision=None, modality="text", config_digest="", tokenizer_digest="",
    feature_layers=[1, 2, 3, 5, 6, 7], hidden_size=HIDDEN, intermediate_size=24, num_layers=TARGET_LAYERS,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 100.0}, max_position_embeddings=64, tie_word_embeddings=False,
    eos_token_ids=[19],
)  # fmt: skip


class Tokens:
    """A tokenizer of the ids 0 to 18: the other rows of the embedding are unused."""

    mask_token_id = pad_token_id = None
    added_tokens_decoder = MappingProxyType[int, str]({})

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(19)}

    def convert_ids_to_tokens(self, i: int) -> str:
        return f"t{i}"


def build_theirs(method: str) -> Any:
    """Return speculators' model of a method with random weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig  # type: ignore[import-not-found]
    from speculators.models import dflash, dflash2, dspark  # type: ignore[import-not-found]
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # type: ignore[import-not-found]

    model_class, config_class = {
        "dflash": (dflash.DFlashDraftModel, dflash.DFlashSpeculatorConfig),
        "dflash2": (dflash2.DFlash2DraftModel, dflash2.DFlash2SpeculatorConfig),
        "dspark": (dspark.DSparkDraftModel, dspark.DSparkSpeculatorConfig),
    }[method]
    layer = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCAB, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0}, attn_implementation="eager",
    )  # fmt: skip
    drafts = BLOCK_METHODS[method].count_drafts(BLOCK)
    verifier = VerifierConfig(name_or_path="a/target", architectures=["Qwen3ForCausalLM"])
    config = config_class(
        transformer_layer_config=layer, draft_vocab_size=VOCAB, block_size=BLOCK, mask_token_id=22,
        aux_hidden_state_layer_ids=list(FEATURES), sample_from_anchor=method == "dspark",
        speculators_config=SpeculatorsConfig(
            algorithm=method, default_proposal_method="greedy", verifier=verifier,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
        ),
        **OWN_SIZES[method],
    )  # fmt: skip
    model = model_class(config).eval().requires_grad_(False)
    for weight in model.parameters():
        noise = torch.randn(weight.shape) * 0.4
        weight.copy_(1 + noise / 4 if weight.ndim == 1 and len(weight) > 1 else noise)
    return model


@torch.no_grad()
def compare(method: str) -> bool:
    """Print the differences of a method; return whether all are small."""
    torch.manual_seed(11)
    theirs = build_theirs(method)
    row, features, last = (
        torch.randint(19, (1, ROW)),
        torch.randn(1, ROW, len(FEATURES) * HIDDEN),
        torch.randn(1, ROW, HIDDEN),
    )
    documents = torch.zeros(1, ROW, dtype=torch.int64)
    anchors = torch.arange(ROW - BLOCK)  # all that speculators may draw
    found = theirs._backbone_forward(
        features, row, torch.ones(1, ROW), last, documents, torch.arange(ROW)[None], max_anchors=len(anchors)
    )
    hidden, unary, block_indices = found[0].view(-1, BLOCK, HIDDEN), found[1].view(-1, BLOCK, VOCAB), found[4]
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        tables = theirs.embed_tokens.weight, theirs.lm_head.weight
        published = read_published_block_draft(Path(folder), TARGET, Tokens(), lambda: tables)
    ours = BlockDraft(parse_block_config(published.config))
    ours.load_state_dict(published.tensors)
    context = ours.project_context(features, torch.arange(ROW)[None])
    pack = row[0], torch.arange(ROW), documents[0], anchors
    states = ours.forward_pack(tables[0], *pack, context)
    slots = ours.select_drafting_slots(states)
    first = ours.config.first_slot
    tokens = row[0, block_indices].view(-1, BLOCK)
    previous = tokens[
        :, : BLOCK - first
    ]  # before each draft: in the slot before it, or its own where it drafts what comes next
    logits = ours.compute_logits(slots, previous, tables[1])
    wanted = unary[:, first:]
    if method == "dspark":
        wanted = wanted + theirs.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
    if method == "dflash2":
        candidates = wanted.topk(ours.config.selector_top_k).indices
        scores = theirs.candidate_selector.score_candidates(wanted, hidden[:, first:], previous, candidates)
        wanted, logits = scores, logits.gather(-1, candidates)
    notes = f", notes: {published.notes}" if published.notes else ""
    pairs = {"hidden": (states, hidden), "logits": (logits, wanted)}
    alike = [_tell(f"{method}, {name}", *pair, notes) for name, pair in pairs.items()]
    return all(alike)


def _tell(name: str, ours: Tensor, theirs: Tensor, notes: str) -> bool:
    off, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    print(f"{name} {tuple(theirs.shape)}: off by {off:.1e} of {size:.2g}{notes}", flush=True)
    return off <= TOLERANCE * size


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("folder", type=Path)
    sys.path.insert(0, str(takes.parse_args().folder))
    connectors: Any = ModuleType("hs_connectors")  # what training imports, and models do without
    connectors.FileTransfer = connectors.HiddenStatesTransfer = connectors.HiddenStatesBackend = type("Absent", (), {})
    sys.modules["hs_connectors"] = connectors
    alike = [compare(method) for method in OWN_SIZES]
    sys.exit(not all(alike))


if __name__ == "__main__":
    main()
