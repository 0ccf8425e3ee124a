"""The engines that serve, by name; which of them a running server is."""

import json
from collections.abc import Mapping
from typing import Any

from stages.engines.http_session import NOT_READY_STATUSES, HttpSession
from stages.engines.llama_cpp import LlamaCpp
from stages.engines.protocol import ServingEngine
from stages.engines.sglang import SGLang
from stages.engines.transformers_serve import TransformersServe
from stages.engines.vllm import VLLM

OTHER = ServingEngine()  # a server of another engine
_ENGINES = {engine.name: engine for engine in (SGLang(), VLLM(), LlamaCpp(), TransformersServe(), OTHER)}


def get(name: str) -> ServingEngine:
    return _ENGINES[name]


def list_simulating(environment: Mapping[str, str], command: list[str]) -> list[str]:
    """Return what of a server's environment and command would make some engine simulate acceptance."""
    return [word for engine in _ENGINES.values() for word in engine.list_simulating(environment, command)]


def list_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that steer an engine. What may be a secret is left out."""
    secret = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    starts = tuple(engine.variables for engine in _ENGINES.values() if engine.variables)
    found = {name: value for name, value in sorted(environment.items()) if name.startswith(starts)}
    return {name: value for name, value in found.items() if not any(word in name for word in secret)}


async def identify_engine(http: HttpSession, url: str) -> ServingEngine:
    """Return the engine of a running server, OTHER for one that is not known here.

    Raises:
        ExchangeFailedError: if the server can't be asked yet.
        ValueError: if it serves another model.
    """
    served: list[dict[str, Any]] = []
    briefly = min(10.0, http.timeout_s)
    reply = await http.send(url, "GET", "/v1/models", within_s=briefly)
    if reply.status in (401, 403):
        raise ValueError(f"{url} answered HTTP {reply.status} for its models; is {http.section}.api_key_env right?")
    if reply.status in NOT_READY_STATUSES:
        http.check(url, reply)
    by_owner = {engine.owned_by: engine for engine in _ENGINES.values() if engine.owned_by}
    try:
        if reply.status == 200:
            served = [m for m in json.loads(reply.body)["data"] if isinstance(m, dict)]
        found = next((by_owner[m["owned_by"]] for m in served if m.get("owned_by") in by_owner), None)
        if found is None:
            spec = await http.send(url, "GET", "/openapi.json", within_s=briefly)
            paths = set(json.loads(spec.body)["paths"] if spec.status == 200 else ())
            by_paths = (engine for engine in _ENGINES.values() if engine.own_paths and engine.own_paths <= paths)
            if found := next(by_paths, None):
                return found
    except (KeyError, TypeError, ValueError):
        return OTHER
    names = [str(m.get("id")) for m in served]
    if names and http.model not in names:
        raise ValueError(
            f"{url} serves {', '.join(names)}, expected {http.model}; correct {http.section}.base_urls, or set "
            f"{http.section}.model to the target's name there"
        )
    return found or OTHER
