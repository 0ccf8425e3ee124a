"""Replay of sampled drafts against every way that decoding can go, and against live runs of the engine."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM

from stages.families.block.exact_replay import AnswerPositions, ReplayPack, compute_anchor_states
from stages.families.block.model import BlockDraft
from stages.families.block.sampled_replay import replay_sampled_drafts
from stages.families.draft_replay import ExpectedCounts
from tests.draft.slow_block_draft import METHOD_OPTIONS, block_states, draft_logits, random_block_draft
from tests.draft.slow_draft import scatter, small_target
from tests.engine.test_sampling import warp_logits

pytestmark = pytest.mark.usefixtures("one_thread")

FEATURES = (1, 2, 3)
ROWS_PER_PACK = 8  # of more, attention between rows costs more than calls
every_method = pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])


def scaled_target(vocab: int, scale: float) -> GraniteForCausalLM:
    """As `small_target`."""
    model = GraniteForCausalLM(
        GraniteConfig(
            vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, logits_scaling=1 / scale,
        )
    )  # fmt: skip
    scatter(model, 0.3, 1)
    return model.eval().requires_grad_(False)


class Pair:
    """A random target of some tokens, which multiplies its logits by `scale`, and a random block draft of some drafts."""

    def __init__(self, method: str, vocab: int, num_drafts: int, scale: float = 1.0):
        self.target, self.scale = small_target(vocab, 1) if scale == 1 else scaled_target(vocab, scale), scale
        self.embedding, self.head = self.target.model.embed_tokens.weight, self.target.lm_head.weight
        sizes = {"vocab_size": vocab, "mask_token_id": vocab - 1, "block_size": num_drafts + (method != "dspark")}
        sizes |= {"selector_top_k": 2} if method == "dflash2" else {}
        options = METHOD_OPTIONS[method] | sizes
        drafts_and_tables = random_block_draft(3, 0.3, torch.float32, **options, feature_layers=FEATURES)
        self.draft: BlockDraft = drafts_and_tables[0]

    def read(self, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Features [T, K*H], the last hidden state [T, H] and logits [T, V]."""
        features, last, logits = self.read_rows([ids])
        return features[0], last[0], logits[0]

    def read_rows(self, rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same of rows of one length, [B, T, ...]."""
        with torch.inference_mode():
            out = self.target(torch.tensor(rows), output_hidden_states=True)
        return torch.cat([out.hidden_states[i] for i in FEATURES], -1), out.hidden_states[-1], out.logits

    def read_positions(self, rows: list[list[int]], start: int) -> "PositionInputs":
        """Rows of prompt and answer, whose answers begin at `start`: packs of some rows of one length, as replay takes them."""
        found = []
        for length, of_length in itertools.groupby(rows, len):
            row = torch.arange(length)
            while pack := list(itertools.islice(of_length, ROWS_PER_PACK)):
                ids, (features, last, _), documents = (
                    torch.tensor(pack).flatten(),
                    self.read_rows(pack),
                    torch.arange(len(pack)),
                )
                bounds = documents * length, documents * length + start, documents * length + length
                positions = AnswerPositions.build(ids, *bounds, self.draft.config.num_drafts)
                layout = row.repeat(len(pack)), documents.repeat_interleave(length)
                packed = ReplayPack(ids, features.flatten(0, 1), *layout)
                states = compute_anchor_states(self.draft, self.embedding, packed, positions.anchors)
                found.append((states, last.flatten(0, 1)[positions.anchors], *positions))
        states, last, *position_tensors = (torch.cat(parts) for parts in zip(*found, strict=True))
        return states, last, AnswerPositions(*position_tensors)

    def replay(self, positions: "PositionInputs", temperature: float, top_p: float) -> ExpectedCounts:
        return replay_sampled_drafts(self.draft, self.head, *positions, temperature, top_p, self.scale)


PositionInputs = tuple[Tensor, Tensor, AnswerPositions]
pair_of = cache(Pair)

# Every way that decoding can go

PROMPT, ROOM, END = [1, 0, 2], 4, 1  # answers of at most four tokens, which end with END
Outcomes = dict[
    tuple[int, ...], np.ndarray
]  # of the tokens to come: their probability, and that times cycles and accepted drafts


def add_outcomes(
    found: Outcomes, tokens: tuple[int, ...], continuations: Outcomes, probability: float, accepted: int
) -> None:
    """Add the outcomes of a cycle that commits `tokens` with a probability, and of what comes after it."""
    for suffix, (mass, cycles, drafts) in continuations.items():
        counted = probability * np.array([mass, cycles + mass, drafts + accepted * mass])
        found[tokens + suffix] = found.get(tokens + suffix, np.zeros(3)) + counted


class Enumeration:
    """The joint distribution of the answer and of its cycles, by every draft, every decision and every token drawn."""

    def __init__(self, pair: Pair, width: int, temperature: float, top_p: float):
        self.pair, self.width, self.sampling = pair, width, (temperature, top_p, None)
        self.target, self.decode = cache(self._target), cache(self._decode)

    def _target(self, row: tuple[int, ...]) -> list[float]:
        return warp_logits(self.pair.read(list(row))[2][-1:], *self.sampling)[0].double().tolist()

    def answers(self) -> Outcomes:
        found: Outcomes = {}
        for token, probability in enumerate(self.target(tuple(PROMPT))):
            if probability:
                add_outcomes(found, (token,), self.decode((*PROMPT, token)), probability, 0)
        return {answer: np.array([p, c - p, a]) for answer, (p, c, a) in found.items()}  # prefill is no cycle

    def _decode(self, row: tuple[int, ...]) -> Outcomes:
        """Outcomes of the tokens after `row`, whose last one starts a cycle."""
        if row[-1] == END or len(row) == len(PROMPT) + ROOM:
            return {(): np.array([1.0, 0.0, 0.0])}
        pair, found = self.pair, {}
        states = block_states(pair.draft, pair.embedding, list(row), pair.read(list(row))[0], len(row) - 1)
        for drafts in itertools.product(range(len(pair.head)), repeat=self.width):
            padded = [row[-1], *drafts, *[0] * pair.draft.config.num_drafts][: pair.draft.config.num_drafts]
            logits = draft_logits(pair.draft, states, pair.head, padded)
            laws = [(x / self.sampling[0]).softmax(-1).double().tolist() for x in logits[: self.width]]
            draft_probability = math.prod(law[x] for law, x in zip(laws, drafts, strict=True))
            self._verify(found, row, drafts, laws, draft_probability)
        return found

    def _verify(
        self, found: Outcomes, row: tuple[int, ...], drafts: tuple[int, ...], laws: list, probability: float
    ) -> None:
        for depth in range(self.width + 1 if probability else 0):
            prefix = (*row, *drafts[:depth])
            if (depth and prefix[-1] == END) or len(prefix) == len(PROMPT) + ROOM:  # the rest is cut off
                add_outcomes(found, drafts[:depth], self.decode(prefix), probability, depth)
                return
            p = self.target(prefix)
            share = min(1.0, p[drafts[depth]] / laws[depth][drafts[depth]]) if depth < self.width else 0.0
            residual = p if depth == self.width else [max(0.0, a - b) for a, b in zip(p, laws[depth], strict=True)]
            for token, mass in enumerate(residual):
                if mass and share < 1:
                    committed = (*drafts[:depth], token)
                    add_outcomes(
                        found,
                        committed,
                        self.decode((*row, *committed)),
                        probability * (1 - share) * mass / sum(residual),
                        depth,
                    )
            probability *= share
            if not probability:
                return


@every_method
@pytest.mark.parametrize(("top_p", "scale"), [(1.0, 1.0), (0.95, 1.0), (1.0, 0.4)])
def test_expected_counts_equal_an_enumeration_of_all_decodings(method: str, top_p: float, scale: float) -> None:
    """Of each answer: given it, the mean cycles and accepted drafts over all draws; and its probability is the target's."""
    pair = pair_of(method, 3, 2, scale)
    for width in (1, 2):
        tree = Enumeration(pair, width, 0.7, top_p)
        outcomes = tree.answers()
        assert sum(p for p, _, _ in outcomes.values()) == pytest.approx(1)
        rows = [[*PROMPT, *answer] for answer in outcomes]
        found = pair.replay(pair.read_positions(rows, len(PROMPT)), 0.7, top_p)
        for answer, cycles, accepted in zip(
            outcomes, found.cycles[:, width - 1], found.accepted[:, width - 1], strict=True
        ):
            probability, of_cycles, of_accepted = outcomes[answer]
            row = (*PROMPT, *answer)
            expected_probability = math.prod(tree.target(row[:n])[row[n]] for n in range(len(PROMPT), len(row)))
            assert probability == pytest.approx(expected_probability, rel=1e-4)
            assert float(cycles) == pytest.approx(of_cycles / probability, rel=1e-4), answer
            assert float(accepted) == pytest.approx(of_accepted / probability, rel=1e-4, abs=1e-6), answer
        assert len(outcomes) > 10 and float(found.accepted[:, width - 1].max()) > 0.1, "the comparison says nothing"
