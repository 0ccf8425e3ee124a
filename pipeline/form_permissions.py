"""Limits of the forms: keys that run code, send secrets or code elsewhere, or name a file outside the project.

The owner of the workspace allows single keys by name in params.yaml, schedule.form_may_set.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from stages.params.schema import Params

MODEL = "target.model"
REVISION = "target.revision"
TRUST = "target.trust_remote_code"
ALLOWED = "schedule.form_may_set"

# * stands for a name of the user's.
REFUSED = {
    ALLOWED: "it says what a form may set",
    TRUST: "it runs Python that comes with the model",
    "sample_target.server.launch_args": "they are flags of a program that is started",
    "sample_target.server.base_urls": "prompts, and the key of api_key_env, are sent there",
    "sample_target.server.api_key_env": "it sends a secret of this machine's environment to a server",
    "benchmark_served.servers.*.command": "it is run as a command",
    "benchmark_served.servers.*.launch_args": "they are flags of a program that is started",
    "benchmark_served.servers.*.base_urls": "prompts, and the key of api_key_env, are sent there",
    "benchmark_served.servers.*.base_urls.*": "prompts, and the key of api_key_env, are sent there",
    "benchmark_served.servers.*.api_key_env": "it sends a secret of this machine's environment to a server",
    "benchmark.run_generated_code": "it runs programs that a model wrote",
    "fix_data.image_folders": "rows may then name images outside of their own folder",
}
# Free text that names, or may name, a file or folder, or becomes part of a command line.
PATHS = (
    MODEL, REVISION, "target.chat_template", "fix_data.raw", "fix_data.eval_file", "fix_data.tables",
    "sample_target.server.model", "extract_hiddens.import", "init_draft.draft_config_path", "init_draft.from",
    "init_draft.revision", "import_draft.checkpoints.*.model", "import_draft.checkpoints.*.revision",
    "prepare_prompts.sets.*.from", "prepare_prompts.sets.*.name", "prepare_prompts.sets.*.split",
    "prepare_prompts.sets.*.revision", "benchmark_served.servers.*.algorithm", "benchmark_served.servers.*.model",
)  # fmt: skip
INSIDE = "a path inside the project: relative, without '..' and hidden folders"
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def check_form(changed: dict[str, dict[str, Any]], params: Params) -> None:
    """Check a form's keys against the limits and the keys that `params` allows by name.

    Raises:
        ValueError: naming the first key that a form may not set.
    """
    allowed = set(params.schedule.form_may_set)
    if unknown := sorted(key for key in allowed if not _find_limit(key)):
        known = ", ".join([*list(REFUSED)[1:], *PATHS])
        raise ValueError(f"params.yaml: {ALLOWED} names {unknown[0]}, expected some of {known}")
    values = list(_list_leaves(changed))
    trusted = trusts_remote_code(params) or any(key == TRUST and value is not False for key, value in values)
    for key, value in values:
        pattern = _find_limit(key)
        if pattern is None or (pattern != ALLOWED and allowed & {key, pattern}):
            continue
        if reason := REFUSED.get(pattern):
            raise ValueError(_format_refusal(key, reason))
        if trusted and pattern in (MODEL, REVISION):
            raise ValueError(_format_refusal(key, f"{TRUST} lets the model run its own Python"))
        if isinstance(value, str) and leaves_project(value):
            raise ValueError(_format_refusal(key, f"{value!r} is neither a hub id nor {INSIDE}"))


def trusts_remote_code(params: Params) -> bool:
    """Return whether the parameters already run a target's own Python, in a stage or on a server that a stage starts."""
    told = [params.sample_target.server.launch_args]
    for server in params.benchmark_served.servers.values():
        told += [server.launch_args, server.command]
    words = [word.replace("_", "-") for words in told for word in words]
    return params.target.trust_remote_code or any(word.startswith("--trust-remote-code") for word in words)


def leaves_project(text: str) -> bool:
    """Return whether the text is neither a hub id, a plain word, nor a path to a file of the project that is not hidden."""
    parts = text.replace("\\", "/").split("/")
    hidden = any(part.startswith(".") and part != "." for part in parts)  # .. too, and .prefect, .dvc, .git
    plain = (
        text.isprintable() and "$" not in text and not text.startswith(("/", "\\", "~", "-")) and not URL.match(text)
    )
    return hidden or not plain


def _format_refusal(key: str, reason: str) -> str:
    return f"other: {key} can't be set through a form: {reason}. Set it in params.yaml, or list it in {ALLOWED} there"


def _find_limit(key: str) -> str | None:
    """Return the pattern of REFUSED or PATHS that the key matches."""
    return next((pattern for pattern in [*REFUSED, *PATHS] if fnmatchcase(key, pattern)), None)


def _list_leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value that is no mapping; items of a list under the list's key."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _list_leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _list_leaves(inner, key)
    else:
        yield key, value
