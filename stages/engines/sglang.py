"""SGLang: flags, its own protocol `/generate`, accepted drafts, what a server reports, and the vision patch of 0.5.17."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from stages.cells.cell import Memory
from stages.cells.request_record import AcceptanceCounts
from stages.engines import protocol
from stages.engines.http_session import ExchangeFailedError, HttpSession
from stages.engines.server_startup.sglang_vision_patch import PREFIX, TARGETS, VERSION
from stages.engines.sse import AnswerStream
from stages.params.families import ALGORITHMS, find_family
from stages.runtime.free_port import find_free_port

FLUSH_TIMEOUT_S = 30  # until a server is idle, so that it may drop its cache
SIMULATED_LENGTH, SIMULATED_METHOD = "SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"
# Before, --cuda-graph-max-bs, which 0.5.23 refuses as ambiguous.
DECODE_GRAPHS = protocol.Change("0.5.14", "--cuda-graph-max-bs-decode")
DFLASH2 = "DFlash2DraftModel"  # architecture
# Before, sliding layers are causal whatever is_causal says.
WINDOWS = protocol.Change("0.5.23", "is_causal: false of layers with a sliding window")
INFO_KEYS = (  # of /server_info, those that explain a measurement
    "version", "launch_command", "model_path", "dtype", "kv_cache_dtype", "attention_backend", "sampling_backend",
    "tp_size", "mem_fraction_static", "max_total_tokens", "max_running_requests", "context_length",
    "enable_torch_compile", "torch_compile_max_bs", "chunked_prefill_size", "page_size", "disable_radix_cache",
    "disable_cuda_graph", "cuda_graph_config", "speculative_algorithm", "speculative_draft_model_path",
    "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_draft_window_size",
)  # fmt: skip
STARTUP_FOLDER = Path(__file__).parent / "server_startup"
PATCH_CORRECTED = (0, 5, 23)  # read from its source: it needs no patch
SWITCH = "benchmark_served.servers.sglang.vision_patch"  # of params.yaml, for messages


class SGLang(protocol.ServingEngine):
    name = "sglang"
    owned_by = "sglang"
    variables = "SGLANG_"
    serve_words = ("serve", "--model-path")
    takes_images = True
    accept_length = "spec_accept_length"
    drafts = {DFLASH2: protocol.Change("0.5.23", DFLASH2)}  # noqa: RUF012 - before, its tensors are skipped

    def list_start_flags(self, device: str) -> dict[str, Any]:
        """SGLang's processes meet on a port of their own, which it would take from the kernel and bind a minute later: of eleven
        servers that started at once, one found it in use.
        """
        return {"--nccl-port": find_free_port(), "--sampling-defaults": "openai"}

    def list_setup_flags(self, setup: protocol.ServerSetup, version: str | None) -> dict[str, Any]:
        return {
            "--tp-size": setup.tp,
            "--mem-fraction-static": _share_gpu_memory(setup),
            "--max-total-tokens": setup.max_total_tokens,
            "--max-running-requests": setup.max_batch,
            DECODE_GRAPHS.feature if DECODE_GRAPHS.is_in(version) else "--cuda-graph-max-bs": setup.max_batch,
            "--context-length": setup.context_length,
            "--enable-torch-compile": setup.torch_compile,
            "--sleep-on-idle": True,  # a server that waits for its turn would poll with a core beside the measured one
        }

    def build_patch_environment(self) -> dict[str, str]:
        """Return the variables that load the patch into every Python process of a server."""
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        return {"PYTHONPATH": os.pathsep.join([str(STARTUP_FOLDER), *inherited]), "AERIE_SGLANG_PATCH": "vision"}

    def describe_patch(self, log: Path, version: str) -> str | None:
        if version != VERSION:
            if protocol.parse_release(version) >= PATCH_CORRECTED:
                return None
            return (
                f"SGLang {version} was not patched, and may give the draft of a multimodal target wrong embeddings and "
                f"positions, as {VERSION} does: compare tau with the replayed one (docs/serving.md)"
            )
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        applied = {line.rpartition(" ")[2] for line in lines if line.startswith(f"{PREFIX} applied to ")}
        if missing := sorted(TARGETS.keys() - applied):
            raise ValueError(
                f"SGLang {version} was to run with the vision patch, found no line of {log} for {', '.join(missing)}; its Python "
                f"must read PYTHONPATH (no -I or -E in benchmark_served.servers.sglang.command), or set {SWITCH}: false"
            )
        return f"drafted with the vision patch of SGLang {VERSION} ({SWITCH}; docs/serving.md)"

    def explain_draft(self, config: protocol.Info) -> str | None:
        if config.get("model_type") == "qwen3" and not find_family(config).is_block:
            return "SGLang's EAGLE-3 draft has no q/k norms, and this one does"
        return None

    def find_change(self, config: protocol.Info) -> protocol.Change | None:
        windows = config.get("use_sliding_window") and config.get("is_causal") is False
        return super().find_change(config) or (WINDOWS if windows else None)

    def build_speculation_flags(self, draft: protocol.ServedDraft, config: protocol.Info) -> list[str]:
        # Of EAGLE-3 SGLang ignores the key of config.json; its flag does not count the query itself.
        window = None if draft.family.is_block else config.get("sliding_window")
        settings = _list_settings(draft) | {"speculative_draft_window_size": window and window - 1}
        return protocol.format_flags({f"--{key.replace('_', '-')}": value for key, value in settings.items()})

    def samples_drafts(self, draft: protocol.ServedDraft, flags: Sequence[str], environment: Mapping[str, str]) -> bool:
        """DFlash2 does, DSPARK unless told otherwise, the other algorithms if told."""
        if draft.family.architecture == DFLASH2:
            return True
        if draft.algorithm == "DSPARK":
            return environment.get("SGLANG_DSPARK_USE_GREEDY_DRAFT", "").lower() not in ("1", "true", "yes", "on")
        return "--speculative-use-rejection-sampling" in flags

    def simulate_acceptance(self, length: float, flags: list[str]) -> tuple[list[str], dict[str, str]]:
        """All requests of a batch accept the same number in a cycle, one of the two integers around the given one; every token is
        id 100, and tokens never end an answer with `ignore_eos` (0.5.17 and 0.5.23, speculative/spec_utils.py:
        generate_simulated_accept_index).
        """
        return flags, {SIMULATED_LENGTH: f"{length:g}", SIMULATED_METHOD: "match-expected"}

    def list_simulating(self, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
        return [name for name in (SIMULATED_LENGTH, SIMULATED_METHOD) if environment.get(name)]

    async def fetch_info(self, http: HttpSession, url: str) -> dict[str, Any]:
        found = await protocol.fetch_json(http, url, "/server_info")
        state = (found.get("internal_states") or [{}])[0]
        info = {key: found[key] for key in INFO_KEYS if key in found}
        return info | {
            key: state[key] for key in ("memory_usage", "effective_max_running_requests_per_dp") if key in state
        }

    def read_memory(self, info: protocol.Info) -> Memory:
        used = info.get("memory_usage") or {}
        return Memory(weights=used.get("weight"), kv_cache=used.get("kvcache"), kv_tokens=used.get("token_capacity"))

    def list_reported_settings(self, draft: protocol.ServedDraft | None) -> dict[str, Any]:
        settings = _list_settings(draft) if draft else {"speculative_algorithm": None}
        # Of a server that was running, the draft may lie elsewhere.
        return {key: value for key, value in settings.items() if key != "speculative_draft_model_path"}

    def read_max_graph_batch(self, info: protocol.Info) -> int | None:
        decode = (info.get("cuda_graph_config") or {}).get("decode") or {}
        if info.get("disable_cuda_graph") or decode.get("backend") == "disabled":
            return None
        captured = decode.get("bs") or []
        return max(captured) if captured else decode.get("max_bs")

    def build_request(self, request: protocol.LoadRequest, model: str) -> protocol.BuiltRequest:
        """Return a request of its own protocol: only there it reports accepted drafts."""
        sampling = {
            "max_new_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
            **request.extensions,
        }  # fmt: skip
        body = {"input_ids": request.prompt, "sampling_params": sampling, "stream": True, **request.engine_fields}
        return protocol.BuiltRequest("/generate", orjson.dumps(body), read_generate)

    async def begin_load(self, http: HttpSession, url: str) -> None:
        """Flush the cache, so that no prompt finds its beginning there and its own averages are of this load."""
        path, within_s = f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", FLUSH_TIMEOUT_S + 10
        try:
            reply = await http.send(url, "POST", path, within_s=within_s)
        except ExchangeFailedError as error:
            raise ValueError(f"{url} did not flush its cache: {error}; see to the server and run again") from None
        if reply.status != 200:
            raise ValueError(
                f"{url} did not flush its cache: HTTP {reply.status} {reply.excerpt()}; expected no running requests after the "
                "warm-up. Does another client use it?"
            )

    async def fetch_figures(self, http: HttpSession, url: str) -> dict[str, Any]:
        """Return the mean accept length since the flush, if it speculates. It lags, unless --decode-log-interval is 1."""
        try:
            state = (await protocol.fetch_json(http, url, "/server_info"))["internal_states"][0]
        except (ExchangeFailedError, KeyError, IndexError, TypeError):
            return {}
        length = state.get("avg_spec_accept_length")
        return {} if length is None else {"avg_spec_accept_length": length}

    def count_request(
        self, figures: protocol.Info, output_tokens: int, num_steps: int | None
    ) -> AcceptanceCounts | None:
        # The second is the older name.
        histogram = figures.get("spec_correct_drafts_histogram") or figures.get("spec_accept_histogram")
        prefills = 1 + figures.get("num_retractions", 0)  # after a retraction another prefill yields a token again
        if not histogram:
            return super().count_request(figures, output_tokens - prefills + 1, num_steps)
        protocol.check_sums("spec_verify_ct", figures.get("spec_verify_ct", sum(histogram)), sum(histogram))
        return protocol.leave_out_cut(histogram, prefills, output_tokens)

    def list_sampling_fields(self, options: protocol.SamplingOptions) -> protocol.Body:
        return {**protocol.PLAIN_SAMPLING, "return_token_ids": True}  # from 0.5.17 on; older versions ignore it


def _share_gpu_memory(setup: protocol.ServerSetup) -> float:
    """Return a server's share of a GPU's memory; the share of all servers that fit on it, where the cache's size is given.

    SGLang refuses to start if less than 1 - share of what was free before loading is free after it, so the weights and caches
    that other servers allocate meanwhile count as its own (kv_cache_configurator.py, 0.5.17).
    """
    if setup.max_total_tokens is None:
        return setup.mem_fraction
    return max(setup.mem_fraction, min(0.9, round(setup.mem_fraction * setup.count_fitting(), 6)))


def _list_settings(draft: protocol.ServedDraft) -> dict[str, Any]:
    """Return the settings of a draft, which are flags, and keys of what a server reports."""
    named = {"speculative_algorithm": draft.algorithm, "speculative_draft_model_path": draft.folder}
    width = {"speculative_num_draft_tokens": draft.shape.num_draft_tokens}
    if draft.algorithm in ALGORITHMS:  # SGLang sets num_steps and topk of a block to 1 itself
        return named | width
    return named | {"speculative_num_steps": draft.shape.num_steps, "speculative_eagle_topk": draft.shape.topk} | width


def read_generate(stream: AnswerStream, message: dict[str, Any], now: float) -> None:
    """Read a message of `/generate`."""
    r, meta = stream.record, message["meta_info"]
    ids, text, total = message.get("output_ids") or [], message.get("text") or "", meta["completion_tokens"]
    stream.record_tokens(total, now)
    # All ids so far, or with --incremental-streaming-output the new ones.
    r.text, r.ids = (text, ids) if len(ids) == total else (r.text + text, r.ids + ids)
    r.input_tokens = meta["prompt_tokens"]
    if reason := meta.get("finish_reason"):
        r.finish_reason, r.engine_meta = reason["type"], meta
        if r.finish_reason == "abort":
            raise ExchangeFailedError("aborted", str(reason.get("message")))
