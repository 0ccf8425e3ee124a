"""vLLM: flags, accepted drafts of each request (0.30 and later), what a server tells in its log, its variables on a CPU."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from stages.cells.request_record import AcceptanceCounts
from stages.engines import protocol
from stages.engines.http_session import HttpSession
from stages.engines.sse import AnswerStream
from stages.params.tree_shape import NamedShape

OLDEST = (0, 30)
BLOCK_TOKENS = 16  # tokens of a block of its KV cache
CONFIG_FLAG = "--speculative-config"
# Of its own families, the keys of the first numbers of a shape.
OWN_SIZES = {"ngram": ("prompt_lookup_max", "prompt_lookup_min"), "suffix": ("suffix_decoding_max_tree_depth",)}
METHOD_KEY, LENGTH_KEY = "rejection_sample_method", "synthetic_acceptance_length"
# As JSON, also escaped, or as a dotted flag; elsewhere the word is a folder's name.
SIMULATES = re.compile(METHOD_KEY + r"""["'\\\s:=]+synthetic""")
LOG_FACTS = {  # what it tells in its log only (0.26 to 0.33)
    "attention_backend": r"Using (\w+) (?:attention )?backend",
    "model_runner": r"Using (V[12]) [Mm]odel [Rr]unner",
}


class VLLM(protocol.ServingEngine):
    name = "vllm"
    owned_by = "vllm"
    variables = "VLLM_"
    counting_flags = ("--per-request-spec-decode-metrics", "summary")  # which a server without a draft refuses
    accept_length = "mean_acceptance_length"
    drafts = {"DFlash2DraftModel": protocol.Change("0.33", "DFlash2DraftModel")}  # noqa: RUF012 - before, the server does not start

    def list_start_flags(self, device: str) -> dict[str, Any]:
        return {"--generation-config": "vllm"}

    def list_setup_flags(self, setup: protocol.ServerSetup, version: str | None) -> dict[str, Any]:
        """It always compiles; prompts of the warm-up must not be in its prefix cache."""
        tokens = setup.max_total_tokens
        return {
            "--tensor-parallel-size": setup.tp,
            "--gpu-memory-utilization": setup.mem_fraction,
            "--no-enable-prefix-caching": True,
            "--num-gpu-blocks-override": tokens and -(-tokens // BLOCK_TOKENS),
            "--max-num-seqs": setup.max_batch,
            "--max-model-len": setup.context_length,
        }

    def build_cpu_environment(self, num_threads: int, cache_bytes: int) -> dict[str, str]:
        """Return what the user does not set: by itself it takes half the memory for its cache."""
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
        own = {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(2 * cache_bytes / 2**30)),  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
        return {name: value for name, value in own.items() if name not in os.environ}

    def check_version(self, version: str | None) -> None:
        """Raise ValueError for one that does not report the accepted drafts of each request."""
        if () < protocol.parse_release(version or "") < OLDEST:
            raise ValueError(f"vLLM {version} does not count accepted drafts by request, expected 0.30 or later; install that "
                             "(make serving-env), or name another server in benchmark_served.servers.vllm")  # fmt: skip

    def build_speculation_flags(self, draft: protocol.ServedDraft, config: protocol.Info) -> list[str]:
        shape, method = draft.shape, {"method": draft.algorithm.lower(), "model": draft.folder}
        more: dict[str, Any] = {"parallel_drafting": True} if draft.family.drafts_in_parallel else {}
        if isinstance(shape, NamedShape):  # suffix decoding is that of arctic-inference, to be installed beside it
            method = {"method": draft.family.name}
            more = dict(zip(OWN_SIZES[draft.family.name], shape.numbers, strict=False))
        return [CONFIG_FLAG, json.dumps(method | more | {"num_speculative_tokens": shape.num_steps})]

    def samples_drafts(self, draft: protocol.ServedDraft, flags: Sequence[str], environment: Mapping[str, str]) -> bool:
        """It does so if told by draft_sample_method."""
        return re.search(r"draft_sample_method\W+probabilistic", " ".join(flags)) is not None

    def simulate_acceptance(self, length: float, flags: list[str]) -> tuple[list[str], dict[str, str]]:
        """By two keys of --speculative-config (config/speculative.py: synthetic_acceptance_length)."""
        index = flags.index(CONFIG_FLAG) + 1
        config = json.loads(flags[index]) | {METHOD_KEY: "synthetic", LENGTH_KEY: length}
        return [*flags[:index], json.dumps(config), *flags[index + 1 :]], {}

    def list_simulating(self, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
        return ["synthetic in the server's command"] if SIMULATES.search(" ".join(command).replace("-", "_")) else []

    async def fetch_info(self, http: HttpSession, url: str) -> dict[str, Any]:
        return await protocol.fetch_json(http, url, "/version")

    def read_log(self, log: str) -> dict[str, str]:
        found = {name: re.search(pattern, log) for name, pattern in LOG_FACTS.items()}
        return {name: match[1] for name, match in found.items() if match}

    def build_request(self, request: protocol.LoadRequest, model: str) -> protocol.BuiltRequest:
        body = {
            "model": model, "prompt": request.prompt, "max_tokens": request.max_tokens,
            "temperature": request.temperature, "top_p": request.top_p, **request.extensions,
            "return_token_ids": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}, **request.engine_fields,
        }  # fmt: skip
        return protocol.BuiltRequest("/v1/completions", orjson.dumps(body), read_completion)

    def count_request(
        self, figures: protocol.Info, output_tokens: int, num_steps: int | None
    ) -> AcceptanceCounts | None:
        if "num_spec_steps" not in figures:
            return super().count_request(figures, output_tokens, num_steps)
        histogram = figures["acceptance_histogram"]
        protocol.check_sums("num_spec_steps", figures["num_spec_steps"], sum(histogram))
        protocol.check_sums(
            "num_accepted_draft_tokens", figures["num_accepted_draft_tokens"], protocol.sum_accepted(histogram)
        )
        # Steps that had no draft to verify, of one token each, are not counted.
        missing = output_tokens - (1 + protocol.sum_accepted(histogram) + sum(histogram))
        if missing > 0:
            first, *others = histogram or [0]
            histogram = [first + missing, *others]
        return protocol.leave_out_cut(histogram, 1, output_tokens)

    def list_sampling_fields(self, options: protocol.SamplingOptions) -> protocol.Body:
        """tool_choice "none" leaves a call as text, as wanted here; for SGLang it removes the tools from the prompt."""
        as_text = {"tool_choice": "none"} if options.has_tools else {}
        return {**protocol.PLAIN_SAMPLING, **as_text, "return_token_ids": True}


def read_completion(stream: AnswerStream, message: dict[str, Any], now: float) -> None:
    """Read a message of `/v1/completions`; the last one, without choices, has the figures of the request."""
    r, usage = stream.record, message["usage"]
    for choice in message["choices"]:
        r.text, r.ids = r.text + choice["text"], r.ids + (choice.get("token_ids") or [])
        r.finish_reason = choice.get("finish_reason") or r.finish_reason
    r.input_tokens = usage["prompt_tokens"]
    stream.record_tokens(usage["completion_tokens"], now)
    r.engine_meta |= (message.get("metrics") or {}).get("speculative_decoding") or {}
