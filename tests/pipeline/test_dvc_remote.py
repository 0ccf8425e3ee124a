"""Stages sent through a DVC remote and collected from it; the remote is a folder, or S3 if moto is installed."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import ParameterTypeError
from ruamel.yaml import YAML

from pipeline import dvc_graph, workspaces
from pipeline.remote import dvc_remote, prefect_worker
from stages.runtime import free_port
from tests.pipeline.conftest import IGNORED, Project, give_params, run_dvc_cli

KEYS = {"AWS_ACCESS_KEY_ID": "ours", "AWS_SECRET_ACCESS_KEY": "ours", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 of this machine, with a bucket -> its address."""
    pytest.importorskip("dvc_s3", reason="pip install -e '.[s3]' to test a remote on S3")
    pytest.importorskip("moto", reason="pip install 'moto[server]' to test a remote on S3")
    port = free_port.find_free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    log = tmp_path_factory.mktemp("s3") / "moto.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        put = urllib.request.Request(f"{url}/store", method="PUT")
        while True:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(put, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(params=["folder", "s3"])
def head(request: pytest.FixtureRequest, project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The project whose first stage has run, with a remote of its own; `clone` beside it is another host's."""
    give_params(project)
    (project.root / ".gitignore").write_text(IGNORED)
    if request.param == "s3":
        for key, value in KEYS.items():
            monkeypatch.setenv(key, value)
        where = {"url": "s3://store/aerie", "endpointurl": request.getfixturevalue("s3")}
    else:
        where = {"url": "../../store"}  # as written relative to .dvc/config
    text = "".join(f"    {key} = {value}\n" for key, value in where.items())
    (project.root / ".dvc/config").write_text(
        f"[core]\n    analytics = false\n    remote = store\n['remote \"store\"']\n{text}"
    )
    project.git("init", "-q")
    project.commit()
    subprocess.run(["git", "clone", "-q", ".", "../clone"], check=True)
    run_dvc_cli("repro", "first")
    return project


def make_there(order: dvc_remote.StageOrder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a worker does, without a flow -> the folder it was made in."""
    monkeypatch.chdir("../clone")
    folder = Path(".scratch/sent", order.stage).resolve()
    workspaces.make_bare_project(folder)
    with monkeypatch.context() as there:
        there.chdir(folder)
        dvc_remote.unpack_order(order)
        dvc_graph.reproduce_stage(order.stage, print)
        dvc_remote.push_results(order.stage)
    monkeypatch.chdir("../project")
    return folder


def test_a_stage_made_in_a_clone_is_in_dvc_lock_as_if_made_here(
    head: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.write_stage("middle", "# not committed")
    graph_file = head.root / "dvc.yaml"  # as hidden states are: too large for every `dvc push`, and needed all the same
    graph_file.write_text(graph_file.read_text().replace("outs: [first.csv]", "outs: [{first.csv: {push: false}}]"))
    shutil.copytree(head.root, tmp_path / "serial")
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q", "middle"], cwd=tmp_path / "serial", check=True)
    order = dvc_remote.offer_stage("middle")
    assert order and list(order.upstream) == ["first"]
    folder = make_there(order, monkeypatch)
    assert "# not committed" in (folder / "middle.py").read_text()
    assert not (head.root / "middle.csv").exists()
    dvc_remote.collect_stage("middle")
    assert dvc_graph.reproduce_stage("middle", print) == dvc_graph.Outcome.RESTORED
    locks = [YAML(typ="safe").load(root / "dvc.lock") for root in (head.root, tmp_path / "serial")]
    assert locks[0] == locks[1]
    # and it is not made again: neither here nor on a host that has only the remote
    assert dvc_remote.offer_stage("middle") is None
    shutil.rmtree(head.root / ".dvc/cache")
    assert dvc_remote.offer_stage("middle") is None
    assert (head.root / ".dvc/cache").exists()


@pytest.mark.parametrize("head", ["folder"], indirect=True)  # on either remote it is the same
def test_what_changed_meanwhile_is_not_taken_for_the_result(head: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    order = dvc_remote.offer_stage("middle")
    assert order
    make_there(order, monkeypatch)
    head.write_stage("middle", "# edited")
    with pytest.raises(
        ValueError, match="what a worker made of middle is not on the remote, or of other files than these"
    ):
        dvc_remote.collect_stage("middle")


def test_the_archive_is_the_same_whenever_it_is_made_and_a_broken_one_is_refused(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_params(project)
    subprocess.run(
        [sys.executable, "-m", "dvc", "remote", "add", "-q", "-d", "store", str(tmp_path / "store")], check=True
    )
    project.git("init", "-q")
    one = dvc_remote.offer_stage("first")
    (project.root / "raw.csv").touch()
    assert one and dvc_remote.offer_stage("first") == one
    (stored,) = (tmp_path / "store/aerie").iterdir()
    assert stored.name == f"{one.files}.tar.gz"
    stored.write_bytes(stored.read_bytes()[:-9])
    (tmp_path / "there/.dvc").mkdir(parents=True)
    shutil.copy(".dvc/config", tmp_path / "there/.dvc/config")
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(ValueError, match="remove it and run again"):
        dvc_remote.unpack_order(one)


def test_files_tracked_by_dvc_travel_through_the_remote_and_untracked_ones_in_the_archive(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_params(project)
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "remote", "add", "-q", "-d", "store", str(tmp_path / "store")], check=True)
    subprocess.run([*dvc, "add", "-q", "raw.csv"], check=True)
    (project.root / "data").mkdir()
    (project.root / "data/own.txt").write_text("ours\n")
    text = (project.root / "dvc.yaml").read_text()
    (project.root / "dvc.yaml").write_text(text.replace("[raw.csv,", "[raw.csv, data,"))
    (project.root / ".gitignore").write_text("data/\n/raw.csv\n")
    project.git("init", "-q")
    (project.root / ".env").write_text("KEY=secret\n")  # untracked
    project.git("add", "dvc.yaml", "params.yaml", ".gitignore", "raw.csv.dvc")
    order = dvc_remote.offer_stage("first")
    assert order and order.upstream == {}
    (tmp_path / "there/.dvc").mkdir(parents=True)
    shutil.copy(".dvc/config", tmp_path / "there/.dvc/config")
    monkeypatch.chdir(tmp_path / "there")
    dvc_remote.unpack_order(order)
    assert Path("data/own.txt").read_text() == "ours\n" and Path("raw.csv").read_text().startswith("tree,tau")
    assert not Path(".env").exists()


@pytest.mark.parametrize(
    "spoil", [{"name": "../out.txt"}, {"name": "/tmp/out.txt"}, {"type": tarfile.SYMTYPE, "linkname": "/"}]
)
def test_an_archive_that_would_write_elsewhere_is_refused(
    spoil: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tarfile.TarInfo("in.txt")
    for key, value in spoil.items():
        setattr(about, key, value)
    with tarfile.open(tmp_path / "files.tar.gz", "w:gz") as archive:
        archive.addfile(about)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(ValueError, match="which aerie never uploads"):
        dvc_remote._unpack_files(tmp_path / "files.tar.gz")
    assert not list(Path().iterdir()) and not (tmp_path / "out.txt").exists()


ORDER: dict[str, Any] = {"stage": "first", "files": "a" * 64, "upstream": {}}
LOCKED = {"cmd": "x", "outs": [{"path": "first.csv", "hash": "md5", "md5": "b" * 32, "size": 1}]}


@pytest.mark.parametrize("stage", ["../../../x", "..", "", "/x", "first/../../../x"])
def test_an_order_whose_stage_leaves_the_folder_of_orders_is_refused_before_anything_is_touched(
    stage: str, project: Project, tmp_path: Path
) -> None:
    """Bug: a worker emptied any folder that an order named: stage="../../../x" was joined to .scratch/sent unchecked."""
    (tmp_path / "x/.dvc").mkdir(parents=True)
    precious = tmp_path / "x/precious.txt"
    precious.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="stage"):
        dvc_remote.StageOrder(**ORDER | {"stage": stage})
    with pytest.raises(ParameterTypeError, match="stage"):
        prefect_worker.stage.validate_parameters({"order": ORDER | {"stage": stage}})
    assert precious.read_text() == "mine" and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": "../../x"},
        {"files": "A" * 64},
        {"stage": "-f"},
        {"stage": "first\n"},
        {"upstream": {"../x": LOCKED}},
        {"upstream": {"first": LOCKED | {"outs": [{"path": "../../x", "md5": "b" * 32}]}}},
        {"upstream": {"first": LOCKED | {"outs": [{"path": "/x", "md5": "b" * 32}]}}},
        {"upstream": {"first": LOCKED | {"outs": [{"path": "x", "md5": "../../../x"}]}}},
        {"upstream": {"first": LOCKED | {"cwd": "/"}}},
    ],
)
def test_an_order_names_stages_digests_and_paths_inside_the_project_alone(wrong: dict[str, Any]) -> None:
    """Bug: whatever stood in `upstream` went into dvc.lock, and DVC would have checked it out over files elsewhere."""
    dvc_remote.StageOrder(**ORDER | {"stage": "benchmark@eval-e003-t8_2_16", "upstream": {"first": LOCKED}})
    with pytest.raises(ValueError, match=r"Order"):
        dvc_remote.StageOrder(**ORDER | wrong)


def test_a_dvc_file_that_names_a_place_outside_the_project_is_refused_before_it_is_checked_out(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: of the files that an order brings, a .dvc file could have DVC put its output over any file."""
    give_params(project)
    for command in (
        ["remote", "add", "-q", "-d", "store", str(tmp_path / "store")],
        ["add", "-q", "raw.csv"],
        ["push"],
    ):
        subprocess.run([sys.executable, "-m", "dvc", *command], check=True)
    named = project.root / "raw.csv.dvc"
    named.write_text(named.read_text().replace("path: raw.csv", "path: ../precious.csv"))
    text = (project.root / "dvc.yaml").read_text()
    (project.root / "dvc.yaml").write_text(text.replace("[raw.csv, first.py]", "[../precious.csv, first.py]"))
    archive = dvc_remote._pack_files({Path(name) for name in ("raw.csv.dvc", "dvc.yaml", "params.yaml", "first.py")})
    digest = hashlib.sha256(archive).hexdigest()
    (tmp_path / "store/aerie").mkdir()
    (tmp_path / f"store/aerie/{digest}.tar.gz").write_bytes(archive)
    (tmp_path / "there/.dvc").mkdir(parents=True)
    shutil.copy(".dvc/config", tmp_path / "there/.dvc/config")
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(ValueError, match=r"has the output \.\./precious\.csv, expected one below"):
        dvc_remote.unpack_order(dvc_remote.StageOrder(**ORDER | {"files": digest}))
    assert not (tmp_path / "precious.csv").exists()
