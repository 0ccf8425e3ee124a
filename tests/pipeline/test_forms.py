"""The answers of forms become sections as a recipe has them, and params.yaml is valid with them."""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from pipeline import form_permissions, recipes
from pipeline.forms import Changes, Sweep
from stages.params.schema import Params, load_params
from stages.params.section import Section


def test_epochs_become_a_chain_of_segments_and_its_names_stand_in_every_list(home) -> None:
    recipes.write_sections(Changes(epochs=[3, 9, 12]).build_sections(load_params()))
    found = load_params()
    chain = [(name, segment.from_, segment.epochs) for name, segment in found.train_draft.checkpoints.items()]
    assert chain == [("e003", "e000", 3), ("e009", "e003", 6), ("e012", "e009", 3)]
    assert found.benchmark.checkpoints == found.replay_trees.checkpoints == ["e003", "e009", "e012"]


def test_other_keys_are_set_and_empty_fields_change_nothing(home) -> None:
    before = load_params()
    changes = Changes(
        trees=["t5_1_6"], other={"train_draft.muon_learning_rate": 0.0003, "sample_target.server.attempts": 2}
    )
    assert recipes.write_sections(changes.build_sections(before)) == [
        "train_draft.muon_learning_rate: 0.008 -> 0.0003",
        "sample_target.server.attempts: 6 -> 2",
        f"benchmark.trees: {before.benchmark.trees} -> ['t5_1_6']",
    ]
    assert load_params().sample_target.server == before.sample_target.server.model_copy(update={"attempts": 2})


def test_a_sweep_sets_the_keys_of_its_engine(home) -> None:
    axes = {"trees": ["t8_2_16"], "checkpoints": ["e003"], "workloads": ["eval"]}
    assert Sweep(**axes).build_sections() == {
        "benchmark": {"trees": ["t8_2_16"], "checkpoints": ["e003"], "torch_workloads": ["eval"]}
    }
    assert Sweep(**axes, engine="served").build_sections() == {"benchmark_served": axes}
    assert Sweep(trees=["t8_2_16"]).build_sections() == {"benchmark": {"trees": ["t8_2_16"]}}


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (
            {"benchmark_served.servers": {"llama.cpp": {"command": ["sh"]}}},
            "benchmark_served.servers.llama.cpp.command",
        ),
        ({"sample_target.server.base_urls": ["http://a:1"]}, "sample_target.server.base_urls"),
        ({"sample_target.server.api_key_env": "HF_TOKEN"}, "sample_target.server.api_key_env"),
        ({"target.trust_remote_code": True, "target.model": "org/name"}, "target.trust_remote_code"),
        ({"fix_data.image_folders": ["/"]}, "fix_data.image_folders"),
        ({"schedule.form_may_set": ["target.trust_remote_code"]}, "schedule.form_may_set"),
        ({"target.model": "data/../../theirs"}, "target.model"),
        ({"fix_data.raw": "s3://theirs/rows.jsonl"}, "fix_data.raw"),
        ({"fix_data.raw": ".prefect/password"}, "fix_data.raw"),
        ({"prepare_prompts.sets": {"s": {"from": "../x.jsonl"}}}, "prepare_prompts.sets.s.from"),
    ],
)
def test_what_runs_code_or_leaves_the_project_is_not_set_through_a_form(home, other: dict, key: str) -> None:
    """Bug: `other` took every key, benchmark_served.servers.sglang.command among them, which a stage then ran as root."""
    with pytest.raises(ValueError, match=rf"other: {re.escape(key)} can't be set through a form"):
        Changes(other=other).build_sections(load_params())


@pytest.mark.parametrize(
    "other",
    [
        {"target.model": "org/name", "target.revision": "refs/pr/1"},
        {"target.model": "models/mine"},
        {"target.trust_remote_code": False, "target.model": "org/name"},
        {"report.title": "../ of /x"},
        {"target.device": "cuda:0"},
    ],
)
def test_a_hub_id_and_a_path_inside_the_project_may_be_set(home, other: dict) -> None:
    if "target.trust_remote_code" in other:
        recipes.write_sections({"schedule": {"form_may_set": ["target.trust_remote_code"]}})
    assert Changes(other=other).build_sections(load_params())


def test_a_key_that_params_yaml_allows_by_name_may_be_set_and_no_other(home) -> None:
    recipes.write_sections(
        {"schedule": {"form_may_set": ["benchmark_served.servers.sglang.launch_args", "target.trust_remote_code"]}}
    )
    args = {"benchmark_served.servers.sglang.launch_args": ["--tp", "2"]}
    assert Changes(other=args).build_sections(load_params())["benchmark_served"]["servers"] == {
        "sglang": {"launch_args": ["--tp", "2"]}
    }
    with pytest.raises(ValueError, match=r"sample_target\.server\.launch_args can't be set"):
        Changes(other={"sample_target.server.launch_args": ["--tp", "2"]}).build_sections(load_params())
    with pytest.raises(ValueError, match="form_may_set can't be set"):
        Changes(other={"schedule.form_may_set": []}).build_sections(load_params())


@pytest.mark.parametrize(
    "trusting",
    [
        {"target": {"trust_remote_code": True}},
        {"benchmark_served": {"servers": {"vllm": {"launch_args": ["--trust-remote-code"]}}}},
        {"sample_target": {"server": {"launch_args": ["--trust_remote_code=true"]}}},
    ],
)
def test_another_model_is_not_set_through_a_form_where_models_run_their_own_code(home, trusting: dict) -> None:
    """Bug: with trust_remote_code in params.yaml, a form could name any repository, whose Python then ran."""
    recipes.write_sections(trusting)
    for other in ({"target.model": "org/name"}, {"target.revision": "theirs"}):
        with pytest.raises(ValueError, match=r"can't be set through a form: target\.trust_remote_code"):
            Changes(other=other).build_sections(load_params())
    recipes.write_sections({"schedule": {"form_may_set": ["target.model"]}})
    assert Changes(other={"target.model": "org/name"}).build_sections(load_params())


# Keys of params.yaml that hold any text, or switch something on and off, and that a form may set: looked at one by one.
HARMLESS = {
    "report.title",  # shown; the page escapes it
    "report.analysis",
    "prepare_prompts.sets.*.columns.*",  # names of columns in the raw data
    "fix_data.columns.*.*",  # the same, of a file: its name is compared with those in fix_data.raw
    "sample_target.thinking",
    "train_draft.train_head",
    "extract_hiddens.compile",
    "extract_hiddens.online",
    *(f"init_draft.{key}" for key in ("fc_norm", "norm_output")),
    "benchmark.workloads.*.ignore_eos",
    "benchmark.workloads.*.grade",  # runs what the target wrote only with run_generated_code
    "benchmark_served.interleave",
    "benchmark_served.servers.*.torch_compile",
    "benchmark_served.servers.*.vision_patch",
    "schedule.stages.*.exclusive",
    # names of trees, which Tree.parse reads whole
    *(f"{section}.trees" for section in ("benchmark", "benchmark_served", "time_cycles")),
    "replay_trees.trace_trees",
}


def _has_pattern(about: Iterable[object]) -> bool:
    """Return whether a pattern is among what a type or a field is annotated with."""
    return any(getattr(part, "pattern", None) or _has_pattern(getattr(part, "metadata", ())) for part in about)


def _open_keys(annotation: object, key: str, pattern: bool = False) -> Iterator[str]:
    """Yield the keys below `annotation` that take any text or a truth value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        for name, field in annotation.model_fields.items():
            yield from _open_keys(
                field.annotation, f"{key}.{field.alias or name}".lstrip("."), _has_pattern(field.metadata)
            )
    elif annotation is bool or (annotation is str and not pattern):
        yield key
    elif get_origin(annotation) is Annotated:
        inner, *about = get_args(annotation)
        yield from _open_keys(inner, key, pattern or _has_pattern(about))
    elif get_origin(annotation) is dict:
        yield from _open_keys(get_args(annotation)[1], f"{key}.*")
    elif get_origin(annotation) is not Literal:
        for inner in get_args(annotation):
            yield from _open_keys(inner, key, pattern)


def test_every_key_of_free_text_or_a_switch_is_classified() -> None:
    """A new key must be named in pipeline/form_permissions.py, or above as one that does no harm."""
    found = set(_open_keys(Params, ""))
    limited = {*form_permissions.REFUSED, *form_permissions.PATHS}
    assert found - limited - HARMLESS == set()
    assert found >= HARMLESS  # none is kept that params.yaml has no more


@pytest.mark.parametrize("name", ["eval; touch x", "eval\n", "$(id)", "../x", "-rf", "a b", ""])
def test_a_name_that_a_shell_would_read_is_refused_by_the_form(name: str) -> None:
    """Names stand in the commands of dvc.yaml, which a shell runs."""
    for given in ({"workloads": [name]}, {"trees": [name]}, {"trees": [f"t8_2_16;{name}"]}):
        with pytest.raises(ValidationError):
            Changes(**given)
    for given in ({"checkpoints": [name]}, {"workloads": [name]}):
        with pytest.raises(ValidationError):
            Sweep(trees=["t8_2_16"], **given)
