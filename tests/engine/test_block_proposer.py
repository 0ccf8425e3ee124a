"""Block drafts in the engine: the answers of plain decoding, and the accept lengths of replay, alone and together."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, DecodeStep
from stages.engine.sampling import SamplingParams
from stages.families.block.decoding import BlockProposer
from stages.families.block.exact_replay import AnswerPositions, ReplayPack, compute_anchor_states, replay_block_trees
from stages.families.block.model import BlockDraft
from stages.params.tree_shape import TreeShape
from tests import built_engines
from tests.draft.slow_block_draft import METHOD_OPTIONS, random_block_draft
from tests.engine import fake_cuda_graphs, test_decode
from tests.engine.test_batch_decode import make_requests, search_greedily, steps
from tests.engine.test_decode import sample_by_transformers

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, END, ROOM = test_decode.VOCAB, test_decode.END, 24
FEATURES = (1, 2, 3)  # the layers whose input the draft reads
NUM_DRAFTS = 5
TREES = [TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(5, 1, 6), TreeShape(3, 2, 6), TreeShape(5, 3, 16)]
CUT, WIDE = TreeShape(5, 2, 4), TreeShape(2, 11, 40)  # fewer nodes than steps, and nearly every token of a level
every_method = pytest.mark.parametrize("method", ["dflash", "dflash_windows", "dflash2", "dspark"])


@cache
def target() -> PreTrainedModel:
    return test_decode.model.__wrapped__()


def run_target(ids: list[int]) -> tuple[Tensor, Tensor]:
    """Features [T, K*H] and transformers' logits [T, V]."""
    with torch.inference_mode():
        out = target()(torch.tensor([ids]), output_hidden_states=True)
    return torch.cat([out.hidden_states[i][0] for i in FEATURES], -1), out.logits[0]


def make(method: str, seed: int = 1, **options: Any) -> BlockDraft:
    sizes = {
        "hidden_size": 64, "head_dim": 16, "vocab_size": VOCAB, "mask_token_id": 11, "max_position_embeddings": 512,
    }  # fmt: skip
    options = {"feature_layers": FEATURES, "block_size": NUM_DRAFTS + (method != "dspark"), **sizes, **options}
    options |= {"selector_top_k": 12} if method == "dflash2" else {}  # as wide as the widest tree
    return random_block_draft(seed, 0.2, torch.float32, **(METHOD_OPTIONS[method] | options))[0]


@cache
def draft(kind: str, method: str) -> BlockDraft:
    """With random weights, or trained on the target's answers to the prompts of `make_requests` for some steps."""
    made = make(method)
    if kind == "random":
        return made
    pack = packed_answers()
    optimizer = torch.optim.Adam(made.requires_grad_(True).parameters(), 3e-3)
    for _ in range(40):
        loss = pack.compute_loss(made)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.requires_grad_(False)


@cache
def packed_answers() -> "Pack":
    """The prompts of `make_requests` and the target's answers; drafts of all methods read the same of them."""
    return Pack([(ask.prompt, search_greedily(target(), ask)) for ask in make_requests()])


class Pack:
    """Prompts and their answers, as replay takes them."""

    def __init__(self, rows: list[tuple[list[int], list[int]]]):
        whole = [prompt + answer for prompt, answer in rows]
        lengths = torch.tensor([len(row) for row in whole])
        self.ids = torch.tensor([token for row in whole for token in row])
        self.positions = torch.cat([torch.arange(len(row)) for row in whole])
        self.features = torch.cat([run_target(row)[0] for row in whole]).clone()
        self.documents = torch.arange(len(rows)).repeat_interleave(lengths)
        ends = lengths.cumsum(0)
        starts = ends - torch.tensor([len(answer) for _, answer in rows])
        self.places = AnswerPositions.build(self.ids, ends - lengths, starts, ends, NUM_DRAFTS)
        pack = ReplayPack(self.ids, self.features, self.positions, self.documents)
        self.inputs = pack, self.places.anchors

    def compute_states(self, made: BlockDraft) -> Tensor:
        embedding = target().get_input_embeddings().weight
        return compute_anchor_states(made, embedding, *self.inputs)

    def compute_loss(self, made: BlockDraft) -> Tensor:
        embedding, head = target().get_input_embeddings().weight, target().get_output_embeddings().weight
        states = compute_anchor_states.__wrapped__(made, embedding, *self.inputs)
        labels = self.places.following
        previous = torch.cat([self.places.anchor_tokens[:, None], labels[:, :-1].clamp(min=0)], 1)
        logits = made.compute_logits(states, previous, head)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def build_engine(made: BlockDraft) -> Engine:
    return built_engines.build_engine(target(), [END], list(FEATURES), made)


def decode(engine: Engine, ask: DecodeRequest, tree: TreeShape) -> list[DecodeStep]:
    prompt, most, _, how = ask
    return list(engine.decode_speculative(prompt, most, tree, None, how))


def decode_asks(engine: Engine, tree: TreeShape, *by: str) -> list[list[DecodeStep]]:
    """Return the steps of each of `make_requests`, decoded alone, once for a tree and an engine; `by` names the engine."""
    if (key := (tree, *by)) not in DECODED:
        DECODED[key] = [decode(engine, ask, tree) for ask in make_requests()]
    return DECODED[key]


DECODED: dict[tuple[TreeShape | str, ...], list[list[DecodeStep]]] = {}


def are_all_trees_run(execution: str, kind: str) -> bool:
    """Otherwise the widest chain and trees of every form are enough.

    What runs is the same for random drafts, and, with transformers' own modules played, the same but for the target's.
    """
    return kind == "trained" and execution != "played"


def join(found: list[DecodeStep]) -> list[int]:
    return [token for step in found for token in step.tokens]


@every_method
@pytest.mark.parametrize("kind", ["trained"])
def test_answers_are_those_of_greedy_search(execution: str, kind: str, method: str) -> None:
    """Prompts of one token and more; answers that end at their first token, inside a block, by END and by length."""
    engine, in_all_trees = build_engine(draft(kind, method)), are_all_trees_run(execution, kind)
    accepted = dict.fromkeys(TREES, 0)
    for tree in TREES if in_all_trees else TREES[2::2]:
        alone = decode_asks(engine, tree, execution, kind, method)
        assert [join(found) for found in alone] == [search_greedily(target(), ask) for ask in make_requests()], tree
        num_slots = {TREES[2]: 2, TREES[4]: 4}.get(tree, 3)
        assert steps(engine.decode_batch(make_requests(), num_slots, tree), len(make_requests())) == alone, (
            tree,
            num_slots,
        )
        accepted[tree] = sum(step.num_accepted for found in alone for step in found)
    assert max(accepted.values()) > 0, "drafts are never right: the comparison says little"
    if in_all_trees:
        assert accepted[TREES[2]] > 30 and accepted[TREES[4]] >= accepted[TREES[1]] > accepted[TREES[0]]


@every_method
@pytest.mark.parametrize("kind", ["trained"])
def test_accept_lengths_are_those_of_replay(execution: str, kind: str, method: str) -> None:
    engine, total = build_engine(draft(kind, method)), 0
    for tree, cycles, accepted in replay_answers(kind, method):
        if not are_all_trees_run(execution, kind) and tree not in [*TREES[2::2], CUT, WIDE]:
            continue
        live = [found[1:] for found in decode_asks(engine, tree, execution, kind, method)]
        counted = [(len(of_one), sum(step.num_accepted for step in of_one)) for of_one in live]
        assert counted == list(zip(cycles, accepted, strict=True)), tree
        total += sum(accepted)
    assert total > 50, "drafts are never right: the comparison says nothing"


@cache
def replay_answers(kind: str, method: str) -> list[tuple[TreeShape, list[int], list[int]]]:
    """(tree, cycles, accepted drafts) of `make_requests` by replay."""
    made, pack, head = draft(kind, method), packed_answers(), target().get_output_embeddings().weight
    chains = [TreeShape(m, 1, m + 1) for m in range(1, NUM_DRAFTS + 1)]
    grown = [CUT, *TREES[3:], WIDE]
    states = pack.compute_states(made)
    found = replay_block_trees(made, head, states, pack.places, [*chains, *grown])
    return list(zip([*chains, *grown], found.cycles.T.tolist(), found.accepted.T.tolist(), strict=True))


@every_method
def test_sampled_answers_are_those_of_plain_decoding(execution: str, method: str) -> None:
    """Tokens are drawn from the target alone, so one seed gives one answer, as transformers' own logits give it."""
    engine = build_engine(draft("trained", method))
    hows = [SamplingParams(0.8, 1.0, None, seed) for seed in range(2)]
    rows = [DecodeRequest(prompt, ROOM, None, how) for how in hows for prompt in test_decode.prompts()]
    expected = [sample_by_transformers(target(), ask.prompt, ask.sampling) for ask in rows]
    assert len(set(map(tuple, expected))) > 4
    found = [[decode(engine, ask, TREES[2]) for ask in rows]]
    found += [steps(engine.decode_batch(rows, 3, tree), len(rows)) for tree in (TREES[2], TREES[4])]
    for answers in found:
        assert [join(of_one) for of_one in answers] == expected
    assert sum(step.num_accepted for answers in found[1:] for of_one in answers for step in of_one) > 5


class NotedOperators(TorchDispatchMode):
    """Notes the names of all operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        with self:  # the operators that an operator is made of
            found = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


@every_method
@pytest.mark.parametrize("tree", [TREES[2], TREES[4]], ids=str)
def test_a_captured_proposal_reads_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch, method: str, tree: TreeShape
) -> None:
    """A CUDA graph can't wait for values, nor for shapes that depend on them."""
    fake_cuda_graphs.install(monkeypatch)
    real, noted = BlockProposer.propose, NotedOperators()

    def propose(self: BlockProposer, *given: Any) -> Any:
        with noted:
            return real(self, *given)

    monkeypatch.setattr(BlockProposer, "propose", propose)
    steps(build_engine(draft("random", method)).decode_batch(make_requests(), 3, tree), len(make_requests()))
    assert {"index_put_", "mm"} <= noted.names, noted.names
    assert not noted.names & {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"}
