"""A GGUF file as a target: what llama.cpp answers with it, and the very numbers that its blocks say; or a refusal by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stages import prepare_target
from stages.draft import supported_targets
from stages.target import chat_template, gguf_target, gguf_tokenizer, loading, manifest
from tests.conftest import edit_params
from tests.target.pinned_targets import start_project

Q8_0 = gguf.GGMLQuantizationType.Q8_0
LAYERS = 6
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = [chr(i) for i in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
TOKENS = [*LETTERS, "ab", "ĠĠ", "<|im_start|>", "<|im_end|>"]
ROPE = {"rope_type": "default", "rope_theta": 100_000.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32
}  # fmt: skip
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = ROPE | {"rope_type": "linear", "factor": 4.0}
LOCAL = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
EXPERTS = {"rope_parameters": ROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA = {"sliding_window": 8, "head_dim": 32, "query_pre_attn_scalar": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # by case: model type of transformers, its config
    "llama": ("llama", {"rope_parameters": ROPE}),
    "llama with biases": ("llama", {"rope_parameters": ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "mixtral": ("mixtral", {"rope_parameters": ROPE, "num_local_experts": 4}),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"rope_parameters": LINEAR, "head_dim": 32}),
    "qwen2moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "phi3": ("phi3", {"rope_parameters": ROPE}),
    "gemma": ("gemma", {"rope_parameters": ROPE, "head_dim": 32}),
    "gemma3": ("gemma3_text", {"rope_parameters": LOCAL, **GEMMA}),
}  # fmt: skip

PROMPT = [(37 * n + 11) % 94 for n in range(120)]
# (length of the prompt, llama.cpp's next token at temperature 0): of xllamacpp 2026.10.11549, matrices in F32
LLAMA_CPP = {
    "llama": [(15, 80)],
    "llama with biases": [(36, 197), (43, 197), (78, 193), (106, 69)],
    "llama 3.1": [(57, 213), (113, 89)],
    "mixtral": [(15, 193), (57, 8), (71, 37), (78, 67)],
    "qwen2": [(36, 258), (92, 222), (106, 83), (113, 62)],
    "qwen3": [(15, 193), (22, 93), (64, 219), (92, 62)],
    "qwen2moe": [(15, 9), (50, 107), (99, 123), (106, 108)],
    "qwen3moe": [(8, 82), (64, 59), (71, 110), (78, 59), (106, 189)],
    "phi3": [(8, 204), (15, 49), (29, 49), (71, 49), (85, 49), (92, 112)],
    "gemma": [(15, 78), (22, 36), (29, 42), (43, 61), (50, 228), (64, 86)],
    "gemma3": [(22, 247), (43, 249), (64, 86), (85, 9)],
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection's rows as llama.cpp has them: rotary pairs side by side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    case: str = "llama",
    split: str = "smollm",
    change: Callable[[gguf.GGUFWriter, str], None] = lambda _, __: None,
    drop: str = "",
    **options: Any,
) -> PreTrainedModel:
    """Write a random model as llama.cpp's converter does, matrices as Q8_0; return the one that the blocks say."""
    kind, more = MODELS[case]
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        kind, vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, eos_token_id=len(TOKENS) - 1, bos_token_id=None,
        pad_token_id=None, tie_word_embeddings=case not in ("llama", "qwen2moe"), **more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    arch = {"mixtral": "llama", "gemma3_text": "gemma3"}.get(kind, kind.replace("_", ""))
    writer = gguf.GGUFWriter(path, arch, **options)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if dim := more.get("head_dim"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    rope = more["rope_parameters"].get("full_attention", more["rope_parameters"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "llama":
        writer.add_rope_dimension_count(16)
        writer.add_vocab_size(len(TOKENS))
    if rope["rope_type"] == "llama3":
        frequencies = model.model.rotary_emb.inv_freq.numpy()
        plain = 100_000.0 ** (-np.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).astype(np.float32))
    if experts := more.get("num_experts", more.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        if "moe_intermediate_size" in more:
            writer.add_expert_feed_forward_length(64)
        if "shared_expert_intermediate_size" in more:
            writer.add_expert_shared_feed_forward_length(32)
    if "sliding_window" in more:
        writer.add_sliding_window(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 3])
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_chat_template(TEMPLATE)
    change(writer, arch)
    arch_id = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(arch_id, LAYERS)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            weight.mul_(6 if weight.dim() > 1 else 1).add_(torch.rand(weight.shape) * 0.2 if weight.dim() == 1 else 0)
            numbers = weight.numpy()
            if weight.dim() > 1:
                numbers = dequantize(quantize(numbers, Q8_0), Q8_0)
                weight.copy_(torch.from_numpy(numbers))
            if arch == "llama" and ("q_proj" in name or "k_proj" in name):
                numbers = interleave(numbers, 4 if "q_proj" in name else 2)
            if arch.startswith("gemma") and "norm" in name:
                numbers = numbers + 1
            parts = {name: numbers}
            if "experts.gate_up_proj" in name:
                halves = np.split(numbers, 2, axis=1)
                parts = dict(zip((name.replace("gate_up", "gate"), name.replace("gate_up", "up")), halves, strict=True))
            for each, part in parts.items():
                theirs = names.get_name(each.removesuffix(".weight").removesuffix(".bias"))
                theirs = f"{theirs}{'.bias' if each.endswith('bias') else '.weight'}"
                if theirs == drop:
                    continue
                if part.ndim == 1:
                    writer.add_tensor(theirs, part.astype(np.float32))
                else:
                    writer.add_tensor(theirs, quantize(np.ascontiguousarray(part), Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("case", MODELS)
def test_a_file_is_the_model_that_llama_cpp_computes(case: str, tmp_path: Path) -> None:
    """Bug: of experts, Llama 3.1's rope_freqs, biases and rope.scaling another model was made, its missing weights at random."""
    truth = write_gguf(tmp_path / "mine.gguf", case)
    assert gguf_target.write_gguf_target(tmp_path / "mine.gguf", tmp_path / "made").startswith("dequantised from Q8_0")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    found, expected = model.state_dict(), truth.to(torch.bfloat16).float().state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    with torch.no_grad():
        best = model(torch.tensor([PROMPT])).logits[0].argmax(-1).tolist()
    assert [(length, best[length - 1]) for length, _ in LLAMA_CPP[case]] == LLAMA_CPP[case]


def test_a_gguf_file_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    start_project(tmp_path, monkeypatch)
    edit_params(
        tmp_path, {"target": {"model": "mine.gguf", "num_threads": 1}, "init_draft": {"draft_vocab_size": None}}
    )
    write_gguf(tmp_path / "mine.gguf")
    prepare_target.main()
    target = manifest.read_manifest()
    assert target.describe_model() == "mine.gguf, dequantised from Q8_0"
    assert "target mine.gguf, dequantised from Q8_0: 6 layers, 64 wide" in capsys.readouterr().out
    loading.load_target(str(manifest.resolve_weights_folder(target)), "float32", "cpu")
    encoder = chat_template.load_tokenizer(manifest.TARGET_FOLDER, False, None)
    prompt = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    ids = chat_template.encode_prompt(encoder, [{"role": "user", "content": "Hi!"}])
    assert encoder.decode(ids) == prompt and ids[0] == 258 and 258 in encoder.all_special_ids
    assert target.eos_token_ids == [259]
    # Bug: split as GPT-2 does, one of the two blanks went to the "3"
    ids = encoder.encode("ab  3", add_special_tokens=False)
    assert [encoder.decode(each) for each in ids] == ["ab", "  ", "3"]
    # Refused before anything starts: Bug: prepare_target was the first to read a GGUF file
    write_gguf(tmp_path / "mine.gguf", drop="blk.3.ffn_up.weight")
    with pytest.raises(ValueError, match=r"it lacks blk\.3\.ffn_up\.weight"):
        supported_targets.main("params.yaml", "mine.gguf")


def test_an_answer_ends_where_llama_cpp_ends_it(tmp_path: Path) -> None:
    """Bug: eos_token_id alone ended answers, and where eot_token_id closes turns each ran to its length."""

    def name_ends(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_eot_token_id(4)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 5)
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 3

    write_gguf(tmp_path / "mine.gguf", change=name_ends)
    assert gguf_target.read_gguf_target(tmp_path / "mine.gguf").model.config.eos_token_id == [
        3, 4, 5, 259,  # <|im_end|> by its text
    ]  # fmt: skip


def set_key(key: str, value: object) -> Callable[[gguf.GGUFWriter, str], None]:
    def change(writer: gguf.GGUFWriter, arch: str) -> None:
        name = f"{arch}.{key}" if not key.startswith(("general", "tokenizer")) else key
        writer.kv_data[0].pop(name, None)
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](name, value)

    return change


def add_tensor(name: str) -> Callable[[gguf.GGUFWriter, str], None]:
    return lambda writer, _: writer.add_tensor(name, np.full(8, 1.5, np.float32))


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("llama", {"split_max_tensors": 30}, r"one of \d+; join them.*llama-gguf-split --merge"),
        ("llama", {"drop": "blk.5.attn_norm.weight"}, "it lacks blk.5.attn_norm.weight"),
        ("llama", {"change": add_tensor("blk.0.attn_k_norm.weight")}, "it has blk.0.attn_k_norm.weight, which"),
        ("llama", {"change": set_key("block_count", 65536)}, "block_count is 65536, found tensors of 6 blocks"),
        ("llama", {"change": set_key("feed_forward_length", [96, 96, 96, 96, 96, 64])}, "one number above 0 for all"),
        ("llama", {"change": set_key("rope.scaling.type", "longrope")}, "rope.scaling is longrope"),
        ("qwen3moe", {"change": set_key("expert_gating_func", 2)}, "expert_gating_func is 2, expected 1"),
        ("mixtral", {"change": lambda writer, _: writer.kv_data[0].pop("llama.expert_used_count")}, "llama.expert_used_count"),
        ("llama", {"split": "whitespace"}, "its tokenizer splits text as 'whitespace'.*llama-bpe.*smollm"),
    ],
)  # fmt: skip
def test_what_would_make_another_model_is_refused_by_name(
    case: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Bug: each gave another model than llama.cpp's, with exit code 0; 65536 blocks were built for hours."""
    write_gguf(tmp_path / "mine.gguf", case, **options)
    (file, *_) = sorted(tmp_path.glob("mine*.gguf"))
    with pytest.raises(ValueError, match=rf"params.yaml: target.model .*mine.*\.gguf: .*({message})"):
        gguf_target.write_gguf_target(file, tmp_path / "made")
    assert not (tmp_path / "made/model.safetensors").exists()


@pytest.mark.parametrize("there", ["nowhere", "/dev/zero"])
def test_a_link_to_no_file_is_named(there: str, tmp_path: Path) -> None:
    """Bug: each of the three ended in a traceback."""
    (tmp_path / "mine.gguf").symlink_to(there)
    with pytest.raises(ValueError, match=r"mine\.gguf .*; get the file again"):
        gguf_target.read_gguf_target(tmp_path / "mine.gguf")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    """Bug: counts and lengths beyond the file took its reader's memory or hours, or ended in a traceback of NumPy."""
    write_gguf(tmp_path / "mine.gguf")
    whole = (tmp_path / "mine.gguf").read_bytes()
    huge, zeros = (2**62).to_bytes(8, "little"), bytes(10**7)
    broken = {
        "cut": [whole[:at] for at in (0, 3, 8, 23, 24, 100, 3000, 9000, len(whole) - 200)],
        "counts": [whole[:8] + huge + whole[16:], whole[:16] + huge + whole[24:], whole[:24] + huge + whole[32:]],
        "noise": [
            b"GGUF" + zeros,
            whole[:24] + zeros,
            whole[:4] + b"\0\0\0\3" + whole[8:],
            b"PK" + whole,
            b"\xff" * 99,
        ],
    }
    at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8  # of the count of an array
    broken["counts"] += [whole[:at] + huge + whole[at + 8 :], whole[: at + 8] + huge + whole[at + 16 :]]
    at = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4  # of a shape
    broken["shapes"] = [whole[:at] + huge + whole[at + 8 :], whole[: at - 4] + b"\xff" * 4 + whole[at:]]
    broken["shapes"] += [whole[: at + 16] + b"\x63\0\0\0" + whole[at + 20 :]]  # a type that no version has
    for data in [data for kind in broken.values() for data in kind]:
        (tmp_path / "broken.gguf").write_bytes(data)
        with pytest.raises(ValueError, match=r"broken\.gguf is not valid GGUF \(.*\); get the file again$"):
            gguf_target.read_gguf_target(tmp_path / "broken.gguf")


@pytest.mark.parametrize(
    ("described", "text", "tokens"),
    [  # bugs: ["▁a"], and ["a", "bc"]; and with transformers before 5.20 splits of Llama 3 and Qwen were not known
        ({"model": "llama", "tokens": ["<unk>", "▁", "a", "▁a"], "scores": [0.0, -1.0, -2.0, -3.0]}, " a", ["▁", "▁a"]),
        ({"model": "gpt2", "pre": "llama-bpe", "tokens": [*"abc", "bc", "abc"], "merges": ["b c"]}, "abc", ["abc"]),
        ({"model": "gpt2", "pre": "llama-bpe", "tokens": [*"123", "12"], "merges": ["1 2"]}, "12312", ["12", "3", "12"]),
        ({"model": "gpt2", "pre": "qwen2", "tokens": [*"12", "12"], "merges": ["1 2"]}, "12", ["1", "2"]),
        ({"model": "gpt2", "pre": "qwen2", "tokens": ["a", "<a>"], "merges": [], "token_type": [1, 4]}, "a<a>", ["a", "<a>"]),
    ],
)  # fmt: skip
def test_a_text_has_llama_cpps_tokens(described: dict[str, Any], text: str, tokens: list[str]) -> None:
    keys = {"general.architecture": "llama", **{f"tokenizer.ggml.{key}": value for key, value in described.items()}}
    made = gguf_tokenizer.build_tokenizer(keys)
    assert made.backend_tokenizer.encode(text).tokens == tokens
