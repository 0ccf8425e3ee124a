"""Hidden states of a pack from a target that runs in the trainer (`extract_hiddens.online`)."""

from dataclasses import dataclass, replace

from stages.hidden_states.format import HiddenStatesRow
from stages.target.online import OnlineTarget
from stages.training.pack_loader import AddImages
from stages.training.ttt import TrainingPack, number_image_tokens


@dataclass(frozen=True)
class OnlinePacks:
    """The target, and the image paths of rows by their ids."""

    target: OnlineTarget
    image_paths: dict[str, list[str]]

    def get_add_images(self) -> AddImages | None:
        """Return `add_images` for a multimodal target, None for one of text."""
        return self.add_images if self.target.image_processor else None

    def add_images(self, pack: TrainingPack, rows: list[HiddenStatesRow]) -> TrainingPack:
        """Return the pack with the image inputs of its rows. May be called by several threads."""
        paths = [self.image_paths.get(row.id) for row in rows]
        inputs = self.target.build_inputs([row.id for row in rows], [row.ids for row in rows], paths)
        assert inputs is not None
        return replace(
            pack,
            multimodal_inputs=inputs,
            rope_positions=inputs.positions.T.contiguous(),
            image_token_index=number_image_tokens(inputs.image_token_mask),
        )

    def fill_hidden_states(self, pack: TrainingPack) -> TrainingPack:
        """Return the pack with hidden states of the target."""
        states = self.target(pack.ids, pack.lengths, pack.multimodal_inputs)
        return replace(pack, features=states.features, last=states.last, image_embeddings=states.image_embeddings)
