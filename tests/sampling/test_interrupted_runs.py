"""sample_target killed and stopped again and again, and before servers that fall: the rows of a whole run, each once."""

import json
import os
import random
import shutil
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stages import sample_target
from stages.engines.gpu_memory import GpuMemory
from stages.sampling import server_backend
from tests.conftest import ROOT
from tests.engines.misbehaving_server import Fake, completion, echo
from tests.sampling.sampled_project import (
    SERVER,
    assert_same,
    conversations_of,
    read_result,
    report,
    run_stage,
    set_backend,
    start_stage,
)


def test_a_killed_run_asks_again_only_what_was_under_way(project: Path) -> None:
    """Bug of counting lines: answers come in any order, so the count says nothing of which are there."""
    rng = random.Random(3)

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        time.sleep(0.005)  # the server takes one at a time, so that there is a middle to be killed in
        return completion(f"place: {body['seed']}", body["model"])

    with Fake(reply) as fake:
        set_backend(project, "server", {"base_urls": [fake.url]}, train_rows=120, eval_rows=20, shard_size=16)
        run_stage()
        whole, num_requests = read_result(project), len(fake.bodies)
        assert num_requests == 160
        shutil.rmtree("data/sampled")
        fake.bodies.clear()
        at = 0
        for _ in range(3):
            at += rng.randrange(15, 45)
            stage = start_stage()
            while len(fake.bodies) < at:
                assert stage.exitcode is None
                time.sleep(0.002)
            stage.kill()
            stage.join()
        (scratch_folder,) = filter(Path.is_dir, Path(".scratch").glob("sample_target-*"))  # beside it is its lock
        kept = sum(len(f.read_text().split("\n")) - 1 for f in scratch_folder.glob("train/journals/*.jsonl"))
        published = len(list(scratch_folder.glob("train/parts/*.parquet")))
        assert published >= 1 and kept + 16 * published <= len(fake.bodies)  # a published shard's journal is gone
        run_stage()
    assert_same(read_result(project), whole)
    again = len(fake.bodies) - num_requests
    assert 0 <= again <= 3 * SERVER["concurrency"]  # only what was under way is asked twice


@pytest.mark.parametrize("history", ["data", "target"])
@pytest.mark.parametrize("allowed", [6])
def test_stopped_again_and_again_it_is_the_same_run(project: Path, history: str, allowed: int) -> None:
    """Conversations of five turns over shards of two rows: a later turn quotes answers of shards that are published.

    Some rows are refused and some can't be told; they are counted once, in whichever run they were.
    """
    conversations_of(project, 6, 5)
    left, asked_before = [10**6], set[str]()

    def reply(body: dict[str, Any], number: int) -> Any:
        odd, name = int(body["seed"]) % 7, json.dumps(body, sort_keys=True)
        left[0] -= odd > 1 or name not in asked_before  # each run asks again for what is of no use
        asked_before.add(name)
        if left[0] < 0:
            return 404  # stops the run
        answer = completion(f"own {len(body['messages'])} {body['seed']}", body["model"])
        return 400 if odd == 0 else answer | {"usage": {"completion_tokens": 99}} if odd == 1 else answer

    with Fake(reply) as fake:
        set_backend(
            project, "server", {"base_urls": [fake.url], "concurrency": 3}, history=history, train_rows=28, shard_size=2
        )
        sample_target.main()
        whole, num_requests = read_result(project), len(fake.bodies)
        assert whole[1]["dropped"]["refused"] and whole[1]["dropped"]["token_ids_unknown"]
        assert (whole[1]["dropped"].get("earlier_turn_incomplete", 0) > 0) == (history == "target")
        shutil.rmtree("data/sampled")
        fake.bodies.clear()
        asked_before.clear()
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
    assert_same(read_result(project), whole)
    assert len(fake.bodies) - num_requests < stopped * 12, (
        len(fake.bodies),
        num_requests,
        stopped,
    )  # under way, and of no use


def test_several_servers_on_several_hosts_one_of_which_dies(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of docs/sampling.md for large runs, on four addresses of this machine: one list, one client."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    settings = {"train_rows": 300, "eval_rows": 20, "shard_size": 50}
    alone = Fake(echo)
    with alone:
        set_backend(project, "server", {"base_urls": [alone.url]}, **settings)
        sample_target.main()
    whole = read_result(project)
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
        set_backend(project, "server", {"base_urls": [host.url for host in hosts], "concurrency": 24}, **settings)
        sample_target.main()
    finally:
        dying.set()
        death.join()
        hosts[0].__exit__()
        hosts[2].__exit__()
    assert_same(read_result(project), whole)
    served = [len(host.bodies) for host in hosts]
    assert served[1] >= 30 and min(served[0], served[2]) > 80
    assert report(project)["asked_again"]["connection"] >= 1


FAKE_ENGINE = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.engines import misbehaving_server
asked, seen = Path({asked!r}), {falls_at}
def reply(body, number):
    with asked.open("ab", buffering=0) as file:
        file.write(b"x")
        count = file.tell()  # behind this own byte; the file's size may be that of a request to the other server
    if count in seen:
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


def test_two_servers_one_of_which_falls(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two GPUs has a server. Answers are those of one server, each once, though one of the two falls twice."""
    engine_that_falls(project, monkeypatch, "{}")
    set_backend(project, "server", {"launch": "sglang"}, train_rows=60)
    sample_target.main()
    whole = read_result(project)
    engine_that_falls(project, monkeypatch, "{10, 40}")
    plan = server_backend.plan_replicas

    def plan_on_gpus(engine: Any, folder: str, target: Any, *others: Any) -> Any:
        return plan(engine, folder, target.model_copy(update={"device": "cuda"}), *others)

    monkeypatch.setattr(server_backend, "list_visible_gpus", lambda: [GpuMemory("H200", 0.0, 139.0)] * 2)
    monkeypatch.setattr(server_backend, "plan_replicas", plan_on_gpus)
    sample_target.main()
    assert_same(read_result(project), whole)
    assert report(project)["server_restarts"] == 2
    logs = [Path(f".scratch/sglang_server_{number}.log").read_text() for number in (0, 1)]
    assert sum(log.count("illegal memory access") for log in logs) == 2
    assert [log.splitlines()[0] for log in logs] == ["threads 1 GPU 0", "threads 1 GPU 1"]


@pytest.mark.long
def test_a_server_that_falls_again_and_again_stops_the_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_that_falls(project, monkeypatch, "range(10, 10**6)")
    set_backend(project, "server", {"launch": "sglang", "concurrency": 1}, train_rows=60)
    # Where the machine is so busy that a fall costs a request two attempts, these end first; the log is shown either way.
    ends = r"(?s)(status 9, after 3 restarts; its|no answer in 6 attempts.*The last lines of its) log, .*illegal memory access"
    with pytest.raises(ValueError, match=ends):
        sample_target.main()
