"""Our hidden states against the serving engine's own, per layer and position: SGLang 0.5.17 on one GPU.

    . /tmp/kit/env.sh && python3 -m benchmarks.sglang_parity [qwen3 | qwen3_moe] [FOLDER]     # writes FOLDER/parity.json

A draft is fed the engine's states when it serves, and ours when it is trained; they must be the same. With an EAGLE3
draft loaded and `enable_return_hidden_states`, SGLang returns the states it would feed the draft. Target and draft are
random and made here, so nothing is downloaded. Both in bfloat16, so they differ by rounding; how much that may be is
measured too, ours in bfloat16 against ours in float32, and so is what an error of one layer would look like.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from stages.draft import eagle3_checkpoint
from stages.draft.eagle3_config import DraftConfig
from stages.target import feature_layers, hooks, loading, packed_forward

V, D, H, LAYERS, MOST = 4096, 1024, 1024, 12, 2048
LENGTHS = (3, 17, 128, 500, 1301)
SHAPE: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": 2 * H, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": V, "max_position_embeddings": 2 * MOST, "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": H // 2, "norm_topk_prob": True}
CLASSES = {"qwen3": (Qwen3Config, {}), "qwen3_moe": (Qwen3MoeConfig, EXPERTS)}
ENGINE: dict[str, Any] = {  # what runs without the kernels that the kit leaves out (shared/gpu/README.md)
    "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none", "mem_fraction_static": 0.4,
    "max_running_requests": 8, "cuda_graph_max_bs_decode": 1, "cuda_graph_backend_prefill": "disabled",
    "disable_custom_all_reduce": True, "mm_feature_transport": "cpu", "skip_server_warmup": True,
    "disable_radix_cache": True, "dtype": "bfloat16", "log_level": "warning",
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4, "enable_return_hidden_states": True,
}  # fmt: skip


def make_target(folder: Path, name: str) -> None:
    """A random target whose blocks change the stream by about as much as it is: a wrong layer must show."""
    torch.manual_seed(0)
    kind, more = CLASSES[name]
    config = kind(**SHAPE, **more, num_hidden_layers=LAYERS, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    model = loading.select_auto_class(config).from_config(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            scale = 1.0 if "embed" in key else 1.5 * weight.shape[-1] ** -0.5
            weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in key else torch.randn_like(weight) * scale)
    model.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(V)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0").save_pretrained(folder)


def make_draft(folder: Path) -> None:
    """A random draft of that target; what it drafts is of no account."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    sizes = DraftConfig(**SHAPE, draft_vocab_size=D, rope=rope)
    folder.mkdir(parents=True, exist_ok=True)
    layers = feature_layers.default_eagle3_feature_layers(LAYERS)
    config = eagle3_checkpoint.build_eagle3_config(sizes, layers, LAYERS, [1], "bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: torch.randn(size, dtype=torch.bfloat16) * 0.02
        for name, size in eagle3_checkpoint.list_tensor_shapes(sizes).items()
    }
    tensors |= {"d2t": torch.zeros(D, dtype=torch.int64), "t2d": torch.arange(V) < D}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(2, V, (length,), generator=g).tolist() for length in LENGTHS]


def theirs(folder: Path) -> list[Tensor]:
    """Of each prompt, the states [T, 3H] that SGLang gives its draft after prefill."""
    import sglang  # type: ignore[import-not-found]  # a kit on the GPU machine

    engine = sglang.Engine(
        model_path=str(folder / "target"), speculative_draft_model_path=str(folder / "draft"), **ENGINE
    )
    try:
        asked = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
        answers = [
            engine.generate(input_ids=ids, sampling_params=asked, return_hidden_states=True) for ids in prompts()
        ]
    finally:
        engine.shutdown()
    return [torch.tensor(answer["meta_info"]["hidden_states"][0]) for answer in answers]


def ours(folder: Path, dtype: str, layers: list[int]) -> list[Tensor]:
    """The same by transformers, all prompts end to end in one forward as extract_hiddens has them: [T, 3H] each."""
    model = loading.load_target(str(folder / "target"), dtype, "cuda" if torch.cuda.is_available() else "cpu")
    packed = packed_forward.supports_packing(model)
    streams: dict[int, Tensor] = {}
    ids = torch.cat([torch.tensor(p) for p in prompts()]).to(model.device)
    with hooks.tap_residual_streams(model, layers, streams.__setitem__):
        packed_forward.forward_documents(model, ids, list(LENGTHS), packed)
    parts = [packed_forward.unpad_stream(streams[k], list(LENGTHS)).float().cpu() for k in range(len(layers))]
    print(f"ours, {dtype}: documents {'end to end' if packed else 'padded'}")
    return list(torch.cat(parts, dim=-1).split(list(LENGTHS)))


def compare(mine: list[Tensor], other: list[Tensor], part: int) -> dict[str, float]:
    """Relative error of a token's states of one layer, |a - b| / |b|: mean and largest over all positions, and where."""
    errors = []
    for number, (a, b) in enumerate(zip(mine, other, strict=True)):
        assert a.shape == b.shape, f"prompt {number}: states {tuple(a.shape)}, expected {tuple(b.shape)}"
        a, b = (t[:, part * H : (part + 1) * H].double() for t in (a, b))
        errors.append((a - b).norm(dim=-1) / b.norm(dim=-1))
    every = torch.cat(errors)
    worst = int(every.argmax())
    return {
        "mean": float(every.mean()),
        "max": float(every.max()),
        "median": float(every.median()),
        "worst_token": worst,
    }


def main(name: str = "qwen3", path: str | None = None) -> None:
    folder = Path(path or tempfile.mkdtemp())
    layers = feature_layers.default_eagle3_feature_layers(LAYERS)
    make_target(folder / "target", name)
    make_draft(folder / "draft")
    engine = theirs(folder)
    half, exact = ours(folder, "bfloat16", layers), ours(folder, "float32", layers)
    off_by_one = ours(folder, "bfloat16", [i + 1 for i in layers])
    pairs = {
        "SGLang - ours": (engine, half),
        "ours - float32": (half, exact),
        "SGLang - float32": (engine, exact),
        "one layer off": (off_by_one, half),
    }
    found = {
        what: {f"entering {i}": compare(a, b, part) for part, i in enumerate(layers)} for what, (a, b) in pairs.items()
    }
    print(f"{name}, {sum(LENGTHS)} positions, relative error of a position's states, bfloat16")
    print(f"{'':18}{'layer':>12}{'mean':>12}{'median':>12}{'max':>12}  worst position")
    for what, of_layers in found.items():
        for layer, e in of_layers.items():
            print(f"{what:18}{layer:>12}{e['mean']:12.2e}{e['median']:12.2e}{e['max']:12.2e}  {e['worst_token']}")
    (folder / "parity.json").write_text(
        json.dumps({"class": name, "lengths": LENGTHS, "errors": found}, indent=1) + "\n"
    )
    rounding = found["ours - float32"]
    same = all(e["median"] <= 3 * rounding[layer]["median"] for layer, e in found["SGLang - ours"].items())
    print(
        f"{folder}/parity.json; {'the same but for rounding' if same else 'NOT THE SAME: more than rounding explains'}"
    )
    sys.exit(not same)


if __name__ == "__main__":
    main(*sys.argv[1:])
