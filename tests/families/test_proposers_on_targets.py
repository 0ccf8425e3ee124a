"""Rival methods on targets of other kinds: with experts, and with eyes. What they say is what plain decoding says, and what EAGLE
learns from pictured rows is what it guesses where it decodes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.draft.eagle3 import DraftConfig
from stages.families.eagle import EagleDraft, EagleMethod, compute_loss, predict_top_tokens
from stages.families.lookahead import LookaheadMethod
from stages.families.medusa import MedusaDraft, MedusaMethod
from stages.families.ngram import PromptLookupMethod
from stages.families.static_tree import StaticTree, select_best_branches
from stages.families.suffix import SuffixMethod
from stages.params.tree_shape import TreeShape
from stages.training import ttt
from tests.built_engines import build_engine, decode_with_method
from tests.target.multimodal_documents import TAPPED, documents, load
from tests.target.test_multimodal_forward import ROOM, described, join_tokens, row

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, STEPS = torch.device("cpu"), 3
PATHS = select_best_branches([[0.5, 0.3, 0.1]] * STEPS, 9)


def methods(embedding: Any, head: Any, config: DraftConfig, eagle: EagleDraft | None = None) -> dict[str, Any]:
    vocabulary, hidden = embedding.shape
    shape = {"hidden_size": hidden, "vocab_size": vocabulary, "draft_vocab_size": vocabulary, "heads": STEPS}
    every = torch.zeros(vocabulary, dtype=torch.int64)
    heads = MedusaDraft.initialise(shape, head, every, torch.ones_like(every).bool()).requires_grad_(False)
    eagle = eagle or EagleDraft.initialise(config, head, seed=1).requires_grad_(False)
    return {
        "ngram": PromptLookupMethod(3, 1, 5, CPU),
        "suffix": SuffixMethod(8, 5, CPU),
        "lookahead": LookaheadMethod(4, 3, 3, CPU),
        "medusa": MedusaMethod(heads, StaticTree.from_paths(PATHS, CPU)),
        "eagle": EagleMethod(eagle, embedding, StaticTree.from_paths(PATHS, CPU), "sglang"),
        "eagle2": EagleMethod(eagle, embedding, TreeShape(STEPS, 2, 6), "sglang"),
    }


def test_a_target_that_sees(tmp_path: Path) -> None:
    model, made = load(tmp_path, "qwen3 vl"), described(tmp_path)
    embedding, head = (t.weight.detach() for t in (model.get_input_embeddings(), model.lm_head))
    names = {f for f in DraftConfig.__dataclass_fields__ if hasattr(made, f)}
    config = DraftConfig(**{n: getattr(made, n) for n in names}, draft_vocab_size=made.vocab_size)
    engine = build_engine(model, [5], TAPPED)
    answers = [join_tokens(engine.decode_plain(ids.tolist(), ROOM, shown)) for ids, shown in documents()]
    rows = [row(model, ids, shown, answer) for (ids, shown), answer in zip(documents(), answers, strict=True)]

    eagle = EagleDraft.initialise(config, head, seed=1)
    pack, optimizer = (
        ttt.TrainingPack.from_rows(rows[:3], 1, "aligned"),
        torch.optim.AdamW(eagle.parameters(), lr=0.003),
    )
    for _ in range(60):
        optimizer.zero_grad()
        compute_loss(eagle, pack, embedding, head, ttt.TrainingObjective(1), None).total_loss.backward()
        optimizer.step()
    eagle.requires_grad_(False)

    for method in methods(embedding, head, config, eagle).values():
        for (ids, shown), answer in zip(documents(), answers, strict=True):
            assert join_tokens(decode_with_method(engine, ids.tolist(), ROOM, method, shown)) == answer

    chain, accepted = EagleMethod(eagle, embedding, StaticTree.from_paths([(0,), (0, 0), (0, 0, 0)], CPU), "sglang"), 0
    for (ids, shown), one in zip(documents(), rows, strict=True):
        alone = ttt.TrainingPack.from_rows([one], STEPS, "aligned")
        found = predict_top_tokens(eagle, alone, embedding, head, STEPS, 1)
        hits = {  # position -> of each step whether it guesses the answer's token
            int(p): [bool(g[n, 0] == one.ids[p + 2 + k]) for k, g in enumerate(found) if n < len(g)]
            for n, p in enumerate(alone.query_tokens)
        }
        position = len(ids) - 1  # the position before the root
        for step in list(decode_with_method(engine, ids.tolist(), ROOM, chain, shown))[1:]:
            expected = hits.get(position, [])
            right = next((k for k, hit in enumerate(expected) if not hit), len(expected))
            assert step.num_accepted == right
            position, accepted = position + 1 + step.num_accepted, accepted + right
    assert accepted > 5, "nothing is accepted, so nothing is compared"
