"""Each family's object in the registry against its facts, by which a stage's inputs name the family's modules."""

import pytest

from stages.families import registry
from stages.params import families
from stages.params.families import DraftFamily
from stages.params.stage_inputs import FAMILY_PARTS, list_family_modules
from tests.conftest import ROOT


@pytest.mark.parametrize("facts", families.FAMILIES.values(), ids=lambda facts: facts.name)
def test_a_family_has_the_parts_that_its_facts_say(facts: DraftFamily) -> None:
    family = registry.get(facts)
    assert family.facts is facts and family.files.facts is facts
    assert (family.training is None) == (facts.segment is None)
    assert (family.build_replay is None) == (family.build_overfit is None) == (not facts.is_timed)
    made_by = {
        "decoding": next(iter(getattr(family.build_drafter, "args", ())), family.build_drafter),  # a partial's method
        "training": family.training and type(family.training),
        "overfit": family.build_overfit,
        "replay": family.build_replay,
    }
    for part, made in made_by.items():
        assert made is None or made.__module__ == f"stages.families.{facts.module.format(part)}"
    for stage in FAMILY_PARTS:
        assert all((ROOT / file).is_file() for file in list_family_modules(stage, [facts] if facts.is_replayed else []))
