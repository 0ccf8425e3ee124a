"""The estimate of a recipe: lines to read, time and disk by stage, totals."""

import math
from dataclasses import dataclass, field

from stages.params.byte_size import format_bytes


@dataclass
class StageEstimate:
    """Time and disk of all stages of dvc.yaml with one name before the @. None where nothing is known."""

    seconds: float | None = None
    gpu_hours: float | None = None
    disk_bytes: float = 0.0


@dataclass
class RecipeEstimate:
    lines: list[str] = field(default_factory=list)
    stages: dict[str, StageEstimate] = field(default_factory=dict)  # by the name in dvc.yaml before the @
    origin: str = ""  # of the seconds in `stages`
    disk_bytes: float = 0.0
    download_bytes: float = 0.0
    gpu_hours: float = 0.0
    weight_bytes: float = 0.0  # of the target, in its dtype

    def add_line(self, label: str, value: str, derivation: str) -> None:
        self.lines.append(f"{label}: {value} ({derivation})")

    def add_disk(self, stage: str, label: str, size: float, derivation: str) -> None:
        self.disk_bytes += size
        self._get_stage(stage).disk_bytes += size
        self.add_line(label, format_bytes(size), derivation)

    def add_hours(self, label: str, gpu_seconds: float, derivation: str, gpus: int = 1) -> None:
        """Add GPU-seconds of a stage, or of a stage and a workload: `benchmark, eval`. Its `gpus` work at once."""
        self.gpu_hours += gpu_seconds / 3600
        stage = self._get_stage(label.partition(",")[0])
        stage.seconds = (stage.seconds or 0) + gpu_seconds / gpus
        stage.gpu_hours = (stage.gpu_hours or 0) + gpu_seconds / 3600
        self.add_line(
            label, f"{gpu_seconds / 3600:.2g} GPU-hours", derivation + (f", on {gpus} GPUs" if gpus > 1 else "")
        )

    def _get_stage(self, name: str) -> StageEstimate:
        return self.stages.setdefault(name, StageEstimate())


def format_count(parameters: int) -> str:
    """Return the count with three digits: 8.19e9."""
    unit = next((unit for unit in (1e9, 1e6) if parameters >= unit), 1e3)
    return f"{parameters / unit:.3g}e{round(math.log10(unit))}"
