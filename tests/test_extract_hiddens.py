"""extract_hiddens on a tiny random target: the right numbers, the same bytes whoever makes them, and none lost to a kill."""

import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stages import extract_hiddens
from stages.draft import supported_targets
from stages.hidden_states import reader
from stages.target import manifest
from stages.telemetry import fork_server
from tests.conftest import ROOT, edit_params
from tests.sampled_rows import sampled_row, write_sampled

H = 32
ROWS = {"train": 44, "eval": 9, "eval_t": 0}
LONGEST = 230


@pytest.fixture(scope="module")
def sampled_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project up to its sampled rows: some 5,000 tokens, 512 bytes each in float32, so several shards of a MiB."""
    project = tmp_path_factory.mktemp("extract")
    (project / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    small = {"max_length": 200, "batch_tokens": 512, "shard_mib": 1}
    edit_params(project, {"target": {"model": "tiny", "num_threads": 1}, "extract_hiddens": small})
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=H, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4, eos_token_id=1
    )
    LlamaForCausalLM(config).save_pretrained(project / "tiny")
    described = supported_targets.describe_target(
        "tiny", None, AutoConfig.from_pretrained(project / "tiny"), project / "tiny", None
    )
    (project / "artifacts/target").mkdir(parents=True)
    manifest.write_manifest(project / "artifacts/target", described)
    (project / "data/sampled").mkdir(parents=True)
    rng = random.Random(0)
    for split, count in ROWS.items():
        rows = []
        for n in range(count):
            prompt, answer = ([rng.randrange(64) for _ in range(rng.randrange(1, most))] for most in (60, LONGEST - 60))
            rows.append(sampled_row(f"{split}.{n}", n, prompt, answer, finish_reason=rng.choice(["stop", "length"])))
        write_sampled(split, rows, project)
    (project / "results").mkdir()
    return project


@pytest.fixture
def project(sampled_project: Path, tmp_path: Path) -> Path:
    """A copy to change; the target and the rows are links."""
    for name in ("artifacts", "tiny"):
        (tmp_path / name).symlink_to(sampled_project / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/sampled").symlink_to(sampled_project / "data/sampled")
    (tmp_path / "params.yaml").write_text((sampled_project / "params.yaml").read_text())
    (tmp_path / "results").mkdir()
    return tmp_path


pytestmark = pytest.mark.usefixtures("forked_stages")


def start(project: Path, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "stages.extract_hiddens"],
        cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(project: Path, **changes: Any) -> str:
    """The stage in this process, which saves seconds of imports; returns what it says."""
    edit_params(project, {"extract_hiddens": changes})
    output = io.StringIO()
    with chdir(project), redirect_stdout(output):
        extract_hiddens.main()
    return output.getvalue()


def test_longer_rows_are_cut_to_the_tokens_that_fit(project: Path) -> None:
    """What is kept of a cut row is what an untruncated one has there: a causal target sees no later token."""
    tables = {s: pl.read_parquet(project / "data/sampled" / s / "*.parquet") for s in ROWS}
    run(project, max_length=LONGEST)
    whole = {row.id: row for split in ("train", "eval") for row in reader.read_rows(project / "data/hiddens" / split)}
    output = run(project, max_length=50, longer_rows="truncate")
    report = json.loads((project / "results/hiddens_report.json").read_text())
    lengths = {
        name: (len(prompt), len(prompt) + len(answer))
        for t in tables.values()
        for name, prompt, answer in t.select("id", "prompt_ids", "answer_ids").iter_rows()
    }
    no_answer_left = {name for name, (prompt, _) in lengths.items() if prompt >= 50}
    cut = {name for name, (_, length) in lengths.items() if length > 50} - no_answer_left
    assert len(cut) > 10 and no_answer_left
    assert report["truncated"] == len(cut) and report["dropped"] == {"longer than max_length": len(no_answer_left)}
    assert f"{len(cut)} rows are longer than max_length 50" in output
    rows = {row.id: row for split in ("train", "eval") for row in reader.read_rows(project / "data/hiddens" / split)}
    assert set(rows) == set(lengths) - no_answer_left
    for name, row in rows.items():
        tokens = min(50, lengths[name][1])
        assert torch.equal(row.ids, whole[name].ids[:tokens]) and torch.equal(row.mask, whole[name].mask[:tokens])
        torch.testing.assert_close(row.features, whole[name].features[:tokens], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(row.last, whole[name].last[:tokens], rtol=1e-4, atol=1e-5)
        assert row.finish_reason == ("length" if name in cut else whole[name].finish_reason)


def run_in_process(project: Path, **changes: Any) -> str:
    """The stage in a process of its own, as unfinished work is known by all code that is loaded."""
    edit_params(project, {"extract_hiddens": changes})
    process = start(project)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def refused(project: Path, **changes: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller looks at all of what is said
        run(project, **changes)
    return str(error.value)


def files(project: Path) -> dict[str, bytes]:
    """Every file under data/hiddens, with its bytes: hidden ones too, so that nothing unfinished may be left."""
    folder = project / "data/hiddens"
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def undisturbed_files(sampled_project: Path) -> dict[str, bytes]:
    """What one process makes, undisturbed."""
    run(sampled_project)
    return files(sampled_project)


def sampled(project: Path, split: str) -> list[dict[str, Any]]:
    return pl.read_parquet(project / f"data/sampled/{split}/*.parquet").to_dicts()


# --- the right numbers ----------------------------------------------------------------------------------------------


def test_rows_are_those_of_transformers_alone(sampled_project: Path, undisturbed_files: dict[str, bytes]) -> None:
    """Each row by itself, in transformers' own words; all that fit, each once, the longest first."""
    model = AutoModelForCausalLM.from_pretrained(sampled_project / "tiny", dtype=torch.float32).eval()
    for split in ("train", "eval"):
        rows = list(reader.read_rows(sampled_project / "data/hiddens" / split))
        expected = {
            r["id"]: r for r in sampled(sampled_project, split) if len(r["prompt_ids"]) + len(r["answer_ids"]) <= 200
        }
        assert sorted(r.id for r in rows) == sorted(expected) and len(expected) < ROWS[split] + (split == "eval")
        assert [len(r.ids) for r in rows] == sorted((len(r.ids) for r in rows), reverse=True)
        for row in rows:
            sampled_row = expected[row.id]
            assert row.ids.tolist() == sampled_row["prompt_ids"] + sampled_row["answer_ids"]
            assert row.mask.tolist() == [False] * len(sampled_row["prompt_ids"]) + [True] * len(
                sampled_row["answer_ids"]
            )
            assert (row.prompt_length, row.finish_reason) == (
                len(sampled_row["prompt_ids"]),
                sampled_row["finish_reason"],
            )
            with torch.inference_mode():
                states = model(row.ids.long()[None], output_hidden_states=True).hidden_states
            torch.testing.assert_close(
                row.features, torch.cat([states[i][0] for i in (2, 3, 4)], -1), rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(row.last, states[-1][0], rtol=1e-5, atol=1e-5)
    assert list(reader.read_rows(sampled_project / "data/hiddens/eval_t")) == []
    assert len([name for name in undisturbed_files if name.startswith("train/shard")]) >= 2


# --- the same bytes -------------------------------------------------------------------------------------------------


def kill_after(project: Path, rng: random.Random, when: Callable[[], bool]) -> bool:
    """Whether it was killed, with all of its processes, a random moment after `when` came true."""
    process = start(project)
    while process.poll() is None and not when():
        time.sleep(0.001)
    time.sleep(rng.random() * 0.02)
    alive = process.poll() is None
    if alive:
        process.kill()
    process.communicate()  # until every process that holds its output has ended
    return alive


def kill_and_resume(project: Path, seed: int, processes: int, undisturbed_files: dict[str, bytes]) -> None:
    rng = random.Random(seed)
    edit_params(project, {"extract_hiddens": {"processes": processes}})
    folder = project / "data/hiddens"
    before = 0
    for _ in range(2):
        most = before + rng.randrange(1, 6)
        kill_after(project, rng, lambda most=most: count_begun(folder) >= most)  # type: ignore[misc]
        before = len(shards_of(folder))
    done = len([*folder.rglob("shard-*.json")])
    output = run_in_process(project)
    assert files(project) == undisturbed_files
    if done and processes == 1:
        assert f"resumed: {done} of " in output


def count_begun(folder: Path) -> int:
    """Number of shards that are written or being written; 0 while a folder is moved into its place."""
    try:
        return len(list(folder.rglob(".*.part"))) + len(shards_of(folder))
    except FileNotFoundError:
        return 0


def shards_of(folder: Path) -> list[Path]:
    return list(folder.rglob("shard-*.safetensors"))


def test_what_was_killed_goes_on_to_the_same_bytes(project: Path, undisturbed_files: dict[str, bytes]) -> None:
    kill_and_resume(project, 0, 1, undisturbed_files)


def test_no_process_outlives_the_stage(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed alone, as DVC or a user kills it: its ranks would else go on writing beside the next run."""
    monkeypatch.delenv(fork_server.ADDRESS_VARIABLE)
    edit_params(project, {"extract_hiddens": {"processes": 2}})
    parent = start(project)
    deadline = time.monotonic() + 60
    while len(ranks := psutil.Process(parent.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert len(ranks) == 2 and not psutil.wait_procs(ranks, timeout=60)[1]


# --- made elsewhere -------------------------------------------------------------------------------------------------


def test_our_own_folder_is_imported_to_the_bit(
    project: Path, sampled_project: Path, undisturbed_files: dict[str, bytes]
) -> None:
    run(project, **{"import": str(sampled_project / "data/hiddens")})
    assert files(project) == undisturbed_files


def specforge(project: Path, folder: Path, dtype: torch.dtype = torch.float32, save: Callable = save_file) -> None:
    """One record a row, as SpecForge names and shapes them (research/specforge.md 2.2)."""
    folder.mkdir()
    for split in ("train", "eval"):
        for number, row in enumerate(reader.read_rows(project / "data/hiddens" / split)):
            record = {
                "input_ids": row.ids.long(),
                "loss_mask": row.mask.long(),
                "hidden_state": row.last.to(dtype)[None],
                "aux_hidden_state": row.features.to(dtype)[None],
            }
            suffix = "safetensors" if save is save_file else "ckpt"
            save(record, folder / f"{split}-{number}.{suffix}")


def test_specforges_records_are_imported(
    project: Path, sampled_project: Path, undisturbed_files: dict[str, bytes], tmp_path: Path
) -> None:
    specforge(sampled_project, tmp_path / "given")
    run(project, **{"import": str(tmp_path / "given")})
    assert files(project) == undisturbed_files


def one_record(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = sorted(folder.glob("train-*.safetensors"))[0]
    with safe_open(path, framework="pt") as file:
        return path, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {**r, "hidden_state": r["hidden_state"] * float("nan")}, "holds NaN or infinity, expected finite"),
        (lambda r: {**r, "hidden_state": r["hidden_state"][:, 1:]}, "of another model, or of other layers"),
        (lambda r: {**r, "input_ids": r["input_ids"] + 1}, "has no hidden states of 1 of "),
    ],
    ids=["NaN", "another length", "other ids"],
)
def test_wrong_records_are_refused_by_name(
    project: Path,
    sampled_project: Path,
    undisturbed_files: dict[str, bytes],
    tmp_path: Path,
    change: Callable,
    message: str,
) -> None:
    specforge(sampled_project, tmp_path / "given")
    path, record = one_record(tmp_path / "given")
    save_file({k: v.contiguous() for k, v in change(record).items()}, path)
    output = refused(project, **{"import": str(tmp_path / "given")})
    assert message in output and (str(path) in output or "has no hidden states" in message)
