"""A double of SGLang and vLLM: their command lines and their HTTP, with our own torch engine behind, on a CPU.

    python -m tests.engines.engine_double serve --model-path TARGET --port P [SGLang's flags]
    python -m tests.engines.engine_double vllm serve TARGET --port P [vLLM's flags]

It really drafts and verifies, so what it says of accepted drafts is true. SGLang's answers are those that 0.5.17 gave on a GPU
(recorded/sglang-0.5.17.json), with this server's own numbers in them; vLLM's have the fields of 0.30's source. One request at
a time. What it doesn't copy: batching, sampling.
"""

import argparse
import asyncio
import base64
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

FORK_VARIABLE = "AERIE_TEST_FORK_SERVER"


def fork() -> None:
    """Go on in a fork of tests/conftest.py's process that has imported torch, if the tests name it."""
    if address := os.environ.pop(FORK_VARIABLE, None):
        from stages.telemetry import fork_server

        fork_server.run_module_forked(address, "tests.engines.engine_double", sys.argv[1:])


if __name__ == "__main__":  # before the imports, which take half a second
    fork()

from aiohttp import web  # noqa: E402

from stages.engines.server_startup import sglang_vision_patch  # noqa: E402

RECORDED = json.loads((Path(__file__).parent / "recorded/sglang-0.5.17.json").read_text())


def parse_arguments(words: list[str]) -> argparse.Namespace:
    engine = "vllm" if words[0] == "vllm" else "sglang"
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-draft-model-path")
    for name in ("num-steps", "eagle-topk", "num-draft-tokens"):
        parser.add_argument(f"--speculative-{name}", type=int)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--model-path")
    parser.add_argument("--max-running-requests", type=int, default=48)
    parser.add_argument("--cuda-graph-max-bs-decode", type=int)
    parser.add_argument("--max-total-tokens", type=int, default=100_000)
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--per-request-spec-decode-metrics", choices=("none", "summary", "detailed"))
    parser.add_argument("--fail-at-start", action="store_true")
    found, _ = parser.parse_known_args(words[2:] if engine == "vllm" else words)
    found.engine = engine
    if engine == "vllm":
        found.model_path = words[2]
        if found.per_request_spec_decode_metrics and not found.speculative_config:
            parser.error("--per-request-spec-decode-metrics needs --speculative-config")  # 0.33 config/vllm.py:1735
        if spec := found.speculative_config:
            found.speculative_algorithm, found.speculative_draft_model_path = (spec["method"].upper(), spec["model"])
            found.speculative_num_steps, found.speculative_eagle_topk = spec["num_speculative_tokens"], 1
            found.speculative_num_draft_tokens = spec["num_speculative_tokens"] + 1
    found.depth = (
        found.speculative_num_steps or (found.speculative_num_draft_tokens or 1) - 1
    )  # drafts of a chain of blocks
    return found


def is_block_algorithm(flags: argparse.Namespace) -> bool:
    return flags.speculative_algorithm in ("DFLASH", "DSPARK")


def load_engine(flags: argparse.Namespace) -> Any:
    """Loaded when the first answer is asked for: a server that will be refused for its flags needs no torch."""
    import torch

    from stages.engine.decode import Engine
    from stages.families import draft_decoding, family
    from stages.target import loading, manifest

    torch.set_num_threads(1)
    target, drafter = manifest.read_manifest(), None
    model = loading.load_target(flags.model_path, "float32", "cpu", False)
    if flags.speculative_draft_model_path:
        folder, head = Path(flags.speculative_draft_model_path).parent, model.get_output_embeddings().weight
        files = family.get_files(family.find_family(folder, "its stage"))
        draft = files.read(folder, "its stage", target, head).freeze(head.device, model.dtype)
        drafter = draft_decoding.build_drafter(draft, model)
    return Engine(model, target.eos_token_ids, drafter, target.logits_scale)


class Double:
    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.speculates = bool(flags.speculative_draft_model_path)
        self.turn = asyncio.Lock()
        self.simulated = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", 0)) if flags.engine == "sglang" else 0.0
        self.reset_counters()

    @cached_property
    def engine(self) -> Any:
        return load_engine(self.flags)

    def reset_counters(self) -> None:
        """Start the counters again, as SGLang's /flush_cache does."""
        self.drafts = self.accepted = 0

    @cached_property
    def image_processor(self) -> Any:
        from stages.target.vision import CachedImageProcessor

        return CachedImageProcessor(self.flags.model_path, False)

    def expand_prompt(self, ids: list[int], urls: list[str]) -> tuple[list[int], Any]:
        """Return a rendered prompt's ids with each image token repeated as in the target, and the images' patches."""
        from stages.target.vision import expand_image_tokens

        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/{index}" for index in range(len(urls))]
            for path, url in zip(paths, urls, strict=True):
                Path(path).write_bytes(base64.b64decode(url.partition(",")[2]))
            return expand_image_tokens(
                ids, self.image_processor.image_token_id, self.image_processor.count_image_tokens(paths)
            ), self.image_processor.load_patches(paths)

    def start_decoding(self, ids: list[int], max_tokens: int, pictures: Any) -> Iterator[Any]:
        f = self.flags
        if (
            not self.speculates or f.speculative_algorithm == "EAGLE"
        ):  # without its fusion an EAGLE-3 draft drafts nonsense
            return self.engine.decode_plain(ids, max_tokens, pictures)
        from stages.params.tree_shape import TreeShape

        tree = TreeShape(f.depth, f.speculative_eagle_topk or 1, f.speculative_num_draft_tokens)
        return self.engine.decode_speculative(ids, max_tokens, tree, pictures)

    async def decode(self, ids: list[int], max_tokens: int, pictures: Any = None) -> Any:
        """Yield (tokens so far, histogram, whether these are all) after each step."""
        if self.simulated and self.speculates:
            async for step in self.simulate(max_tokens):
                yield step
            return
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def put_steps() -> None:
            try:
                for step in self.start_decoding(ids, max_tokens, pictures):
                    loop.call_soon_threadsafe(queue.put_nowait, step)
                loop.call_soon_threadsafe(queue.put_nowait, None)
            except Exception as error:  # the request fails of it, and the next one is answered
                loop.call_soon_threadsafe(queue.put_nowait, error)

        async with self.turn:
            threading.Thread(target=put_steps, daemon=True).start()
            tokens: list[int] = []
            histogram = [0] * (self.flags.depth + 1)
            step, is_prefill = await queue.get(), True
            while step is not None:
                if isinstance(step, Exception):
                    raise step
                tokens += step.tokens
                if not is_prefill and self.speculates:
                    histogram[step.num_accepted] += 1
                    self.drafts, self.accepted = self.drafts + 1, self.accepted + step.num_accepted
                is_prefill, step = False, await queue.get()
                yield list(tokens), histogram, step is None

    async def simulate(self, max_tokens: int) -> Any:
        """As `decode`, with tokens of id 100 and the simulated number of tokens in each cycle, whose time grows with the tree."""
        tokens, histogram = [100], [0] * (self.flags.speculative_num_steps + 1)
        owed = 0.0
        async with self.turn:
            yield list(tokens), histogram, max_tokens == 1
            while len(tokens) < max_tokens:
                await asyncio.sleep(
                    0.001 * self.flags.speculative_num_steps + 0.0002 * self.flags.speculative_num_draft_tokens
                )
                owed += self.simulated
                histogram[int(owed) - 1] += 1
                self.drafts, self.accepted = self.drafts + 1, self.accepted + int(owed) - 1
                tokens += [100] * int(owed)
                owed -= int(owed)
                yield tokens[:max_tokens], histogram, len(tokens) >= max_tokens

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids, max_tokens, pictures = body["input_ids"], body["sampling_params"]["max_new_tokens"], None
        if urls := body.get("image_data"):
            ids, pictures = self.expand_prompt(ids, urls)
        response = await open_stream(request)
        async for tokens, histogram, is_last in self.decode(ids, max_tokens, pictures):
            ended = "stop" if not self.simulated and tokens[-1] in self.engine.end_tokens else "length"
            recorded = RECORDED["generate"]["meta_info"]
            meta: dict[str, Any] = {key: recorded[key] for key in recorded if not key.startswith("spec_")}
            meta |= {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
            meta["finish_reason"] = {"type": ended} if is_last else None
            if is_last and self.speculates:
                cycles, longest = sum(histogram), max((i for i, times in enumerate(histogram) if times), default=0)
                meta |= dict.fromkeys(
                    ("spec_correct_drafts_histogram", "spec_accept_histogram"), histogram[: longest + 1]
                )
                meta |= {"spec_verify_ct": cycles, "spec_accept_length": len(tokens) / max(1, cycles)}
            await send_event(response, {"text": "", "output_ids": tokens, "meta_info": meta})
        return await end_stream(response)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response, num_sent = await open_stream(request), 0
        usage: dict[str, Any] = {}
        histogram: list[int] = []
        async for tokens, found, is_last in self.decode(body["prompt"], body["max_tokens"]):
            stops = not self.simulated and tokens[-1] in self.engine.end_tokens
            reason = ("stop" if stops else "length") if is_last else None
            choice = {"index": 0, "text": "x", "token_ids": tokens[num_sent:], "finish_reason": reason}
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
            await send_event(response, {"choices": [choice], "usage": usage})
            num_sent, histogram = len(tokens), found
        final: dict[str, Any] = {"choices": [], "usage": usage}
        if self.flags.per_request_spec_decode_metrics == "summary":
            accepted = sum(i * times for i, times in enumerate(histogram))
            counts = {"num_spec_steps": sum(histogram), "num_accepted_draft_tokens": accepted}
            final["metrics"] = {"speculative_decoding": counts | {"acceptance_histogram": histogram}}
        await send_event(response, final)
        return await end_stream(response)

    async def server_info(self, _request: web.Request) -> web.Response:
        f, recorded = self.flags, RECORDED["server_info"]
        (state,) = recorded["internal_states"]
        state = state | {
            "memory_usage": state["memory_usage"] | {"token_capacity": f.max_total_tokens},
            "effective_max_running_requests_per_dp": f.max_running_requests,
        }
        if self.drafts:
            state["avg_spec_accept_length"] = 1 + self.accepted / self.drafts
        decode = {"max_bs": f.cuda_graph_max_bs_decode, "bs": [f.cuda_graph_max_bs_decode or 8]}
        graphs = recorded["cuda_graph_config"] | {"decode": recorded["cuda_graph_config"]["decode"] | decode}
        tree = {
            key: getattr(f, key) for key in vars(f) if key.startswith("speculative") and key != "speculative_config"
        }
        if is_block_algorithm(f):  # whatever was asked: SGLang 0.5.17 and 0.5.23
            tree |= {"speculative_num_steps": 1, "speculative_eagle_topk": 1}
        own_info = {"model_path": f.model_path, "context_length": f.context_length, "cuda_graph_config": graphs}
        return web.json_response(recorded | own_info | {"internal_states": [state]} | tree)

    async def flush(self, _request: web.Request) -> web.Response:
        self.reset_counters()
        return web.Response()

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.flags.model_path, "owned_by": self.flags.engine}]})


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, value: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


async def end_stream(response: web.StreamResponse) -> web.StreamResponse:
    await response.write(b"data: [DONE]\n\n")
    return response


async def answer_version(_request: web.Request) -> web.Response:
    return web.json_response({"version": "0.30.0"})


def main(words: list[str]) -> None:
    flags = parse_arguments(words)
    if flags.fail_at_start:
        sys.exit("RuntimeError: the double was told to fail at start")
    if os.environ.get("AERIE_SGLANG_PATCH"):  # it drafts as trained; SGLang 0.5.17 would after this
        for module in sglang_vision_patch.TARGETS:
            print(f"{sglang_vision_patch.PREFIX} applied to {module}", flush=True)
    double = Double(flags)
    app = web.Application()
    app.add_routes(
        [web.get("/health", answer_version), web.get("/version", answer_version), web.get("/v1/models", double.models)]
    )
    if flags.engine == "sglang":
        app.add_routes([web.post("/generate", double.generate), web.post("/flush_cache", double.flush)])
        app.add_routes([web.get("/server_info", double.server_info)])
    else:
        app.add_routes([web.post("/v1/completions", double.completions)])
    web.run_app(app, host="127.0.0.1", port=flags.port, print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
