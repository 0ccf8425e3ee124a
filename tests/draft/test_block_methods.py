"""The list of families against what else names them: their modules, and the losses of block drafts."""

import importlib

import pytest

from stages.params.families import EAGLE3, FAMILIES, DraftFamily, find_family


def test_a_family_is_found_by_any_architecture_of_a_config_or_by_its_method() -> None:
    for family in FAMILIES.values():
        assert find_family({"architectures": [family.architecture], "method": family.name}) is family
    assert find_family({"architectures": ["Other", "Qwen3DSparkModel"]}) is FAMILIES["dspark"]
    assert find_family({"architectures": ["LlamaForCausalLMEagle3"]}) is find_family({}) is EAGLE3


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_family_has_every_part_that_its_facts_promise(family: DraftFamily) -> None:
    parts = {"files": "Files", "decoding": "build_drafter"}
    parts |= {"training": "Training"} if family.segment else {}
    parts |= {"replay": "build_replay", "overfit": "build_overfit"} if family.is_replayed else {}
    for part, name in parts.items():
        assert hasattr(importlib.import_module(f"stages.families.{family.module.format(part)}"), name)
