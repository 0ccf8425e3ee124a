"""A GGUF file as a target: its weights are what each block says, under the names that transformers gives them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from stages import prepare_target
from stages.target import chat_template, gguf_target, loading, manifest
from tests.conftest import edit_params
from tests.target.pinned_targets import start_project

Q8_0 = gguf.GGMLQuantizationType.Q8_0
HEADS, KV_HEADS, LAYERS = 4, 2, 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection's rows as llama.cpp has them: rotary pairs side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, split: str = "smollm") -> LlamaForCausalLM:
    """Write a random model, matrices as Q8_0; return the model of the very numbers that the blocks say."""
    letters = [chr(i) for i in [*range(33, 127), *range(161, 173), *range(174, 256)]] + [
        chr(256 + n) for n in range(68)
    ]
    tokens = [*letters, "ab", "ĠĠ", "<|im_start|>", "<|im_end|>"]
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=256, rope_theta=100_000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True, eos_token_id=len(tokens) - 1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        numbers, theirs = weight.numpy(), names.get_name(name, (".weight",))
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        if numbers.ndim == 1:
            writer.add_tensor(theirs, numbers)
            continue
        writer.add_tensor(theirs, quantize(interleave(numbers, heads) if heads else numbers, Q8_0), raw_dtype=Q8_0)
        weight.copy_(
            torch.from_numpy(dequantize(quantize(numbers, Q8_0), Q8_0))
        )  # blocks lie within rows, in any order
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def test_a_gguf_file_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    start_project(tmp_path, monkeypatch)
    edit_params(
        tmp_path, {"target": {"model": "mine.gguf", "num_threads": 1}, "init_draft": {"draft_vocab_size": None}}
    )
    truth = write_gguf(tmp_path / "mine.gguf")
    prepare_target.main()
    target = manifest.read_manifest()
    assert target.describe_model() == "mine.gguf, dequantised from Q8_0"
    assert "target mine.gguf, dequantised from Q8_0: 4 layers, 64 wide" in capsys.readouterr().out
    model = loading.load_target(str(manifest.resolve_weights_folder(target)), "float32", "cpu")
    found, expected = model.state_dict(), truth.to(torch.bfloat16).float().state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    encoder = chat_template.load_tokenizer(manifest.TARGET_FOLDER, False, None)
    prompt = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.decode(chat_template.encode_prompt(encoder, [{"role": "user", "content": "Hi!"}])) == prompt
    assert target.eos_token_ids == [259]
    # Bug: split as GPT-2 does, one of the two blanks went to the "3"
    ids = encoder.encode("ab  3", add_special_tokens=False)
    assert [encoder.decode(each) for each in ids] == ["ab", "  ", "3"]


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ValueError, match=r"cut\.gguf: expected a GGUF file that transformers can read, found"):
        gguf_target.write_gguf_target(tmp_path / "cut.gguf", tmp_path / "made")


def test_a_split_that_is_not_known_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "mine.gguf", "whitespace")
    with pytest.raises(ValueError, match=r"mine\.gguf: its tokenizer splits text as 'whitespace'.*llama-bpe.*smollm"):
        gguf_target.write_gguf_target(tmp_path / "mine.gguf", tmp_path / "made")


@pytest.mark.parametrize(
    ("described", "text", "tokens"),
    [  # bugs: ["▁a"], and ["a", "bc"]
        ({"model": "llama", "tokens": ["<unk>", "▁", "a", "▁a"], "scores": [0.0, -1.0, -2.0, -3.0]}, " a", ["▁", "▁a"]),
        ({"model": "gpt2", "pre": "llama-bpe", "tokens": [*"abc", "bc", "abc"], "merges": ["b c"]}, "abc", ["abc"]),
    ],
)
def test_a_text_has_llama_cpps_tokens(described: dict[str, Any], text: str, tokens: list[str]) -> None:
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    made, _ = convert_gguf_tokenizer("llama", {names.get(key, key): value for key, value in described.items()})
    fields = {f"tokenizer.ggml.{k}": SimpleNamespace(contents=lambda v=v: v) for k, v in described.items()}
    gguf_target._correct_tokenizer(Path(), SimpleNamespace(get_field=fields.get), made)  # type: ignore[arg-type]
    assert made.encode(text).tokens == tokens
