"""A new block draft, DFlash, DFlash2 or DSpark: its config from the sizes of e000's layer, and its random weights."""

from typing import Any

import torch
from torch import Tensor

from stages.draft.eagle3 import DraftConfig
from stages.families.block import objective
from stages.families.block.config import BlockDraftConfig, Sight, build_block_config, parse_block_config
from stages.families.block.mask_token import choose_mask_token, load_tokenizer
from stages.families.block.model import BlockDraft
from stages.families.draft_files import LoadedDraft
from stages.families.draft_training import DraftTraining
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.hidden_states import reader
from stages.hidden_states.reader import TRAIN_FOLDER
from stages.params import schema
from stages.params.draft_sections import TrainDraft
from stages.params.families import BlockSegment, Segment
from stages.target.feature_layers import choose_block_feature_layers
from stages.target.manifest import TargetManifest
from stages.training.packed_rows import PackObjective
from stages.training.trainer import ComputeLoss

INITIAL_STD = 0.02  # transformers' initializer_range, of SpecForge and DeepSpec too


def choose_sizes(
    segment: BlockSegment, root: DraftConfig, target: TargetManifest, mask_token_id: int
) -> BlockDraftConfig:
    """Return the segment's draft: the sizes of a layer are those of `root`, e000's."""
    stored = target.feature_layers, target.num_layers
    own_sizes: dict[str, Any] = {key: getattr(segment, key) for key in segment.family.own_sizes}
    return BlockDraftConfig(
        **{key: getattr(root, key) for key in eagle3_checkpoint.LAYER_SIZES},
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_hidden_layers=segment.layers,
        rope={key: value for key, value in root.rope.items() if not key.startswith("mrope")},
        method=segment.method,
        block_size=segment.block_size,
        mask_token_id=mask_token_id,
        feature_layers=tuple(segment.feature_layers or choose_block_feature_layers(*stored)),
        sights=(Sight(segment.sliding_window, segment.sliding_window is not None),) * segment.layers,
        confidence_head=bool(segment.family.loss.confidence),
        **own_sizes,
    )


def initialise_block_draft(config: BlockDraftConfig, seed: int) -> BlockDraft:
    """Return a draft with normal weights of INITIAL_STD, norms of one, a bias of zero, and convolutions that change nothing."""
    draft, generator = BlockDraft(config), torch.Generator().manual_seed(seed)
    for name, parameter in draft.named_parameters():
        if name.endswith("kernel_projection.weight"):
            torch.nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    return draft


class Training(DraftTraining):
    """A block draft's start, and the objective of its method."""

    tables = ("markov_w", "_codebook")

    def initialise(self, name: str, params: schema.Params, target: TargetManifest, head: Tensor) -> LoadedDraft:
        segment = params.train_draft.checkpoints[name]
        assert isinstance(segment, BlockSegment), name
        root, _ = eagle3_checkpoint.read_root_draft()
        longest, held = int(reader.read_index(TRAIN_FOLDER)["length"].max() or 0), reader.list_tokens(TRAIN_FOLDER)
        try:
            mask_token = choose_mask_token(load_tokenizer(params, target), target, held)
            sizes = choose_sizes(segment, DraftConfig.from_json(root), target, mask_token)
            config = build_block_config(sizes, target.num_layers, params.train_draft.compute_dtype)
            if sizes.max_position_embeddings < (end := longest + sizes.block_size):  # engines prepare no later ones
                raise ValueError(
                    f"blocks of rows of {longest} tokens reach position {end}, expected at most e000's max_position_embeddings "
                    f"{sizes.max_position_embeddings}: raise init_draft.max_position_embeddings, or lower block_size or "
                    "extract_hiddens.max_length"
                )
        except ValueError as error:
            raise ValueError(f"params.yaml: train_draft.checkpoints.{name}: {error}") from None
        draft = initialise_block_draft(parse_block_config(config), params.train_draft.seed)
        return LoadedDraft(self.facts, draft, config, list(draft.config.feature_layers))

    def build_objective(
        self, draft: LoadedDraft, segment: Segment, settings: TrainDraft, logits_scale: float
    ) -> tuple[PackObjective, ComputeLoss]:
        assert isinstance(segment, BlockSegment) and isinstance(draft.module, BlockDraft)
        sizes = segment, draft.module.config.num_drafts, settings.seed, logits_scale
        return objective.BlockTrainingObjective.of_segment(*sizes), objective.compute_loss
