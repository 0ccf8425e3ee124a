"""Targets that see: forwards with pictures against transformers' own, and drafts that see what their target saw."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig

from stages.draft import supported_targets
from stages.draft.eagle3 import DraftConfig, Eagle3Draft, MultimodalFeatures
from stages.hidden_states import format
from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayBatch, replay_answers
from stages.target import multimodal, packed_forward
from stages.target.multimodal import ImagePatches
from stages.training import ttt
from tests.built_engines import build_engine
from tests.target.multimodal_documents import (
    CLASSES,
    DOCUMENTS,
    INTERLEAVED,
    LAYOUT,
    TAPPED,
    TOKEN,
    alone,
    documents,
    forward,
    load,
    positions_of,
)
from tests.target.test_target_forward import H, save_random_model

pytestmark = pytest.mark.usefixtures("one_thread")


every_class = pytest.mark.parametrize("name", CLASSES)


# --- the target -----------------------------------------------------------------------------------------------------


@every_class
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_documents_with_pictures_are_as_each_alone(tmp_path: Path, name: str, packed: bool) -> None:
    """Streams, last hidden, merged embeddings: those of transformers' own forward of each document by itself."""
    model = load(tmp_path, name)
    assert packed_forward.supports_packing(model)
    found = forward(model, documents(), packed)
    expected = [alone(model, ids, shown) for ids, shown in documents()]
    for part in ("features", "last", "embeds"):
        torch.testing.assert_close(found[part], torch.cat([e[part] for e in expected]), rtol=1e-5, atol=1e-5)
    assert found["positions"].tolist() == [list(p) for shape in DOCUMENTS for p in positions_of(shape)]
    ids = torch.cat([i for i, _ in documents()])
    assert torch.equal(found["pictured"], ids == TOKEN)
    table = model.get_input_embeddings().weight
    assert torch.equal(found["embeds"][~found["pictured"]], table[ids[~found["pictured"]]])
    pad = table[TOKEN]  # DESIGN 5.9: what a rival's draft saw of every picture
    assert (found["embeds"][found["pictured"]] - pad).norm(dim=-1).min() > 0.01


@pytest.mark.parametrize("name", ["qwen3 vl", "qwen3 vl moe"])
def test_of_deepstack_a_stream_holds_what_sglang_captures(tmp_path: Path, name: str) -> None:
    """Bug: the stream was taken after the addition right before its block, which SGLang 0.5.17 makes inside that block.

    `hidden_states + residual` is appended before the layer is called with `post_residual_addition` (qwen3_vl.py:1164).
    """
    model, (ids, shown) = load(tmp_path, name), documents()[0]
    blocks, entering, leaving = model.get_decoder().layers, {}, {}
    for i in (1, 2, 3):
        blocks[i].register_forward_pre_hook(lambda _m, args, _i=i: entering.__setitem__(_i, args[0][0]))
        blocks[i - 1].register_forward_hook(lambda _m, _args, out, _i=i: leaving.__setitem__(_i, out[0]))
    low = forward(model, [(ids, shown)])["features"][:, :H]
    assert torch.equal(low, leaving[2])
    pieces = ids == TOKEN
    assert torch.equal(entering[2][~pieces], low[~pieces]) and torch.equal(entering[3], leaving[3])
    assert (entering[2] - low)[pieces].norm(dim=-1).min() > 0.01  # two levels here: after blocks 0 and 1
    assert (entering[1] - leaving[1])[pieces].norm(dim=-1).min() > 0.01


def test_pictures_that_are_not_the_documents_own_are_refused_by_name(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3 vl")
    (ids, shown), (_, other) = documents()[0], documents()[2]
    with pytest.raises(
        ValueError, match=r"row a has 6 image tokens \(id 90\), expected 8 for its 2 images; .* sample_target"
    ):
        multimodal.build_multimodal_inputs(model, ["row a"], [ids], [other])
    with pytest.raises(ValueError, match=r"row b has 6 image tokens \(id 90\), expected 0 for its 0 images"):
        multimodal.build_multimodal_inputs(model, ["row a", "row b"], [ids, ids], [shown, None])


# --- positions ------------------------------------------------------------------------------------------------------


def described(folder: Path) -> Any:
    return supported_targets.describe_target(str(folder), None, AutoConfig.from_pretrained(folder), folder, None)


@every_class
def test_a_drafts_rotation_is_its_targets_own(tmp_path: Path, name: str) -> None:
    """transformers' rotary module of the class, on positions of pictures and text, against the draft made for it."""
    model = save_random_model(tmp_path, name, False)
    made = described(tmp_path)
    draft = random_draft(made)
    positions = torch.tensor([p for shape in DOCUMENTS for p in positions_of(shape)])  # [N, 3]
    cos, sin = model.get_decoder().rotary_emb(torch.zeros(1), positions.T[:, None])  # [1, N, E], halves alike
    found = draft.compute_rope(positions)
    for mine, theirs in zip(found, (cos, sin), strict=True):
        torch.testing.assert_close(mine[:, 0], theirs[0, :, : made.head_dim // 2])
    assert draft.frequency_axes is not None and draft.frequency_axes.tolist() == LAYOUT[name]
    assert made.rope["mrope_interleaved"] == (LAYOUT[name] == INTERLEAVED)
    assert made.image_token_id == TOKEN


# --- the draft ------------------------------------------------------------------------------------------------------


def random_draft(made: Any, seed: int = 0) -> Eagle3Draft:
    """A draft of the target's own vocabulary."""
    torch.manual_seed(seed)
    names = {f for f in DraftConfig.__dataclass_fields__ if hasattr(made, f)}
    draft = Eagle3Draft(DraftConfig(**{n: getattr(made, n) for n in names}, draft_vocab_size=made.vocab_size))
    draft.t2d[:] = True
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return draft


class Run:
    """A target that sees, its greedy answers to prompts with pictures, and a draft that learned some of them."""

    def __init__(self, folder: Path, name: str):
        self.model, self.made = load(folder, name), described(folder)
        self.prompts = documents()
        self.plain = build_engine(self.model, [5], TAPPED)
        self.answers = [join_tokens(self.plain.decode_plain(ids.tolist(), ROOM, shown)) for ids, shown in self.prompts]
        self.rows = [
            row(self.model, ids, shown, answer) for (ids, shown), answer in zip(self.prompts, self.answers, strict=True)
        ]
        self.embedding, self.head = (t.weight.detach() for t in (self.model.get_input_embeddings(), self.model.lm_head))
        self.draft = random_draft(self.made)
        self.overfit_draft()

    def overfit_draft(self) -> None:
        pack, objective = ttt.TrainingPack.from_rows(self.rows[:3], STEPS, "aligned"), ttt.TrainingObjective(STEPS)
        optimizer = torch.optim.AdamW(self.draft.parameters(), lr=0.003)
        for _ in range(50):
            optimizer.zero_grad()
            ttt.compute_loss(self.draft, pack, self.embedding, self.head, objective).total_loss.backward()
            optimizer.step()
        self.draft.requires_grad_(False)


ROOM, STEPS = 24, 4


def join_tokens(steps: Any) -> list[int]:
    return [token for step in steps for token in step.tokens]


def row(model: Any, ids: Tensor, shown: ImagePatches | None, answer: list[int]) -> format.HiddenStatesRow:
    """As extract_hiddens makes it."""
    whole = torch.cat([ids, torch.tensor(answer)])
    found = forward(model, [(whole, shown)])
    return format.HiddenStatesRow(
        "", whole.int(), torch.arange(len(whole)) >= len(ids), len(ids), "length", found["pictured"],
        features=found["features"], last=found["last"], positions=found["positions"].int(),
        image_embeddings=found["embeds"][found["pictured"]],
    )  # fmt: skip


@pytest.fixture(scope="module", params=CLASSES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("seeing"), request.param)


def without_sections(draft: Eagle3Draft) -> Eagle3Draft:
    """The same weights with plain positions, as SGLang runs a draft whose config names no mrope_section."""
    rope = {k: v for k, v in draft.config.rope.items() if not k.startswith("mrope")}
    other = Eagle3Draft(replace(draft.config, rope=rope)).requires_grad_(False)
    other.load_state_dict(draft.state_dict())
    return other


@pytest.mark.parametrize(("tree", "sections"), [((1, 1, 2), True), ((4, 2, 8), True), ((3, 3, 10), False)])
def test_replay_says_what_the_live_engine_accepts(run: Run, tree: tuple[int, int, int], sections: bool) -> None:
    """And the engine says what plain decoding says, whatever the draft."""
    draft = run.draft if sections else without_sections(run.draft)
    engine = build_engine(run.model, [5], TAPPED, draft)
    live = []
    for (ids, shown), answer in zip(run.prompts, run.answers, strict=True):
        steps = list(engine.decode_speculative(ids.tolist(), ROOM, TreeShape(*tree), shown))
        assert join_tokens(steps) == answer
        live.append([sum(s.num_accepted for s in steps[1:]), len(steps) - 1])
    rows = run.rows
    visual = torch.cat([r.image_embeddings for r in rows if r.image_embeddings is not None])
    ids, features, positions, pictured = (
        pad_sequence([getattr(r, name) for r in rows], batch_first=True)
        for name in ("ids", "features", "positions", "image_token_mask")
    )
    starts = torch.tensor([r.prompt_length for r in rows])
    ends = torch.tensor([len(r.ids) for r in rows])
    seen = MultimodalFeatures(positions, pictured, visual)
    answers = ReplayBatch(ids.long(), features, starts, ends, seen)
    a, c, *_ = replay_answers(draft, run.embedding, answers, [TreeShape(*tree)])
    assert torch.cat([a, c], dim=1).tolist() == live
    assert sum(accepted for accepted, _ in live[:3]) > 15  # a draft that is never accepted would prove nothing


def test_training_rolls_what_decoding_rolls(run: Run) -> None:
    """A chain over an answer, walked in the training forward: the live engine's chain, row by row."""
    engine = build_engine(run.model, [5], TAPPED, run.draft)
    for (ids, shown), one in zip(run.prompts, run.rows, strict=True):
        pack = ttt.TrainingPack.from_rows([one], STEPS, "aligned")
        result = ttt.compute_loss(run.draft, pack, run.embedding, run.head, ttt.TrainingObjective(STEPS))
        accepted, position, walked = ttt.count_chain_accepted(result, pack).tolist(), 0, []
        while position < len(accepted):
            walked.append(accepted[position])
            position += accepted[position] + 1
        steps = list(engine.decode_speculative(ids.tolist(), ROOM, TreeShape(STEPS, 1, STEPS + 1), shown))
        assert walked == [s.num_accepted for s in steps[1:]][: len(walked)]
        assert (
            len(walked) >= len(steps) - 2
        )  # a last cycle may stand on the answer's last token, where nothing is supervised
