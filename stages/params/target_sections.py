"""The sections of the target: target, prepare_target, extract_hiddens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from stages.params.section import BUILTIN, Count, Dtype, FeatureLayers, Positive, Section, Seed, Source, Text
from stages.params.target_files import GGUF_SUFFIX

TARGETS_FOLDER = Path("data/targets")  # of embedded targets that are shipped


class Target(Section):
    # a toy of a million parameters, made by prepare_target; else a Hugging Face id, a local folder or a GGUF file
    model: Source
    revision: str | None = None  # branch, tag or commit of a Hugging Face id; pinned to a commit in target.json
    trust_remote_code: bool = False  # true runs Python that comes with the model: only for sources you trust
    dtype: Dtype = "float32"  # float32 makes speculative decoding exactly lossless
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"  # cpu, cuda or cuda:N
    # CPU threads of torch; fixed, so that sums round the same on every machine (decoding: benchmark.num_threads)
    num_threads: Count = 2
    # ids i, "the residual stream entering block i", in increasing order: what is stored for drafts. For drafts of
    # several families list all of theirs (docs/drafts.md); null: EAGLE-3's [2, n//2, n-3], of fewer than 7 layers [1,
    # n//2, n-1]
    feature_layers: FeatureLayers | None = None
    # a file in templates/, for a target without a correct chat template; null: the target's own
    chat_template: Annotated[str, Field(pattern=r"^[^/]+$")] | None = None

    @property
    def is_embedded(self) -> bool:
        """Return whether prepare_target makes the target without a download, by its name: builtin/NAME."""
        return self.model.startswith(BUILTIN)

    @property
    def is_gguf(self) -> bool:
        return self.model.endswith(GGUF_SUFFIX)

    def find_file(self, name: str) -> Path | None:
        """Return a file of the target, of a Hub id that in the local cache; None where it is not on this machine."""
        folder = TARGETS_FOLDER / self.model.removeprefix(BUILTIN) if self.is_embedded else Path(self.model)
        if (folder / name).is_file():
            return folder / name
        if self.is_embedded or self.is_gguf:
            return None
        from huggingface_hub import try_to_load_from_cache  # where the target is an id

        try:
            found = try_to_load_from_cache(self.model, name, revision=self.revision)
        except ValueError:  # the name is no id
            return None
        return Path(found) if isinstance(found, str) else None

    def gpus(self, processes: int = 1) -> list[int]:
        """Return the visible GPUs of a stage: the one named by `device`, or one for each of several processes."""
        if self.device == "cpu":
            return []
        return [int(self.device.partition(":")[2] or 0)] if processes == 1 else list(range(processes))


class PrepareTarget(Section):
    # shipped: builtin/weather-tiny as it lies in data/targets; train: made here by the keys below
    weights: Literal["shipped", "train"] = "shipped"
    seed: Seed = 7
    steps: Count = 300  # a count and not a duration, so that machines of a kind train the same weights: a minute or two
    batch_tokens: Count = 2048
    learning_rate: Positive = 0.03  # of Muon, for matrices; embeddings and norms use AdamW at a fifth of it


class ExtractHiddens(Section):
    # as stored: float32, bfloat16, float16 or fp8 (e4m3): docs/hiddens.md
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] = "bfloat16"
    max_length: Count = 2048  # tokens of prompt and answer
    # drop: rows longer than max_length are dropped; truncate: their answers are cut. Both are counted
    longer_rows: Literal["drop", "truncate"] = "drop"
    batch_tokens: Count = 16384  # of one forward pass, without padding
    shard_mib: Count = 1024  # approximate size of a file, and the unit of work of a process
    compile: bool = False  # torch.compile of the target's blocks; takes a minute, worth it for hours of work
    processes: Count = 1  # one per GPU; the number doesn't change the files
    online: bool = False  # true: training rows are not stored, and train_draft runs the target in each epoch
    # a folder of hidden states made elsewhere, which is checked and stored; null: compute them
    import_: Annotated[Text | None, Field(alias="import")] = None

    def list_conflicts(self) -> Iterator[str]:
        if self.online and self.import_ is not None:
            yield f"online is true and import is {self.import_}, expected one of the two"
