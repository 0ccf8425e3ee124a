"""Command lines of engines, and what is made of what a server says of itself."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.engines import protocol, registry
from stages.engines.protocol import ServedDraft, ServerSetup, describe_draft
from stages.params.families import EAGLE3, FAMILIES
from stages.params.tree_shape import TreeShape, parse_shape

SETUP = ServerSetup(
    "sglang", "/models/t", "bfloat16", "cuda", False, 2, 0.85, 65536, 64, 4096, True, ("--attention-backend", "triton")
)
DRAFT = ServedDraft("/drafts/e9/draft", "EAGLE3", TreeShape(5, 8, 32), EAGLE3)


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_command_lines_of_seed_002() -> None:
    """Section 2.3: baseline and EAGLE3, but with the algorithm that an EAGLE-3 draft needs."""
    plain = registry.get("sglang").build_setup_command(SETUP, 30000, [])
    assert plain[:4] == ["sglang", "serve", "--model-path", "/models/t"]
    assert flag(plain, "--tp-size") == "2" and flag(plain, "--max-total-tokens") == "65536"
    assert flag(plain, "--mem-fraction-static") == "0.85" and "--enable-torch-compile" in plain
    assert flag(plain, "--max-running-requests") == flag(plain, "--cuda-graph-max-bs-decode") == "64"
    assert plain[-2:] == ["--attention-backend", "triton"]  # the user's own come last, so that they win
    flags = registry.get("sglang").build_speculation_flags(DRAFT, {})
    assert flag(flags, "--speculative-algorithm") == "EAGLE3"
    shape = [flag(flags, f"--speculative-{x}") for x in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert shape == ["5", "8", "32"]


def test_vllm_is_told_of_a_chain_in_json() -> None:
    setup = ServerSetup("vllm", "/models/t", "bfloat16", "cuda", False, 1, 0.9, 1000, 8, None, False, ())
    line = registry.get(setup.engine).build_setup_command(setup, 8000, ["/env/bin/vllm", "serve"])
    assert line[:3] == ["/env/bin/vllm", "serve", "/models/t"] and "--no-enable-prefix-caching" in line
    assert flag(line, "--num-gpu-blocks-override") == "63"  # of 16 tokens each, rounded up
    (_, flags) = registry.get("vllm").build_speculation_flags(
        ServedDraft("/d", "EAGLE3", TreeShape(5, 1, 6), EAGLE3), {}
    )
    assert json.loads(flags) == {"method": "eagle3", "model": "/d", "num_speculative_tokens": 5}


def test_llama_cpp_is_told_of_a_chain_and_of_n_grams() -> None:
    setup = ServerSetup("llama.cpp", "t.gguf", "float32", "cpu", False, 1, 0.9, None, 8, None, False, ())
    line = registry.get(setup.engine).build_setup_command(setup, 8000, ["/env/bin/llama-server"])
    assert line[:3] == ["/env/bin/llama-server", "-m", "t.gguf"] and flag(line, "--port") == "8000"
    draft = ServedDraft("d.gguf", "DSPARK", TreeShape(5, 1, 6), FAMILIES["dspark"])
    flags = registry.get("llama.cpp").build_speculation_flags(draft, {})
    assert [flag(flags, f"--spec-{name}") for name in ("type", "draft-n-max", "draft-p-min")] == [
        "draft-dspark",
        "5",
        "0",
    ]
    looked_up = ServedDraft("", "", parse_shape("n3_3_8"), FAMILIES["ngram"])
    flags = registry.get("llama.cpp").build_speculation_flags(looked_up, {})
    assert (flag(flags, "--spec-ngram-simple-size-n"), flag(flags, "--spec-ngram-simple-size-m")) == ("3", "8")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("n3_2_8", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2, "num_speculative_tokens": 8}),
        ("x24_8", {"method": "suffix", "suffix_decoding_max_tree_depth": 24, "num_speculative_tokens": 8}),
    ],
)
def test_vllm_is_told_of_what_it_looks_up(shape: str, expected: dict[str, Any]) -> None:
    draft = ServedDraft("", "", parse_shape(shape), FAMILIES[expected["method"]])
    flags = registry.get("vllm").build_speculation_flags(draft, {})
    assert json.loads(flag(flags, "--speculative-config")) == expected


@pytest.mark.parametrize(
    ("engine", "tree", "config", "problem"),
    [
        ("vllm", (5, 2, 8), {}, "topk 2"),
        ("llama.cpp", (5, 2, 8), {}, "llama.cpp drafts chains only, this tree has topk 2"),
        ("sglang", (8, 2, 8), {}, "num_steps \\+ 1 = 9, found 8"),
        ("sglang", (5, 1, 6), {"model_type": "qwen3"}, "no q/k norms"),
    ],
)
def test_what_an_engine_cannot_run_is_explained(
    engine: str, tree: tuple[int, int, int], config: dict[str, Any], problem: str
) -> None:
    assert re.search(problem, registry.get(engine).explain_unsupported(TreeShape(*tree), config) or "")
    assert registry.get(engine).explain_unsupported(TreeShape(5, 1, 6), {"model_type": "llama"}) is None


BLOCKS = {
    "DFLASH": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "sliding_window": None},
    "DSPARK": {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 7, "sliding_window": None},
}


def test_dflash2_needs_engines_that_know_it() -> None:
    """SGLang 0.5.17 skips its tensors in silence."""
    config = {"architectures": ["DFlash2DraftModel"], "block_size": 16}
    reason = registry.get("sglang").explain_old_version("0.5.17", config)
    assert reason == "sglang 0.5.17 does not know DFlash2DraftModel, expected 0.5.23 or later"
    changes = [registry.get(engine).find_change(config) for engine in ("sglang", "vllm", "llama.cpp")]
    assert [change and change.first_version for change in changes] == ["0.5.23", "0.33", None]
    assert "0.33 or later" in str(registry.get("vllm").explain_old_version("0.26.0", config))
    for engine, version in (("sglang", "0.5.23"), ("sglang", None), ("vllm", "0.33.0")):
        assert registry.get(engine).explain_old_version(version, config) is None
    assert registry.get("sglang").explain_old_version("0.5.17", {"architectures": ["DFlashDraftModel"]}) is None
    assert registry.get("sglang").find_change({"architectures": ["DFlashDraftModel"]}) is None
    assert registry.get("sglang").explain_unsupported(TreeShape(15, 1, 16), config) is None


@pytest.mark.parametrize(
    ("engine", "algorithm", "flags", "environment", "samples"),
    [
        ("sglang", "DSPARK", [], {}, True),
        ("sglang", "DSPARK", [], {"SGLANG_DSPARK_USE_GREEDY_DRAFT": "1"}, False),
        ("sglang", "DFLASH", [], {}, False),
        ("sglang", "DFLASH2", [], {}, True),
        ("sglang", "EAGLE3", ["--speculative-use-rejection-sampling"], {}, True),
        ("vllm", "DFLASH", ["--speculative-config", '{"draft_sample_method": "greedy"}'], {}, False),
        ("vllm", "DFLASH", ["--speculative-config", '{"draft_sample_method":"probabilistic"}'], {}, True),
        ("vllm", "DSPARK", ["--speculative-config.draft_sample_method", "probabilistic"], {}, True),
    ],
)
def test_whether_an_engine_samples_drafts(
    engine: str, algorithm: str, flags: list[str], environment: dict[str, str], samples: bool
) -> None:
    draft = ServedDraft("draft", algorithm.removesuffix("2"), TreeShape(7, 1, 8), FAMILIES[algorithm.lower()])
    assert registry.get(engine).samples_drafts(draft, flags, environment) == samples


@pytest.mark.parametrize("algorithm", BLOCKS)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_block_draft_is_launched_at_its_full_width_alone(engine: str, algorithm: str) -> None:
    """Both blocks draft 7 tokens: DFlash's first slot drafts nothing."""
    config = BLOCKS[algorithm]
    assert registry.get(engine).explain_unsupported(TreeShape(7, 1, 8), config) is None
    for tree, problem in (
        ((7, 2, 8), "engines verify chains only"),
        ((2, 2, 6), "this tree has topk 2"),
        ((6, 1, 7), "has 7 drafts and this chain 6.*take t7_1_8"),
        ((8, 1, 9), "has 7 drafts and this chain 8.*take t7_1_8"),
    ):
        assert re.search(problem, registry.get(engine).explain_unsupported(TreeShape(*tree), config) or "")
    draft = describe_draft("/d", config, TreeShape(7, 1, 8), "EAGLE3")
    flags = registry.get(engine).build_speculation_flags(draft, config)
    if engine == "sglang":
        assert flags == [
            "--speculative-algorithm", algorithm, "--speculative-draft-model-path", "/d",
            "--speculative-num-draft-tokens", "8",
        ]  # fmt: skip
    else:
        (name, text) = flags
        assert name == "--speculative-config"
        assert json.loads(text) == {"method": algorithm.lower(), "model": "/d", "num_speculative_tokens": 7}


GRAPHS = {"decode": {"backend": "full", "max_bs": 64, "bs": [1, 2, 4, 32]}}
TREE = {"speculative_num_steps": 5, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 32}


@pytest.mark.parametrize(
    ("info", "draft", "problem"),
    [
        ({"speculative_algorithm": None}, DRAFT, "speculative_algorithm None, expected EAGLE3"),
        ({"speculative_algorithm": "EAGLE3", **TREE, "speculative_num_steps": 3}, DRAFT, "num_steps 3, expected 5"),
        ({"context_length": 1000}, None, "context length is 1000 tokens, expected at least 1500"),
        ({"effective_max_running_requests_per_dp": 16, "max_running_requests": 64}, None, "at most 16 requests in one"),
        ({"cuda_graph_config": GRAPHS}, None, "at most 32 requests in its CUDA graphs"),
        ({"cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 8}}}, None, None),
        ({"cuda_graph_config": GRAPHS, "disable_cuda_graph": True}, None, None),
        ({}, DRAFT, None),  # vLLM says nothing of itself
    ],
)
def test_a_server_with_other_settings_is_refused(info: dict[str, Any], draft: Any, problem: str | None) -> None:
    if problem is None:
        registry.get("sglang").check_info(info, draft, 64, 1500)
        return
    with pytest.raises(ValueError, match=problem):
        registry.get("sglang").check_info(info, draft, 64, 1500)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.5.23", "--cuda-graph-max-bs-decode"),
        ("0.5.14", "--cuda-graph-max-bs-decode"),
        ("0.5.13.post1", "--cuda-graph-max-bs"),
    ],
)
def test_a_flag_has_the_name_that_its_version_knows(version: str | None, name: str) -> None:
    line = registry.get("sglang").build_setup_command(SETUP, 1, [], version)
    assert [word for word in line if word.startswith("--cuda-graph-max-bs")] == [name] and flag(line, name) == "64"


def test_an_environment_says_its_engines_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the program or of its Python, by a link or not; a program elsewhere is asked if it is a vLLM."""
    packages = tmp_path / "env/lib/python3.12/site-packages"
    (packages / "sglang-0.4.9.post6.dist-info").mkdir(parents=True)
    (packages / "sglang_kernel-0.4.5.dist-info").mkdir()
    (tmp_path / "env/bin").mkdir()
    for name in ("sglang", "python"):
        (tmp_path / f"env/bin/{name}").symlink_to(sys.executable)
        assert protocol.find_version("sglang", str(tmp_path / f"env/bin/{name}")) == "0.4.9.post6"
    assert protocol.find_version("sglang", str(tmp_path / "nowhere")) is None
    for output, version in (("INFO 11-23 starts\n0.26.0", "0.26.0"), ("no version here", None)):
        (tmp_path / "vllm").write_text(f"#!/bin/sh\nprintf '{output}\\n'\n")
        (tmp_path / "vllm").chmod(0o755)
        assert protocol.find_version("vllm", str(tmp_path / "vllm")) == version
    monkeypatch.setattr(protocol, "VERSION_TIMEOUT_S", 0.01)
    (tmp_path / "vllm").write_text("#!/bin/sh\nexec sleep 5\n")
    assert protocol.find_version("vllm", str(tmp_path / "vllm")) is None
