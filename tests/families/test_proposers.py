"""Rival methods on the engine: whoever proposes, what is said is transformers' own; and each proposes what it should."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from stages.draft.eagle3 import DraftConfig
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest
from stages.engine.sampling import SamplingParams
from stages.engine.target_runner import TargetRunner
from stages.families.eagle import EagleDraft, EagleMethod
from stages.families.lookahead import LookaheadMethod
from stages.families.medusa import MedusaDraft, MedusaMethod
from stages.families.ngram import PromptLookupMethod
from stages.families.static_tree import StaticTree, select_best_branches
from stages.families.suffix import SuffixMethod
from stages.params.tree_shape import TreeShape
from tests.built_engines import build_engine, decode_with_method
from tests.engine import fake_cuda_graphs
from tests.engine.test_batch_decode import search_greedily
from tests.engine.test_decode import END, ROOM, VOCAB, join_tokens, prompts, sample_by_transformers

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PATHS = select_best_branches([[0.5, 0.3, 0.1], [0.4, 0.2, 0.1], [0.3, 0.2, 0.1]], 9)
H = 64
ROPE = {"rope_theta": 1e4, "rope_type": "default"}


@pytest.fixture(scope="module")
def model() -> Any:
    """As test_decode's."""
    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=H, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)


def random_eagle(head: Tensor, vocab: int = VOCAB, hidden: int = H) -> EagleDraft:
    config = DraftConfig(hidden, 96, 4, 2, 16, vocab, vocab, 512, 1e-6, ROPE)
    return EagleDraft.initialise(config, head, seed=1).requires_grad_(False)


def random_heads(head: Tensor, count: int = 3) -> MedusaDraft:
    kept = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11])  # a part of the vocabulary, the end token in it
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    config = {"hidden_size": H, "vocab_size": VOCAB, "draft_vocab_size": len(kept), "heads": count}
    made = MedusaDraft.initialise(config, head, kept - torch.arange(len(kept)), t2d).requires_grad_(False)
    for weight in made.parameters():
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    return made


METHODS = {
    "ngram": lambda model: PromptLookupMethod(3, 1, 5, CPU),
    "suffix": lambda model: SuffixMethod(8, 5, CPU),
    "lookahead": lambda model: LookaheadMethod(4, 4, 3, CPU),
    "medusa": lambda model: MedusaMethod(random_heads(model.lm_head.weight), StaticTree.from_paths(PATHS, CPU)),
    "eagle": lambda model: EagleMethod(
        random_eagle(model.lm_head.weight), model.model.embed_tokens.weight, StaticTree.from_paths(PATHS, CPU), "eagle"
    ),
    "eagle2": lambda model: EagleMethod(
        random_eagle(model.lm_head.weight), model.model.embed_tokens.weight, TreeShape(4, 3, 10), "eagle"
    ),
}
every_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(params=["called", "played"])
def engine(request: pytest.FixtureRequest, model: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """As on a CPU, and with the fixed shapes of a GPU."""
    if request.param == "played":
        fake_cuda_graphs.install(monkeypatch)
        monkeypatch.setattr(TargetRunner, "_build_fused_decoder", lambda *_: None)
    return build_engine(model, [END], [1, 2, 3])


@every_method
def test_greedy_answers_are_transformers_own(engine: Engine, model: Any, name: str) -> None:
    method, accepted = METHODS[name](model), 0
    for prompt in [*prompts(), *prompts()]:  # the second time in a room that was used
        steps = list(decode_with_method(engine, prompt, ROOM, method))
        assert join_tokens(steps) == search_greedily(model, DecodeRequest(prompt, ROOM))
        assert all(len(step.tokens) == step.num_accepted + 1 for step in steps[1:-1])
        accepted += sum(step.num_accepted for step in steps[1:])
    assert accepted > 5, "nothing is accepted, so nothing is tested"


@every_method
def test_drawn_answers_are_those_of_plain_decoding_by_hand(engine: Engine, model: Any, name: str) -> None:
    method, accepted = METHODS[name](model), 0
    for seed, prompt in enumerate([*prompts(), *prompts()]):
        how = SamplingParams(0.8, 0.95, 6, seed)
        steps = list(decode_with_method(engine, prompt, ROOM, method, sampling=how))
        assert join_tokens(steps) == sample_by_transformers(model, prompt, how)
        accepted += sum(step.num_accepted for step in steps[1:])
    assert accepted > 5


# --- what is proposed, by slow ways ---------------------------------------------------------------------------------


class Noted:
    """A method, and the trees that it proposed: after how much text, and each as its branches of tokens."""

    def __init__(self, method: Any):
        self.method, self.num_steps, self.num_draft_tokens = method, method.num_steps, method.num_draft_tokens
        self.num_scratch_rows = method.num_scratch_rows
        self.seen: list[tuple[int, set[tuple[int, ...]]]] = []

    def build_proposer(self, capacity: int) -> Any:
        made = self.method.build_proposer(capacity)
        real = made.propose

        def noted(slots: Any, state: Any, visible_length: int) -> Any:
            tree, ids = real(slots, state, visible_length)
            self.seen.append((int(state.cache_length), branches(tree, ids[0])))
            return tree, ids

        made.propose = noted
        return made


def branches(tree: Any, ids: Tensor) -> set[tuple[int, ...]]:
    """Of every node that could be accepted the tokens from below the root to it, by its parents."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node, (wanted, parent) in enumerate(zip(tree.tokens[0].tolist(), tree.parents[0, 1:].tolist(), strict=True), 1):
        if wanted >= 0:
            assert wanted == int(ids[node])
            found[node] = (*found[parent], wanted)
            ancestors = {other for other in found if found[other] == found[node][: len(found[other])]}
            assert set(tree.ancestor_mask[0, node].nonzero()[:, 0].tolist()) == ancestors, (
                "it sees itself and what leads to it"
            )
            assert int(tree.depths[0, node]) == len(found[node])
    assert len(set(found.values())) == len(found), "siblings differ"
    return set(found.values()) - {()}


def texts(model: Any, method: Any) -> list[tuple[list[int], set[tuple[int, ...]]]]:
    """Of each cycle the text that it stood behind, the root its last, and the branches that were proposed."""
    engine, found = build_engine(model, [END], [1, 2, 3]), []
    for prompt in prompts():
        noted = Noted(method)
        whole = prompt + join_tokens(decode_with_method(engine, prompt, ROOM, noted))
        found += [(whole[: length + 1], tree) for length, tree in noted.seen]
    return found


def test_prompt_lookup_takes_the_longest_and_then_the_last_match(model: Any) -> None:
    several = 0
    for text, found in texts(model, PromptLookupMethod(3, 1, 5, CPU)):
        expected: set[tuple[int, ...]] = set()
        for size in (3, 2, 1):
            ends = [
                end for end in range(size, len(text)) if text[end - size : end] == text[-size:] and size < len(text)
            ]
            if ends:
                follows = text[ends[-1] : ends[-1] + 5]
                expected = {tuple(follows[:n]) for n in range(1, len(follows) + 1)}
                several += len(ends) > 1
                break
        assert found == expected
    assert several > 5


def test_lookahead_keeps_what_the_target_itself_says_after_each_column(model: Any) -> None:
    """Jacobi iteration by hand: of every column a plain causal forward over text, row 0 up to it, and the column."""
    method, kept = LookaheadMethod(4, 4, 3, CPU), 0
    prompt = prompts()[2]
    engine, noted = build_engine(model, [], [1, 2, 3]), Noted(method)
    text = prompt + join_tokens(decode_with_method(engine, prompt, ROOM, noted))
    pool: dict[int, list[tuple[int, ...]]] = {}
    proposer = engine.slots.idle[0].proposers[noted]
    first = method.build_proposer(8)
    first.start(None, prompt, None, None)  # type: ignore[arg-type]
    rows = [list(row) for row in first.rows]
    for number, (length, found) in enumerate(noted.seen):
        rows[0][0] = text[length]
        guesses = pool.get(text[length], [])[-3:]
        assert found == {guess[:end] for guess in guesses for end in range(1, 4)}
        kept += len(found)
        grown = []
        for column in range(4):
            ids = text[:length] + rows[0][: column + 1] + [row[column] for row in rows[1:]]
            grown.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if number >= 2:  # the rows but the first are the target's
            for column in range(4):
                words = (rows[1][column], rows[2][column], grown[column])
                some = pool.setdefault(rows[0][column], [])
                pool[rows[0][column]] = [*(x for x in some if x != words), words][-3:]
        rows = [*rows[1:], grown]
    assert kept > 20 and proposer.passes == len(noted.seen)


def test_medusa_proposes_the_ranks_of_its_heads_on_the_hidden_state_before_the_root(model: Any) -> None:
    heads = random_heads(model.lm_head.weight)
    kept = heads.t2d.nonzero()[:, 0]
    for text, found in texts(model, MedusaMethod(heads, StaticTree.from_paths(PATHS, CPU))):
        hidden = model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
        ranked = []
        for block, out in zip(heads.blocks, heads.outs, strict=True):
            logits = out(hidden + torch.nn.functional.silu(block(hidden)))
            ranked.append(kept[logits.argsort(descending=True)].tolist())
        assert found == {tuple(ranked[depth][rank] for depth, rank in enumerate(path)) for path in PATHS}


def guessed(eagle: EagleDraft, model: Any, text: list[int], branch: tuple[int, ...]) -> Tensor:
    """Logits after a branch, its layer written out over the whole text: no cache, no tree, no reuse of a state."""
    hidden = list(model.model(torch.tensor([text[:-1]])).last_hidden_state[0])  # of positions 0 .. n-1
    tokens = [*text[1:], *branch]
    for end in range(len(text) - 1, len(tokens) + 1):
        x = eagle.fc(torch.cat([model.model.embed_tokens.weight[tokens[:end]], torch.stack(hidden[:end])], dim=-1))
        layer = eagle.midlayer
        q, k, v = (
            getattr(layer.self_attn, f"{name}_proj")(x).unflatten(-1, (-1, 16)).transpose(0, 1) for name in "qkv"
        )
        angle = torch.arange(end)[:, None] / 1e4 ** (torch.arange(0, 16, 2) / 16)
        turn = torch.polar(torch.ones_like(angle), angle)  # [end, 8]
        q, k = (torch.view_as_complex(torch.stack(y.chunk(2, dim=-1), -1).contiguous()) * turn for y in (q, k))
        q, k = (torch.cat([y.real, y.imag], dim=-1) for y in (q, k))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
        )
        x = x + layer.self_attn.o_proj(out.transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if end >= len(hidden):
            hidden.append(x[-1])
    return hidden[-1] @ model.lm_head.weight.T


def test_eagle_proposes_the_ranks_of_its_layer_written_out(model: Any) -> None:
    eagle = random_eagle(model.lm_head.weight)
    method = EagleMethod(eagle, model.model.embed_tokens.weight, StaticTree.from_paths(PATHS, CPU), "eagle")
    cycles = [(text, tree) for text, tree in texts(model, method) if len(text) > 1][::2]
    for text, found in cycles:
        tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for path in PATHS:
            ranked = guessed(eagle, model, text, tokens[path[:-1]]).argsort(descending=True)
            tokens[path] = (*tokens[path[:-1]], int(ranked[path[-1]]))
        assert found == set(tokens.values()) - {()}
    assert len(cycles) > 5


def test_eagle_2_proposes_the_likeliest_branches_of_its_layer_written_out(model: Any) -> None:
    eagle = random_eagle(model.lm_head.weight)
    method = EagleMethod(eagle, model.model.embed_tokens.weight, TreeShape(3, 2, 6), "eagle")
    for text, found in texts(model, method)[1::4]:
        beam: dict[tuple[int, ...], float] = {(): 0.0}
        every: dict[tuple[int, ...], float] = {}
        for _ in range(3):
            more: dict[tuple[int, ...], float] = {}
            for branch, score in beam.items():
                probabilities = guessed(eagle, model, text, branch).log_softmax(-1)
                more |= {
                    (*branch, int(token)): score + float(probabilities[token])
                    for token in probabilities.topk(2).indices
                }
            every |= more
            beam = dict(sorted(more.items(), key=lambda x: -x[1])[:2])
        assert found == {branch for branch, _ in sorted(every.items(), key=lambda x: -x[1])[:5]}


# --- static trees ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_best_first_finds_the_tree_of_the_greatest_expected_length(seed: int) -> None:
    """Against every tree of that size there is: sets of branches that hold their parents."""
    draw = random.Random(seed)
    accuracy = [[draw.choice([0.0, 0.2, 0.5, draw.random()]) for _ in range(2)] for _ in range(3)]  # in no order
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    worth = {path: math.prod(accuracy[d][rank] for d, rank in enumerate(path)) for path in every}
    for count in (1, 3, 5):
        trees = [
            some for some in itertools.combinations(every, count) if all(p[:-1] in {(), *some} for p in some)
        ]  # fmt: skip
        best = max(sum(worth[path] for path in some) for some in trees)
        found = select_best_branches(accuracy, count)
        assert tuple(found) in trees
        assert sum(worth[path] for path in found) == pytest.approx(best)
    assert select_best_branches(accuracy, 99) == sorted(every, key=lambda path: (len(path), path))
