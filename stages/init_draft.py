"""init_draft: token counts -> draft vocabulary and a fresh draft, checkpoint e000.   python -m stages.init_draft

The draft vocabulary is the most frequent tokens of the training answers; the shape follows the target. Weights are
drawn from a seed; the fusion starts as the mean of the three feature layers.
"""

from pathlib import Path
from typing import Any

import torch

from stages import params
from stages.drafting import vocab
from stages.drafting.draft import Draft, DraftConfig
from stages.formats import atomic, checkpoint, hiddens, manifest

HIDDENS, REPORT = Path("data/hiddens"), Path("results/vocab_report.json")


def main() -> None:
    p = params.load()
    made = manifest.read()
    params.check_draft_vocab(p, made.vocab_size)
    counts = {split: _count(split, made.vocab_size) for split in ("train", "eval")}
    size = p.init_draft.draft_vocab_size or made.vocab_size
    chosen = vocab.choose(counts["train"], size, made.eos_token_ids)
    d2t, t2d = vocab.maps(chosen, made.vocab_size)

    longest = p.extract_hiddens.max_length + p.train_draft.ttt_steps
    positions = p.init_draft.max_position_embeddings or max(made.max_position_embeddings, longest)
    if positions < longest:
        raise ValueError(
            f"params.yaml: init_draft.max_position_embeddings {positions} is below extract_hiddens.max_length + "
            f"train_draft.ttt_steps = {longest}: positions past it would be trained wrong; raise it, or null for the target's"
        )
    shape: dict[str, Any] = {
        "hidden_size": made.hidden_size,
        "intermediate_size": p.init_draft.intermediate_size or made.intermediate_size,
        "num_attention_heads": made.num_attention_heads,
        "num_key_value_heads": made.num_key_value_heads,
        "head_dim": made.head_dim,
        "vocab_size": made.vocab_size,
        "draft_vocab_size": size,
        "max_position_embeddings": positions,
        "rms_norm_eps": made.rms_norm_eps,
    }
    torch.manual_seed(p.init_draft.seed)
    draft = Draft(DraftConfig(**shape, rope=made.rope))
    draft.d2t.copy_(d2t)
    draft.t2d.copy_(t2d)
    for name, parameter in draft.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
        if name == "fc.weight":
            parameter.data += torch.eye(made.hidden_size).repeat(1, 3) / 3
    config = checkpoint.config_json(shape, made.rope, made.feature_layers, made.num_layers, made.eos_token_ids)
    place = checkpoint.folder(params.ROOT_CHECKPOINT)
    checkpoint.write_draft(place, config, draft.state_dict())
    checkpoint.write_state(place, {}, {"epoch": 0, "step": 0})

    report = {
        "draft_vocab_size": size,
        "target_vocab_size": made.vocab_size,
        "distinct_tokens_train": int((counts["train"] > 0).sum()),
        "coverage_train": vocab.coverage(counts["train"], t2d),
        "coverage_eval": vocab.coverage(counts["eval"], t2d),
        "draft_parameters": sum(x.numel() for x in draft.parameters()),
    }
    atomic.write_json(REPORT, report)
    print(
        f"e000: {report['draft_parameters']:,} parameters, draft vocabulary {size} of {made.vocab_size}, "
        f"covers {report['coverage_eval']:.2%} of the eval answers' tokens"
    )


def _count(split: str, vocab_size: int) -> torch.Tensor:
    """How often each token stands in the split's answers: [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in hiddens.read(HIDDENS / split):
        counts += torch.bincount(row.ids[row.mask].to(torch.int64), minlength=vocab_size)
    return counts


if __name__ == "__main__":
    params.run_stage(main)
