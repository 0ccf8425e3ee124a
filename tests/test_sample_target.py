"""sample_target through a real `transformers serve`, through kills, and with the data's own answers."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from ruamel.yaml import YAML
from transformers import AutoTokenizer

from stages import fix_data, params, prepare_target, sample_target
from stages.serving import server
from tests.conftest import ROOT, copy_project, edit_params
from tests.serving.fake import Fake, completion

SERVER = {"launch": None, "launch_args": [], "start_timeout_s": 120.0, "base_urls": [], "model": None,
          "concurrency": 8, "timeout_s": 60.0, "attempts": 6, "api_key_env": None}  # fmt: skip
SPLITS = ("train", "eval", "eval_t")


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a target that can say a little, and its answers by the transformers backend. Copy it to change it."""
    project = copy_project(tmp_path_factory.mktemp("sampled"))
    edit_params(project, {
        "prepare_target": {"steps": 30},
        "sample_target": {"train_rows": 6, "eval_rows": 3, "max_new_tokens": 24},
    })  # fmt: skip
    before = Path.cwd()
    os.chdir(project)
    try:
        for main in (fix_data.main, prepare_target.main, sample_target.main):
            main()
    finally:
        os.chdir(before)
    return project


@pytest.fixture
def project(sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(sampled, tmp_path / "project", ignore=shutil.ignore_patterns(".git", ".dvc"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


@pytest.fixture(scope="session")
def transformers_serve(sampled: Path) -> Iterator[dict[str, Any]]:
    """The real server, of the same target; as the keys of sample_target.server that name it."""
    folder, port = str(sampled / "artifacts/target"), server.free_port()
    line = server.command("transformers", folder, port, "float32", "cpu", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # two processes of two threads on two cores would wait for each other
        with server.started("transformers", line, port, folder, sampled / "server.log", 120) as running:
            yield {"base_urls": [running.base_url], "model": folder}


def use(project: Path, backend: str, server_: dict[str, Any] | None = None, **settings: Any) -> None:
    edit_params(project, {"sample_target": {"backend": backend, "server": SERVER | (server_ or {}), **settings}})


def answers(project: Path, split: str) -> pl.DataFrame:
    return pl.read_parquet(project / f"data/sampled/{split}/*.parquet")


def report(project: Path) -> dict[str, Any]:
    found = json.loads((project / "results/sample_report.json").read_text())
    assert found["rows_in"] == found["rows_out"] + sum(found["dropped"].values())
    return found


def test_a_real_server_says_what_this_process_says(project: Path, transformers_serve: dict[str, Any]) -> None:
    """At temperature 0, where its ids can be told; and above, the same at any concurrency, since each row has its seed."""
    own = {row["id"]: row for row in answers(project, "eval").to_dicts()}
    use(project, "server", transformers_serve)
    sample_target.main()
    said = answers(project, "eval").to_dicts()
    assert said and all(row == own[row["id"]] for row in said)
    found = report(project)
    assert set(found["token_ids"]) == {"text, as many"}
    assert set(found["dropped"]) <= {"truncated", "token_ids_unknown", "empty"}
    first = {split: answers(project, split) for split in SPLITS}
    use(project, "server", {**transformers_serve, "concurrency": 1})
    sample_target.main()
    for split in SPLITS:
        assert answers(project, split).equals(first[split])
    hot, cold = answers(project, "eval_t")["answer_ids"].to_list(), answers(project, "eval")["answer_ids"].to_list()
    assert hot != cold  # bug of a plain request: `transformers serve` is greedy at any temperature without do_sample


def test_another_template_in_the_server_stops_the_run(project: Path) -> None:
    with Fake(lambda b, n: completion("hi", b["model"], usage={"prompt_tokens": 3, "completion_tokens": 2})) as fake:
        use(project, "server", {"base_urls": [fake.url], "attempts": 1})
        with pytest.raises(
            ValueError, match=r"row .*\.0: the server was prompted with 3 tokens, .* give \d+; let the server"
        ):
            sample_target.main()


def test_ids_that_cannot_be_told_are_dropped_and_counted(project: Path) -> None:
    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        return completion("hi", body["model"], usage={"completion_tokens": 99} if number % 3 == 0 else {})

    with Fake(reply) as fake:
        use(project, "server", {"base_urls": [fake.url], "concurrency": 1})
        sample_target.main()
    found = report(project)
    assert found["dropped"]["token_ids_unknown"] == 4 == found["rows_in"] - found["rows_out"]


def test_a_refused_row_is_dropped_and_refusing_servers_stop_the_run(project: Path) -> None:
    with Fake(lambda b, n: 400 if n == 1 else completion("hi", b["model"])) as fake:
        use(project, "server", {"base_urls": [fake.url]})
        sample_target.main()
    assert report(project)["dropped"]["refused"] == 1
    with Fake(lambda *_: 400) as fake:
        use(project, "server", {"base_urls": [fake.url]}, train_rows=20)
        with pytest.raises(ValueError, match="the servers refused the first 8 rows"):
            sample_target.main()


def test_later_turns_are_asked_after_the_targets_own_answers(project: Path) -> None:
    talk = [{"role": r, "content": f"{r} {i}"} for i, r in enumerate(["user", "assistant"] * 3)]
    rows = pl.read_parquet("data/fixed/train.parquet").head(1).with_columns(pl.Series("messages", [talk]))
    rows.write_parquet("data/fixed/train.parquet")
    with Fake(lambda b, n: completion(f"own {len(b['messages'])}", b["model"])) as fake:
        use(project, "server", {"base_urls": [fake.url]}, history="target")
        sample_target.main()
    histories = [[m["content"] for m in b["messages"]] for b in fake.bodies[:3]]
    assert histories == [
        ["user 0"],
        ["user 0", "own 1", "user 2"],
        ["user 0", "own 1", "user 2", "own 3", "user 4"],
    ]
    assert len({b["seed"] for b in fake.bodies[:3]}) == 3


def test_a_killed_run_goes_on_without_a_hole_or_a_duplicate(project: Path) -> None:
    """Bug of counting lines: answers come in any order, so the count says nothing of which are there."""
    rng, command = random.Random(3), [sys.executable, "-m", "stages.sample_target"]

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(0.01)  # the server takes one at a time, so that there is a middle to be killed in
        return completion(f"place: {body['seed']}", body["model"])

    with Fake(reply) as fake:
        use(project, "server", {"base_urls": [fake.url]}, train_rows=120, eval_rows=20)
        subprocess.run(command, check=True, capture_output=True)
        whole, asked = {split: answers(project, split) for split in SPLITS}, len(fake.bodies)
        assert asked == 160
        shutil.rmtree("data/sampled")
        fake.bodies.clear()
        at = 0
        for _ in range(3):
            at += rng.randrange(15, 45)
            stage = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while len(fake.bodies) < at:
                assert stage.poll() is None
                time.sleep(0.002)
            os.kill(stage.pid, signal.SIGKILL)
            stage.wait()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "resumed: " in done.stdout
    for split in SPLITS:
        assert answers(project, split).equals(whole[split])
    again = len(fake.bodies) - asked
    assert 0 <= again <= 3 * SERVER["concurrency"]  # only what was under way is asked twice
    assert not list(Path(".scratch").glob("sample_target-*"))


def test_keep_takes_the_datas_own_answers_and_the_targets_for_eval(project: Path) -> None:
    before = {split: answers(project, split) for split in SPLITS}
    use(project, "keep")
    sample_target.main()
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
    fixed = pl.read_parquet("data/fixed/train.parquet").to_dicts()
    said = [m["content"] for row in fixed for m in row["messages"] if m["role"] == "assistant"]
    rows = answers(project, "train").to_dicts()
    assert len(rows) == 6
    for row, text, asked in zip(rows, said, before["train"].to_dicts(), strict=False):
        assert tokenizer.decode(row["answer_ids"]) == f"{text}<|im_end|>"
        assert (row["id"], row["prompt_ids"], row["finish_reason"]) == (asked["id"], asked["prompt_ids"], "stop")
    assert answers(project, "eval").equals(before["eval"])
    assert report(project)["token_ids"] == {"template": 6, "exact": 6}


def test_keep_names_the_row_whose_mask_is_wrong(project: Path) -> None:
    rows = pl.read_parquet("data/fixed/train.parquet").head(2).to_dicts()
    schema = pl.read_parquet("data/fixed/train.parquet").schema
    rows[1]["messages"][-1]["content"] = ""
    pl.DataFrame(rows, schema=schema).write_parquet("data/fixed/train.parquet")
    use(project, "keep")
    with pytest.raises(ValueError, match=rf"row {rows[1]['id']}\.0: its mask is all zero"):
        sample_target.main()


def test_the_preview_shows_what_is_trained_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample_target.main("--preview", "2")
    shown = capsys.readouterr().out
    assert shown.count("--- ") == 2
    row = answers(project, "train").row(0, named=True)
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
    painted = "".join(part.split("\x1b[0m")[0] for part in shown.split("--- ")[1].split("\x1b[30;42m")[1:])
    assert painted == tokenizer.decode(row["answer_ids"]).replace("\n", "")
    shutil.rmtree("data/sampled")
    sample_target.main("--preview", "1")
    assert "with the data's own answers" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected no arguments or --preview N, found --preview"):
        sample_target.main("--preview")


def test_every_key_that_moves_an_answer_is_tracked() -> None:
    """And no other: with another port or more at once, the rows that were answered stay answered."""
    graph = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]["sample_target"]["params"]
    section = params.SampleTarget.model_fields
    way = {f"sample_target.server.{key}" for key in params.Server.model_fields}
    untracked = {"start_timeout_s", "base_urls", "concurrency", "timeout_s", "attempts", "api_key_env"}
    wanted = {f"sample_target.{key}" for key in section if key != "server"} | way
    assert set(graph) == {"target"} | wanted - {f"sample_target.server.{key}" for key in untracked}
