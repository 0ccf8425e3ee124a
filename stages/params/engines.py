"""The engines, by what params.yaml, records and the command line say of them: names, titles, programs, options. No torch.

ENGINES has one entry for each; what it is told, asked and answers is in stages/engines/ (`registry.get`). A new engine is an
entry here and its name in the options below, a module there, and its line in the registry.
"""

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from stages.params.tree_shape import NamedShape, TreeShape

ServedEngine = Literal["sglang", "vllm", "llama.cpp"]  # benchmark_served.engines
LaunchedEngine = Literal["transformers", "sglang", "vllm", "llama.cpp"]  # sample_target.server.launch
CellEngine = Literal[
    "torch", "sglang", "vllm", "llama.cpp"
]  # `engine` of a cell, of a recipe's cells, and time_cycles.engines
EngineKind = Literal["torch", "served"]  # of the cells that a form of `aerie serve` names
DEFAULT_KIND: EngineKind = "torch"
ENVIRONMENTS_FOLDER = Path("serving-env")  # with an environment for each

ExplainShape = Callable[[TreeShape], str | None]  # returns why an engine can't run a shape; None if it can


def _explain_tree(shape: TreeShape) -> str | None:
    if shape.num_draft_tokens < shape.num_steps + 1:
        return f"SGLang needs num_draft_tokens of at least num_steps + 1 = {shape.num_steps + 1}, found {shape.num_draft_tokens}"
    return None


def _explain_ngram(shape: TreeShape) -> str | None:
    longest, shortest, length = shape.numbers if isinstance(shape, NamedShape) else (0, 0, 0)
    if longest != shortest or length < longest:
        return f"llama.cpp looks up n-grams of one length, no longer than its chain: n{longest}_{longest}_8, say"
    return None


@dataclass(frozen=True)
class EngineFacts:
    """The facts of an engine."""

    name: str  # as params.yaml and cells have it
    title: str  # as its authors write it
    program: str = ""  # that starts its server; "": this Python, with its package
    modules: tuple[str, ...] = ()  # that cells of engines without them import and never run
    serves_drafts: bool = True  # as benchmark_served.engines
    is_in_process: bool = False
    tells_version: bool = False  # whether its program tells it, where no environment does
    loads_quantised: bool = False  # files of the type `quantised` of its servers
    runs: str = "chains"  # in words
    # the first version that lets EAGLE-3's layers draft a chain in one pass; "": none does
    drafts_in_parallel: str = ""
    explain_tree: ExplainShape | None = None  # of EAGLE-3's; None: it runs chains alone
    # Families of drafts without weights that it has itself, by name; None: one that aerie does not start.
    own_families: Mapping[str, ExplainShape | None] = field(default_factory=dict)

    def explain_unserved(self, shape: TreeShape) -> str | None:
        """Return why it can't run a dynamic tree of an EAGLE-3 draft; None if it can."""
        if self.explain_tree:
            return self.explain_tree(shape)
        return f"{self.title} drafts chains only, this tree has topk {shape.topk}" if shape.topk > 1 else None


# By which cells of all engines that serve are measured, and cycles timed.
SERVED_CELLS = tuple(f"stages/measuring/{name}.py" for name in ("measured_server", "server_setup"))
TORCH = EngineFacts(
    "torch", "the torch engine", serves_drafts=False, is_in_process=True,
    modules=("stages/engines/torch_engine.py", "stages/engines/torch_cycles.py"),
)  # fmt: skip
ENGINES = {
    engine.name: engine
    for engine in (
        TORCH,
        EngineFacts(
            "sglang", "SGLang", "sglang",
            modules=(*SERVED_CELLS, "stages/engines/sglang.py", "stages/engines/server_startup/sglang_vision_patch.py"),
            runs="trees of at least num_steps + 1 draft tokens", explain_tree=_explain_tree, own_families={"ngram": None},
        ),
        EngineFacts(
            "vllm", "vLLM", "vllm",
            modules=(*SERVED_CELLS, "stages/engines/vllm.py"), tells_version=True, drafts_in_parallel="0.16",
            own_families={"ngram": lambda shape: None, "suffix": lambda shape: None},
        ),
        EngineFacts(
            "llama.cpp", "llama.cpp", "llama-server",
            modules=(*SERVED_CELLS, "stages/engines/llama_cpp.py", "stages/engines/gguf_files.py"), loads_quantised=True,
            own_families={"ngram": _explain_ngram},
        ),
        EngineFacts(
            "transformers", "transformers", modules=("stages/engines/transformers_serve.py",), serves_drafts=False
        ),
    )
}  # fmt: skip
GGUF_ENGINE = "llama.cpp"  # which `aerie export` writes files for
SERVED = {name: engine for name, engine in ENGINES.items() if engine.serves_drafts}


def is_in_process(engine: str) -> bool:
    """Return whether an engine decodes in the stage's own process."""
    return ENGINES[engine].is_in_process


def list_environments(engine: str) -> list[Path]:
    """Return the folders of an engine's own environment, the first that exists is used (make serving-env)."""
    return [ENVIRONMENTS_FOLDER / name for name in (engine, f"{engine}-cpu")]


def find_program(engine: str, program: str = "") -> str | None:
    """Return the path of a program of the engine, by default its server: in its own environment, else on the PATH."""
    program = program or ENGINES[engine].program or sys.executable
    paths = [folder / "bin" / program for folder in list_environments(engine)]
    return next((str(path) for path in paths if path.exists()), shutil.which(program))


def locate_program(engine: str, program: str = "") -> str:
    """Return a program of the engine, by default its server: of its own environment, else the name, to be found on the PATH."""
    found = find_program(engine, program)
    return str(Path(found).absolute()) if found else program or ENGINES[engine].program


def join_words(words: list[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


# URLs of running servers: `base_urls` of sample_target.server and of benchmark_served.servers

# http://host:port; no user:password@, which would be logged
SERVER_URL_PATTERN = r"^https?://[^\s/@?#:]+(:\d{1,5})?(/v1)?/?$"
# The pattern also takes a range of ports: http://host:6000-6007 names a server on each of them.
SERVER_URLS_PATTERN = r"^https?://[^\s/@?#:]+(:\d{1,5}(-\d{1,5})?)?(/v1)?/?$"
MAX_RANGE = 1024


def strip_api_path(url: str) -> str:
    """Return a server's URL without the /v1 that users may write."""
    return re.sub(r"(/v1)?/?$", "", url)


def expand_urls(base_urls: list[str]) -> list[str]:
    """Return one URL per server: http://host:6000-6007 names eight. Raises ValueError for an invalid range."""
    urls = []
    for url in map(strip_api_path, base_urls):
        host, first, last = re.fullmatch(r"(.*?)(?::(\d+)-(\d+))?", url).groups()  # type: ignore[union-attr]
        ports = range(int(first), int(last) + 1) if first else None
        if ports is not None and not 0 < len(ports) <= MAX_RANGE:
            raise ValueError(f"{url} is no range of ports, expected the lower port first, at most {MAX_RANGE}")
        urls += [url] if ports is None else [f"{host}:{port}" for port in ports]
    return urls


def _check_ranges(base_urls: list[str]) -> list[str]:
    expand_urls(base_urls)
    return base_urls


ServerUrls = Annotated[list[Annotated[str, Field(pattern=SERVER_URLS_PATTERN)]], AfterValidator(_check_ranges)]
ConfigurationName = Annotated[str, Field(pattern=r"^(baseline|[A-Za-z]\w*-t\d+_\d+_\d+)$")]
ConfigurationUrls = dict[ConfigurationName, Annotated[str, Field(pattern=SERVER_URL_PATTERN)]]
