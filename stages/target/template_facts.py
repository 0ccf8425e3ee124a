"""Facts of chat templates, found by rendering known words: some take a content as a list of parts only, some ignore tools, and
the key that switches thoughts on has two names.
"""

import datetime
import re
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jinja2
import jinja2.meta

from stages.runtime.limited_call import call_limited
from stages.target.manifest import TemplateFacts

Messages = list[dict[str, Any]]
THINKING_KEYS = ("enable_thinking", "thinking")  # Qwen3's and GLM's; Granite's, DeepSeek-V3.1's and Kimi's
DATE = "strftime_now"  # the function by which a template reads today's date
MOST_RENDERED = 1 << 20  # characters of a question of one word; a tokenizer takes minutes for ten million
facts_by_tokenizer: "WeakKeyDictionary[Any, TemplateFacts]" = WeakKeyDictionary()

ASK, ANSWER = {"role": "user", "content": "aeriequestion"}, {"role": "assistant", "content": "aerieanswer"}
CALL = {
    "id": "aeriecall",  # nine letters: Mistral's template accepts no other id
    "type": "function",
    "function": {"name": "aeriefunction", "arguments": {"city": "aerieargument"}},
}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
_RESULT = {"role": "tool", "tool_call_id": "aeriecall", "name": "aeriefunction", "content": "aerieresult"}
TOOL = {
    "type": "function",
    "function": {
        "name": "aerietool",
        "description": "aeriedescription",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}},
    },
}
# Of each kind of what a row may hold: messages with it, their tools, and a word that their rendering must have.
PROBES: dict[str, tuple[Messages, Messages | None, str]] = {
    "questions": ([ASK], None, "aeriequestion"),
    "answers": ([ASK, ANSWER, ASK], None, "aerieanswer"),
    "system messages": ([{"role": "system", "content": "aeriesystem"}, ASK], None, "aeriesystem"),
    "tools": ([ASK], [TOOL], "aerietool"),
    "tool calls": ([ASK, _CALLING, _RESULT], [TOOL], "aerieargument"),
    "tool results": ([ASK, _CALLING, _RESULT], [TOOL], "aerieresult"),
    "reasoning": ([ASK, {**ANSWER, "reasoning_content": "aeriethought"}], None, "aeriethought"),
}
ROLES_OF_PROBES = {"questions": "user", "answers": "assistant", "system messages": "system", "tool results": "tool"}


def probe_template(tokenizer: Any) -> TemplateFacts:
    """Return what the tokenizer's chat template shows, found once. Raises ValueError where the known words exceed the limits.

    A kind that the template refuses, by an error, is not among those that it hides: each such row is refused by that error. In a
    child process: a template is a program of others, and no thread can stop one that computes inside C.
    """
    if tokenizer not in facts_by_tokenizer:
        doing = "rendering a question by the target's chat template"
        remedy = "give another: target.chat_template names a file in templates/"
        facts_by_tokenizer[tokenizer] = call_limited(partial(_probe_here, tokenizer), doing, remedy)
    return facts_by_tokenizer[tokenizer]


def _probe_here(tokenizer: Any) -> TemplateFacts:
    parts: tuple[str, ...] = ()
    for kind, role in ROLES_OF_PROBES.items():
        if _is_shown(tokenizer, kind, parts) is False and _is_shown(tokenizer, kind, (*parts, role)):
            parts = (*parts, role)
    hides = tuple(kind for kind in PROBES if _is_shown(tokenizer, kind, parts) is False)
    keys = tuple(key for key in THINKING_KEYS if key in _list_read_names(tokenizer.chat_template))
    for kind in PROBES:  # what later renderings ask for must end too
        for thinking in (True, False):
            _is_shown(tokenizer, kind, parts, dict.fromkeys(keys, thinking))
    return TemplateFacts(hides, parts, keys)


def _is_shown(
    tokenizer: Any, kind: str, parts: tuple[str, ...], settings: dict[str, bool] | None = None
) -> bool | None:
    """Return whether the template shows this kind, contents of the roles `parts` as parts; None where it refuses it."""
    messages, tools, word = PROBES[kind]
    header = messages[-1]["role"] != "assistant"
    try:
        text = apply_template(tokenizer, write_as_parts(messages, parts), header, tools, settings or {})
    except MemoryError:
        raise
    except Exception:  # a template may raise anything
        return None
    if len(text) > MOST_RENDERED:
        raise ValueError(f"it renders {len(text):,} characters, expected at most {MOST_RENDERED:,}")
    return word in text


def _list_read_names(template: str | dict[str, str]) -> set[str]:
    """Return the names that the template reads and does not set."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    read: set[str] = set()
    for text in filter(None, template.values() if isinstance(template, dict) else [template]):
        try:
            read |= jinja2.meta.find_undeclared_variables(environment.parse(text))
        except (
            jinja2.TemplateSyntaxError,
            RecursionError,
        ):  # a tag of transformers' own, as {% generation %}: by its words
            read |= set(re.findall(r"\w+", text))
    return read


def reads_date(template: str | dict[str, str]) -> bool:
    """Return whether the template shows today's date. Evaluates nothing."""
    return DATE in _list_read_names(template)


def fix_date(template: str | dict[str, str], day: datetime.date) -> str:
    """Return the template with `day` for today, in every renderer: its function of the date is replaced by a macro."""
    if isinstance(template, dict):  # transformers takes the one of this name where there are tools
        tools, plain = template.get("tool_use"), template.get("default", "")
        template = f"{{% if tools %}}\n{tools}{{% else %}}\n{plain}{{% endif %}}" if tools else plain
    codes = sorted(set(re.findall(r"%-?[A-Za-z]", template)))
    filters = "".join(f" | replace('{code}', '{value}')" for code in codes if (value := day.strftime(code)) != code)
    return f"{{% macro {DATE}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


def explain_hidden(tokenizer: Any, messages: Messages, tools: Messages | None) -> str | None:
    """Return which kinds of these messages and tools the chat template renders as nothing, and what to do; None where it shows
    all. Thoughts must be shown of the last message alone: many templates drop earlier ones, as servers then do.
    """
    held = {
        "questions": any(m["role"] == "user" for m in messages),
        "answers": any(m["role"] == "assistant" and m["content"] for m in messages),
        "system messages": any(m["role"] == "system" and m["content"] for m in messages),
        "tools": bool(tools),
        "tool calls": any(m.get("tool_calls") for m in messages),
        "tool results": any(m["role"] == "tool" and m["content"] for m in messages),
        "reasoning": bool(messages and messages[-1].get("reasoning_content")),
    }
    hidden = [kind for kind in probe_template(tokenizer).hides if held[kind]]
    return (
        None
        if not hidden
        else (
            f"the target's chat template renders {' and '.join(hidden)} as nothing, so the target would be asked something else; "
            "leave such rows out of the data, or write a template that shows them to templates/NAME.jinja and set "
            "target.chat_template: NAME.jinja"
        )
    )


def check_thinking(tokenizer: Any, thinking: bool | None) -> None:
    """Raise ValueError where `thinking` is asked for and the chat template reads it under no known name."""
    if thinking is not None and not probe_template(tokenizer).thinking_keys:
        raise ValueError(
            f"params.yaml: sample_target.thinking is {str(thinking).lower()}, expected null: the target's chat template reads "
            f"none of {', '.join(THINKING_KEYS)}, so prompts would be the same; set it to null"
        )


def apply_template(
    tokenizer: Any, messages: Messages, header: bool, tools: Messages | None, settings: dict[str, bool]
) -> str:
    """Return the rendered text. `reasoning_content` is given as `thinking` too, the key that gpt-oss's template reads."""
    messages = [{**m, "thinking": m["reasoning_content"]} if m.get("reasoning_content") else m for m in messages]
    given: dict[str, Any] = settings | ({"tools": tools} if tools else {})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header, **given)
    return text


def write_as_parts(messages: Messages, roles: tuple[str, ...]) -> Messages:
    """Return the messages, those of `roles` with texts as lists of one part, as SGLang and vLLM give them to such templates."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else []}
        if m["role"] in roles and isinstance(m["content"], str)
        else m
        for m in messages
    ]
