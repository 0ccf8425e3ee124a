"""A workload as a serving engine gets it: how servers are set up, what they must hold, what they can't run, and requests."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.cells import cell
from stages.cells.cell import Hardware
from stages.draft import checkpoint
from stages.engines import gpu_memory, http_session, registry
from stages.engines.cell_engine import CellContext, QuestionTurn
from stages.engines.protocol import LoadRequest, ServerSetup, ServingEngine
from stages.families.family import find_family, get_files
from stages.params import schema
from stages.params.benchmark_sections import BenchmarkServer
from stages.params.engines import locate_program
from stages.prompts import workload_prompts
from stages.target import vision

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROMPT_COLUMNS = ("id", "prompt_ids", "length_share")  # of a cell's fingerprint


def read_draft_config(params: schema.Params, checkpoint_name: str) -> dict[str, Any]:
    """Return config.json of the draft, all of whose files are checked."""
    folder, maker = checkpoint.locate_checkpoint(checkpoint_name), params.get_making_stage(checkpoint_name)
    return get_files(find_family(folder, maker)).read_checked(folder, maker)[0]


@dataclass(frozen=True)
class ServedWorkload:
    """A workload on servers of one engine, with one draft and without."""

    context: CellContext
    draft_config: dict[str, Any]  # of config.json; {} without a draft
    simulated_answers: Mapping[tuple[str, int], int] | None = None  # tokens by prompt and length: simulated_answers.py

    @property
    def params(self) -> schema.Params:
        return self.context.params

    @property
    def section(self) -> str:
        """Return the section of params.yaml, for messages."""
        return f"benchmark_served.servers.{self.context.engine}"

    @property
    def settings(self) -> BenchmarkServer:
        return self.params.benchmark_served.get_server(self.context.engine)

    @property
    def engine(self) -> ServingEngine:
        return registry.get(self.context.engine)

    @cached_property
    def api_key(self) -> str | None:
        return http_session.read_api_key(self.settings.api_key_env, self.section)

    def make_session(self) -> http_session.HttpSession:
        deadline_s = self.context.workload.deadline_s
        return http_session.HttpSession(self.served_model, deadline_s, self.section, self.api_key)

    @cached_property
    def image_processor(self) -> vision.CachedImageProcessor | None:
        """Return the processor of the prompts' pictures; None where they have none."""
        has_images = (self.context.prompts["images"].list.len() > 0).any()
        trust = self.params.target.trust_remote_code
        return vision.CachedImageProcessor(self.context.target_folder, trust) if has_images else None

    @property
    def served_model(self) -> str:
        return self.settings.model or str(self.context.target_folder)

    @cached_property
    def setup(self) -> ServerSetup:
        """Return the configuration of a server that loads the target's folder as it is."""
        target, settings = self.params.target, self.settings
        caps = [cap for _, cap in self.context.workload.list_loads() if cap is not None]
        most = self.context.manifest.max_position_embeddings
        positions = self.draft_config.get("max_position_embeddings", most)
        return ServerSetup(
            engine=self.context.engine,
            folder=str(self.context.target_folder),
            dtype=target.dtype,
            device=target.device,
            trust_remote_code=target.trust_remote_code,
            tp=settings.tp,
            mem_fraction=settings.mem_fraction,
            max_total_tokens=settings.max_total_tokens,
            max_batch=settings.max_batch or max(caps, default=None),
            # Engines refuse a draft with fewer positions than the context length.
            context_length=positions if positions < most else None,
            torch_compile=settings.torch_compile,
            more=tuple(settings.launch_args),
            quantised=settings.quantised,
        )

    @property
    def program_path(self) -> str:
        """Return the program that starts a server."""
        return self.settings.command[0] if self.settings.command else locate_program(self.context.engine)

    def find_version(self) -> str | None:
        """Return the version of the engine; None where it can't be told. Raises ValueError for one that is too old."""
        return self.engine.find_version(self.program_path)

    # What servers hold

    def count_servers_at_once(self) -> int:
        """Return how many of these servers this machine holds at once; a running one (base_urls) takes nothing of it."""
        if self.setup.device == "cpu" or self.settings.base_urls:
            return 2
        return self.setup.count_fitting()

    def can_start_together(self) -> bool:
        """Return whether servers may start at once: an engine sizes a cache of no given size by the memory that it finds free."""
        return self.setup.device == "cpu" or self.setup.max_total_tokens is not None

    def limit_reported_weights(self) -> float | None:
        """Return the most GiB of weights that a server's report is right about; None without a limit.

        SGLang reports the memory that became less while it read its weights, and so what a server that started meanwhile, of
        this stage or of another, took. In float32 files of 16 bits take twice their size.
        """
        if not self.can_start_together() or self.setup.device == "cpu" or self.setup.dtype == "float32":
            return None
        loaded = Path(self.setup.folder)
        files = [loaded] if loaded.is_file() else loaded.glob("*.safetensors")
        return round(sum(file.stat().st_size for file in files) / 2**30, 3)

    @property
    def max_concurrency(self) -> int | None:
        """Return the most requests at once, at most the number of prompts; None without a limit."""
        caps = [cap for _, cap in self.context.workload.list_loads() if cap is not None]
        return min(max(caps), len(self.context.prompts)) if caps else None

    @property
    def request_tokens(self) -> int:
        """Return the tokens of the longest prompt and its answer."""
        return self.context.longest_prompt + max(length for length, _ in self.context.workload.list_loads())

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of keys and values of the largest load."""
        target, prompts, loads = self.context.manifest, len(self.context.prompts), self.context.workload.list_loads()
        tokens = max(min(cap or prompts, prompts) * (self.context.longest_prompt + length) for length, cap in loads)
        values = 2 * target.num_layers * target.num_key_value_heads * target.head_dim
        return tokens * values * DTYPE_BYTES[self.params.target.dtype]

    def check_positions(self, num_draft_tokens: int) -> None:
        """Raises ValueError if the target or the draft has fewer positions than the longest request needs."""
        required, target = self.request_tokens + num_draft_tokens, self.context.manifest.max_position_embeddings
        draft = self.draft_config.get("max_position_embeddings", target)
        for name, positions in (("the target", target), ("the draft", draft)):
            if positions < required:
                raise ValueError(
                    f"{name} holds {positions} positions (max_position_embeddings), expected at least {required} for the longest "
                    f"prompt of {self.context.workload_name}, its answer and a tree; lower max_new_tokens, choose shorter "
                    "prompts, or raise init_draft.max_position_embeddings, which needs no training again"
                )

    # What a cell records

    def describe_hardware(self, config_name: str, gpus: list[gpu_memory.GpuMemory]) -> Hardware:
        if config_name in self.settings.base_urls:
            return {"server": "one that was running; what it runs on isn't known"}
        hardware = cell.describe_hardware("cpu", self.params.target.num_threads)
        if gpus and self.params.target.device != "cpu":
            hardware["gpu"] = ", ".join(gpu.name for gpu in gpus[: self.settings.tp])
        return hardware

    def build_fingerprint(self, version: str | None, hardware: Hardware) -> dict[str, Any]:
        """Return what a cell and its baseline must share for a speedup. The context length is left out: it changes no time."""
        target = self.context.manifest
        named = [target.model, target.revision, target.config_digest]
        prompts, workload = self.context.prompts, self.context.workload
        requests = [prompts.select(*PROMPT_COLUMNS).to_dicts(), workload.model_dump(exclude={"until"})]
        return {
            "target": named,
            "setup": asdict(self.setup) | {"folder": named[0], "context_length": None},
            "engine_version": version,
            "workload": hashlib.sha256(json.dumps(requests, sort_keys=True).encode()).hexdigest()[:16],
            "hardware": {key: hardware[key] for key in sorted(hardware) if key != "python"},
        }

    # Requests

    def make_request(self, turn: QuestionTurn, length: int) -> LoadRequest:
        """Return the request of a turn under a limit of `length` tokens, as engines take it."""
        workload, row, simulated = self.context.workload, turn.question, self.simulated_answers
        limit = workload_prompts.compute_max_new_tokens(row.length_share, length)
        return LoadRequest(
            id=turn.id,
            prompt=turn.ids,
            max_tokens=limit if simulated is None else simulated.get((row.id, length), limit),
            temperature=workload.temperature,
            top_p=workload.top_p,
            top_k=workload.top_k,
            ignore_eos=workload.ignore_eos or simulated is not None,
            engine_fields=self._build_image_fields(row.images, turn.ids) if row.images else {},
        )

    def _build_image_fields(self, images: list[str], ids: list[int]) -> dict[str, Any]:
        """Return the images as SGLang takes them with token ids.

        SGLang repeats each image's token itself; a prompt in which it is already repeated is never answered (0.5.17).
        """
        processor = self.image_processor
        assert processor, "a prompt with pictures has a processor"
        counts = processor.count_image_tokens(images)
        return {
            "input_ids": vision.collapse_image_tokens(ids, processor.image_token_id, counts),
            "image_data": [processor.build_data_url(path) for path in images],
        }
