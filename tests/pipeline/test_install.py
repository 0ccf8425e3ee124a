"""pipeline/install.py: the commands for uv and pip, what is shown of them, and what a killed installation leaves behind."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import install
from tests.conftest import ROOT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a .venv that has a python with pip, this one."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    install.PYTHON.parent.mkdir(parents=True)
    install.PYTHON.symlink_to(sys.executable)
    return tmp_path


def make(*words: str, folder: Path = ROOT) -> str:
    """Return what make would run, on a path without uv."""
    tools = ("sh", "command", "find", "python3", "rm", "touch")
    found = [Path(path).parent for tool in tools if (path := shutil.which(tool))]
    path = os.pathsep.join(str(folder) for folder in found if not (folder / "uv").exists())
    command = [str(shutil.which("make")), "-n", *words]
    return subprocess.run(command, cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A new checkout, as far as make looks."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_make_passes_the_choice_of_torch_and_a_second_run_installs_nothing(bare: Path) -> None:
    planned = make("run", "TORCH=cpu", "UV=", folder=bare)
    assert 'pipeline/install.py --torch "cpu" --uv ""' in planned and "touch .venv/.installed " in planned
    assert make("run", "UV=", folder=bare).count('install.py --torch ""') == 1
    (bare / ".venv").mkdir()
    for name in (".installed", ".installed-torch-cpu"):
        (bare / ".venv" / name).touch()
    for words in ([], ["TORCH=cpu"]):
        assert make("run", *words, folder=bare).splitlines() == [".venv/bin/python -m pipeline run"]
    assert 'install.py --torch "cu130"' in make("run", "TORCH=cu130", folder=bare)  # another torch than is there


NOTED = """\
#!/bin/sh
case "$1" in pipeline/install.py) echo "$@" >> installed.log;; esac
"""


def test_what_the_tests_need_is_installed_with_all_the_rest_or_alone_where_that_is_there(bare: Path) -> None:
    """Bug: in a new checkout `make test` installed twice, the second time to find that most of it is there."""
    python, log = bare / "python", bare / "installed.log"
    python.write_text(NOTED)
    python.chmod(0o755)
    (bare / ".venv").mkdir()

    def install_by(*words: str) -> list[str]:
        log.write_text("")
        subprocess.run(["make", *words, "UV=", f"PYTHON={python}"], cwd=bare, check=True, capture_output=True)
        return [line.removeprefix("pipeline/install.py ") for line in log.read_text().splitlines()]

    assert install_by(".venv/.installed-test", "TORCH=cpu") == ["--torch cpu --uv  --extra test"]
    assert install_by(".venv/.installed-test", ".venv/.installed", "TORCH=cpu") == []
    (bare / ".venv/.installed-test").unlink()
    assert install_by(".venv/.installed-test", "TORCH=cpu") == ["--uv  --extra test"]
    (bare / "pyproject.toml").touch()
    assert install_by(".venv/.installed") == ["--torch  --uv "]
    assert install_by(".venv/.installed-test") == ["--uv  --extra test"]


def test_make_takes_the_uv_that_is_on_the_path(bare: Path) -> None:
    uv = bare / "bin/uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    env = os.environ | {"PATH": os.pathsep.join([str(uv.parent), os.environ["PATH"]])}
    planned = subprocess.run(
        ["make", "-n", "run"], cwd=bare, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert f'--uv "{uv}"' in planned


@pytest.mark.usefixtures("here")
def test_pip_takes_torch_alone_from_pytorchs_index() -> None:
    resume, torch, project = install.build_commands(uv="", torch="cpu", extra="")
    assert resume[-1].startswith("pip>=")
    start = [str(install.PYTHON), "-m", "pip", "install"]
    assert torch[:4] == project[:4] == start
    at = torch.index("--index-url")
    assert torch[at + 1] == "https://download.pytorch.org/whl/cpu" and "--no-deps" in torch
    assert re.fullmatch(r"torch>=[\d.]+,<[\d.]+", torch[-1])
    assert project[4:] == ["-c", "constraints.txt", "-e", "."] and "-c" in torch


@pytest.mark.usefixtures("here")
def test_without_a_choice_every_package_comes_from_the_users_index() -> None:
    commands = [*install.build_commands(uv="", torch="", extra="test")]
    assert not any("--index-url" in command for command in commands)
    assert [command[-1] for command in commands[1:]] == [".[test]"]
    (alone,) = install.build_commands(uv="/usr/bin/uv", torch="", extra="")
    assert "--torch-backend" not in alone


def test_uv_makes_the_environment_and_chooses_torchs_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, take = install.build_commands(uv="/usr/bin/uv", torch="cu130", extra="")
    assert make[:2] == ["/usr/bin/uv", "venv"] and sys.executable in make
    assert take[:3] == ["/usr/bin/uv", "pip", "install"] and take[take.index("--torch-backend") + 1] == "cu130"
    assert take[take.index("--python") + 1] == str(install.PYTHON)


def test_a_package_that_a_kill_has_cut_is_forgotten_and_a_whole_one_stays(here: Path) -> None:
    """uv and pip take a package for installed by its METADATA, which may be there before its modules are."""
    packages = here / ".venv/lib/python3.11/site-packages"
    for name in ("cut-1.0.dist-info", "whole-1.0.dist-info"):
        (packages / name).mkdir(parents=True)
        (packages / name / "METADATA").write_text("Name: x\n")
    (packages / "whole-1.0.dist-info/INSTALLER").write_text("pip\n")
    [*install.build_commands(uv="", torch="", extra="")]
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_an_environment_that_was_cut_gets_its_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a .venv with a python and no pip, as a kill leaves it, was never completed."""
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], check=True)
    next(install.build_commands(uv="", torch="", extra=""))
    assert subprocess.run([install.PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0


FAKE = """\
import sys
print("Obtaining file:///src/aerie")
print("Requirement already satisfied: numpy in ./.venv")
print("Downloading torch-2.13.0.whl (526.6 MB)")
print("Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)")
print("Installing collected packages: torch, six")
print("ERROR: no space left", file=sys.stderr)
sys.exit({status})
"""


def test_elsewhere_than_on_a_terminal_there_is_a_line_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert install.run_installer([sys.executable, "-c", FAKE.format(status=0)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "finding packages",
        "Downloading torch-2.13.0.whl (526.6 MB)",
        "unpacking 2 packages",
    ]


def test_a_failed_installation_shows_its_end_and_says_that_downloads_are_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "build_commands", lambda *words: iter([[sys.executable, "-c", FAKE.format(status=3)]]))
    with pytest.raises(
        SystemExit, match=r"pip ended with 3, see above. Run the same again: complete downloads are kept"
    ):
        install.main(["--uv", "", "--torch", "cpu"])
    printed = capsys.readouterr().out
    assert "ERROR: no space left" in printed and "up to 0.5 GB to download" in printed


def test_a_torch_of_no_such_form_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"TORCH is '\.\./cpu', expected cpu, or a release of CUDA as cu130"):
        install.main(["--torch", "../cpu"])


def test_it_imports_the_standard_library_only() -> None:
    """It runs before anything is installed."""
    code = f"import runpy, sys; runpy.run_path({str(ROOT / 'pipeline/install.py')!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded <= {*sys.stdlib_module_names, "__main__"}, loaded
