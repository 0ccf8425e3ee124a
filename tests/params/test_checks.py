"""Checks before any stage: folders, raw data, GPUs and vocabularies that params.yaml names, and the command that runs them."""

from pathlib import Path
from typing import Any

import pytest

from stages.params import checks, schema
from tests.params.params_edits import edit_params_text, set_value, set_values


@pytest.mark.parametrize("model", ["/nowhere/qwen", "../qwen", "~/qwen", "our/models/qwen"])
def test_a_target_folder_that_is_missing_is_named_before_any_stage(model: str) -> None:
    """Bug: it was looked for on Hugging Face, after fix_data had run, and the message was about the network."""
    set_value(("target", "model"), model)
    with pytest.raises(ValueError, match=rf"^params\.yaml: target\.model is {model}, expected a folder, found none"):
        checks.check_target(schema.load_params())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("onw.jinja", r"target\.chat_template is onw\.jinja \(did you mean own\.jinja\?\), expected the name of a file in"),
        ("broken.jinja", r"templates/broken\.jinja is not valid Jinja .*line 2: "),
        ("deep.jinja", r"templates/deep\.jinja is not valid .*recursion"),
    ],
)  # fmt: skip
def test_a_chat_template_that_is_not_there_or_no_template_is_refused_before_any_stage(name: str, message: str) -> None:
    """Bug: prepare_target found it, after fix_data; one of a thousand brackets ended in a traceback."""
    Path("templates").mkdir()
    Path("templates/broken.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    Path("templates/own.jinja").write_text("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}")
    Path("templates/deep.jinja").write_text("{% if " + "(" * 3000)
    checks.check_target(schema.load_params())
    set_value(("target", "chat_template"), "own.jinja")
    checks.check_target(schema.load_params())
    set_value(("target", "chat_template"), name)
    with pytest.raises(ValueError, match=message):
        checks.check_target(schema.load_params())


def test_cuda_without_a_gpu_is_refused_before_any_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `device: cuda` on a machine without CUDA ended in a traceback of torch, after the data had been made."""
    set_value(("target", "device"), "cuda")
    monkeypatch.setattr(checks, "GPU_DEVICES", ("/nowhere/*",))
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    with pytest.raises(
        ValueError, match=r"target\.device is cuda, expected a GPU, found none .*; set target\.device: cpu"
    ):
        checks.check_target(schema.load_params())
    other = schema.load_params()  # whose workers' hosts may have one
    checks.check_target(other.model_copy(update={"schedule": other.schedule.model_copy(update={"runner": "workers"})}))
    monkeypatch.setattr(checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    checks.check_target(schema.load_params())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        checks.check_target(schema.load_params())


def test_an_eval_file_fits_files_of_the_raw_folder() -> None:
    edit_params_text(("eval_file: null", "eval_file: test.jsonl"))
    Path("data/raw/bench").mkdir(parents=True)
    files = ("weather_toon.jsonl", "test.jsonl", "bench/b1.jsonl", "bench/b2[x].jsonl")
    for name in files:
        Path("data/raw", name).touch()  # test.jsonl is beside the raw file, where DVC would not see it change
    with pytest.raises(ValueError, match=r"eval_file names test\.jsonl, expected .* as seen from fix_data\.raw"):
        checks.check_raw(schema.load_params())

    def find_eval_files(given: Any, raw: str = "data/raw") -> list[str]:
        set_values({("fix_data", "eval_file"): given, ("fix_data", "raw"): raw})
        checks.check_raw(p := schema.load_params())
        return [file for file in files if p.fix_data.is_eval_source(file)]

    assert find_eval_files("weather_toon.jsonl", "data/raw/weather_toon.jsonl") == ["weather_toon.jsonl"]
    assert find_eval_files("test.jsonl") == ["test.jsonl"]
    both = ["bench/b1.jsonl", "bench/b2[x].jsonl"]
    for given in ("bench", "./bench/", "bench/b*.jsonl", both, ["bench/b1.jsonl", "bench/*[[]x].jsonl"]):
        assert find_eval_files(given) == both
    for given, message in (
        ("data/raw/test.jsonl", r"as seen from fix_data\.raw"),
        ("data/raw/bench/b*", r"names data/raw/bench/b\*"),
        (["bench/b1.jsonl", "bench/b7.jsonl"], r"names bench/b7\.jsonl"),
        ("ben", "names ben"),
    ):
        with pytest.raises(ValueError, match=message):
            find_eval_files(given)
    with pytest.raises(ValueError, match=r"fix_data\.eval_file\.1: expected text"):
        find_eval_files(["a", 3])


ASKED = {"prompt": "question", "answer": "reply"}
TALK = {"messages": "talk"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"b.cvs": ASKED},
            r"columns names b\.cvs \(did you mean b\.csv\?\), expected .*, found a\.csv, b\.csv in data/raw; correct it$",
        ),
        ({"*.csv": ASKED, "a*": TALK}, r"columns has \*\.csv and a\* for a\.csv, expected one; name the file itself"),
    ],
)
def test_a_name_of_columns_that_fits_no_file_is_refused_before_any_stage(columns: dict[str, Any], message: str) -> None:
    Path("data/raw").mkdir(parents=True)
    for name in ("a.csv", "b.csv", ".hidden"):
        Path("data/raw", name).touch()
    set_values({("fix_data", "raw"): "data/raw", ("fix_data", "columns"): columns})
    with pytest.raises(ValueError, match=rf"^params\.yaml: fix_data\.{message}"):
        checks.check_raw(schema.load_params())
