"""Correct what SGLang 0.5.17 gives an EAGLE-3 draft of a multimodal target. Wraps five functions as their modules are imported.

SGLang 0.5.17 answers prompts with images correctly, but the draft reads something else than it was trained on, so that fewer of
its tokens are accepted (tau 31 to 41% lower on the embedded target, docs/results/2026-11-22-h200-serving.md):

    general_mm_embed_routine    keeps the prompt's embeddings for the draft, and hands the same tensor to the target, whose
                                first layer adds its attention to it in place
    _draft_extend_for_prefill   gives the draft these embeddings unshifted, where a text's are those of the next token
    execute, of two runners     replays a CUDA graph without filling the graph's own multimodal positions
    draft_forward               advances `positions` from step to step of the draft, the multimodal positions not

SGLang 0.5.23 has these corrections itself (read from its source). A version other than 0.5.17 is left alone, with a notice; a
0.5.17 in which one of the functions differs from the one read here ends the server. Each outcome is a line of the log that begins
with `aerie vision patch:`, which `benchmark_served` reads (stages/measuring/measured_server.py).
"""

import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

VERSION = "0.5.17"
PREFIX = "aerie vision patch:"
EAGLE3_DRAFT = "LlamaForCausalLMEagle3"  # SGLang's other drafts shift the embeddings themselves, or are not EAGLE-3


def keep_embeddings(routine: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `general_mm_embed_routine`: the target works on a copy of the embeddings that are kept for the draft."""

    @functools.wraps(routine)
    def wrapped(input_ids: Any, forward_batch: Any, language_model: Any, *more: Any, **named: Any) -> Any:
        if not forward_batch.contains_mm_inputs():
            return routine(input_ids, forward_batch, language_model, *more, **named)

        def copy_kept(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            embeds = kwargs.get("input_embeds")
            if embeds is not None and embeds is forward_batch.mm_input_embeds:
                kwargs = {**kwargs, "input_embeds": embeds.clone()}
            return args, kwargs

        hook = language_model.register_forward_pre_hook(copy_kept, with_kwargs=True)
        try:
            return routine(input_ids, forward_batch, language_model, *more, **named)
        finally:
            hook.remove()

    return wrapped


def shift_embeddings(extend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_draft_extend_for_prefill`: each position has the next token's embedding [tokens, H].

    The last position of each request is the draft's own to fill, with the token that the target has just sampled.
    """

    @functools.wraps(extend)
    def wrapped(
        self: Any, batch: Any, target_hidden_states: Any, next_token_ids: Any, mm_input_embeds: Any = None
    ) -> Any:
        if mm_input_embeds is not None and type(self.draft_runner.model).__name__ == EAGLE3_DRAFT:
            mm_input_embeds = mm_input_embeds.roll(-1, 0)
        return extend(self, batch, target_hidden_states, next_token_ids, mm_input_embeds)

    return wrapped


def fill_positions(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `execute` of a graph runner: the graph reads the batch's multimodal positions [3, tokens], and zeros beyond them."""

    @functools.wraps(execute)
    def wrapped(self: Any, forward_batch: Any, *more: Any, **named: Any) -> Any:
        positions = forward_batch.mrope_positions
        if positions is not None:
            count, buffer = positions.shape[1], self.buffers.mrope_positions
            buffer[:, :count].copy_(positions)  # before the zeros: `positions` may be a view of the buffer
            buffer[:, count:].zero_()
        return execute(self, forward_batch, *more, **named)

    return wrapped


def advance_positions(draft_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `draft_forward`: every step of the draft but the first is one position further, in all three axes."""

    @functools.wraps(draft_forward)
    def wrapped(self: Any, forward_batch: Any) -> Any:
        if forward_batch.mrope_positions is None:
            return draft_forward(self, forward_batch)
        runner, steps = self.draft_runner, 0
        forward = runner.forward

        def step(batch: Any, *more: Any, **named: Any) -> Any:
            nonlocal steps
            if steps:
                batch.mrope_positions.add_(1)
            steps += 1
            return forward(batch, *more, **named)

        runner.forward = step
        try:
            return draft_forward(self, forward_batch)
        finally:
            del runner.forward  # the method of its class again

    return wrapped


# Module -> the class (or None), the function, its wrapper, and the first digits of the SHA-256 of its source in SGLang 0.5.17.
Target = tuple[str | None, str, Callable[[Callable[..., Any]], Callable[..., Any]], str]
TARGETS: dict[str, list[Target]] = {
    "sglang.srt.managers.mm_utils": [(None, "general_mm_embed_routine", keep_embeddings, "e2a794e55c1ab742")],
    "sglang.srt.speculative.eagle_worker_v2": [
        ("EagleDraftWorker", "_draft_extend_for_prefill", shift_embeddings, "e4fba3084f1ef87a"),
        ("EagleDraftWorker", "draft_forward", advance_positions, "a63f1ba87d1ad3e1"),
    ],
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner": [
        ("EAGLEDraftCudaGraphRunner", "execute", fill_positions, "8cca5a035bcfb33c")
    ],
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner": [
        ("EAGLEDraftExtendCudaGraphRunner", "execute", fill_positions, "99cbdbd557e1a155")
    ],
}


def patch_module(module: Any) -> None:
    """Wrap the functions of a module. Raises SystemExit if one isn't the function that its wrapper was written for."""
    for owner_name, name, wrap, digest in TARGETS[module.__name__]:
        owner = getattr(module, owner_name) if owner_name else module
        function = vars(owner)[name]
        found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
        if found != digest:
            raise SystemExit(
                f"{PREFIX} refused: {module.__name__}.{name} has digest {found}, expected {digest} of SGLang {VERSION}; "
                f"install SGLang {VERSION} as published, or set benchmark_served.servers.*.vision_patch: false"
            )
        setattr(owner, name, wrap(function))
    print(f"{PREFIX} applied to {module.__name__}", file=sys.stderr, flush=True)


class _PatchingLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        patch_module(module)


class _PatchFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in TARGETS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=_PatchingLoader(fullname, spec.origin)
        )


def install() -> None:
    """Patch the modules as they are imported, if this environment has SGLang 0.5.17."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return
    if version == VERSION:
        sys.meta_path.insert(0, _PatchFinder())
    else:
        print(f"{PREFIX} not applied to SGLang {version}, expected {VERSION}", file=sys.stderr, flush=True)
