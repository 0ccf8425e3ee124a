"""llama.cpp: flags of llama-server, its own protocol `/completion`, accepted drafts, and GGUF files in place of folders."""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from stages.cells.request_record import AcceptanceCounts
from stages.engines import protocol
from stages.engines.chat_answer import AnswerModel, ChatAnswer
from stages.engines.http_session import HttpSession
from stages.engines.sse import AnswerStream
from stages.params.engines import locate_program
from stages.params.tree_shape import NamedShape
from stages.runtime.free_port import HOST

DEFAULT_SLOTS = 4  # for loads without a limit; its own default
CPU_SLOTS = 8  # of sample_target: more requests at once are no faster on a few cores
PROMPT_TOKENS = 2048  # of a conversation in a slot of sample_target, on average at most
SIMULATED_LENGTH = "--spec-synth-len"
NO_HIDDEN_STATES = (
    "llama.cpp keeps no hidden states of a target of this architecture, so it drafts for it by n-grams alone; take another "
    "engine (benchmark_served.engines)"
)
REASONS = {"eos": "stop", "word": "stop", "limit": "length"}  # finish reasons by its `stop_type`


class Completion(AnswerModel):
    """The fields that are read of a response of `/completion`, which takes and returns token ids."""

    content: str
    tokens: list[int]
    stop_type: str
    tokens_evaluated: int
    tokens_predicted: int
    stopping_word: str = ""

    def get_answer(self) -> ChatAnswer:
        return ChatAnswer(
            text=self.content,
            reasoning=None,
            finish_reason=REASONS.get(self.stop_type, self.stop_type),
            prompt_tokens=self.tokens_evaluated,
            completion_tokens=self.tokens_predicted,
            prompt_ids=None,
            answer_ids=self.tokens,
            stopped_at=self.stopping_word or None,
        )


class LlamaCpp(protocol.ServingEngine):
    name = "llama.cpp"
    owned_by = "llamacpp"
    variables = "LLAMA_ARG_"
    program_words = 1
    answer_type = Completion
    known_ends = (("layer input tensor is null", NO_HIDDEN_STATES),)

    def build_command(self, folder: str, port: int, dtype: str, device: str, trust_remote_code: bool) -> list[str]:
        """`folder` is a GGUF file, which has the data type; --cache-ram 0: no cache of earlier prompts."""
        return [locate_program(self.name), "-m", folder, "--host", HOST, "--port", str(port), "--cache-ram", "0"]

    def list_slot_flags(
        self, setup: protocol.ServerSetup, model: str, concurrency: int | None, request_tokens: int, num_threads: int
    ) -> dict[str, Any]:
        """A slot stops drafting two tokens before its end."""
        slots = setup.max_batch or concurrency or DEFAULT_SLOTS
        tokens = setup.max_total_tokens or slots * (request_tokens + 2)
        return {"--alias": model, **build_slot_flags(slots, tokens, num_threads if setup.device == "cpu" else None)}

    def convert_folder(self, folder: Path, setup: protocol.ServerSetup, target: Path | None = None) -> str:
        return _make_gguf(folder, setup.dtype, setup.quantised, setup.trust_remote_code, target)

    def prepare_sampling(self, launch: protocol.SamplingLaunch) -> tuple[str, list[str]]:
        """Its cache is one for all slots (-kvu), so that a long conversation may take of the others'."""
        file = _make_gguf(launch.folder, launch.dtype, None, launch.trust_remote_code)
        count = min(launch.concurrency, CPU_SLOTS) if launch.device == "cpu" else launch.concurrency
        slots = build_slot_flags(count, count * (launch.max_new_tokens + PROMPT_TOKENS), launch.threads)
        return file, protocol.format_flags({"--alias": file, "-kvu": True, **slots})

    def explain_draft(self, config: protocol.Info) -> str | None:
        if config.get("use_sliding_window") and config.get("is_causal") is None:
            return "llama.cpp runs all layers of a block draft as causal or none, and here those with a sliding window alone are"
        return None

    def check_program(self, program: str, flags: Sequence[str]) -> None:
        with suppress(OSError):
            told = subprocess.run([program, "--help"], capture_output=True, text=True, errors="replace").stdout
            missing = [word for word in flags if word.startswith(("draft-", "ngram-", "--")) and word not in told]
            if told and missing:
                raise ValueError(
                    f"{program} does not know {', '.join(missing)}, expected llama.cpp of October 2026 or later; run: "
                    "make serving-env ENGINE=llama.cpp, or name a newer one in benchmark_served.servers.llama.cpp.command"
                )

    def build_speculation_flags(self, draft: protocol.ServedDraft, config: protocol.Info) -> list[str]:
        if isinstance(draft.shape, NamedShape):  # of n-gram lookup
            looked_up, drafted = str(draft.shape.numbers[0]), str(draft.shape.num_steps)
            sizes = ["--spec-ngram-simple-size-n", looked_up, "--spec-ngram-simple-size-m", drafted]
            return ["--spec-type", "ngram-simple", *sizes]
        # By default it drafts no token that the draft is unsure of, which replay does not know.
        kind = ["--spec-type", f"draft-{draft.algorithm.lower()}", "--spec-draft-p-min", "0"]
        return [*kind, "--spec-draft-n-max", str(draft.shape.num_steps), "--spec-draft-model", draft.folder]

    def name_draft_file(self, checkpoint: str, outtype: str) -> str:
        """Return the file as `aerie export` names it."""
        return f"gguf/{checkpoint}-{outtype}.gguf"

    def simulate_acceptance(self, length: float, flags: list[str]) -> tuple[list[str], dict[str, str]]:
        """Each draft is accepted at random, with chances that give the length (server-context.cpp)."""
        return [*flags, SIMULATED_LENGTH, f"{length:g}"], {}

    def list_simulating(self, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
        return [word for word in command if word.startswith("--spec-synth-")]

    async def fetch_info(self, http: HttpSession, url: str) -> dict[str, Any]:
        found = await protocol.fetch_json(http, url, "/props")
        facts = {"version": "build_info", "max_running_requests": "total_slots", "weights": "model_ftype"}
        context = (found.get("default_generation_settings") or {}).get("n_ctx")
        return {"context_length": context} | {name: found[key] for name, key in facts.items() if key in found}

    def build_request(self, request: protocol.LoadRequest, model: str) -> protocol.BuiltRequest:
        """Return a request of its own protocol: only there it reports accepted drafts."""
        body = {
            "prompt": request.prompt, "n_predict": request.max_tokens, "ignore_eos": request.ignore_eos, "stream": True,
            "return_tokens": True, "cache_prompt": False,
            "temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k or 0, "min_p": 0,
        }  # fmt: skip
        # It ends a connection after some answers, and does not say so before.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        return protocol.BuiltRequest("/completion", orjson.dumps(body), read_completion, headers)

    def count_request(
        self, figures: protocol.Info, output_tokens: int, num_steps: int | None
    ) -> AcceptanceCounts | None:
        """It has no histogram, and its first token comes from the prefill; without a draft its figures look like those of a
        request in which nothing was drafted.

        Its counts end with the answer: it drafts at most as many tokens as fit before the last (docs/serving.md). Where the end
        token is the last draft of a cycle, that is accepted and no bonus follows: a cycle more than the tokens tell. A cycle
        drafts at most `num_steps`, so the number of drafts tells it, but for answers that end within the last `num_steps` tokens
        before the limit.
        """
        if "predicted_n" not in figures:
            return super().count_request(figures, output_tokens, num_steps)
        drafted, accepted = figures.get("draft_n", 0), figures.get("draft_n_accepted", 0)
        cycles = figures["predicted_n"] - 1 - accepted
        if figures["predicted_n"] != output_tokens or not 0 <= accepted <= drafted or cycles < 0:
            raise ValueError(
                f"the engine's figures don't add up: predicted_n {figures['predicted_n']} for {output_tokens} tokens, "
                f"draft_n_accepted {accepted} of draft_n {drafted}"
            )
        if num_steps is None:
            return None
        return AcceptanceCounts(max(cycles, -(-drafted // num_steps)), accepted, [])

    def build_sampling_request(
        self, body: protocol.Body, options: protocol.SamplingOptions | None
    ) -> tuple[str, protocol.Body]:
        """It gets the prompt as token ids, and answers in them."""
        if options is None or options.has_images:  # the ids of a prompt hold no picture
            raise ValueError(
                "a llama-server is asked by token ids and so sees no pictures; sample conversations with pictures by another "
                "engine"
            )
        by_id = {"prompt": options.prompt_ids, "repeat_penalty": 1.0, "return_tokens": True, "cache_prompt": False}
        return "/completion", body | protocol.PLAIN_SAMPLING | by_id


def _make_gguf(folder: Path, dtype: str, quantised: str | None, trust: bool, target: Path | None = None) -> str:
    from stages.engines import gguf_files  # which imports transformers: the report needs flags alone

    return str(gguf_files.make_gguf(folder, dtype, quantised, trust, target))


def build_slot_flags(slots: int, tokens: int, threads: int | None) -> dict[str, Any]:
    """Return the flags of slots, a cache of that many tokens for all of them, and CPU threads.

    By itself it takes a cache for the target's whole context. A prompt that spans several batches would be drafted from a row
    that is overwritten (-b; docs/serving.md).
    """
    return {"-np": slots, "-c": tokens, "-b": tokens, "-t": threads, "-td": threads}


def read_completion(stream: AnswerStream, message: dict[str, Any], now: float) -> None:
    """Read a message of `/completion`."""
    r = stream.record
    stream.record_tokens(message["tokens_predicted"], now)
    r.text, r.ids = r.text + message["content"], r.ids + message["tokens"]
    r.input_tokens = message["tokens_evaluated"]
    if message["stop"]:
        r.finish_reason, r.engine_meta = REASONS[message["stop_type"]], message["timings"]
        if len(r.ids) != r.output_tokens:  # it sends no id of a token that ends within a character
            r.ids = []
