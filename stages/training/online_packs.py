"""Hidden states of a pack from a target that runs in the trainer (`extract_hiddens.online`)."""

from dataclasses import dataclass, replace

from stages.hidden_states.format import HiddenStatesRow
from stages.target.feature_target import FeatureTarget
from stages.training.ttt import TrainingPack, number_image_tokens


@dataclass(frozen=True)
class OnlinePacks:
    """The target, and the image paths of rows by their ids."""

    target: FeatureTarget
    image_paths: dict[str, list[str]]

    def add_images(self, pack: TrainingPack, rows: list[HiddenStatesRow]) -> TrainingPack:
        """Return the pack with the image inputs of its rows, if any. May be called by several threads."""
        inputs = self.target.build_inputs([row.id for row in rows], [row.ids for row in rows], self.image_paths)
        if inputs is None:
            return pack
        return replace(
            pack,
            multimodal_inputs=inputs,
            rope_positions=inputs.positions.T.contiguous(),
            image_token_index=number_image_tokens(inputs.image_token_mask),
        )

    def fill_hidden_states(self, pack: TrainingPack) -> TrainingPack:
        """Return the pack with hidden states of the target."""
        return replace(
            pack, **self.target.compute_hidden_states(pack.ids, pack.lengths, pack.multimodal_inputs)._asdict()
        )
