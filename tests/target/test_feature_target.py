"""A live target says what transformers says of each document alone, for every class; and gradients may be taken beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration

from stages.params.schema import load_params
from stages.target import multimodal
from stages.target.feature_target import FeatureTarget
from tests.conftest import ROOT
from tests.target import multimodal_documents
from tests.target.test_target_forward import LENGTHS, TEXT, V, every_class, manifest_of, save_random_model

LAYERS = multimodal_documents.TAPPED


@every_class
def test_texts(tmp_path: Path, name: str) -> None:
    save_random_model(tmp_path, name, False)
    made = replace(manifest_of(tmp_path), feature_layers=LAYERS)
    live = FeatureTarget.load(made, load_params(ROOT / "params.yaml").target, "cpu")
    documents = [torch.randint(7, min(V, 80), (length,)) for length in LENGTHS]
    view = live.build_inputs([str(n) for n in range(len(LENGTHS))], documents, {})
    assert (view is None) == (name not in multimodal_documents.CLASSES)
    states = live.compute_hidden_states(torch.cat(documents), LENGTHS, view)
    parts = zip(documents, states.features.split(LENGTHS), states.last.split(LENGTHS), strict=True)
    for ids, features, last in parts:
        with torch.inference_mode():
            whole = live.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        expected = torch.cat([whole.hidden_states[i][0] for i in LAYERS], dim=-1)
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last, whole.hidden_states[-1][0], rtol=1e-4, atol=1e-5)
    weight = torch.ones(states.last.shape[1], requires_grad=True)
    (states.last * weight).sum().backward()  # what was made in inference mode would refuse
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("name", multimodal_documents.CLASSES)
def test_pictures(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = multimodal_documents.load(tmp_path, name)
    documents = multimodal_documents.documents()
    shown = {str(n): pixels for n, (_, pixels) in enumerate(documents)}

    class Eyes:
        def load_patches(self, paths: list[str]) -> object:
            return shown[paths[0]]

    live = FeatureTarget(model, LAYERS, Eyes())  # type: ignore[arg-type]
    ids, lengths = [i for i, _ in documents], [len(i) for i, _ in documents]
    view = live.build_inputs(list(shown), ids, {n: [n] for n, pixels in shown.items() if pixels})
    assert isinstance(view, multimodal.MultimodalInputs)
    states = live.compute_hidden_states(torch.cat(ids), lengths, view)
    expected = [multimodal_documents.alone(model, *document) for document in documents]
    for key, found in (("features", states.features), ("last", states.last)):
        torch.testing.assert_close(found, torch.cat([e[key] for e in expected]), rtol=1e-4, atol=1e-5)
    seen = torch.cat([e["embeds"][i == multimodal_documents.TOKEN] for e, i in zip(expected, ids, strict=True)])
    torch.testing.assert_close(states.image_embeddings, seen, rtol=1e-4, atol=1e-5)


def test_a_block_that_does_not_run_leaves_no_hidden_states() -> None:
    """Bug: Mllama skips its blocks of cross-attention for texts, and what lay in memory was stored as their residual stream."""
    text = TEXT | {"cross_attention_layers": [3], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    sight = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
        "image_size": 28, "vision_output_dim": 32, "intermediate_layers_indices": [0],
    }  # fmt: skip
    model = MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=sight)).eval()
    ids = torch.randint(7, V, (9,))
    assert FeatureTarget(model, [2, 3, 5], None).compute_hidden_states(ids, [9], None).features.shape == (9, 96)
    with pytest.raises(
        ValueError, match=r"MllamaForConditionalGeneration skipped the blocks before feature layers \[4\], expected"
    ):
        FeatureTarget(model, [2, 4, 5], None).compute_hidden_states(ids, [9], None)
