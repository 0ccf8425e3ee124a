"""Write a draft and its target as GGUF files, and let llama-server load them and answer.   aerie export CHECKPOINT [FOLDER]

python -m stages.measuring.export_gguf CHECKPOINT FOLDER TYPE
"""

import asyncio
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.cells.request_record import RequestRecord
from stages.draft import checkpoint
from stages.engines import registry, server
from stages.engines.http_session import HttpSession
from stages.engines.protocol import LoadRequest, ServedDraft, ServerSetup, describe_draft, format_flags
from stages.measuring import load_generator, server_setup
from stages.measuring.load_generator import Arrivals
from stages.params import schema
from stages.params.engines import ENGINES, GGUF_ENGINE
from stages.params.families import find_family
from stages.params.target_files import GGUF_TYPES
from stages.params.tree_shape import TreeShape
from stages.runtime import atomic, free_port
from stages.target import chat_template, manifest
from stages.telemetry.run_stage import run_stage

ENGINE = registry.get(GGUF_ENGINE)
STEPS = 3  # drafts a cycle in the line that is printed; a block draft's are its block
REQUEST_TOKENS = 1024
QUESTION, ANSWER_TOKENS = "What is the weather like in winter?", 64
TIMEOUT_S = 600.0
LOG = Path(".scratch/export.log")


def main(checkpoint_name: str, folder: str, outtype: str) -> None:
    """Raises ValueError where a file can't be made, or llama-server drafts nothing with the two."""
    params = schema.load_params()
    config = server_setup.read_draft_config(params, checkpoint_name)
    draft = _choose_chain(params, checkpoint_name, config)
    setup = _choose_setup(params, outtype)
    files = _write_files(setup, draft, Path(folder), outtype)
    flags = ENGINE.build_speculation_flags(replace(draft, folder=str(files[1])), config)
    record = _ask_server(params, replace(setup, folder=str(files[0])), flags)
    if record.failure_reason or record.counts is None:
        raise ValueError(
            f"llama-server does not draft with {files[1]}: {record.failure_message or 'it counts no drafts'}; its log is {LOG}"
        )
    print(
        f"llama-server answers with both: {record.output_tokens} tokens in {record.counts.cycles} cycles, "
        f"{record.counts.accepted} drafts accepted. Start it with",
        f"  {shlex.join([ENGINES[ENGINE.name].program, '-m', str(files[0]), *flags])}",
        sep="\n",
    )


def _choose_chain(params: schema.Params, checkpoint_name: str, config: dict[str, Any]) -> ServedDraft:
    """Return the draft with the chain that is tried. Raises ValueError where llama.cpp does not run it."""
    family = find_family(config)
    num_steps = family.find_depth(config) or STEPS
    shape = TreeShape(num_steps, 1, num_steps + 1)
    if reason := ENGINE.explain_unsupported(shape, config):
        raise ValueError(f"{checkpoint_name}: {reason}; llama.cpp takes EAGLE-3 and block drafts")
    folder = checkpoint.locate_checkpoint(checkpoint_name) / "draft"
    return describe_draft(str(folder), config, shape, params.benchmark_served.get_server(ENGINE.name).algorithm)


def _choose_setup(params: schema.Params, outtype: str) -> ServerSetup:
    """Return the server of the target, in a GGUF type, or that of target.dtype where none is named."""
    by_type, target = {name: dtype for dtype, name in GGUF_TYPES.items()}, params.target
    return ServerSetup(
        engine=ENGINE.name,
        folder=str(manifest.resolve_weights_folder(manifest.read_manifest())),
        dtype=by_type.get(outtype, target.dtype),
        device=target.device,
        trust_remote_code=target.trust_remote_code,
        max_batch=1,
        quantised=None if outtype in by_type else outtype or None,
    )


def _write_files(setup: ServerSetup, draft: ServedDraft, folder: Path, outtype: str) -> tuple[Path, Path]:
    """Return the files of target and draft in `folder`."""
    target, own = Path(setup.folder), Path(draft.folder)
    made = {"target": ENGINE.convert_folder(target, setup), own.parent.name: ENGINE.convert_folder(own, setup, target)}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, file in made.items():
        paths.append(folder / f"{name}-{outtype or GGUF_TYPES[setup.dtype]}.gguf")
        with atomic.write_file(paths[-1]) as temporary:
            shutil.copyfile(file, temporary)
        print(f"{paths[-1]}: {paths[-1].stat().st_size / 1e6:.1f} MB", flush=True)
    return paths[0], paths[1]


def _ask_server(params: schema.Params, setup: ServerSetup, flags: list[str]) -> RequestRecord:
    """Return one answer of a server that is started for it."""
    t, found = params.target, manifest.read_manifest()
    tokenizer = chat_template.load_tokenizer(
        manifest.resolve_weights_folder(found), t.trust_remote_code, found.chat_template
    )
    prompt = chat_template.encode_prompt(tokenizer, [{"role": "user", "content": QUESTION}])
    request = LoadRequest("export#0", prompt, ANSWER_TOKENS, 0.0, 1.0, None, ignore_eos=True)
    port = free_port.find_free_port()
    slots = ENGINE.list_slot_flags(setup, setup.folder, 1, REQUEST_TOKENS, t.num_threads)
    line = [*ENGINE.build_setup_command(setup, port, []), *format_flags(slots), *flags]
    with server.ServerProcess(ENGINE.name, line, port, LOG, TIMEOUT_S, section="aerie export") as own:
        session, one_at_once = HttpSession(setup.folder, TIMEOUT_S, "aerie export"), Arrivals(math.inf, 1, 0)
        load = load_generator.run_load(session, own.base_url, ENGINE, [request], one_at_once, [], STEPS)
        return asyncio.run(load).records[0]


if __name__ == "__main__":
    run_stage(main)
