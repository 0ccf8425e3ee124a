"""Every class of target through the one generic path, against transformers' own outputs, on tiny random models."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PreTrainedModel

from stages.draft import supported_targets
from stages.target import config_facts, feature_layers, hooks, loading, manifest, packed_forward

H, V, LAYERS = 32, 96, 7
TEXT: dict[str, Any] = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}
MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
}
SIGHT: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": H, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def build_vision_config(name: str, tied: bool, sight: dict[str, Any], **text: Any) -> Any:
    return getattr(transformers, name)(
        text_config={**TEXT, **MROPE, **text, "tie_word_embeddings": tied},
        vision_config={**SIGHT, **sight},
        tie_word_embeddings=tied,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )


DEEPSTACK = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
CLASSES = {
    "qwen3": lambda tied: transformers.Qwen3Config(**TEXT, head_dim=16, tie_word_embeddings=tied),
    "qwen2": lambda tied: transformers.Qwen2Config(**TEXT, tie_word_embeddings=tied),
    "qwen2 with a window": lambda tied: transformers.Qwen2Config(
        **TEXT, tie_word_embeddings=tied, use_sliding_window=True, sliding_window=4, max_window_layers=3
    ),
    "llama3": lambda tied: transformers.LlamaConfig(
        **TEXT | {"eos_token_id": [5, 6]},
        tie_word_embeddings=tied,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "hunyuan": lambda tied: transformers.HunYuanDenseV1Config(**TEXT, tie_word_embeddings=tied, head_dim=8),
    "qwen3 moe": lambda tied: transformers.Qwen3MoeConfig(
        **TEXT, **EXPERTS, tie_word_embeddings=tied, output_router_logits=True
    ),
    "hunyuan moe": lambda tied: transformers.HunYuanMoEV1Config(
        **TEXT, tie_word_embeddings=tied, head_dim=8, num_experts=4, moe_topk=2
    ),
    "qwen3 vl": lambda tied: build_vision_config("Qwen3VLConfig", tied, DEEPSTACK, head_dim=8),
    "qwen3 vl moe": lambda tied: build_vision_config("Qwen3VLMoeConfig", tied, DEEPSTACK, head_dim=8, **EXPERTS),
    "qwen2 vl": lambda tied: build_vision_config("Qwen2VLConfig", tied, {"embed_dim": 16, "hidden_size": H, "mlp_ratio": 2}),
    "qwen2.5 vl": lambda tied: build_vision_config("Qwen2_5_VLConfig", tied, {"fullatt_block_indexes": [1], "window_size": 16}),
}  # fmt: skip
every_class = pytest.mark.parametrize("name", CLASSES)
LENGTHS = [9, 3, 7]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return request.param


def save_random_model(folder: Path, name: str, tied: bool) -> PreTrainedModel:
    """A random model of the class, in a folder as Hugging Face has it. Norms are not one, so that a lost norm shows."""
    torch.manual_seed(0)
    config = CLASSES[name](tied)
    model = loading.select_auto_class(config).from_config(config).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in parameter else torch.randn_like(weight) * 0.15)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def compute_hidden_states(
    model: PreTrainedModel, ids: torch.Tensor, layers: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the captured features [B, T, 3H] and the last hidden [B, T, H] of right-padded ids [B, T]."""
    with hooks.capture_residual_streams(model, layers) as caught:
        last = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat(caught, dim=-1), last


def rows() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(7, 80, (length,), generator=g) for length in LENGTHS]


@every_class
def test_what_we_capture_is_what_transformers_calls_hidden_states(tmp_path: Path, name: str, tied: bool) -> None:
    """Entering block i; the last one after the final norm, so that the head's table makes the model's logits of it."""
    save_random_model(tmp_path, name, tied)
    model = loading.load_target(str(tmp_path), "float32", "cpu")
    assert not any(weight.data_ptr() % 64 for weight in model.parameters())  # sums are rounded alike in every process
    made = manifest_of(tmp_path)
    ids = pad_sequence(rows(), batch_first=True)  # [3, 9]
    features, last = compute_hidden_states(model, ids, made.feature_layers)
    with torch.inference_mode():
        whole = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    assert made.feature_layers == [2, 3, 4] == feature_layers.default_eagle3_feature_layers(LAYERS)
    assert torch.equal(features, torch.cat([whole.hidden_states[i] for i in made.feature_layers], dim=-1))
    assert torch.equal(last, whole.hidden_states[-1])
    embedding, head = manifest.read_embedding_and_head(made, tmp_path)
    assert embedding.shape == head.shape == (V, H) and torch.equal(embedding, head) == tied
    torch.testing.assert_close(last @ head.T, whole.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(embedding[ids], whole.hidden_states[0])


@every_class
def test_documents_end_to_end_are_as_each_alone(tmp_path: Path, name: str) -> None:
    """Packed as one row, or padded: the same as every document by itself, in all layers that are tapped."""
    save_random_model(tmp_path, name, False)
    model = loading.load_target(str(tmp_path), "float32", "cpu")
    alone = [compute_hidden_states(model, row[None], [2, 3, 4]) for row in rows()]
    expected = torch.cat([features[0] for features, _ in alone]), torch.cat([last[0] for _, last in alone])
    assert packed_forward.supports_packing(model)
    for packed in (True, False):
        streams: dict[int, torch.Tensor] = {}
        with hooks.tap_residual_streams(model, [4, 2, 3], streams.__setitem__):
            last = packed_forward.forward_documents(model, torch.cat(rows()), LENGTHS, packed)
        features = torch.cat([packed_forward.unpad_stream(streams[k], LENGTHS) for k in range(3)], dim=-1)
        torch.testing.assert_close(features, expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last, expected[1], rtol=1e-5, atol=1e-5)
    again = compute_hidden_states(model, rows()[0][None], [2, 3, 4])
    assert torch.equal(again[0], alone[0][0])  # its own attention is back


def test_a_class_that_gives_its_window_to_the_mask_alone_is_padded() -> None:
    """Bug: Phi-3.5-MoE's attention is not told of the window, and packed documents have no mask: those longer than the window
    had the hidden states of a target without one, since the documents that are compared are shorter.
    """
    torch.manual_seed(0)
    config = transformers.PhimoeConfig(**TEXT, sliding_window=64, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.PhimoeForCausalLM(config).eval()
    model.config._attn_implementation = "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not packed_forward.supports_packing(model)
    ids = torch.arange(100) % V
    lengths = [90, 10]
    found = packed_forward.forward_documents(model, ids, lengths, packed_forward.supports_packing(model))
    alone = [compute_hidden_states(model, part[None], [2])[1][0] for part in ids.split(lengths)]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_blocks_are_compiled_once_for_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block compiled again for each layer or batch would soon meet the compiler's limit, and run uncompiled."""
    save_random_model(tmp_path, "qwen3 moe", False)
    model = loading.load_target(str(tmp_path), "float32", "cpu")
    plain = packed_forward.forward_documents(model, torch.cat(rows()), LENGTHS, True)
    compiled: list[int] = []

    def count(graph: Any, _example: Any) -> Any:
        compiled.append(1)
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiler(function, dynamic=dynamic, backend=count))
    packed_forward.compile_blocks(model, 64)
    once = len(compiled)
    for lengths in ([5, 9, 30], [7], [50, 1, 1, 1]):
        packed_forward.forward_documents(model, torch.arange(sum(lengths)) % V, lengths, True)
    assert len(compiled) == once <= 12  # pieces: on a CPU a block is cut at its attention, and at its experts
    torch.testing.assert_close(packed_forward.forward_documents(model, torch.cat(rows()), LENGTHS, True), plain)


# --- facts ----------------------------------------------------------------------------------------------------------


def manifest_of(folder: Path) -> manifest.TargetManifest:
    return supported_targets.describe_target(str(folder), None, AutoConfig.from_pretrained(folder), folder, None)


@every_class
def test_the_facts_are_those_of_the_model(tmp_path: Path, name: str, tied: bool) -> None:
    """Read off the weights themselves, not off the config they come from."""
    model = save_random_model(tmp_path, name, tied)
    made = manifest_of(tmp_path)
    block = model.get_decoder().layers[0]
    assert (made.vocab_size, made.hidden_size) == model.get_input_embeddings().weight.shape
    assert made.num_layers == len(model.get_decoder().layers)
    assert made.num_attention_heads * made.head_dim == block.self_attn.q_proj.out_features
    assert made.num_key_value_heads * made.head_dim == block.self_attn.k_proj.out_features
    assert made.tie_word_embeddings == tied
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert made.eos_token_ids == ([5, 6] if name == "llama3" else [5])
    assert made.rope["rope_theta"] == (500_000.0 if name == "llama3" else 10_000.0)
    assert made.rope["rope_type"] == ("llama3" if name == "llama3" else "default")
    assert ("mrope_section" in made.rope) == ("vl" in name)
    assert made.modality == ("image" if "vl" in name else "text")


def test_a_config_without_what_is_needed_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"GPT2Config.* has no intermediate_size or moe_intermediate_size; such a model"
    ):
        config_facts.read_config_facts(transformers.GPT2Config())


def test_a_class_with_a_mask_of_its_own_is_padded() -> None:
    """Bug: Doge keeps the 2,048 keys of the largest weights, by a mask that packed documents left out. Documents of the 24 tokens
    that are compared are shorter than that, so longer ones were packed and had wrong hidden states.
    """
    torch.manual_seed(0)
    config = transformers.DogeConfig(**TEXT, keep_window_size=16)
    model = transformers.DogeForCausalLM(config).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not packed_forward.supports_packing(model)
