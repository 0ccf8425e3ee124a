"""telemetry/gpu_energy.py and spent.py against a library with NVML's own signatures, compiled here; what a stage leaves behind."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from stages.telemetry import gpu_energy, stage_record
from stages.telemetry.gpu_energy import EnergyMeter

# Three cards; the third has no counter, as slices of a card have none. Each look at one takes 1500 mJ more.
NVML = """
#include <string.h>
typedef struct { int number; unsigned long long spent; } *nvmlDevice_t;
static struct { int number; unsigned long long spent; } cards[] = {{0, 7000000000ULL}, {1, 20}, {2, 0}};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *card) {
  if (index > 2) return 2; *card = (nvmlDevice_t)&cards[index]; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *card) {
  if (strcmp(uuid, "GPU-one")) return 6; *card = (nvmlDevice_t)&cards[1]; return 0; }
int nvmlDeviceGetName(nvmlDevice_t card, char *name, unsigned int length) {
  strncpy(name, card->number ? "Other" : "Card", length); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t card, unsigned long long *spent) {
  if (card->number == 2) return 3; *spent = (card->spent += 1500); return 0; }
"""


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler here")
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "nvml.so", tmp_path / "nvml.c"], check=True)
    monkeypatch.setattr(gpu_energy, "NVML_LIBRARY", str(tmp_path / "nvml.so"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_joules_are_the_difference_of_the_cards_own_counters(cards: None) -> None:
    meter = EnergyMeter([0, 1])
    assert meter.names() == ["Card", "Other"]
    assert meter.joules() == 3.0  # a look each, since the first
    assert EnergyMeter([1]).joules() == 1.5


def test_a_card_that_counts_nothing_makes_the_sum_unknown(cards: None) -> None:
    meter = EnergyMeter(None)
    assert meter.names() == ["Card", "Other", "Other"] and meter.joules() is None


@pytest.mark.parametrize(
    ("visible", "which", "names"),
    [
        ("1,0", [0], ["Other"]),
        ("GPU-one, 0", None, ["Other", "Card"]),
        ("0,GPU-gone,1", None, ["Card"]),  # as CUDA: none from the first on that isn't there
        ("", None, []),
        ("0", [0, 1], ["Card"]),
        ("0", [], []),
    ],
)
def test_the_cards_are_those_that_cuda_would_show(
    cards: None, monkeypatch: pytest.MonkeyPatch, visible: str, which: list[int] | None, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert EnergyMeter(which).names() == names


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_energy, "NVML_LIBRARY", "libno-such-thing.so.1")
    meter = EnergyMeter(None)
    assert (meter.names(), meter.joules()) == ([], None)


def test_a_stage_leaves_a_record(cards: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    main = stage_record.record_stage(told.append, "replay_trees", lambda: [0])
    main("e003")
    assert told == ["e003"]
    record = json.loads(Path("results/spent/replay_trees-e003.json").read_text())
    assert record.pop("seconds") >= 0 and record == {"gpus": ["Card"], "joules": 1.5}
    assert stage_record.read_record("replay_trees", "e003")["joules"] == 1.5


def test_what_only_shows_or_helps_or_fails_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(*words: str) -> None:
        raise ValueError("no")

    stage_record.record_stage(lambda *words: None, "sample_target")("--preview", "3")
    with pytest.raises(ValueError, match="no"):
        stage_record.record_stage(fail, "sample_target")()
    monkeypatch.setenv("RANK", "1")
    stage_record.record_stage(lambda: None, "sample_target")()
    assert not stage_record.RECORDS_FOLDER.exists()


def test_a_record_that_is_missing_or_cut_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"train_draft-e003\.json not found; run: dvc repro train_draft@e003"):
        stage_record.read_record("train_draft", "e003")
    stage_record.RECORDS_FOLDER.mkdir(parents=True)
    stage_record.locate_record("train_draft", "e003").write_text('{"seconds": 1}')
    with pytest.raises(ValueError, match=r"train_draft-e003\.json is no record .* dvc repro -f -s train_draft@e003"):
        stage_record.read_record("train_draft", "e003")
