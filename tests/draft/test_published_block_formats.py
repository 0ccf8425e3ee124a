"""Published block drafts of each project: the imported one drafts what the slow draft does from the original weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor

from stages.draft.published_files import PublishedDraft
from stages.families.block import files as published
from stages.families.block.config import Sight, parse_block_config
from stages.families.block.model import BlockContext, BlockDraft
from stages.params.families import BLOCKS
from stages.target.manifest import TargetManifest
from tests.draft import published_blocks
from tests.draft.published_blocks import FORMS, Config, Form, Tensors, publish
from tests.draft.slow_block_draft import METHOD_OPTIONS, block_states, draft_logits, greedy_block, random_block_draft

T, LAYERS, V, H = 12, 8, 23, 16
FEATURES = (2, 3, 5, 7)  # entering blocks; two pairs of neighbours, so an id that is one off reads another layer's
TARGET = TargetManifest(
    model="a/target", revision=None, modality="text", config_digest="", tokenizer_digest="",
    feature_layers=[1, 2, 3, 5, 6, 7], hidden_size=H, intermediate_size=24, num_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=V, rms_norm_eps=1e-6, rope={"rope_type": "default", "rope_theta": 100.0},
    max_position_embeddings=64, tie_word_embeddings=False, eos_token_ids=[19],
)  # fmt: skip
ADDED = {19: "<|end|>", 20: "<|fim_pad|>"}
SLOWLY = pytest.mark.parametrize(
    ("method", "form"), [(method, form) for method, forms in FORMS.items() for form in forms],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)  # fmt: skip


class Tokens(SimpleNamespace):
    """A tokenizer of the ids 0 to 18, two added ones, and no more: rows 21 and 22 of the embedding are unused."""

    mask_token_id = pad_token_id = None
    added_tokens_decoder: ClassVar = {i: AddedToken(text, special=False) for i, text in ADDED.items()}  # as Qwen's

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(19)} | {text: i for i, text in ADDED.items()}

    def convert_ids_to_tokens(self, i: int) -> str:
        return ADDED.get(i, f"t{i}")


def original(method: str, seed: int = 3, **options: Any) -> tuple[BlockDraft, Tensor, Tensor]:
    """A random draft in float32, and the target's tables."""
    return random_block_draft(seed, 0.4, torch.float32, **METHOD_OPTIONS[method], feature_layers=FEATURES, **options)


def read(folder: Path, tables: tuple[Tensor, Tensor], **options: Any) -> PublishedDraft:
    target, tokenizer = options.pop("target", TARGET), options.pop("tokenizer", Tokens())
    return published.Files(BLOCKS["dflash"]).read_published_folder(folder, target, tokenizer, lambda: tables, **options)


def hidden_states() -> list[Tensor]:
    """The target's hidden states [n + 1] of [T, H], transformers' `output_hidden_states`."""
    generator = torch.Generator().manual_seed(8)
    return list(torch.randn(LAYERS + 1, T, H, generator=generator, dtype=torch.float64))


def read_features(config: Config) -> Tensor:
    """The features [T, K*H] that a published config names, by the rule of its project."""
    if "aux_hidden_state_layer_ids" in config:
        ids = config["aux_hidden_state_layer_ids"]
    else:
        nested = config.get("dflash_config", {})
        ids = [k + 1 for k in config.get("target_layer_ids") or nested["target_layer_ids"]]
    states = hidden_states()
    return torch.cat([states[i] for i in ids], -1)


def check_same_drafts(truth: BlockDraft, tables: tuple[Tensor, Tensor], config: Config, found: PublishedDraft) -> None:
    """Compare drafts, logits and confidences of the imported draft with those of the slow one."""
    embedding, head = (table.double() for table in tables)
    parsed = parse_block_config(found.config)
    imported = BlockDraft(parsed)
    imported.load_state_dict(found.tensors)
    imported.double()
    states = hidden_states()
    stream_features = torch.cat([states[i] for i in parsed.feature_layers], -1)[None]
    context = imported.project_context(stream_features, torch.arange(T)[None])
    features, ids = read_features(config), torch.randint(19, (T,), generator=torch.Generator().manual_seed(9)).tolist()
    truth.double()
    drafted = set()
    for a in range(1, T):
        slow = greedy_block(truth, embedding, head, ids, features, a)
        cut = BlockContext(*(tuple(x[:, :a] for x in side) for side in context))
        hidden = imported.forward_cached(embedding, torch.tensor(ids[a : a + 1]), torch.tensor([a]), cut)
        slots = imported.select_drafting_slots(hidden)
        assert imported.draft_greedily(slots, torch.tensor(ids[a : a + 1]), head)[0].tolist() == slow
        previous = [ids[a], *slow[:-1]]
        rows = block_states(truth, embedding, ids, features, a)
        logits = torch.stack(draft_logits(truth, rows, head, previous))
        torch.testing.assert_close(imported.compute_logits(slots, torch.tensor([previous]), head)[0], logits)
        drafted.add(tuple(slow))
    assert len(drafted) > T // 2, "the drafts hardly differ: the comparison says little"


@SLOWLY
def test_an_imported_draft_drafts_what_the_original_does(tmp_path: Path, method: str, form: Form) -> None:
    truth, *tables = original(method)
    config, tensors = form(truth, LAYERS)
    found = read(publish(tmp_path, config, tensors), (tables[0], tables[1]))
    assert found.notes == [] and found.config["dtype"] == "float32"
    assert parse_block_config(found.config) == replace(truth.config, rope=found.config["rope_parameters"])
    assert found.options == {"method": method, "block_size": truth.config.block_size}
    check_same_drafts(truth, (tables[0], tables[1]), config, found)


W = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 5}
SWA = {"use_swa": True, "swa_window_size": 5, "causal": False}
MIXED = W | {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("form", "keys", "sights"),
    [
        (published_blocks.z_lab, W, [Sight(5, True)] * 2),
        (published_blocks.z_lab, MIXED, [Sight(5, True), Sight()]),
        (published_blocks.z_lab, MIXED | {"is_causal": True}, [Sight(5, True), Sight(None, True)]),
        (published_blocks.z_lab, {"dflash_config": SWA}, [Sight(5, False)] * 2),
        (published_blocks.speculators, {"transformer_layer_config": MIXED}, [Sight(5, True), Sight()]),
        (
            published_blocks.speculators,
            {"transformer_layer_config": W, "sliding_window_non_causal": True},
            [Sight(5, False)] * 2,
        ),
    ],
)
def test_layers_see_what_engines_let_them(tmp_path: Path, form: Form, keys: Config, sights: list[Sight]) -> None:
    truth, *tables = original("dflash", sights=tuple(sights))
    config, tensors = form(truth, LAYERS)
    for key, value in keys.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    found = read(publish(tmp_path, config, tensors), (tables[0], tables[1]))
    assert parse_block_config(found.config).layer_sights == tuple(sights)
    assert [note for note in found.notes if "did not move" in note] == found.notes
    check_same_drafts(truth, (tables[0], tables[1]), config, found)


def change(config: Config, changes: Config) -> Config:
    """The config with other keys; those of a section are merged into it, and None takes a key away."""
    changed = dict(config)
    for key, value in changes.items():
        if isinstance(value, dict) and key in ("dflash_config", "dspark_config", "transformer_layer_config"):
            changed[key] = {k: v for k, v in (config.get(key, {}) | value).items() if v is not None}
        elif value is None:
            changed.pop(key, None)
        else:
            changed[key] = value
    return changed


Spoil = Callable[[Tensors], Any]
ZLAB, DEEP, SF, SP = (
    published_blocks.z_lab, published_blocks.deepspec, published_blocks.specforge_dspark, published_blocks.speculators
)  # fmt: skip
HIDDEN = torch.zeros(V, H)


def keep(tensors: Tensors) -> None:
    """Leave the tensors as they are."""


def drop_markov(tensors: Tensors) -> None:
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        del tensors[name]


REFUSED: dict[str, tuple[str, Form, Config, Spoil, str]] = {
    # A mask token that the tokenizer uses
    "a mask token of texts": (
        "dflash", ZLAB, {"dflash_config": {"mask_token_id": 4}}, keep,
        r"config.json: mask_token_id is 4, the token 't4' of ordinary text; expected one of the 23 rows .* that no text uses"),
    # Feature layers
    "layers out of order": (
        "dflash", ZLAB, {"dflash_config": {"target_layer_ids": [2, 1, 4, 6]}}, keep,
        r"dflash_config.target_layer_ids \[2, 1, 4, 6\], layers left, expected ids in increasing order, each once"),
    "layers that are not stored": (
        "dspark", SP, {"aux_hidden_state_layer_ids": [2, 3, 4, 7]}, keep,
        r"entering blocks \[2, 3, 4, 7\], .* without 4; set target.feature_layers to \[1, 2, 3, 4, 5, 6, 7\]"),
    # Another method
    "DFlash from its anchor": (
        "dflash", SP, {"sample_from_anchor": True}, keep,
        r"sample_from_anchor is True, expected False for speculators_model_type 'dflash', .* a checkpoint of another method"),
    "two methods": (
        "dspark", SF, {"architectures": ["DFlashDraftModel"]}, keep,
        r"architectures \['DFlashDraftModel'\], projector_type 'dspark', expected one of .*, and one method"),
    # Markov heads
    "no Markov weights": (
        "dspark", DEEP, {}, drop_markov,
        r"markov_rank is 3, with no weights of it in the files; expected markov_head.markov_w1.weight and markov_head.markov_w2"),
    "a gated head": ("dspark", DEEP, {"markov_head_type": "gated"}, keep, "markov_head_type is 'gated', expected 'vanilla'"),
    # Other models
    "causal and not": ("dflash", ZLAB, {"is_causal": False, "dflash_config": {"causal": True}}, keep, "expected one answer"),
    "DFlash2 that scales its logits": (
        "dflash2", ZLAB, {"dflash_config": {"output_multiplier": 2.0}}, keep, "output_multiplier is 2.0, expected 1.0"),
    "Domino": ("dflash", ZLAB, {"dflash_config": {"projector_type": "domino"}}, keep, "projector_type 'domino', expected one of"),
    "a part of the vocabulary": (
        "dflash", SP, {"draft_vocab_size": 5}, lambda t: t.update({"d2t": torch.zeros(5).long(), "lm_head.weight": HIDDEN[:5]}),
        "draft_vocab_size is 5, expected the target's 23: a block draft shares the target's head"),
    # Sizes and tensors
    "RoPE on three axes": (
        "dflash", ZLAB, {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, keep,
        "expected RoPE on one axis"),
    "other features than its list": (
        "dspark", DEEP, {"target_layer_ids": [1, 2, 6]}, keep, r"fc.weight is \(16, 64\), expected \(16, 48\)"),
    "eight bits": (
        "dspark", DEEP, {}, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}),
        "holds float32, float8_e4m3fn"),
    "NaN": ("dspark", DEEP, {}, lambda t: t["norm.weight"].fill_(torch.nan), "norm.weight holds 16 NaN"),
}  # fmt: skip


@pytest.mark.parametrize(("method", "form", "changes", "spoil", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_published_drafts_that_would_draft_differently_are_refused(
    tmp_path: Path, method: str, form: Form, changes: Config, spoil: Spoil, message: str
) -> None:
    truth, *tables = original(method)
    config, tensors = form(truth, LAYERS)
    spoil(tensors)
    folder = publish(tmp_path / "theirs", change(config, changes), tensors)
    with pytest.raises(ValueError, match=message) as error:
        read(folder, (tables[0], tables[1]))
    assert str(folder) in str(error.value), "the message names the draft"
