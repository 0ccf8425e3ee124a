"""The patch of SGLang's drafts of images, on a stand-in with the faults of 0.5.17, in the processes that a server starts.

The stand-in has SGLang's module and function names. That the patch brings tau to replay's on SGLang itself was measured on a GPU
(docs/results).
"""

import hashlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.engines import sglang
from stages.engines.server_startup import sglang_vision_patch

MODULES = {
    "managers/mm_utils.py": '''
def general_mm_embed_routine(input_ids, forward_batch, language_model, **more):
    embeds = more.pop("table")[input_ids]
    if forward_batch.contains_mm_inputs():
        forward_batch.mm_input_embeds = embeds
    return language_model(input_ids=None, forward_batch=forward_batch, input_embeds=embeds)
''',
    "speculative/eagle_worker_v2.py": '''
class EagleDraftWorker:
    def _draft_extend_for_prefill(self, batch, target_hidden_states, next_token_ids, mm_input_embeds=None):
        return mm_input_embeds

    def draft_forward(self, forward_batch):
        return [self.draft_runner.forward(forward_batch) for _ in range(3)]
''',
    "speculative/eagle_draft_cuda_graph_runner.py": '''
class EAGLEDraftCudaGraphRunner:
    def execute(self, forward_batch):
        return self.buffers.mrope_positions.clone()
''',
    "speculative/eagle_draft_extend_cuda_graph_runner.py": '''
class EAGLEDraftExtendCudaGraphRunner:
    def execute(self, forward_batch):
        return self.buffers.mrope_positions.clone()
''',
}  # fmt: skip
# What a draft is given in a prompt of four tokens, of which the target's first layer adds 100 to the embeddings in place.
PROBE = """
import multiprocessing
from types import SimpleNamespace

def probe():
    import torch
    from sglang.srt.managers import mm_utils
    from sglang.srt.speculative import eagle_draft_cuda_graph_runner as draft, eagle_draft_extend_cuda_graph_runner as extend
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    class Target(torch.nn.Module):
        def forward(self, input_ids, forward_batch, input_embeds):
            return input_embeds.add_(100)

    class LlamaForCausalLMEagle3:
        pass

    class Runner:
        model = LlamaForCausalLMEagle3()
        def forward(self, batch):
            return batch.mrope_positions[:, 0].tolist()

    table, positions = torch.arange(8.0)[:, None], torch.tensor([[7, 8], [4, 5], [2, 3]])
    batch = SimpleNamespace(contains_mm_inputs=lambda: True, mm_input_embeds=None, mrope_positions=positions.clone())
    answered = mm_utils.general_mm_embed_routine(torch.tensor([3, 5, 6, 1]), batch, Target(), table=table)
    worker = EagleDraftWorker()
    worker.draft_runner = Runner()
    given = worker._draft_extend_for_prefill(None, None, None, batch.mm_input_embeds)
    graphs = []
    for kind in (draft.EAGLEDraftCudaGraphRunner, extend.EAGLEDraftExtendCudaGraphRunner):
        runner = kind()
        runner.buffers = SimpleNamespace(mrope_positions=torch.full((3, 3), 9))
        graphs.append(runner.execute(batch).tolist())
    steps = worker.draft_forward(batch)
    print([answered[:, 0].tolist(), given[:3, 0].tolist(), graphs, steps, "forward" in vars(worker.draft_runner)], flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=probe)  # as SGLang starts its scheduler
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
ANSWERED = [103.0, 105.0, 106.0, 101.0]
FILLED = [[7, 8, 0], [4, 5, 0], [2, 3, 0]]
CORRECT = [ANSWERED, [5.0, 6.0, 1.0], [FILLED, FILLED], [[7, 4, 2], [8, 5, 3], [9, 6, 4]], False]


def install_engine(site: Path, version: str) -> None:
    """Write a package sglang into `site`, as an environment has it."""
    info = site / f"sglang-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    for name, text in MODULES.items():
        path = site / "sglang/srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip())
    (site / "sitecustomize.py").write_text("import sys\nprint('own sitecustomize', file=sys.stderr, flush=True)\n")


def copy_patch(folder: Path, version_digests: bool) -> Path:
    """Copy the start-up module; with the digests of the stand-in's functions, or SGLang's own."""
    folder.mkdir()
    for file in sglang.STARTUP_FOLDER.glob("*.py"):
        text = file.read_text()
        for targets in sglang_vision_patch.TARGETS.values() if version_digests else ():
            for owner, name, _, digest in targets:
                text = text.replace(digest, digest_stand_in(owner, name))
        (folder / file.name).write_text(text)
    return folder


def digest_stand_in(owner: str | None, name: str) -> str:
    for text in MODULES.values():
        scope: dict[str, Any] = {}
        exec(text, scope)
        if owner in scope or (owner is None and name in scope):
            lines = text.lstrip().splitlines(keepends=True)
            first = next(n for n, line in enumerate(lines) if line.lstrip().startswith(f"def {name}("))
            return hashlib.sha256("".join(inspect.getblock(lines[first:])).encode()).hexdigest()[:16]
    raise LookupError(name)


def run_probe(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch, own_digests: bool = True) -> Any:
    install_engine(tmp_path / "site", version)
    monkeypatch.setattr(sglang, "STARTUP_FOLDER", copy_patch(tmp_path / "startup", own_digests))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (tmp_path / "probe.py").write_text(PROBE)
    environment = os.environ | sglang.SGLang().build_patch_environment()
    line = [sys.executable, "-B", str(tmp_path / "probe.py")]
    completed = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    (tmp_path / "log").write_text(completed.stderr)
    return completed


def test_the_draft_is_given_what_it_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completed = run_probe(tmp_path, "0.5.17", monkeypatch)
    assert eval(completed.stdout) == CORRECT, completed.stderr
    assert "own sitecustomize" in completed.stderr
    assert "drafted with the vision patch of SGLang 0.5.17" in str(
        sglang.SGLang().describe_patch(tmp_path / "log", "0.5.17")
    )


def test_a_changed_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completed = run_probe(tmp_path, "0.5.17", monkeypatch, own_digests=False)
    assert completed.returncode and not completed.stdout
    assert (
        "aerie vision patch: refused: sglang.srt.managers.mm_utils.general_mm_embed_routine has digest"
        in completed.stderr
    )
    with pytest.raises(ValueError, match=r"was to run with the vision patch.*its Python must read PYTHONPATH"):
        sglang.SGLang().describe_patch(tmp_path / "log", "0.5.17")
