"""A double of SGLang and vLLM: their command lines and their HTTP, with our own torch engine behind, on a CPU.

    python -m tests.serving.engine_double serve --model-path TARGET --port P [SGLang's flags]
    python -m tests.serving.engine_double vllm serve TARGET --port P [vLLM's flags]

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

        fork_server.run_module_forked(address, "tests.serving.engine_double", sys.argv[1:])


if __name__ == "__main__":  # before the imports, which take half a second
    fork()

from aiohttp import web  # noqa: E402

from stages.serving.server_startup import sglang_vision_patch  # noqa: E402

RECORDED = json.loads((Path(__file__).parent / "recorded/sglang-0.5.17.json").read_text())


def arguments(words: list[str]) -> argparse.Namespace:
    engine = "vllm" if words[0] == "vllm" else "sglang"
    takes = argparse.ArgumentParser()
    takes.add_argument("--port", type=int)
    takes.add_argument("--speculative-algorithm")
    takes.add_argument("--speculative-draft-model-path")
    for name in ("num-steps", "eagle-topk", "num-draft-tokens"):
        takes.add_argument(f"--speculative-{name}", type=int)
    takes.add_argument("--speculative-config", type=json.loads)
    takes.add_argument("--model-path")
    takes.add_argument("--max-running-requests", type=int, default=48)
    takes.add_argument("--cuda-graph-max-bs-decode", type=int)
    takes.add_argument("--max-total-tokens", type=int, default=100_000)
    takes.add_argument("--context-length", type=int, default=1024)
    takes.add_argument("--per-request-spec-decode-metrics", choices=("none", "summary", "detailed"))
    takes.add_argument("--fail-at-start", action="store_true")
    found, _ = takes.parse_known_args(words[2:] if engine == "vllm" else words)
    found.engine = engine
    if engine == "vllm":
        found.model_path = words[2]
        if found.per_request_spec_decode_metrics and not found.speculative_config:
            takes.error("--per-request-spec-decode-metrics needs --speculative-config")  # 0.33 config/vllm.py:1735
        if told := found.speculative_config:
            found.speculative_algorithm, found.speculative_draft_model_path = told["method"].upper(), told["model"]
            found.speculative_num_steps, found.speculative_eagle_topk = told["num_speculative_tokens"], 1
            found.speculative_num_draft_tokens = told["num_speculative_tokens"] + 1
    found.depth = (
        found.speculative_num_steps or (found.speculative_num_draft_tokens or 1) - 1
    )  # drafts of a chain of blocks
    return found


def is_block_algorithm(flags: argparse.Namespace) -> bool:
    return flags.speculative_algorithm in ("DFLASH", "DSPARK")


def engine(flags: argparse.Namespace) -> Any:
    """Loaded when the first answer is asked for: a server that will be refused for its flags needs no torch."""
    import torch

    from stages.draft import block_checkpoint, eagle3_checkpoint
    from stages.draft.block_draft import BlockDraft
    from stages.draft.eagle3 import Eagle3Draft
    from stages.engine.decode import Engine
    from stages.target import loading, manifest

    torch.set_num_threads(1)
    made, draft = manifest.read_manifest(), None
    layers = made.feature_layers
    if is_block_algorithm(flags):
        config, tensors = block_checkpoint.read_block_draft(
            Path(flags.speculative_draft_model_path).parent, "its stage"
        )
        draft = BlockDraft(block_checkpoint.parse_block_config(config)).requires_grad_(False)
        draft.load_state_dict(tensors)
        layers = list(draft.config.feature_layers)
    elif flags.speculative_draft_model_path:
        config, tensors = eagle3_checkpoint.read_eagle3_draft(
            Path(flags.speculative_draft_model_path).parent, "its stage"
        )
        draft = Eagle3Draft.from_checkpoint(config, tensors).requires_grad_(False)
        layers = eagle3_checkpoint.read_feature_layers(config, made.num_layers)
    model = loading.load_target(flags.model_path, "float32", "cpu", False)
    return Engine(model, made.eos_token_ids, layers, draft)


class Double:
    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.speculates = bool(flags.speculative_draft_model_path)
        self.turn = asyncio.Lock()
        self.simulated = float(os.environ.get("SGLANG_SIMULATE_ACC_LEN", 0)) if flags.engine == "sglang" else 0.0
        if flags.speculative_config and flags.speculative_config.get("rejection_sample_method") == "synthetic":
            self.simulated = flags.speculative_config["synthetic_acceptance_length"]
        self.forget()

    @cached_property
    def engine(self) -> Any:
        return engine(self.flags)

    def forget(self) -> None:
        """As after SGLang's /flush_cache."""
        self.drafts = self.accepted = 0
        self.positions = [0] * self.flags.depth

    @cached_property
    def eyes(self) -> Any:
        from stages.target.vision import CachedImageProcessor

        return CachedImageProcessor(self.flags.model_path, False)

    def look(self, ids: list[int], urls: list[str]) -> tuple[list[int], Any]:
        """A rendered prompt's ids with each picture's token as often as it is seen, and the pictures."""
        from stages.target.vision import expand_image_tokens

        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/{number}" for number in range(len(urls))]
            for path, url in zip(paths, urls, strict=True):
                Path(path).write_bytes(base64.b64decode(url.partition(",")[2]))
            return expand_image_tokens(
                ids, self.eyes.image_token_id, self.eyes.count_image_tokens(paths)
            ), self.eyes.load_patches(paths)

    def steps(self, ids: list[int], most: int, pictures: Any) -> Iterator[Any]:
        f = self.flags
        if (
            not self.speculates or f.speculative_algorithm == "EAGLE"
        ):  # without its fusion an EAGLE-3 draft drafts nonsense
            return self.engine.decode_plain(ids, most, pictures)
        from stages.params.tree_shape import TreeShape

        tree = TreeShape(f.depth, f.speculative_eagle_topk or 1, f.speculative_num_draft_tokens)
        return self.engine.decode_speculative(ids, most, tree, pictures)

    async def decode(self, ids: list[int], most: int, pictures: Any = None) -> Any:
        """(tokens so far, histogram, whether that is all) after each step."""
        if self.simulated and self.speculates:
            async for step in self.simulate(most):
                yield step
            return
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def work() -> None:
            try:
                for step in self.steps(ids, most, pictures):
                    loop.call_soon_threadsafe(queue.put_nowait, step)
                loop.call_soon_threadsafe(queue.put_nowait, None)
            except Exception as error:  # the request fails of it, and the next one is answered
                loop.call_soon_threadsafe(queue.put_nowait, error)

        async with self.turn:
            threading.Thread(target=work, daemon=True).start()
            said: list[int] = []
            histogram = [0] * (self.flags.depth + 1)
            step, first = await queue.get(), True
            while step is not None:
                if isinstance(step, Exception):
                    raise step
                said += step.tokens
                if not first and self.speculates:
                    histogram[step.num_accepted] += 1
                    self.drafts, self.accepted = self.drafts + 1, self.accepted + step.num_accepted
                    for place in range(step.num_accepted):
                        self.positions[place] += 1
                first, step = False, await queue.get()
                yield list(said), histogram, step is None

    async def simulate(self, most: int) -> Any:
        """As `decode`, of id 100 and of as many tokens in each cycle as was said, which takes a time by the tree's size."""
        said, histogram = [100], [0] * (self.flags.speculative_num_steps + 1)
        owed = 0.0
        async with self.turn:
            yield list(said), histogram, most == 1
            while len(said) < most:
                await asyncio.sleep(
                    0.001 * self.flags.speculative_num_steps + 0.0002 * self.flags.speculative_num_draft_tokens
                )
                owed += self.simulated
                histogram[int(owed) - 1] += 1
                self.drafts, self.accepted = self.drafts + 1, self.accepted + int(owed) - 1
                for place in range(int(owed) - 1):
                    self.positions[place] += 1
                said += [100] * int(owed)
                owed -= int(owed)
                yield said[:most], histogram, len(said) >= most

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids, most, pictures = body["input_ids"], body["sampling_params"]["max_new_tokens"], None
        if urls := body.get("image_data"):
            ids, pictures = self.look(ids, urls)
        response = await opened(request)
        async for said, histogram, last in self.decode(ids, most, pictures):
            ended = "stop" if not self.simulated and said[-1] in self.engine.end_tokens else "length"
            seen = RECORDED["generate"]["meta_info"]
            meta: dict[str, Any] = {key: seen[key] for key in seen if not key.startswith("spec_")}
            meta |= {"prompt_tokens": len(ids), "completion_tokens": len(said)}
            meta["finish_reason"] = {"type": ended} if last else None
            if last and self.speculates:
                cycles, most = sum(histogram), max((i for i, times in enumerate(histogram) if times), default=0)
                meta |= dict.fromkeys(("spec_correct_drafts_histogram", "spec_accept_histogram"), histogram[: most + 1])
                meta |= {"spec_verify_ct": cycles, "spec_accept_length": len(said) / max(1, cycles)}
            await event(response, {"text": "", "output_ids": said, "meta_info": meta})
        return await done(response)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response, before = await opened(request), 0
        usage: dict[str, Any] = {}
        histogram: list[int] = []
        async for said, found, last in self.decode(body["prompt"], body["max_tokens"]):
            stops = not self.simulated and said[-1] in self.engine.end_tokens
            reason = ("stop" if stops else "length") if last else None
            choice = {"index": 0, "text": "x", "token_ids": said[before:], "finish_reason": reason}
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(said)}
            await event(response, {"choices": [choice], "usage": usage})
            before, histogram = len(said), found
        whole: dict[str, Any] = {"choices": [], "usage": usage}
        if self.flags.per_request_spec_decode_metrics == "summary":
            accepted = sum(i * times for i, times in enumerate(histogram))
            told = {"num_spec_steps": sum(histogram), "num_accepted_draft_tokens": accepted}
            whole["metrics"] = {"speculative_decoding": told | {"acceptance_histogram": histogram}}
        await event(response, whole)
        return await done(response)

    async def server_info(self, _request: web.Request) -> web.Response:
        f, seen = self.flags, RECORDED["server_info"]
        (state,) = seen["internal_states"]
        state = state | {
            "memory_usage": state["memory_usage"] | {"token_capacity": f.max_total_tokens},
            "effective_max_running_requests_per_dp": f.max_running_requests,
        }
        if self.drafts:
            state["avg_spec_accept_length"] = 1 + self.accepted / self.drafts
        decode = {"max_bs": f.cuda_graph_max_bs_decode, "bs": [f.cuda_graph_max_bs_decode or 8]}
        graphs = seen["cuda_graph_config"] | {"decode": seen["cuda_graph_config"]["decode"] | decode}
        tree = {
            key: getattr(f, key) for key in vars(f) if key.startswith("speculative") and key != "speculative_config"
        }
        if is_block_algorithm(f):  # whatever was asked: SGLang 0.5.17 and 0.5.23
            tree |= {"speculative_num_steps": 1, "speculative_eagle_topk": 1}
        mine = {"model_path": f.model_path, "context_length": f.context_length, "cuda_graph_config": graphs}
        return web.json_response(seen | mine | {"internal_states": [state]} | tree)

    async def metrics(self, _request: web.Request) -> web.Response:
        if not self.speculates:
            return web.Response(text="")
        lines = [
            f"vllm:spec_decode_num_drafts_total {self.drafts}",
            f"vllm:spec_decode_num_accepted_tokens_total {self.accepted}",
        ]
        lines += [f"vllm:spec_decode_num_draft_tokens_total {self.drafts * len(self.positions)}"]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}'
            for i, n in enumerate(self.positions)
        ]
        return web.Response(text="\n".join(lines))

    async def flush(self, _request: web.Request) -> web.Response:
        self.forget()
        return web.Response()

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.flags.model_path, "owned_by": self.flags.engine}]})


async def opened(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def event(response: web.StreamResponse, value: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


async def done(response: web.StreamResponse) -> web.StreamResponse:
    await response.write(b"data: [DONE]\n\n")
    return response


async def answer(_request: web.Request) -> web.Response:
    return web.json_response({"version": "0.30.0"})


def main(words: list[str]) -> None:
    flags = arguments(words)
    if flags.fail_at_start:
        sys.exit("RuntimeError: the double was told to fail at start")
    if os.environ.get("AERIE_SGLANG_PATCH"):  # it drafts as trained; SGLang 0.5.17 would after this
        for module in sglang_vision_patch.TARGETS:
            print(f"{sglang_vision_patch.PREFIX} applied to {module}", flush=True)
    double = Double(flags)
    app = web.Application()
    app.add_routes([web.get("/health", answer), web.get("/version", answer), web.get("/v1/models", double.models)])
    if flags.engine == "sglang":
        app.add_routes([web.post("/generate", double.generate), web.post("/flush_cache", double.flush)])
        app.add_routes([web.get("/server_info", double.server_info)])
    else:
        app.add_routes([web.post("/v1/completions", double.completions), web.get("/metrics", double.metrics)])
    web.run_app(app, host="127.0.0.1", port=flags.port, print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
