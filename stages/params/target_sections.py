"""The sections of the target: target, prepare_target, extract_hiddens."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.params.section import Count, Dtype, FeatureLayers, Positive, Section, Seed, Text


class Target(Section):
    model: Text
    watch: Text
    revision: str | None
    trust_remote_code: bool
    dtype: Dtype
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
    num_threads: Count
    feature_layers: FeatureLayers | None  # what is stored: the layers of all drafts
    lm_head_key: Text | None
    chat_template: Annotated[str, Field(pattern=r"^[^/]+$")] | None

    def gpus(self, processes: int = 1) -> list[int]:
        """Return the visible GPUs of a stage: the one named by `device`, or one for each of several processes."""
        if self.device == "cpu":
            return []
        return [int(self.device.partition(":")[2] or 0)] if processes == 1 else list(range(processes))


class PrepareTarget(Section):
    weights: Literal["shipped", "train"]
    seed: Seed
    steps: Count
    batch_tokens: Count
    learning_rate: Positive


class ExtractHiddens(Section):
    dtype: Literal["float32", "bfloat16", "float16", "fp8"]
    max_length: Count
    longer_rows: Literal["drop", "truncate"]
    batch_tokens: Count
    shard_mib: Count
    compile: bool
    processes: Count
    online: bool
    import_: Annotated[Text | None, Field(alias="import")]

    @model_validator(mode="after")
    def has_one_source(self) -> "ExtractHiddens":
        if self.online and self.import_ is not None:
            raise ValueError(
                f"online is true and import is {self.import_}, expected one of the two: imported hidden states are "
                "stored already; set online to false, or import to null"
            )
        return self
