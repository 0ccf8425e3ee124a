"""What a form may not set: what is executed, sends secrets or code elsewhere, or names a file outside the project.

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

# * stands for a name that the user chose.
REFUSED = {
    ALLOWED: "it says what a form may set",
    TRUST: "it runs Python that comes with the model",
    "sample_target.server.launch_args": "they are flags of a program that is started",
    "sample_target.server.base_urls": "prompts, and the key of api_key_env, are sent there",
    "sample_target.server.api_key_env": "it sends a secret of this machine's environment to a server",
    "benchmark_served.server.command": "it is run as a command",
    "benchmark_served.server.launch_args": "they are flags of a program that is started",
    "benchmark_served.server.base_urls": "prompts, and the key of api_key_env, are sent there",
    "benchmark_served.server.base_urls.*": "prompts, and the key of api_key_env, are sent there",
    "benchmark_served.server.api_key_env": "it sends a secret of this machine's environment to a server",
    "benchmark.allow_unsandboxed_code": "it lets programs that a model wrote run without a sandbox",
    "schedule.ray_address": "code and the Prefect server's password are sent there",
}
# Free text that names, or may name, a file or folder, or stands on a command line.
PATHS = (
    MODEL,
    REVISION,
    "target.watch",
    "target.chat_template",
    "fix_data.raw",
    "fix_data.eval_file",
    "sample_target.server.model",
    "extract_hiddens.import",
    "init_draft.draft_config_path",
    "init_draft.from",
    "init_draft.watch",
    "init_draft.revision",
    "import_draft.watch",
    "import_draft.checkpoints.*.model",
    "import_draft.checkpoints.*.revision",
    "prepare_prompts.sets.*.from",
    "prepare_prompts.sets.*.name",
    "prepare_prompts.sets.*.split",
    "prepare_prompts.sets.*.revision",
    "benchmark_served.server.algorithm",
    "benchmark_served.server.model",
)
INSIDE = "a path inside the project: relative, without '..' and hidden folders"
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def check(changed: dict[str, dict[str, Any]], now: Params) -> None:
    """Check sections of changed keys, as a form gave them, against the limits and what `now` allows by name.

    Raises:
        ValueError: naming the first key that may not be set so.
    """
    allowed = set(now.schedule.form_may_set)
    if unknown := sorted(key for key in allowed if not _pattern(key)):
        raise ValueError(
            f"params.yaml: {ALLOWED} names {unknown[0]}, expected keys that are refused otherwise: "
            f"{', '.join([*list(REFUSED)[1:], *PATHS])}; correct the list"
        )
    values = list(_leaves(changed))
    trusted = trusts_code(now) or any(key == TRUST and value is not False for key, value in values)
    for key, value in values:
        pattern = _pattern(key)
        if pattern is None or (pattern != ALLOWED and allowed & {key, pattern}):
            continue
        if reason := REFUSED.get(pattern):
            raise ValueError(_refusal(key, reason))
        if trusted and pattern in (MODEL, REVISION):
            raise ValueError(_refusal(key, f"{TRUST} lets the model run its own Python"))
        if isinstance(value, str) and leaves_project(value):
            raise ValueError(_refusal(key, f"{value!r} is neither a hub id nor {INSIDE}"))


def trusts_code(now: Params) -> bool:
    """Return whether a target's own Python is run already, by us or by a server that is started."""
    servers = [now.sample_target.server.launch_args, now.benchmark_served.server.launch_args]
    words = [word.replace("_", "-") for words in [*servers, now.benchmark_served.server.command] for word in words]
    return now.target.trust_remote_code or any(word.startswith("--trust-remote-code") for word in words)


def leaves_project(text: str) -> bool:
    """Return whether the text is anything but a hub id, a plain word, or a path to a file of the project that is not hidden."""
    parts = text.replace("\\", "/").split("/")
    hidden = any(part.startswith(".") and part != "." for part in parts)  # .. too, and .prefect, .dvc, .git
    plain = (
        text.isprintable() and "$" not in text and not text.startswith(("/", "\\", "~", "-")) and not URL.match(text)
    )
    return hidden or not plain


def _refusal(key: str, reason: str) -> str:
    return f"other: {key} can't be set through a form: {reason}. Set it in params.yaml, or list it in {ALLOWED} there"


def _pattern(key: str) -> str | None:
    """Return the limit that is about this key."""
    return next((pattern for pattern in [*REFUSED, *PATHS] if fnmatchcase(key, pattern)), None)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that is no mapping; items of a list under the key of the list."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value
