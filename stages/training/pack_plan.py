"""Assignment of rows to packs, of packs to optimizer steps, and of a step's packs to processes."""

import random

from stages.params.draft_sections import TrainDraft

MAX_OPEN_PACKS = 8


def plan_epoch(lengths: list[int], settings: TrainDraft, epoch: int) -> list[list[list[int]]]:
    """Return the steps of an epoch, each `packs_per_step` packs of row numbers with at most `batch_tokens` tokens a pack.

    The plan depends on the seed and the epoch only, so a segment that starts at epoch 3 has the same plan as a straight run.
    """
    rng = random.Random(settings.seed * 1_000_003 + epoch)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    packs: list[list[int]] = []
    open_packs: list[tuple[list[int], list[int]]] = []  # packs that may take more rows, and the tokens left in each
    for row in order:  # first fit among a few open packs: nearly full packs, with other rows together every epoch
        pack, tokens_left = next((x for x in open_packs if x[1][0] >= lengths[row]), ([], [settings.batch_tokens]))
        if not pack:
            packs.append(pack)
            open_packs = [*open_packs, (pack, tokens_left)][-MAX_OPEN_PACKS:]
        pack.append(row)
        tokens_left[0] -= lengths[row]
    rng.shuffle(packs)
    return [packs[i : i + settings.packs_per_step] for i in range(0, len(packs), settings.packs_per_step)]


def share_packs(packs: list[list[int]], rank: int, world: int) -> list[tuple[list[int], bool]]:
    """Return this process's packs of a step, each with whether it is supervised.

    All processes get the same number, since FSDP synchronises them at each forward: the step's first pack is repeated, without
    supervision, where packs run out.
    """
    padded = [(rows, True) for rows in packs] + [(packs[0], False)] * (-len(packs) % world)
    return padded[rank::world]
