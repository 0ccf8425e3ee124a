"""The families of drafts: what each is called, how params.yaml describes it, which shapes it drafts, and which engines run it.

FAMILIES has one entry for each. What reads, trains, replays and decodes its drafts is its object in stages/families/registry.py,
so a new family is an entry here, with a class of its keys if it is trained, a module of stages/families, and a line there. The
facts of an entry are inputs of the stages that run such drafts (stage_inputs.py); this file is not.
"""

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from stages.params.engines import SERVED, join_words
from stages.params.section import BUILTIN, Count, FeatureLayers, Name, Positive, Section
from stages.params.tree_shape import TreeShape

TORCH_ONLY = "torch engine only"
SHAPES = {  # by the first letter of a shape's name (tree_shape.py)
    "t": "dynamic trees, as t8_2_16",
    "s": "static trees, as s6_16",
    "n": "chains looked up by n-grams, as n3_1_8",
    "l": "lookahead windows, as l5_4_5",
    "x": "chains by suffixes, as x24_8",
}
# Epochs where no number is given: the square root of this over the rows (docs/training.md).
SQUARED_EPOCH_ROWS, MOST_EPOCHS = 216_000, 20


class Segment(Section):
    """A segment of training: `epochs` more from the checkpoint `from`, then a saved one; of EAGLE-3 without a key `method`."""

    from_: Annotated[Name, Field(alias="from")]
    epochs: Count | None = None  # null: by the rows
    of_training: ClassVar[set[str]] = {"method", "from_", "epochs", "horizon_epochs"}  # these are no sizes of a draft
    method: Literal["eagle3", "eagle"] = "eagle3"
    horizon_epochs: Count | None = None  # None: train_draft's, or its own end; filled in by TrainDraft

    @property
    def family(self) -> "DraftFamily":
        return FAMILIES[self.method]

    def count_epochs(self, rows: int) -> int:
        """Return the epochs of training on so many rows: few rows are read up to MOST_EPOCHS times, many once."""
        return self.epochs or min(MOST_EPOCHS, max(1, round(math.sqrt(SQUARED_EPOCH_ROWS / rows))))

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the keys beside the method that a checkpoint has in common with the one it starts from."""
        return self.model_dump(exclude=self.of_training)

    @property
    def draft(self) -> "DraftKind":
        """Return what is known of the draft before it is trained."""
        return DraftKind(self.family)


class MedusaSegment(Segment):
    method: Literal["medusa"]  # type: ignore[assignment]
    heads: Count

    @property
    def draft(self) -> "DraftKind":
        return DraftKind(self.family, self.heads)


class PEagleSegment(Segment):
    """A P-EAGLE draft (families/peagle), which starts from random weights with the sizes of e000's layer."""

    of_training = Segment.of_training | {"down_sample_ratio", "down_sample_ratio_min"}
    method: Literal["peagle"]  # type: ignore[assignment]
    layers: Count  # published drafts have 2 to 4
    # of the positions, that each further draft is trained at, and the least of all; 1: all (families/peagle/training.py)
    down_sample_ratio: Annotated[float, Field(gt=0, le=1)] = 0.7
    down_sample_ratio_min: Annotated[float, Field(gt=0, le=1)] = 0.2


class BlockSegment(Segment):
    """A block draft (families/block/model.py), which starts from random weights with the sizes of e000's layer."""

    of_training = Segment.of_training | {"anchors", "decay"}
    method: Literal["dflash", "dflash2", "dspark"]  # type: ignore[assignment]
    layers: Count
    block_size: Annotated[int, Field(ge=2)]  # rows of a block, B: dflash and dflash2 draft B - 1 tokens, dspark B
    anchors: Count  # most blocks of a pack that one step trains
    feature_layers: FeatureLayers | None = None  # None: the published five if stored, else all stored ones
    decay: Positive | None = None  # of draft d's weight, exp(-d / decay); None: that of the method's authors
    sliding_window: Count | None = None  # positions up to its own that a slot sees; None: all, later ones too

    @property
    def family(self) -> "BlockFamily":
        return BLOCKS[self.method]

    @property
    def num_drafts(self) -> int:
        """Drafts of a block: the depth of its deepest trees."""
        return self.block_size - self.family.first_slot

    @property
    def draft(self) -> "DraftKind":
        return DraftKind(self.family, self.num_drafts, getattr(self, "selector_top_k", None))


class DsparkSegment(BlockSegment):
    method: Literal["dspark"]
    markov_rank: Count


class Dflash2Segment(BlockSegment):
    method: Literal["dflash2"]
    conv_kernel_size: Count  # taps along the slots of a block; published drafts have 2, 16, 256 and 16 of these four
    conv_group_size: Count  # channels that share a dynamic kernel
    selector_rank: Count
    selector_top_k: Count  # candidates of a slot, and the most that a tree's topk may be


@dataclass(frozen=True)
class DraftFamily:
    """The facts of a family."""

    # one forward drafts a block; engines then verify the chain of the whole block alone
    is_block: ClassVar[bool] = False
    name: str  # `method` of a segment of train_draft.checkpoints, and of config.json where that has no architecture
    title: str  # as its authors write it
    module: str  # of stages/families, whose code is an input; {} stands for the part of a family that is a folder
    segment: type[Segment] | None = None  # the keys of a segment; None: nothing is trained
    shapes: str = "t"  # first letters of the shapes that it drafts
    depth_of: str = "its guesses"  # what bounds the depth of a shape, in words
    architecture: str | None = None  # in config.json, by which SGLang and vLLM load the draft
    config_key: str | None = None  # of config.json, by which its drafts differ from e000's of the same architecture
    published_as: tuple[str, ...] = ()  # in files of other projects: architectures, speculators_model_type, keys
    drafts_in_parallel: bool = False  # a pass of EAGLE-3's layers drafts a chain: engines need their own way to run it
    # SGLang's --speculative-algorithm; in lower case vLLM's; None: that of benchmark_served.servers
    algorithm: str | None = None
    is_replayed: bool = True  # by replay_trees
    has_root: bool = False  # e000 is one of its drafts, and the others start from it
    samples_drafts: bool = False  # its chains can be drawn, and verified by the ratio of both probabilities
    measures_steps: bool = False  # its static trees are as deep as train_draft.ttt_steps

    @property
    def is_timed(self) -> bool:
        """Return whether time_cycles and servers run its drafts; one without weights is replayed by looking its guesses up."""
        return self.is_replayed and self.segment is not None

    @property
    def served_by(self) -> str | None:
        """Return the one engine that aerie starts with its own drafts of this family; None if there is none."""
        return next((name for name, engine in SERVED.items() if engine.own_families.get(self.name)), None)

    def find_depth(self, config: Mapping[str, Any]) -> int | None:
        """Return the drafts of a block by its config.json; None of other families."""
        return None

    def list_facts(self) -> dict[str, Any]:
        """Return what may change a result, by name."""
        found = {key: value for key, value in asdict(self).items() if key not in ("segment", "title", "depth_of")}
        return {key: list(x) if isinstance(x, tuple) else x for key, x in found.items()}  # as JSON has them


@dataclass(frozen=True)
class BlockLossWeights:
    """The weights of the parts of a block draft's loss (families/block/loss.py)."""

    ce: float = 1.0
    l1: float = 0.0
    confidence: float = 0.0
    decay: float | None = 7.0  # None: every draft of a block weighs the same
    selector: float = 0.0


@dataclass(frozen=True)
class BlockFamily(DraftFamily):
    """The facts of a family of block drafts: layers of families/block/model.py, with labels, heads and a loss of its own."""

    is_block = True
    module: str = "block.{}"
    segment: type[Segment] | None = BlockSegment
    depth_of: str = "the {} drafts of a block"
    samples_drafts: bool = True
    # the slot that predicts the first draft: 1 where slots predict themselves, 0 from the anchor on
    first_slot: int = 1
    own_sizes: tuple[str, ...] = ()  # keys of config.json, beside those of DFlash, which a segment may have too
    loss: BlockLossWeights = BlockLossWeights()

    def find_depth(self, config: Mapping[str, Any]) -> int | None:
        return int(config["block_size"]) - self.first_slot


EAGLE3 = DraftFamily("eagle3", "EAGLE-3", "eagle3.{}", Segment, has_root=True)
PEAGLE = DraftFamily(
    "peagle", "P-EAGLE", "peagle.{}", PEagleSegment, algorithm="EAGLE3", config_key="ptd_token_id", drafts_in_parallel=True,
    published_as=(
        "PEagleSpeculator", "PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "peagle", "ptd_token_id",
        "pard_token",
    ),
)  # fmt: skip
DFLASH = BlockFamily(
    "dflash", "DFlash", architecture="DFlashDraftModel", algorithm="DFLASH", published_as=("DFlashSpeculator", "dflash")
)  # decay as in SpecForge's recipes at block 16
DFLASH2 = BlockFamily(
    "dflash2", "DFlash2", segment=Dflash2Segment, architecture="DFlash2DraftModel", algorithm="DFLASH",
    own_sizes=("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    published_as=("DFlash2Speculator", "dflash2"), loss=BlockLossWeights(selector=1.0),
)  # fmt: skip
DSPARK = BlockFamily(
    "dspark", "DSpark", segment=DsparkSegment, architecture="Qwen3DSparkModel", algorithm="DSPARK", first_slot=0,
    own_sizes=("markov_rank",), published_as=("DSparkDraftModel", "DSparkSpeculator", "dspark"),
    loss=BlockLossWeights(ce=0.1, l1=0.9, confidence=1.0, decay=4.0),  # DeepSpec's at block 7
)  # fmt: skip
EAGLE = DraftFamily(
    "eagle", "EAGLE", "eagle", Segment, shapes="ts", is_replayed=False, measures_steps=True,
    depth_of="the {} steps whose guesses are measured (train_draft.ttt_steps)",
)  # fmt: skip
MEDUSA = DraftFamily("medusa", "Medusa", "medusa", MedusaSegment, "s", depth_of="its {} heads", is_replayed=False)
NGRAM = DraftFamily("ngram", "n-gram lookup", "ngram", shapes="n")
LOOKAHEAD = DraftFamily("lookahead", "lookahead", "lookahead", shapes="l", is_replayed=False)
SUFFIX = DraftFamily("suffix", "suffix decoding", "suffix", shapes="x")
FAMILIES = {f.name: f for f in (EAGLE3, PEAGLE, DFLASH, DFLASH2, DSPARK, EAGLE, MEDUSA, NGRAM, LOOKAHEAD, SUFFIX)}
ROOT_FAMILY = next(family for family in FAMILIES.values() if family.has_root)  # of e000
BUILTINS = {f"{BUILTIN}{name}": family for name, family in FAMILIES.items() if family.segment is None}
TRAINABLE = {name: family.segment for name, family in FAMILIES.items() if family.segment}
BLOCKS = {name: family for name, family in FAMILIES.items() if isinstance(family, BlockFamily)}
BLOCK_TITLES = " or ".join(family.title for family in BLOCKS.values())
ALGORITHMS = frozenset(family.algorithm for family in BLOCKS.values())


SEGMENT_TAG = "a segment of {}"  # in pydantic's locations, where it is no key of the file


def _discriminate_segment(value: Any) -> str:
    found = value.get("method", "eagle3") if isinstance(value, dict) else getattr(value, "method", "eagle3")
    return SEGMENT_TAG.format(found)


if TYPE_CHECKING:
    AnySegment = Segment
else:
    _members = [Annotated[segment, Tag(SEGMENT_TAG.format(name))] for name, segment in TRAINABLE.items()]
    AnySegment = Annotated[functools.reduce(operator.or_, _members), Discriminator(_discriminate_segment)]


def find_family(config: Mapping[str, Any]) -> DraftFamily:
    """Return the family of a draft by its config.json: e000's where neither an architecture nor a method names another."""
    named = config.get("architectures") or ()
    by_name = {family.architecture: family for family in FAMILIES.values() if family.architecture}
    found = next((by_name[name] for name in named if name in by_name), None)
    by_key = (family for family in FAMILIES.values() if family.config_key and family.config_key in config)
    return found or next(by_key, None) or FAMILIES.get(str(config.get("method")), ROOT_FAMILY)


@dataclass(frozen=True)
class DraftKind:
    """A draft's family, and what of its sizes decides which shapes it drafts."""

    family: DraftFamily = ROOT_FAMILY
    depth: int | None = None  # of its deepest shape: drafts of a block, Medusa's heads, EAGLE's static trees; None: any
    most_topk: int | None = None  # None: any

    @property
    def title(self) -> str:
        return self.family.title

    @property
    def whole_block(self) -> TreeShape | None:
        """Return the chain of the whole block, the only one that engines run; None of other families."""
        return TreeShape(self.depth, 1, self.depth + 1) if self.family.is_block and self.depth else None

    def explain_ungrown(self, shape: TreeShape) -> str | None:
        """Return why the draft can't draft a shape; None if it can."""
        if shape.letter not in self.family.shapes:
            drafted = " and ".join(SHAPES[letter] for letter in self.family.shapes)
            return f"{self.family.title} drafts {drafted}"
        is_free = self.family.measures_steps and shape.letter == "t"  # dynamic trees need no measured accuracy
        if self.depth is not None and shape.num_steps > self.depth and not is_free:
            return f"it is deeper than {self.family.depth_of.format(self.depth)}"
        if self.most_topk is not None and shape.topk > self.most_topk:
            return f"its topk is above the {self.most_topk} candidates of the draft's selector (selector_top_k)"
        return None

    def explain_unserved(self, engine: str, shape: TreeShape) -> str | None:
        """Return why an engine can't run a shape with this draft; None if it can."""
        facts = SERVED[engine]
        if explain := facts.own_families.get(self.family.name):
            return self.explain_ungrown(shape) or explain(shape)
        if not self.family.is_timed:
            return f"aerie starts no {engine} with {self.family.title}: {self._explain_own_engines()}"
        if shape.letter != "t":
            return f"{engine} drafts {SHAPES['t']}"
        if self.family.drafts_in_parallel and not facts.drafts_in_parallel:
            able = [f"{other.title} {first}" for other in SERVED.values() if (first := other.drafts_in_parallel)]
            return f"{facts.title} runs no {self.title}, whose drafts come in one pass, expected {join_words(able)} or later"
        if not (whole := self.whole_block):
            return facts.explain_unserved(shape)
        if shape.topk > 1:
            return f"engines verify chains only of {self.title} drafts, this tree has topk {shape.topk}"
        if shape.num_steps != whole.num_steps:
            return (
                f"a {self.title} block has {whole.num_steps} drafts and this chain {shape.num_steps}; take {whole.name}"
            )
        return None

    def is_served(self, shape: TreeShape) -> bool:
        """Return whether a serving engine can run the shape."""
        return self.list_engines(shape) != TORCH_ONLY

    def list_engines(self, shape: TreeShape) -> str:
        """Return the engines that run the shape, in words."""
        running = [facts.title for engine, facts in SERVED.items() if self.explain_unserved(engine, shape) is None]
        return ", ".join(running) or TORCH_ONLY

    def explain_torch_only(self, shapes: Iterable[TreeShape]) -> str | None:
        """Return what serving engines run of this draft, where they run not all of the shapes; None where they do."""
        if all(map(self.is_served, shapes)):
            return None
        if whole := self.whole_block:
            return f"{TORCH_ONLY}: serving engines run the chain of the whole block alone, {whole.label}"
        if not self.family.is_timed:
            return f"{TORCH_ONLY}: {self._explain_own_engines()}"
        able = [x for x in SERVED.values() if x.drafts_in_parallel or not self.family.drafts_in_parallel]
        return f"{TORCH_ONLY}: {', '.join(f'{facts.title} runs {facts.runs}' for facts in able)}"

    def _explain_own_engines(self) -> str:
        """Return which engines run a family that is not timed, in words."""
        own = [facts.title for facts in SERVED.values() if self.family.name in facts.own_families]
        if not own:
            return f"no serving engine runs {self.family.title} so"
        served = f"benchmark_served measures {self.family.served_by}'s (docs/serving.md)"
        return f"{join_words(own)} have {self.family.title} of their own; {served}"
