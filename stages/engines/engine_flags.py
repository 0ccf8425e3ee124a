"""SGLang, vLLM and llama.cpp as measured engines: command lines, unsupported configurations, and what a server reports of itself.

Flags are those of SGLang 0.5.17, vLLM 0.30 and llama.cpp 0c1e57098 and later, read from their sources; versions.py has
what other versions call otherwise. `server.build_server_command` has the flags that sampling needs; this module adds those of
speculation and measuring.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.engines import server, versions
from stages.engines.http_session import ExchangeFailedError, HttpSession
from stages.params.families import ALGORITHMS, DFLASH2, DSPARK, EAGLE3, NGRAM, DraftFamily, DraftKind, find_family
from stages.params.tree_shape import NamedShape, TreeShape

VLLM_BLOCK_TOKENS = 16  # tokens of a block of vLLM's KV cache


@dataclass(frozen=True)
class ServedDraft:
    """A draft and its tree, as an engine's flags name them."""

    folder: str
    algorithm: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    family: DraftFamily
    ngram: int = 0  # tokens that n-gram lookup looks up


@dataclass(frozen=True)
class ServerSetup:
    """A server's configuration without the draft, shared by a cell and its baseline.

    The field names are keys of the cell's fingerprint on disk.
    """

    engine: str
    folder: str  # the target
    dtype: str
    device: str
    trust_remote_code: bool
    tp: int
    mem_fraction: float
    max_total_tokens: int | None
    max_batch: int | None
    context_length: int | None  # null: the target's own
    torch_compile: bool
    more: tuple[str, ...]  # further flags
    quantised: str | None = None  # GGUF type of target and draft, for llama.cpp; None: `dtype`

    def build_flags(self, version: str | None = None) -> list[str]:
        """Return the flags beyond those of `server.build_server_command`, for a version of the engine; None: the newest."""
        batch, tokens = self.max_batch, self.max_total_tokens
        renamed = versions.has_change("decode graphs", "sglang", version)
        flags = {
            "sglang": {
                "--tp-size": self.tp,
                "--mem-fraction-static": self._share_gpu_memory(),
                "--max-total-tokens": tokens,
                "--max-running-requests": batch,
                "--cuda-graph-max-bs-decode" if renamed else "--cuda-graph-max-bs": batch,
                "--context-length": self.context_length,
                "--enable-torch-compile": self.torch_compile,
                "--sleep-on-idle": True,  # a server that waits for its turn would poll with a core beside the measured one
            },
            "vllm": {  # it always compiles; prompts of the warm-up must not be in its prefix cache
                "--tensor-parallel-size": self.tp,
                "--gpu-memory-utilization": self.mem_fraction,
                "--no-enable-prefix-caching": True,
                "--num-gpu-blocks-override": tokens and -(-tokens // VLLM_BLOCK_TOKENS),
                "--max-num-seqs": batch,
                "--max-model-len": self.context_length,
            },
            "llama.cpp": {},  # ServerPlan.build_slot_flags
        }[self.engine]
        return [*server.format_flags(flags), *self.more]

    def _share_gpu_memory(self) -> float:
        """Return SGLang's share of a GPU's memory; the share of all servers that fit on it, where the cache's size is given.

        SGLang refuses to start if less than 1 - share of what was free before loading is free after it, so the weights and caches
        that other servers allocate meanwhile count as its own (kv_cache_configurator.py, 0.5.17).
        """
        if self.max_total_tokens is None:
            return self.mem_fraction
        return max(self.mem_fraction, min(0.9, round(self.mem_fraction * self.count_fitting(), 6)))

    def count_fitting(self) -> int:
        """Return how many servers of `mem_fraction` fit on a GPU."""
        return max(1, int(1 / self.mem_fraction + 1e-9))


def describe_draft(folder: str, config: dict[str, Any], shape: TreeShape, algorithm: str) -> ServedDraft:
    """Return the draft of a config.json in `folder`; `algorithm`, which benchmark_served.server names, is of EAGLE-3 drafts."""
    family, ngram = find_family(config), shape.numbers[0] if isinstance(shape, NamedShape) else 0
    sizes = shape.num_steps, shape.topk, shape.num_draft_tokens
    return ServedDraft(folder, family.algorithm or algorithm, *sizes, family, ngram)


def find_first_version(engine: str, config: dict[str, Any]) -> str | None:
    """Return the first version of an engine that knows a draft of that config.json; None where all that aerie starts do."""
    change = _find_change(engine, config)
    return ".".join(map(str, versions.CHANGES[change].since)) if change else None


def _find_change(engine: str, config: dict[str, Any]) -> str | None:
    if find_family(config) is DFLASH2 and engine != "llama.cpp":
        return f"DFlash2 in {engine}"
    is_early = config.get("use_sliding_window") and config.get("is_causal") is False and engine == "sglang"
    return "is_causal of windows in sglang" if is_early else None


def explain_old_version(engine: str, version: str | None, config: dict[str, Any]) -> str | None:
    """Return why this version of an engine does not know a draft of that config.json; None if it does, or is not known."""
    change = _find_change(engine, config)
    if change is None or versions.has_change(change, engine, version):
        return None
    feature, first_version = versions.CHANGES[change].feature, find_first_version(engine, config)
    return f"{engine} {version} does not know {feature}, expected {first_version} or later"


def samples_drafts(
    engine: str, draft: ServedDraft, flags: Sequence[str], environment: Mapping[str, str], top_k: int | None
) -> bool:
    """Return whether an engine samples drafts above temperature 0 and verifies them by the ratio of both probabilities.

    vLLM does so if told by draft_sample_method; SGLang with DFlash2 does, and with DSPARK unless told otherwise, its other
    algorithms if told; neither for requests of top_k 1. `flags` are those of the server, `environment` its variables.
    """
    if top_k == 1 or engine == "llama.cpp":
        return False
    if engine == "vllm":
        return re.search(r"draft_sample_method\W+probabilistic", " ".join(flags)) is not None
    if draft.family is DFLASH2:
        return True
    if draft.family is DSPARK:
        return environment.get("SGLANG_DSPARK_USE_GREEDY_DRAFT", "").lower() not in ("1", "true", "yes", "on")
    return "--speculative-use-rejection-sampling" in flags


def explain_unsupported(engine: str, shape: TreeShape, config: dict[str, Any]) -> str | None:
    """Return why an engine can't run a tree with a draft of that config.json; None if it can."""
    family = find_family(config)
    depth = family.count_drafts(config["block_size"]) if family.is_block else None
    if reason := DraftKind(family, depth).explain_unserved(engine, shape):
        return reason
    if engine == "sglang" and family is EAGLE3 and config.get("model_type") == "qwen3":
        return "SGLang's EAGLE-3 draft has no q/k norms, and this one does (init_draft.qk_norm)"
    if engine == "llama.cpp" and config.get("use_sliding_window") and config.get("is_causal") is None:
        return "llama.cpp runs all layers of a block draft as causal or none, and here those with a sliding window alone are"
    return None


def build_speculation_flags(engine: str, draft: ServedDraft, config: dict[str, Any]) -> list[str]:
    """Return the flags of speculative decoding; `config` is the draft's config.json."""
    if engine == "vllm":
        fields = {"method": draft.algorithm.lower(), "model": draft.folder, "num_speculative_tokens": draft.num_steps}
        return ["--speculative-config", json.dumps(fields)]
    if draft.family is NGRAM:
        sizes = {"--spec-ngram-simple-size-n": draft.ngram, "--spec-ngram-simple-size-m": draft.num_steps}
        return ["--spec-type", "ngram-simple", *server.format_flags(sizes)]
    if engine == "llama.cpp":  # by default it drafts no token that the draft is unsure of, which replay does not know
        kind = ["--spec-type", f"draft-{draft.algorithm.lower()}", "--spec-draft-p-min", "0"]
        return [*kind, "--spec-draft-n-max", str(draft.num_steps), "--spec-draft-model", draft.folder]
    # Of EAGLE-3 SGLang ignores the key; its flag does not count the query itself.
    window = None if draft.family.is_block else config.get("sliding_window")
    settings = _list_sglang_settings(draft) | {"speculative_draft_window_size": window and window - 1}
    return server.format_flags({f"--{key.replace('_', '-')}": value for key, value in settings.items()})


def _list_sglang_settings(draft: ServedDraft) -> dict[str, Any]:
    """Return SGLang's settings of a draft, which are its flags, and keys of what it reports."""
    named = {"speculative_algorithm": draft.algorithm, "speculative_draft_model_path": draft.folder}
    width = {"speculative_num_draft_tokens": draft.num_draft_tokens}
    if draft.algorithm in ALGORITHMS:  # SGLang sets num_steps and topk of a block to 1 itself
        return named | width
    return named | {"speculative_num_steps": draft.num_steps, "speculative_eagle_topk": draft.topk} | width


def build_setup_command(setup: ServerSetup, port: int, program: list[str], version: str | None = None) -> list[str]:
    """Return the command line of a server without a draft, for a version of the engine; None: the newest.

    `program`, if not empty, replaces the engine's own.
    """
    command = server.build_server_command(
        setup.engine, setup.folder, port, setup.dtype, setup.device, setup.trust_remote_code
    )
    own = 1 if setup.engine == "llama.cpp" else 2  # llama-server, sglang serve, vllm serve
    return [*(program or command[:own]), *command[own:], *setup.build_flags(version)]


# What a server reports of itself

SERVER_INFO_KEYS = (  # of SGLang's /server_info, those that explain a measurement
    "version", "launch_command", "model_path", "dtype", "kv_cache_dtype", "attention_backend", "sampling_backend", "tp_size",
    "mem_fraction_static",
    "max_total_tokens", "max_running_requests", "context_length", "enable_torch_compile", "torch_compile_max_bs",
    "chunked_prefill_size", "page_size", "disable_radix_cache", "disable_cuda_graph", "cuda_graph_config",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "speculative_draft_window_size",
)  # fmt: skip


async def fetch_server_info(http: HttpSession, url: str, engine: str) -> dict[str, Any]:
    """Return what the server reports, by its own names. Raises ExchangeFailedError if it can't be asked."""
    reply = await http.send(url, "GET", {"vllm": "/version", "llama.cpp": "/props"}.get(engine, "/server_info"))
    found = _parse_json(reply.body) if reply.status == 200 else {}
    if engine == "vllm":
        return found
    if engine == "llama.cpp":
        facts = {"version": "build_info", "max_running_requests": "total_slots", "weights": "model_ftype"}
        context = (found.get("default_generation_settings") or {}).get("n_ctx")
        return {"context_length": context} | {name: found[key] for name, key in facts.items() if key in found}
    state = (found.get("internal_states") or [{}])[0]
    info = {key: found[key] for key in SERVER_INFO_KEYS if key in found}
    return info | {key: state[key] for key in ("memory_usage", "effective_max_running_requests_per_dp") if key in state}


# What vLLM tells in its log only (0.26 to 0.33).
VLLM_LOG_FACTS = {
    "attention_backend": r"Using (\w+) (?:attention )?backend",
    "model_runner": r"Using (V[12]) [Mm]odel [Rr]unner",
}


def read_vllm_log(log: str) -> dict[str, str]:
    """Return what vLLM's log says of how it computes, by our names."""
    found = {name: re.search(pattern, log) for name, pattern in VLLM_LOG_FACTS.items()}
    return {name: match[1] for name, match in found.items() if match}


def list_engine_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that steer an engine. What may be a secret is left out."""
    secret = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(("SGLANG_", "VLLM_", "LLAMA_ARG_")) and not any(word in name for word in secret)
    }


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError as error:
        raise ExchangeFailedError("malformed", f"no JSON of what it is ({error})") from None
    return found if isinstance(found, dict) else {}


def check_server_info(
    info: dict[str, Any], draft: ServedDraft | None, concurrency: int | None, needed_tokens: int
) -> None:
    """Check by its report that a server is the one meant; what it doesn't report is not checked (vLLM).

    Raises:
        ValueError: if it runs another tree or another algorithm, or can't hold the requests: in a measurement each would
            look like a slow draft.
    """
    expected = _list_sglang_settings(draft) if draft else {"speculative_algorithm": None}
    expected.pop("speculative_draft_model_path", None)  # of a server that was running, elsewhere
    for key, value in expected.items():
        if key in info and info[key] != value:
            raise ValueError(
                f"the server reports {key} {info[key]}, expected {value}; start it with this cell's flags, or correct "
                "benchmark_served.server.base_urls"
            )
    context = info.get("context_length")
    if isinstance(context, int) and context < needed_tokens:
        raise ValueError(
            f"the server's context length is {context} tokens, expected at least {needed_tokens} (the longest prompt, its "
            "answer and a tree); raise --context-length, or max_position_embeddings of target or draft, or ask for less"
        )
    max_batch = info.get("effective_max_running_requests_per_dp", info.get("max_running_requests"))
    for limit, resource, key in (
        (max_batch, "one batch", "--max-running-requests"),
        (_read_max_graph_batch(info), "its CUDA graphs", "--cuda-graph-max-bs-decode"),
    ):
        if concurrency is not None and isinstance(limit, int) and limit < concurrency:
            raise ValueError(
                f"the server takes at most {limit} requests in {resource}, expected {concurrency}, the workload's concurrency: "
                f"beyond it they wait or run many times slower; raise benchmark_served.server.max_batch (or {key})"
            )


def _read_max_graph_batch(info: dict[str, Any]) -> int | None:
    """Return the largest batch with CUDA graphs; None if it uses none, or doesn't report it."""
    decode = (info.get("cuda_graph_config") or {}).get("decode") or {}
    if info.get("disable_cuda_graph") or decode.get("backend") == "disabled":
        return None
    captured = decode.get("bs") or []
    return max(captured) if captured else decode.get("max_bs")


@dataclass(frozen=True)
class ReportedMemory:
    """Memory as a server reports it; None for what it doesn't report."""

    weights: float | None  # GiB
    kv_cache: float | None  # GiB
    kv_tokens: int | None  # that the cache holds


def read_server_memory(info: dict[str, Any]) -> ReportedMemory:
    used = info.get("memory_usage") or {}
    return ReportedMemory(used.get("weight"), used.get("kvcache"), used.get("token_capacity"))
