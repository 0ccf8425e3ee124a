"""`aerie launch` where the advised draft needs a newer engine than is installed: the best that runs, and how to get the newer."""

from pathlib import Path

import pytest

from stages import report
from stages.cells import prediction
from stages.cells.prediction import EngineLaunch, LaunchAdvice, PredictedSpeedup
from stages.reporting.inputs import describe_older_engines
from tests.cells.test_prediction import guess

NEWEST = "t7_1_8"  # of the draft that only the newer engine knows


def describe_launch(engine: str, row: PredictedSpeedup) -> EngineLaunch | None:
    if engine == "vllm":
        return None
    return EngineLaunch(["--tree", row.shape.name], "0.5.23" if row.shape.name == NEWEST else None)


def choose(*others: PredictedSpeedup) -> list[LaunchAdvice]:
    return prediction.choose_launches([guess(NEWEST, 2.1, 1.9, checkpoint="new"), *others], describe_launch)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the lists of serving-env/, and no engine on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("serving-env").mkdir()
    Path("serving-env/sglang-0.5.23.txt").touch()
    return tmp_path


def install(version: str, folder: str = "sglang") -> None:
    """Make an environment look as `make serving-env` leaves it."""
    environment = Path("serving-env") / folder
    (environment / "bin").mkdir(parents=True)
    (environment / f"lib/python3.12/site-packages/sglang-{version}.dist-info").mkdir(parents=True)
    (environment / "bin/sglang").touch()
    (environment / "bin/sglang").chmod(0o755)


def test_the_runner_up_is_told_with_its_flags_and_the_way_to_the_newer_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: only the best was told, which the installed engine does not start."""
    launch = choose(guess("t5_4_16", 1.6, 1.5), guess("t3_1_4", 1.4, 1.3))
    assert [row.runner_up and row.runner_up.shape.name for row in launch] == ["t5_4_16"]
    prediction.write_launch(launch, [])
    Path("results/metrics.json").write_text('{"verdict": {"text": "Do not speculate"}}')
    report.main("--launch")
    lines = capsys.readouterr().out.splitlines()
    first, flags, newer = lines[-3:]
    assert first.startswith(
        "sglang before 0.5.23 does not know the draft new; the best that it runs at concurrency 1: 5_4_16 of"
    )
    assert first.endswith("of e009, predicted 1.60x (1.50-1.70)") and flags == "    --tree t5_4_16"
    assert newer.startswith(
        "to get sglang 0.5.23: make serving-env ENGINE=sglang-0.5.23, and benchmark_served.servers.sglang.command: "
    )
    assert newer.endswith("[serving-env/sglang-0.5.23/bin/sglang, serve]")


def test_what_is_installed_decides_whether_anything_is_told() -> None:
    launch = choose(guess("t5_4_16", 1.6, 1.5))
    install("0.5.17")
    assert describe_older_engines(launch)[0].startswith("sglang 0.5.17, installed here, does not know the draft new;")
    install("0.5.23", "sglang-0.5.23")
    assert describe_older_engines(launch)[-1].startswith(
        "sglang 0.5.23 is in serving-env/sglang-0.5.23: benchmark_served"
    )
    Path("serving-env/sglang/lib/python3.12/site-packages/sglang-0.5.17.dist-info").rename(
        "serving-env/sglang/lib/python3.12/site-packages/sglang-0.5.24.dist-info"
    )
    assert describe_older_engines(launch) == []
