"""The families of drafts: one object each, by which stages read, train, check, import, decode and replay its drafts.

Beside its facts (params/families.py) a family has parts, of which a stage uses those that it runs:

    files           config.json and weights, published drafts (draft_files.py)
    build_drafter   the draft beside its target in the torch engine (engine/proposer.py)
    training        an untrained draft and its objective (draft_training.py)
    build_overfit   a draft that learns one row, for check_overfit (overfit_run.py)
    build_replay    the draft on stored hidden states (draft_replay.py)

A family without weights has the first two alone; one that is replayed is so by what it proposes in the engine. A stage's inputs
follow no import of this file: they have the parts, of the families that an instance meets, by name (FAMILY_PARTS of
params/stage_inputs.py). So the decoding of no draft depends on a loss, nor does training depend on the engine, or on another
family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from stages.engine.proposer import Drafter
from stages.families import eagle, host_proposer, lookahead, medusa, ngram, suffix
from stages.families.block import decoding as block_decoding
from stages.families.block import files as block_files
from stages.families.block import overfit as block_overfit
from stages.families.block import replay as block_replay
from stages.families.block import training as block_training
from stages.families.draft_files import DraftFiles, LoadedDraft
from stages.families.draft_replay import DraftReplay
from stages.families.draft_training import DraftTraining
from stages.families.eagle3 import decoding as eagle3_decoding
from stages.families.eagle3 import files as eagle3_files
from stages.families.eagle3 import overfit as eagle3_overfit
from stages.families.eagle3 import replay as eagle3_replay
from stages.families.eagle3 import training as eagle3_training
from stages.families.overfit_run import OverfitRun
from stages.families.peagle import decoding as peagle_decoding
from stages.families.peagle import files as peagle_files
from stages.families.peagle import overfit as peagle_overfit
from stages.families.peagle import replay as peagle_replay
from stages.families.peagle import training as peagle_training
from stages.params import families, schema
from stages.params.families import DraftFamily
from stages.target.manifest import TargetManifest

# (draft, embedding and head [V, H] of the target, a key of draft_tree.TREE_SCORINGS)
BuildDrafter = Callable[[LoadedDraft, Tensor, Tensor, str], Drafter]
# (draft, embedding and head of the target, its manifest, a key of TREE_SCORINGS)
BuildReplay = Callable[[LoadedDraft, Tensor, Tensor, TargetManifest, str], DraftReplay]
# (e000 or the segment that starts from the untrained draft, parameters, the target's manifest, device). Raises ValueError where
# it can't be built.
BuildOverfit = Callable[[str, schema.Params, TargetManifest, str], OverfitRun]


@dataclass(frozen=True)
class Family:
    """A family of drafts."""

    facts: DraftFamily
    files: DraftFiles
    build_drafter: BuildDrafter
    training: DraftTraining | None = None  # None: nothing is trained
    build_overfit: BuildOverfit | None = None  # None: check_overfit does not ask it
    build_replay: BuildReplay | None = None  # None: it is not replayed


def _list_families() -> list[Family]:
    f, look_up = families, host_proposer.build_drafter
    return [
        Family(
            f.EAGLE3, eagle3_files.Files(f.EAGLE3), eagle3_decoding.build_drafter, eagle3_training.Training(f.EAGLE3),
            eagle3_overfit.build_overfit, eagle3_replay.build_replay,
        ),
        Family(
            f.PEAGLE, peagle_files.Files(f.PEAGLE), peagle_decoding.build_drafter, peagle_training.Training(f.PEAGLE),
            peagle_overfit.build_overfit, peagle_replay.build_replay,
        ),
        *(
            Family(
                block, block_files.Files(block), block_decoding.build_drafter, block_training.Training(block),
                block_overfit.build_overfit, block_replay.build_replay,
            )
            for block in f.BLOCKS.values()
        ),
        Family(f.EAGLE, eagle.Files(f.EAGLE), eagle.build_drafter, eagle.Training(f.EAGLE)),
        Family(f.MEDUSA, medusa.Files(f.MEDUSA), medusa.build_drafter, medusa.Training(f.MEDUSA)),
        Family(f.NGRAM, host_proposer.HostFiles(f.NGRAM), partial(look_up, ngram.PromptLookupMethod)),
        Family(f.LOOKAHEAD, host_proposer.HostFiles(f.LOOKAHEAD), partial(look_up, lookahead.LookaheadMethod)),
        Family(f.SUFFIX, host_proposer.HostFiles(f.SUFFIX), partial(look_up, suffix.SuffixMethod)),
    ]  # fmt: skip


FAMILIES = {family.facts.name: family for family in _list_families()}


def get(facts: DraftFamily) -> Family:
    return FAMILIES[facts.name]
