"""sample_target through a real `transformers serve`, through kills and faults, and with the data's own answers."""

import asyncio
import http.client
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import stat
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from ruamel.yaml import YAML
from transformers import AutoTokenizer

from pipeline import stage_summaries
from stages import fix_data, prepare_target, sample_target
from stages.params import schema
from stages.params.data_sections import SampleTarget, SamplingServer
from stages.runtime import free_port
from stages.serving import client, load_generator, replicas, server
from stages.serving.gpu_memory import GpuMemory
from tests.conftest import ROOT, copy_project, edit_params
from tests.serving.faulty_proxy import Proxy
from tests.serving.misbehaving_server import Fake, completion, echo

SERVER = {"launch": None, "launch_args": [], "start_timeout_s": 120.0, "base_urls": [], "model": None,
          "concurrency": 8, "timeout_s": 60.0, "attempts": 6, "api_key_env": None}  # fmt: skip
SPLITS = ("train", "eval", "eval_t")
# The builtin target's template, and tools, calls and thoughts as a template may render them.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    " {{ k }}={{ v | tojson }}{% endfor %}>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A stage that is killed runs in a fork of a process that has imported everything: half a second instead of five.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["stages.sample_target"])


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a target that can say a little, and its answers by the transformers backend. Copy it to change it."""
    project = copy_project(tmp_path_factory.mktemp("sampled"))
    edit_params(project, {
        "target": {"num_threads": 1},  # two processes of two threads on two cores would wait for each other
        "sample_target": {"train_rows": 6, "eval_rows": 3, "max_new_tokens": 24, "shard_size": 4},
    })  # fmt: skip
    before = Path.cwd()
    os.chdir(project)
    try:
        fix_data.main()
        prepare_target.main()
        template = Path("artifacts/target/chat_template.jinja")
        assert template.exists()
        template.write_text(TEMPLATE)
        sample_target.main()
    finally:
        os.chdir(before)
    return project


@pytest.fixture
def project(sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(sampled, tmp_path / "project", ignore=shutil.ignore_patterns(".git", ".dvc"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


@pytest.fixture(scope="session")
def transformers_serve(sampled: Path) -> Iterator[server.ServerProcess]:
    """The real server, of the same target.

    On one CI machine it started, said it is healthy, and reset every connection that asked for an answer; why is not
    known. So the standard library's client asks first, of two servers: where neither answers it, there is no server to
    test ours with, and the reason shown holds its log. One that doesn't start, or isn't healthy, is an error as ever.
    """
    folder, said = str(sampled / "artifacts/target"), ""
    for _ in range(2):
        port = free_port.find_free_port()
        line = server.build_server_command("transformers", folder, port, "float32", "cpu", False)
        with server.ServerProcess("transformers", line, port, sampled / "server.log", 120, threads=1) as running:
            if not (problem := unanswered(running)):
                yield running
                return
            said = f"{problem}; ended: {running.get_exit_status()}; its log:\n{server.read_log_tail(running.log, 40)}"
    pytest.skip(f"`transformers serve` answers nobody on this machine: {said}")


def model_of(running: server.ServerProcess) -> str:
    """Return the name of the served model in requests: the target's folder."""
    return running.line[running.line.index("serve") + 1]


def unanswered(running: server.ServerProcess) -> str:
    """What went wrong with a plain request, or nothing."""
    body = {"model": model_of(running), "messages": [{"role": "user", "content": "Oslo"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{running.base_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=60) as response:
            json.load(response)["choices"][0]["message"]
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    return ""


@pytest.fixture
def real(transformers_serve: server.ServerProcess) -> Iterator[dict[str, Any]]:
    """The keys of sample_target.server that name it. Where a test fails, pytest prints the server's log with it."""
    transformers_serve.check_alive()  # says so, with the log, where an earlier test has ended it
    yield {"base_urls": [transformers_serve.base_url], "model": model_of(transformers_serve)}
    ended = transformers_serve.get_exit_status()
    print(f"the server {'runs' if ended is None else f'ended with status {ended}'}; its log's last lines:")
    print(server.read_log_tail(transformers_serve.log, 40))


def test_the_load_generator_reads_the_stream_of_a_real_server(real: dict[str, Any]) -> None:
    """What it puts together from pieces is the answer that the same server gives whole."""
    url, model = real["base_urls"][0], real["model"]
    bodies = [
        {"messages": [{"role": "user", "content": place}], "max_tokens": 12, "temperature": 0.0}
        for place in ("Oslo", "Rome", "Lima")
    ]

    async def whole() -> list[client.ChatAnswer]:
        async with client.ChatClient([url], model, 1, 60.0, 1) as http:
            return [await http.complete(body) for body in bodies]

    asks = [
        load_generator.LoadRequest(str(n), b["messages"], b["max_tokens"], b["temperature"], 1.0, None, False)
        for n, b in enumerate(bodies)
    ]
    found = asyncio.run(
        load_generator.run_load(
            url, model, asks, load_generator.Arrivals(math.inf, 1, 0), 60.0, asks[:1], "benchmark_served.server"
        )
    )
    assert found.engine == "transformers" and found.warmup_failed == {}
    for record, answer in zip(found.records, asyncio.run(whole()), strict=True):
        assert record.failure_reason is None, record.failure_message
        assert (record.text, record.finish_reason) == (answer.text, answer.finish_reason)
        assert (record.input_tokens, record.output_tokens) == (answer.prompt_tokens, answer.completion_tokens)
        assert 0 < record.ttft_s <= record.e2e_s


def use(project: Path, backend: str, server_: dict[str, Any] | None = None, **settings: Any) -> None:
    edit_params(project, {"sample_target": {"backend": backend, "server": SERVER | (server_ or {}), **settings}})


def answers(project: Path, split: str) -> pl.DataFrame:
    return pl.read_parquet(project / f"data/sampled/{split}/*.parquet")


def report(project: Path) -> dict[str, Any]:
    found = json.loads((project / "results/sample_report.json").read_text())
    assert found["rows_in"] == found["rows_out"] + sum(found["dropped"].values())
    return found


def test_a_real_server_says_what_this_process_says(project: Path, real: dict[str, Any]) -> None:
    """At temperature 0, where its ids can be told; and above, the same at any concurrency, since each row has its seed."""
    own = {row["id"]: row for row in answers(project, "eval").to_dicts()}
    use(project, "server", real)
    sample_target.main()
    said = answers(project, "eval").to_dicts()
    assert said and all(row == own[row["id"]] for row in said)
    found = report(project)
    assert set(found["token_ids"]) == {"text, as many"}
    assert set(found["dropped"]) <= {"truncated", "token_ids_unknown", "empty"}
    first = {split: answers(project, split) for split in SPLITS}
    use(project, "server", {**real, "concurrency": 1})
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
    bodies = [b for b in fake.bodies if b["messages"][0]["content"] == "user 0"]  # of train; eval is asked meanwhile
    histories = [[m["content"] for m in b["messages"]] for b in bodies]
    assert histories == [
        ["user 0"],
        ["user 0", "own 1", "user 2"],
        ["user 0", "own 1", "user 2", "own 3", "user 4"],
    ]
    assert len({b["seed"] for b in bodies}) == 3


def test_servers_get_the_next_split_while_the_last_answers_of_one_are_awaited(project: Path) -> None:
    """Bug: servers ran empty at the end of each split, for as long as its longest answer took."""
    wait_s = 2.0
    with Fake(delay_s=lambda body: wait_s * (body is fake.bodies[0])) as fake:
        use(project, "server", {"base_urls": [fake.url]}, temperature=0.7)
        sample_target.main()
    temperatures = [body["temperature"] for body in fake.bodies]
    assert temperatures[0] == 0.7  # of train, still unanswered when eval is asked
    assert fake.arrived[temperatures.index(0.0)] < fake.arrived[0] + wait_s
    assert all(answers(project, split).height for split in SPLITS)


def begun() -> Any:
    """The stage as a process of its own, to be killed."""
    stage = FORKS.Process(target=sample_target.main)
    stage.start()
    return stage


def finished() -> None:
    stage = begun()
    stage.join(300)
    assert stage.exitcode == 0


def result(project: Path) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
    """The rows of each split, checked for being one each, and what the report counts, but for how it came about."""
    rows = {split: answers(project, split) for split in SPLITS}
    for split, table in rows.items():
        assert table["id"].is_unique().all(), split
        size = schema.load_params().sample_target.shard_size
        heights = [pl.read_parquet(f).height for f in sorted((project / f"data/sampled/{split}").iterdir())]
        assert max(heights) <= size
    assert not list(Path(".scratch").glob("sample_target-*"))
    return rows, {k: v for k, v in report(project).items() if k not in ("seconds", "asked_again", "server_restarts")}


def assert_same(found: tuple[dict[str, pl.DataFrame], dict[str, Any]], whole: Any) -> None:
    for split in SPLITS:
        assert found[0][split].equals(whole[0][split]), split
    assert found[1] == whole[1]


def killed_at_random(project: Path, kills: int, seed: int) -> None:
    """As often as said, at any moment from its start to its end; whenever a run comes through, another begins."""
    warm = FORKS.Process(target=time.sleep, args=(0,))
    warm.start()
    warm.join()
    rng, begin = random.Random(seed), time.monotonic()
    finished()
    took, whole = time.monotonic() - begin, result(project)
    shutil.rmtree("data/sampled")
    while kills:
        stage = begun()
        stage.join(rng.uniform(0, 0.8) * took)
        if stage.exitcode is None:
            stage.kill()
            stage.join()
            kills -= 1
            continue
        assert stage.exitcode == 0
        assert_same(result(project), whole)
        shutil.rmtree("data/sampled")
    finished()
    assert_same(result(project), whole)


def test_killed_at_random_before_a_real_server(project: Path, real: dict[str, Any]) -> None:
    use(project, "server", real, train_rows=18, eval_rows=3, max_new_tokens=4)
    killed_at_random(project, 5, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_50_random_points_before_a_real_server(project: Path, real: dict[str, Any], seed: int) -> None:
    use(project, "server", real, train_rows=60, eval_rows=10, max_new_tokens=8, shard_size=7)
    killed_at_random(project, 50, seed)


@pytest.mark.long
def test_killed_at_50_random_points_in_this_process(project: Path) -> None:
    use(project, "transformers", train_rows=60, eval_rows=10, shard_size=8, batch_size=3)
    killed_at_random(project, 50, seed=5)


def test_a_killed_run_asks_again_only_what_was_under_way(project: Path) -> None:
    """Bug of counting lines: answers come in any order, so the count says nothing of which are there."""
    rng = random.Random(3)

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(0.005)  # the server takes one at a time, so that there is a middle to be killed in
        return completion(f"place: {body['seed']}", body["model"])

    with Fake(reply) as fake:
        use(project, "server", {"base_urls": [fake.url]}, train_rows=120, eval_rows=20, shard_size=16)
        finished()
        whole, asked = result(project), len(fake.bodies)
        assert asked == 160
        shutil.rmtree("data/sampled")
        fake.bodies.clear()
        at = 0
        for _ in range(3):
            at += rng.randrange(15, 45)
            stage = begun()
            while len(fake.bodies) < at:
                assert stage.exitcode is None
                time.sleep(0.002)
            stage.kill()
            stage.join()
        (place,) = filter(Path.is_dir, Path(".scratch").glob("sample_target-*"))  # beside it is its lock
        kept = sum(len(f.read_text().split("\n")) - 1 for f in place.glob("train/journals/*.jsonl"))
        published = len(list(place.glob("train/parts/*.parquet")))
        assert published >= 1 and kept + 16 * published <= len(fake.bodies)  # a published shard's journal is gone
        finished()
    assert_same(result(project), whole)
    again = len(fake.bodies) - asked
    assert 0 <= again <= 3 * SERVER["concurrency"]  # only what was under way is asked twice


def conversations_of(project: Path, count: int, turns: int, **changes: Any) -> None:
    """Make the training data `count` conversations of `turns` questions each."""
    rows = pl.read_parquet("data/fixed/train.parquet").head(count).to_dicts()
    schema = pl.read_parquet("data/fixed/train.parquet").schema
    for n, row in enumerate(rows):
        says = itertools.cycle(("user", "assistant"))
        row["messages"] = [{"role": r, "content": f"{n}: {i}"} for i, r in zip(range(2 * turns), says, strict=False)]
        row |= changes
    pl.DataFrame(rows, schema=schema).write_parquet("data/fixed/train.parquet")


@pytest.mark.parametrize("history", ["data", "target"])
@pytest.mark.parametrize("allowed", [3, 7])
def test_stopped_again_and_again_it_is_the_same_run(project: Path, history: str, allowed: int) -> None:
    """Conversations of five turns over shards of two rows: a later turn quotes answers of shards that are published.

    Some rows are refused and some can't be told; they are counted once, in whichever run they were.
    """
    conversations_of(project, 6, 5)
    left = [10**6]

    def reply(body: dict[str, Any], number: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return 404  # stops the run
        odd = int(body["seed"]) % 7
        said = completion(f"own {len(body['messages'])} {body['seed']}", body["model"])
        return 400 if odd == 0 else said | {"usage": {"completion_tokens": 99}} if odd == 1 else said

    with Fake(reply) as fake:
        use(
            project, "server", {"base_urls": [fake.url], "concurrency": 3}, history=history, train_rows=28, shard_size=2
        )
        sample_target.main()
        whole, asked = result(project), len(fake.bodies)
        assert whole[1]["dropped"]["refused"] and whole[1]["dropped"]["token_ids_unknown"]
        assert (whole[1]["dropped"].get("earlier_turn_incomplete", 0) > 0) == (history == "target")
        shutil.rmtree("data/sampled")
        fake.bodies.clear()
        stopped = 0
        while not Path("data/sampled").exists():
            left[0] = allowed
            try:
                sample_target.main()
            except ValueError as error:
                if "HTTP 404" not in str(error):
                    raise
                stopped += 1
        assert stopped >= 2
    assert_same(result(project), whole)
    assert len(fake.bodies) - asked < stopped * 8  # what was under way, and the refused


def test_a_proxy_that_breaks_answers_changes_none(project: Path, real: dict[str, Any]) -> None:
    """10% of all answers are errors, 5% reset in the middle, 2% never come."""
    use(project, "server", real, train_rows=56, eval_rows=2, max_new_tokens=3, shard_size=16)
    sample_target.main()
    whole = result(project)
    rng = random.Random(17)
    drawn = [rng.random() for _ in range(1000)]

    def fault(number: int) -> str | None:
        at = drawn[number]
        return "500" if at < 0.10 else "reset" if at < 0.15 else "hang" if at < 0.17 else None

    with Proxy(real["base_urls"][0], fault) as proxy:
        broken = {**real, "base_urls": [proxy.url], "timeout_s": 4.0}
        use(project, "server", broken, train_rows=56, eval_rows=2, max_new_tokens=3, shard_size=16)
        sample_target.main()
    assert_same(result(project), whole)
    assert proxy.faults["500"] >= 5 and proxy.faults["reset"] >= 3 and proxy.faults["hang"] >= 1
    again = Counter(report(project)["asked_again"])
    assert again["http 500"] == proxy.faults["500"] and again["timeout"] == proxy.faults["hang"]
    assert again["connection"] == proxy.faults["reset"] and proxy.asked == 60 + sum(again.values())


def test_several_servers_on_several_hosts_one_of_which_dies(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of docs/sampling.md for large runs, on four addresses of this machine: one list, one client."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    settings = {"train_rows": 300, "eval_rows": 20, "shard_size": 50}
    alone = Fake(echo)
    with alone:
        use(project, "server", {"base_urls": [alone.url]}, **settings)
        sample_target.main()
    whole = result(project)
    hosts = [Fake(echo, delay_s=0.01, host=f"127.0.0.{n}") for n in (2, 3, 4)]
    reply = hosts[1].reply
    dying = threading.Event()

    def dies(body: dict[str, Any], number: int) -> Any:
        if number == 30:
            dying.set()
        return "reset" if number >= 30 else reply(body, number)

    hosts[1].reply = dies
    hosts[0].__enter__()
    hosts[2].__enter__()
    hosts[1].__enter__()

    def end() -> None:
        dying.wait(60)
        hosts[1].__exit__()

    death = threading.Thread(target=end)
    death.start()
    try:
        use(project, "server", {"base_urls": [host.url for host in hosts], "concurrency": 24}, **settings)
        sample_target.main()
    finally:
        dying.set()
        death.join()
        hosts[0].__exit__()
        hosts[2].__exit__()
    assert_same(result(project), whole)
    served = [len(host.bodies) for host in hosts]
    assert served[1] >= 30 and min(served[0], served[2]) > 80
    assert report(project)["asked_again"]["connection"] >= 1


FAKE_ENGINE = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.serving import misbehaving_server
asked, seen = Path({asked!r}), {falls_at}
def reply(body, number):
    with asked.open("a") as file:
        file.write("x")
    if asked.stat().st_size in seen:
        print("CUDA error: an illegal memory access", flush=True)
        os._exit(9)
    return misbehaving_server.echo(body, number)
print("threads", os.environ["OMP_NUM_THREADS"], "GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
with misbehaving_server.Fake(reply, port=port) as running:
    running._thread.join()
"""


def engine_that_falls(project: Path, monkeypatch: pytest.MonkeyPatch, falls_at: str) -> None:
    """An `sglang` on the PATH that ends itself at the requests whose numbers are in `falls_at`."""
    program = project / "bin/sglang"
    program.parent.mkdir(exist_ok=True)
    (project / "asked").unlink(missing_ok=True)
    settings = {"python": sys.executable, "root": str(ROOT), "asked": str(project / "asked"), "falls_at": falls_at}
    program.write_text(FAKE_ENGINE.format(**settings))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_a_server_that_falls_is_started_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long run must not be lost to one crash of the engine."""
    engine_that_falls(project, monkeypatch, "{10, 40}")
    use(project, "server", {"launch": "sglang"}, train_rows=60)
    sample_target.main()
    assert "ended with status 9; starting it again (2 of 3)" in capsys.readouterr().out
    found = report(project)
    assert found["server_restarts"] == 2 and found["rows_out"] == 66
    log = Path(".scratch/sglang_server.log").read_text()
    assert log.count("illegal memory access") == 2
    assert log.count("threads 1 GPU None\n") == 3  # of target.num_threads: else it would take the stage's cores


def test_two_servers_one_of_which_falls(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two GPUs has a server. Answers are those of one server, each once, though one of the two falls twice."""
    engine_that_falls(project, monkeypatch, "{}")
    use(project, "server", {"launch": "sglang"}, train_rows=60)
    sample_target.main()
    whole = result(project)
    engine_that_falls(project, monkeypatch, "{10, 40}")
    plan = replicas.plan_replicas
    monkeypatch.setattr(replicas, "list_visible_gpus", lambda: [GpuMemory("H200", 0.0, 139.0)] * 2)
    monkeypatch.setattr(replicas, "plan_replicas", lambda *told: plan(*told[:3], "cuda", *told[4:]))
    sample_target.main()
    assert_same(result(project), whole)
    assert report(project)["server_restarts"] == 2
    logs = [Path(f".scratch/sglang_server_{number}.log").read_text() for number in (0, 1)]
    assert sum(log.count("illegal memory access") for log in logs) == 2
    assert [log.splitlines()[0] for log in logs] == ["threads 1 GPU 0", "threads 1 GPU 1"]


@pytest.mark.long
def test_a_server_that_falls_again_and_again_stops_the_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_that_falls(project, monkeypatch, "range(10, 10**6)")
    use(project, "server", {"launch": "sglang", "concurrency": 1}, train_rows=60)
    # Where the machine is so busy that a fall costs a request two attempts, these end first; the log is shown either way.
    ends = r"(?s)(status 9, after 3 restarts; its|no answer in 6 attempts.*The last lines of its) log, .*illegal memory access"
    with pytest.raises(ValueError, match=ends):
        sample_target.main()


@pytest.mark.long
def test_a_real_server_that_is_killed_is_started_again(project: Path) -> None:
    import psutil

    use(project, "server", {"launch": "transformers"}, train_rows=60, max_new_tokens=8)
    sample_target.main()
    whole = result(project)
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        """Some shards are there, and most are not."""
        while not killed and not over.wait(0.01):
            if len(list(Path(".scratch").glob("sample_target-*/train/parts/*.parquet"))) > 2:
                for child in psutil.Process().children(recursive=True):
                    if "transformers.cli.transformers" in " ".join(child.cmdline()[:3]):
                        child.kill()
                        killed.append(child.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    sample_target.main()
    over.set()
    killer.join()
    assert killed, "it was over before"
    assert report(project)["server_restarts"] == 1
    assert_same(result(project), whole)


def test_each_rows_temperature_is_its_own(project: Path) -> None:
    """AngelSlim draws one for each process; here it follows from the row, wherever and whenever it is asked."""
    mixture = [
        {"temperature": 0.0, "weight": 2},
        {"temperature": 0.5, "weight": 1},
        {"temperature": 1.0, "weight": 1.0},
    ]
    with Fake(echo) as fake:
        use(project, "server", {"base_urls": [fake.url]}, temperature=mixture, train_rows=400, shard_size=64)
        sample_target.main()
        asked = {b["seed"]: b["temperature"] for b in fake.bodies[:400]}
        rows = answers(project, "train")
        shares = Counter(rows["temperature"].to_list())
        assert Counter(asked.values()) == shares
        assert set(shares) == {0.0, 0.5, 1.0}
        assert abs(shares[0.0] - 200) < 40 and abs(shares[0.5] - 100) < 35  # four standard deviations
        assert report(project)["temperatures"] == {"0": shares[0.0], "0.5": shares[0.5], "1": shares[1.0]}
        assert set(answers(project, "eval_t")["temperature"]) == {0.5}  # the heaviest above 0, the first of equals
        use(project, "server", {"base_urls": [fake.url], "concurrency": 1}, train_rows=100, shard_size=7)
        sample_target.main()
        some = answers(project, "train")  # a part of the four hundred
        assert len(some) == 100 and some.equals(rows.filter(pl.col("id").is_in(some["id"].to_list())))


def test_a_mixture_in_this_process(project: Path) -> None:
    mixture = [{"temperature": 0.0, "weight": 1.0}, {"temperature": 0.9, "weight": 1.0}]
    use(project, "transformers", temperature=mixture, train_rows=20, batch_size=4, max_new_tokens=6)
    sample_target.main()
    rows = answers(project, "train")
    assert set(rows["temperature"].cast(pl.Float64).round(3)) == {0.0, 0.9}
    use(project, "transformers", temperature=0.0, train_rows=20, batch_size=4, max_new_tokens=6)
    sample_target.main()
    cold = answers(project, "train")
    assert rows["id"].to_list() == cold["id"].to_list()
    same = rows["answer_ids"].to_list(), cold["answer_ids"].to_list(), rows["temperature"].to_list()
    assert all(a == b for a, b, heat in zip(*same, strict=True) if heat == 0.0)
    assert not all(a == b for a, b, heat in zip(*same, strict=True) if heat > 0)
    assert answers(project, "eval_t").is_empty()


TOOLS = [{"type": "function", "function": {"name": "sky", "description": "d", "parameters": {"type": "object"}}}]
CALLED = {"id": "abc", "type": "function", "function": {"name": "sky", "arguments": '{"at": "Oslo", "b": [1, 2]}'}}


def with_tools(thoughts: bool) -> None:
    """Make every conversation one in which a tool is called: question, call, result, answer."""
    for split in ("train", "eval"):
        table = pl.read_parquet(f"data/fixed/{split}.parquet")
        rows = table.head(6).to_dicts()
        for row in rows:
            first = row["messages"][0]["content"]
            said = [("user", first), ("assistant", ""), ("tool", "blue"), ("assistant", "it is blue")]
            row["messages"] = [{"role": role, "content": text} for role, text in said]
            row["tools"], row["tool_calls"] = json.dumps(TOOLS), [None, json.dumps([CALLED]), None, None]
            row["reasoning"] = [None, "I look up", None, "so"] if thoughts else None
        pl.DataFrame(rows, schema=table.schema).write_parquet(f"data/fixed/{split}.parquet")


def rendered(body: dict[str, Any], tokenizer: Any) -> list[int]:
    """The prompt's ids as a server makes them: arguments parsed, then the template."""
    messages = json.loads(json.dumps(body["messages"]))
    for call in itertools.chain.from_iterable(m.get("tool_calls", ()) for m in messages):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(messages, tools=body["tools"], tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def test_tools_calls_and_thoughts_reach_the_server_and_the_prompt(project: Path) -> None:
    """Prompts are compared id by id with those of a server that renders what it was sent."""
    with_tools(thoughts=True)
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        return completion("hi", body["model"], prompt_token_ids=rendered(body, tokenizer))

    models = {"data": [{"id": "tiny", "owned_by": "vllm"}]}
    with Fake(reply, models=models) as fake:
        use(project, "server", {"base_urls": [fake.url], "model": "tiny"}, train_rows=None, eval_rows=None)
        sample_target.main()
    assert all(body["tools"] == TOOLS and body["tool_choice"] == "none" for body in fake.bodies)
    second = next(b["messages"] for b in fake.bodies if len(b["messages"]) == 3)
    assert second[1] == {"role": "assistant", "content": "", "reasoning_content": "I look up", "tool_calls": [CALLED]}
    assert second[2] == {"role": "tool", "content": "blue", "tool_call_id": "abc"}
    text = tokenizer.decode(answers(project, "train")["prompt_ids"][1])
    assert json.dumps(TOOLS[0])[:20] in text and '(I look up)<sky at="Oslo" b=[1, 2]>' in text
    use(project, "keep", {"base_urls": [fake.url], "model": "tiny"}, train_rows=2, eval_rows=1)
    with Fake(reply, models=models, port=fake.port):
        sample_target.main()
    kept = [tokenizer.decode(ids) for ids in answers(project, "train")["answer_ids"]]
    assert kept == ['(I look up)<sky at="Oslo" b=[1, 2]><|im_end|>', "(so)it is blue<|im_end|>"]


def test_a_real_server_renders_tools_as_we_do(project: Path, real: dict[str, Any]) -> None:
    """It says the prompt's length, and in this process the same prompts get the same answers."""
    with_tools(thoughts=False)
    own = {}
    for backend in ("transformers", "server"):
        use(project, backend, real, train_rows=6, eval_rows=1, temperature=0.0, max_new_tokens=6)
        sample_target.main()
        own[backend] = {row["id"]: row for row in answers(project, "train").to_dicts()}
    assert len(own["transformers"]) == 6
    assert own["server"] and all(row == own["transformers"][name] for name, row in own["server"].items())


def test_a_server_that_leaves_thoughts_out_is_told(project: Path, real: dict[str, Any]) -> None:
    """`transformers serve` takes no thoughts into a history; where the template shows them, that is another prompt."""
    with_tools(thoughts=True)
    use(project, "server", real)
    with pytest.raises(ValueError, match="this row has tools, calls or thoughts, which not every server renders"):
        sample_target.main()


def test_rows_whose_tools_can_t_be_read_are_dropped(project: Path) -> None:
    conversations_of(project, 6, 2)
    table = pl.read_parquet("data/fixed/train.parquet")
    bad = pl.Series("tools", ["a prose", *[None] * 5], dtype=pl.String)
    table.with_columns(bad).write_parquet("data/fixed/train.parquet")
    for backend in ("transformers", "keep", "server"):
        with Fake(echo) as fake:
            use(project, backend, {"base_urls": [fake.url]}, train_rows=8, max_new_tokens=4)
            sample_target.main()
        assert report(project)["dropped"]["malformed_tools"] == 2
        assert answers(project, "train").height == 6


def test_conversations_with_images_are_refused(project: Path) -> None:
    table = pl.read_parquet("data/fixed/train.parquet")
    seen = pl.Series("images", [["sky.png"], [], *[None] * (len(table) - 2)], dtype=pl.List(pl.String))
    table.with_columns(seen).write_parquet("data/fixed/train.parquet")
    with pytest.raises(ValueError, match=r"1 conversations of data/fixed/train\.parquet have images, expected none"):
        sample_target.main()


@pytest.mark.parametrize("backend", ["transformers", "server"])
def test_a_prompt_that_is_empty_names_its_row(project: Path, backend: str) -> None:
    """A mask that is all one: the template renders nothing before the answer."""
    Path("artifacts/target/chat_template.jinja").write_text(
        "{% if messages[-1].role == 'user' and messages[-1].content | length > 1 %}{% else %}"
        + TEMPLATE
        + "{% endif %}"
    )
    first = answers(project, "train")["id"][0]  # of the rows that are asked
    with Fake(echo) as fake:
        use(project, backend, {"base_urls": [fake.url], "concurrency": 1})
        with pytest.raises(ValueError, match=rf"row {re.escape(first)}: its mask is all one"):
            sample_target.main()


def test_an_answer_without_a_word_is_dropped_and_one_without_an_end_stops_the_run(project: Path) -> None:
    """A target may end at once: that row teaches nothing, and is no reason to stop a run of days."""

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        return completion("hi" if number else "", body["model"])

    with Fake(reply) as fake:
        use(project, "server", {"base_urls": [fake.url], "concurrency": 1})
        sample_target.main()
    assert report(project)["dropped"] == {"empty": 1}
    use(project, "transformers", max_new_tokens=4)
    plain, ends = sample_target.generation.generate_answers, []

    def answers_without_end(*args: Any, **kwargs: Any) -> list[tuple[list[int], str]]:
        ends.append(1)
        return [(ids[:1], "stop") for ids, _ in plain(*args, **kwargs)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_target.generation, "generate_answers", answers_without_end)
        with pytest.raises(ValueError, match=r"row .*\.0: its answer ends in token \d+, expected one of the target's"):
            sample_target.main()
    assert ends


def test_keep_takes_the_datas_own_answers_and_the_targets_for_eval(project: Path) -> None:
    before = {split: answers(project, split) for split in SPLITS}
    use(project, "keep")
    sample_target.main()
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
    fixed = pl.read_parquet("data/fixed/train.parquet").to_dicts()
    said = {
        f"{row['id']}.{n}": text
        for row in fixed
        for n, text in enumerate(m["content"] for m in row["messages"] if m["role"] == "assistant")
    }
    rows = answers(project, "train").to_dicts()
    assert len(rows) == 6
    for row, asked in zip(rows, before["train"].to_dicts(), strict=True):
        assert tokenizer.decode(row["answer_ids"]) == f"{said[row['id']]}<|im_end|>"
        assert (row["id"], row["prompt_ids"], row["finish_reason"]) == (asked["id"], asked["prompt_ids"], "stop")
    assert answers(project, "eval").equals(before["eval"])
    found = report(project)
    assert found["token_ids"] == {"template": 6, "exact": 6}
    assert found["temperatures"] == {"the data": 6} and found["shards"] == {"train": 2, "eval": 1, "eval_t": 1}


def test_keep_names_the_row_whose_mask_is_wrong(project: Path) -> None:
    rows = pl.read_parquet("data/fixed/train.parquet").head(2).to_dicts()
    schema = pl.read_parquet("data/fixed/train.parquet").schema
    rows[1]["messages"][-1]["content"] = ""
    pl.DataFrame(rows, schema=schema).write_parquet("data/fixed/train.parquet")
    use(project, "keep")
    with pytest.raises(ValueError, match=rf"row {rows[1]['id']}\.0: its mask is all zero"):
        sample_target.main()


def test_cut_answers_are_one_warning_and_missing_questions_are_counted(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: the same warning came for each split; and 60,000 rows of 30 were sampled without a word."""
    pl.read_parquet("data/fixed/train.parquet").head(10).write_parquet("data/fixed/train.parquet")
    use(project, "transformers", max_new_tokens=2, temperature=1.0, train_rows=1000, eval_rows=2)
    sample_target.main()
    shown, found = capsys.readouterr().out, report(project)
    (warning,) = (line for line in shown.splitlines() if line.startswith("warning: "))
    num_train = sum(source["asked"] for source in found["sources"]["train"].values())
    assert re.search(
        rf"(\d+) of {num_train + 4} answers are cut \(train \d+ of {num_train}, eval \d of 2, eval_t \d of 2\)", warning
    )
    assert warning.split()[1] == str(sum(found["truncated"].values()))
    assert f"to all {num_train} questions of the data, 1000 were wanted" in shown and "questions not asked" in shown
    assert found["missing"] == {"train": 1000 - num_train, "eval": 0, "eval_t": 0}
    told = stage_summaries.summarise_stage("sample_target")
    assert (
        f"{1000 - num_train:,} fewer than sample_target.train_rows: the data has no more" in told
        and "eval_rows" not in told
    )


def test_the_preview_shows_what_is_trained_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample_target.main("--preview", "2")
    shown = capsys.readouterr().out
    assert shown.count("--- ") == 2
    row = answers(project, "train").row(0, named=True)
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
    painted = "".join(part.split("\x1b[0m")[0] for part in shown.split("--- ")[1].split("\x1b[30;42m")[1:])
    assert painted == tokenizer.decode(row["answer_ids"]).replace("\n", "")
    kept = report(project)["preview"]
    assert [r["id"] for r in kept] == answers(project, "train")["id"].to_list()[:3]
    assert kept[0]["answer"] == tokenizer.decode(row["answer_ids"])
    assert kept[0]["prompt"] == tokenizer.decode(row["prompt_ids"]) and kept[0]["answer_tokens"] == len(
        row["answer_ids"]
    )
    shutil.rmtree("data/sampled")
    sample_target.main("--preview", "1")
    assert "with the data's own answers" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected no arguments or --preview N, found --preview"):
        sample_target.main("--preview")


def test_every_key_that_moves_an_answer_is_tracked() -> None:
    """And no other: with another port or more at once, the rows that were answered stay answered."""
    graph = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]["sample_target"]["params"]
    section = SampleTarget.model_fields
    way = {f"sample_target.server.{key}" for key in SamplingServer.model_fields}
    untracked = {"start_timeout_s", "base_urls", "concurrency", "timeout_s", "attempts", "api_key_env"}
    wanted = {f"sample_target.{key}" for key in section if key != "server"} | way
    assert set(graph) == {"target"} | wanted - {f"sample_target.server.{key}" for key in untracked}
