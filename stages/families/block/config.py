"""A block draft's sizes and heads, and its config.json and tensors as SGLang 0.5.17 to 0.5.23 and vLLM 0.33 load them.

    dflash   architectures ["DFlashDraftModel"]     ids and mask token under dflash_config
    dflash2  architectures ["DFlash2DraftModel"]    the sizes of convolutions and selector there too; SGLang from 0.5.23 on
    dspark   architectures ["Qwen3DSparkModel"]     ids and mask token also on top, from which alone SGLang builds DSpark's heads

SGLang skips unknown tensor names, and neither engine misses absent ones: random weights remain, and few draft tokens are
accepted. So names and shapes are compared with a list on every write and read. Keys that would make an engine run another model
(another first slot, another Markov head) are refused by name.

Layers with a sliding window are `layer_types` and `sliding_window`, which counts the slot itself. `is_causal` is for all layers;
where it is absent, SGLang and vLLM take sliding layers as causal and full ones as not, and llama.cpp all as not. So it is written
wherever the layers agree.

Feature layers: ours count the residual stream entering block i of the target, as vLLM's `eagle_aux_hidden_state_layer_ids` do;
`target_layer_ids` of block drafts counts the output of layer i (SGLang, vLLM, SpecForge, DeepSpec, z-lab): ours less one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stages.draft.config_types import check_types
from stages.params.families import BLOCKS, BlockFamily, find_family
from stages.target import feature_layers

FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
SIZE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "block_size",
)  # fmt: skip
OWN_SIZES = tuple(key for family in BLOCKS.values() for key in family.own_sizes)  # each of some families alone


class Sight(NamedTuple):
    """The part of its context and its block that a slot sees in a layer."""

    window: int | None = None  # positions up to its own, itself counted; None: all of its document
    is_causal: bool = False  # no later slots of its block


EVERYTHING = Sight()


@dataclass(frozen=True)
class BlockDraftConfig:
    """Sizes and heads of a block draft."""

    hidden_size: int  # H, the target's
    intermediate_size: int
    num_hidden_layers: int  # L
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # V, the target's
    max_position_embeddings: int
    rms_norm_eps: float
    rope: dict[str, Any]  # rope_parameters: rope_theta, rope_type, ...
    method: str  # one of BLOCKS
    block_size: int  # B
    mask_token_id: int
    feature_layers: tuple[int, ...]  # the residual stream entering block i of the target, strictly increasing
    confidence_head: bool = False
    confidence_head_with_markov: bool = True  # the confidence head reads the Markov embedding too
    # OWN_SIZES, 0 where the family has none of the kind
    markov_rank: int = 0  # r
    conv_kernel_size: int = 0  # taps of the convolutions around attention and MLP
    conv_group_size: int = 0  # channels that share a dynamic kernel
    selector_rank: int = 0  # r of the candidate selector
    selector_top_k: int = 0  # candidates of a slot
    sights: tuple[Sight, ...] = ()  # by layer; empty where all of them see everything

    def __post_init__(self) -> None:
        if set(self.sights) == {EVERYTHING}:
            object.__setattr__(self, "sights", ())

    @property
    def layer_sights(self) -> tuple[Sight, ...]:
        return self.sights or (EVERYTHING,) * self.num_hidden_layers

    @property
    def family(self) -> BlockFamily:
        return BLOCKS[self.method]

    @property
    def num_drafts(self) -> int:
        """Return the number of draft tokens of a block, D."""
        return self.block_size - self.family.first_slot

    def check(self) -> None:
        """Raise ValueError for a config that can't be built or that an engine would misread."""
        if self.method not in BLOCKS:
            raise ValueError(f"method is {self.method!r}, expected one of {', '.join(BLOCKS)}")
        if self.num_drafts < 1:
            least = 1 + self.family.first_slot
            raise ValueError(f"block_size is {self.block_size}, expected at least {least} for {self.method}: raise it")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, expected a row of the target's embedding, 0 to "
                f"{self.vocab_size - 1}: take an unused one"
            )
        if sections := self.rope.get("mrope_section"):
            raise ValueError(
                f"rope: mrope_section is {sections}, expected RoPE on one axis, which is all that block drafts have in engines"
            )
        layers = list(self.feature_layers)
        if not layers or layers[0] < 1 or layers != sorted(set(layers)):
            raise ValueError(
                f"feature_layers are {layers}, expected layers from 1 on, strictly increasing: engines capture features in "
                "the target's order, and name them by the layer before, of which layer 0 has none"
            )
        self._check_own_sizes()
        self._check_sights()

    def _check_own_sizes(self) -> None:
        for key in OWN_SIZES:
            size, is_own = getattr(self, key), key in self.family.own_sizes
            if is_own and size < 1:
                raise ValueError(f"{key} is {size}, expected 1 or more for {self.method}: engines refuse others")
            if size and not is_own:
                raise ValueError(f"{key} is {size}, expected none for {self.method}: leave it out, or name its method")
        if self.confidence_head and not self.family.loss.confidence:
            raise ValueError(f"the draft has a confidence head, which {self.method} does not train: leave it out")
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}, expected a divisor of the hidden size {self.hidden_size}"
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"selector_top_k is {self.selector_top_k}, expected at most the {self.vocab_size} tokens of the vocabulary"
            )

    def _check_sights(self) -> None:
        windows = {sight.window for sight in self.sights if sight.window is not None}
        if len(self.layer_sights) != self.num_hidden_layers or len(windows) > 1 or min(windows, default=1) < 1:
            raise ValueError(
                f"layers see {list(self.sights)}, expected {self.num_hidden_layers} of them, and one sliding window of 1 or more"
            )


def build_block_config(c: BlockDraftConfig, num_target_layers: int, dtype: str = "float32") -> dict[str, Any]:
    """Return config.json of a block draft. Raises ValueError for one that engines can't load."""
    c.check()
    rope = c.rope
    is_default_rope = rope.get("rope_type", "default") == "default"
    shared = {"mask_token_id": c.mask_token_id, "target_layer_ids": feature_layers.to_after_layer_ids(c.feature_layers)}
    own = {key: getattr(c, key) for key in c.family.own_sizes}
    config = {
        "architectures": [c.family.architecture],
        "model_type": "qwen3",
        **{key: getattr(c, key) for key in SIZE_KEYS},
        "hidden_act": "silu",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if is_default_rope else {key: value for key, value in rope.items() if key != "rope_theta"},
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        **_write_sights(c.layer_sights),
        "num_target_layers": num_target_layers,
        "dtype": dtype,
        "dflash_config": shared if c.markov_rank else shared | own,
    }
    if c.markov_rank:
        config |= shared | own
        config |= {
            "markov_head_type": "vanilla",
            "enable_confidence_head": c.confidence_head,
            "confidence_head_with_markov": c.confidence_head_with_markov,
            "sample_from_anchor": c.family.first_slot == 0,
        }
    parse_block_config(config)
    return config


def _write_sights(sights: Sequence[Sight]) -> dict[str, Any]:
    """Return the keys of what layers see. Raises ValueError where engines have no keys for it."""
    window = next((sight.window for sight in sights if sight.window is not None), None)
    keys: dict[str, Any] = {
        "layer_types": [FULL if sight.window is None else SLIDING for sight in sights],
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }
    if len(causal := {sight.is_causal for sight in sights}) == 1 and (window is not None or True in causal):
        keys["is_causal"] = causal.pop()
    if read_sights(keys, len(sights)) != tuple(sights):
        raise ValueError(
            f"layers see {list(sights)}, expected all of them causal, none, or those with a sliding window: engines read no other"
        )
    return keys


def read_sights(config: Mapping[str, Any], num_layers: int) -> tuple[Sight, ...]:
    """Return what the slots of a block see in each layer, by config.json's keys. Raises ValueError for those of other layers."""
    kinds = config.get("layer_types") or [FULL] * num_layers
    window, is_causal, slides = config.get("sliding_window"), config.get("is_causal"), SLIDING in kinds
    is_known = len(kinds) == num_layers and {*kinds} <= {SLIDING, FULL} and not (slides and window is None)
    if not is_known or config.get("use_sliding_window", slides) != slides:  # transformers drops the window of false
        raise ValueError(
            f"layer_types is {kinds}, sliding_window {window} and use_sliding_window {config.get('use_sliding_window')}; "
            f"expected {num_layers} of {FULL} and {SLIDING}, and a window and true where one slides"
        )
    return tuple(
        Sight(window if kind == SLIDING else None, kind == SLIDING if is_causal is None else is_causal)
        for kind in kinds
    )


def parse_block_config(config: dict[str, Any]) -> BlockDraftConfig:
    """Return the draft that config.json describes. Raises ValueError for a missing key, or one of another model."""
    check_types(config)
    try:
        return _parse_block_config({key: value for key, value in config.items() if value is not None})
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}, which a block draft's has") from None


def _parse_block_config(config: dict[str, Any]) -> BlockDraftConfig:
    family = find_family(config)
    if not isinstance(family, BlockFamily) or config["architectures"] != [family.architecture]:
        known = ", ".join(str(each.architecture) for each in BLOCKS.values())
        raise ValueError(f"architectures is {config['architectures']}, expected one of {known}")
    nested, num_layers = config["dflash_config"], config["num_hidden_layers"]
    expected = {  # what this code runs, and absent keys mean
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "markov_head_type": "vanilla",
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "sample_from_anchor": family.first_slot == 0,
        "mask_token_id": nested["mask_token_id"],
        "target_layer_ids": nested["target_layer_ids"],
    }
    for prefix, keys in (("", config), ("dflash_config.", nested)):
        for key, value in expected.items():
            if keys.get(key, value) != value:
                raise ValueError(f"{prefix}{key} is {keys[key]!r}, expected {value!r} for {config['architectures'][0]}")
    if nested.get("causal") is not None or nested.get("use_swa"):
        raise ValueError(
            "dflash_config has causal or use_swa, expected is_causal and layer_types, which all engines read"
        )
    sights, sizes = read_sights(config, num_layers), config | nested
    parsed = BlockDraftConfig(
        **{key: config[key] for key in SIZE_KEYS},
        rope=config["rope_parameters"],
        method=family.name,
        mask_token_id=nested["mask_token_id"],
        feature_layers=tuple(feature_layers.to_entering_ids(nested["target_layer_ids"])),
        confidence_head=config.get("enable_confidence_head", False),
        confidence_head_with_markov=config.get("confidence_head_with_markov", True),
        sights=sights,
        **{key: sizes[key] if key in family.own_sizes else sizes.get(key, 0) for key in OWN_SIZES},
    )
    parsed.check()
    if (last := nested["target_layer_ids"][-1]) > config["num_target_layers"] - 2:
        raise ValueError(
            f"the draft reads feature layer {last + 1}, expected at most {config['num_target_layers'] - 1}, which enters the "
            f"target's last layer (in config.json target_layer_ids end with {last})"
        )
    return parsed
