"""Compare the target's own logits with those of later stages: the final hidden state times a head read by name.

Training, replay and the engines of other methods read embedding and head from the target's files without loading it
(`target.lm_head_key` names the head where its name is unusual). A wrong table of the right shape trains a draft on noise.
Only embedding, first block, final norm and head are loaded: about 3 GB in bfloat16 for 8 billion parameters, on the CPU.

Letters: V vocabulary, H hidden.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from stages.target.loading import select_auto_class

TOKENS = 8
# Largest difference over largest logit: several times the rounding of hidden states and logits.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class HeadDifference(NamedTuple):
    logits: float  # the largest, over all tokens
    largest: float  # of the target's own logits
    allowed: float
    same_choice: bool  # equal argmax for all tokens
    same_head: bool  # the table is the class's own head, though its logits may be scaled or capped
    same_embedding: bool
    has_bias: bool  # of the class's own head

    @property
    def agrees(self) -> bool:
        return self.logits <= self.allowed  # False where either is NaN


def load_first_block(source: str, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """Return the target on the CPU with its first block only; other weights are not read."""
    config = cut_to_first_block(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it lists every tensor of the other blocks as unexpected
    logging.disable_progress_bar()
    try:
        model = select_auto_class(config).from_pretrained(
            source,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    finally:
        logging.set_verbosity(before)
    return model.eval()


def cut_to_first_block(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a config with one block; lists with an item per block keep their first."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    count = text.num_hidden_layers
    text.num_hidden_layers = 1
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:1])
    return short


@torch.inference_mode()
def compare_head(model: PreTrainedModel, embedding: Tensor, head: Tensor) -> HeadDifference:
    """Compare on TOKENS tokens; embedding and head are the tables [V, H] float32 that later stages read."""
    hidden, own = _run_tokens(model, min(len(embedding), model.get_input_embeddings().weight.shape[0]))
    ours = hidden.float() @ head.T
    known = model.get_output_embeddings(), model.get_input_embeddings()
    same_head, same_embedding = (
        module is not None and torch.equal(module.weight, mine.to(model.dtype))
        for module, mine in zip(known, (head, embedding), strict=True)
    )
    has_bias = getattr(known[0], "bias", None) is not None
    if ours.shape != own.shape:
        return HeadDifference(torch.inf, float(own.abs().max()), 0.0, False, same_head, same_embedding, has_bias)
    largest = float(own.abs().max())
    return HeadDifference(
        float((ours - own).abs().max()),
        largest,
        TOLERANCE[model.dtype] * largest,
        bool((ours.argmax(-1) == own.argmax(-1)).all()),
        same_head,
        same_embedding,
        has_bias,
    )


@torch.inference_mode()
def check_drawn_logits(model: PreTrainedModel, temperature: float) -> None:
    """Raise ValueError where tokens are to be drawn, and the class's logits are not final hidden states times its head."""
    if temperature == 0:  # a scale or cap moves no argmax
        return
    head = model.get_output_embeddings().weight  # [V, H]
    hidden, own = _run_tokens(model, len(head))
    ours = (hidden.to(head.device) @ head.T).float().to(own.device)
    if (ours - own).abs().max() > TOLERANCE[model.dtype] * own.abs().max():
        raise ValueError(
            f"{type(model).__name__} scales or caps its logits, and the torch engine would draw by logits without, another "
            f"distribution; expected a workload at temperature 0, found {temperature:g}: set 0 there, or take it out of "
            "benchmark.torch_workloads and measure it on SGLang or vLLM (benchmark_served)"
        )


def _run_tokens(model: PreTrainedModel, rows: int) -> tuple[Tensor, Tensor]:
    """Return the last hidden [TOKENS, H] and the class's own logits [TOKENS, V] in float32 of ids spread over `rows`."""
    ids = torch.arange(TOKENS) * (rows // TOKENS) + rows // (2 * TOKENS)
    ids[ids == getattr(model.config, "image_token_id", None)] = 0
    caught: list[Tensor] = []
    decoder = model.get_decoder()
    with decoder.register_forward_hook(lambda _module, _args, out: caught.append(out.last_hidden_state)):
        own = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0].float()  # [8, V]
    return caught[0][0], own
