"""Compare the target's own logits with those of later stages: the final hidden state times a head read by name.

Training, replay and the engines of other methods read embedding and head from the target's files without loading it
. A wrong table of the right shape trains a draft on noise.
Only embedding, first block, final norm and head are loaded: about 5 GB in float32 for 8 billion parameters, on the CPU.

Some classes multiply or divide their logits by a number of their config, under many names (Granite, Cohere, MiniCPM3). It is
measured here, as the one factor between the two for all tokens and the whole vocabulary, and kept beside the head
(`TargetManifest.logits_scale`), not multiplied into it: block drafts share the head's table without the factor, as in SGLang
and vLLM, a tied table is the embedding too, and a factor that is no power of two would round every weight in 16 bits.

Letters: V vocabulary, H hidden.
"""

import copy
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PretrainedConfig, PreTrainedModel

from stages.target import foreign_files
from stages.target.config_facts import read_sliding_window
from stages.target.loading import read_model, select_auto_class

TOKENS, SHORT_WINDOW = 8, 4
TOLERANCE = 1e-4  # largest difference over largest logit, in float32
# The same where hidden states and logits are rounded to the target's dtype: several times that rounding.
ROUNDED_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
LARGE_LOGIT = 1000.0  # far above any cap
MAX_DENOMINATOR = 10_000  # of factors: classes multiply or divide by numbers of a few digits


class HeadDifference(NamedTuple):
    logits: float  # the largest, over all tokens
    largest: float  # of the target's own logits
    scale: float  # where they agree, the class's logits are this times final hidden states times its head
    same_choice: bool  # equal argmax for all tokens
    same_head: bool  # the table is the class's own head, though its logits may be capped
    same_embedding: bool
    has_bias: bool  # of the class's own head

    @property
    def allowed(self) -> float:
        return TOLERANCE * self.largest

    @property
    def agrees(self) -> bool:
        return self.logits <= self.allowed  # False where either is NaN


def load_first_block(source: str, trust_remote_code: bool) -> PreTrainedModel:
    """Return the target on the CPU in float32 with its first block only; other weights are not read."""
    config = cut_to_first_block(foreign_files.read_config(source, trust_remote_code))
    model = read_model(source, config, trust_remote_code, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def build_first_block(config: PretrainedConfig) -> PreTrainedModel | None:
    """Return a model of this config with one block, without weights (on the meta device); None where the class can't."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = select_auto_class(config).from_config(cut_to_first_block(config))
    except Exception:  # remote code, or a class that may raise anything with one block
        return None
    return model


def cut_to_first_block(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a config with one block; lists with an item per block keep their first.

    Where layers have a sliding window, this block has, of SHORT_WINDOW tokens: eight tokens reach beyond it.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config()
    count = text.num_hidden_layers
    text.num_hidden_layers = 1
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:1])
    if read_sliding_window(config) is not None:
        text.sliding_window = SHORT_WINDOW
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = ["sliding_attention"]
    return short


@torch.inference_mode()
def compare_head(model: PreTrainedModel, embedding: Tensor, head: Tensor) -> HeadDifference:
    """Compare a model of `load_first_block` on TOKENS tokens; embedding and head [V, H] float32 are what later stages read."""
    rows = min(len(embedding), model.get_input_embeddings().weight.shape[0])
    hidden, class_logits = _run_tokens(model, rows)
    logits, known = hidden @ head.T, (model.get_output_embeddings(), model.get_input_embeddings())
    same_head, same_embedding = (
        module is not None and torch.equal(module.weight, weight)
        for module, weight in zip(known, (head, embedding), strict=True)
    )
    own_tables = same_head, same_embedding, getattr(known[0], "bias", None) is not None
    if logits.shape != class_logits.shape:
        return HeadDifference(torch.inf, float(class_logits.abs().max()), 1.0, False, *own_tables)
    same_choice = bool((logits.argmax(-1) == class_logits.argmax(-1)).all())
    scale = measure_scale(class_logits, logits)
    found = HeadDifference(*_differ(class_logits, scale * logits), scale, same_choice, *own_tables)
    if scale != 1 and not found.agrees:
        found = HeadDifference(*_differ(class_logits, logits), 1.0, same_choice, *own_tables)
    if found.agrees:
        # A cap, as Gemma 2's 30 tanh(logits / 30), is no factor, but nearly one where logits are small.
        amplitude = LARGE_LOGIT / max(found.largest, 1e-30)
        hidden, class_logits = _run_tokens(model, rows, amplitude)
        logits = found.scale * (amplitude * hidden @ head.T)
        found = HeadDifference(*_differ(class_logits, logits), found.scale, same_choice, *own_tables)
    return found


def _differ(class_logits: Tensor, logits: Tensor) -> tuple[float, float]:
    """Return the largest difference, and the largest of the class's logits."""
    return float((class_logits - logits).abs().max()), float(class_logits.abs().max())


def measure_scale(class_logits: Tensor, logits: Tensor) -> float:
    """Return the positive s for which s * logits is nearest to class_logits; a short fraction where one is as near; else 1."""
    class_logits, logits = class_logits.double(), logits.double()
    scale = float((class_logits * logits).sum() / (logits * logits).sum())
    if not (0 < scale < torch.inf):
        return 1.0
    short = float(Fraction(scale).limit_denominator(MAX_DENOMINATOR))
    return short if abs(short - scale) <= 1e-5 * scale else scale


@torch.inference_mode()
def check_drawn_logits(model: PreTrainedModel, temperature: float, logits_scale: float) -> None:
    """Raise ValueError where tokens are to be drawn, and the class's logits are not final hidden states times its head and
    `logits_scale`.
    """
    if temperature == 0:  # a cap moves no argmax
        return
    head = model.get_output_embeddings().weight  # [V, H]
    hidden, class_logits = _run_tokens(model, len(head))
    logits = (hidden.to(head.device) @ head.T).float().to(class_logits.device) * logits_scale
    if (logits - class_logits).abs().max() > ROUNDED_TOLERANCE[model.dtype] * class_logits.abs().max():
        raise ValueError(
            f"{type(model).__name__} caps its logits, or scales them otherwise than by {logits_scale:g}: the torch engine would "
            f"draw from another distribution; expected a workload at temperature 0, found {temperature:g}: set 0, or measure it "
            "by benchmark_served"
        )


def _run_tokens(model: PreTrainedModel, rows: int, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the last hidden [TOKENS, H] of ids spread over `rows`, and the class's own logits [TOKENS, V] in float32 of
    `amplitude` times it.
    """
    ids = torch.arange(TOKENS) * (rows // TOKENS) + rows // (2 * TOKENS)
    ids[ids == getattr(model.config, "image_token_id", None)] = 0
    caught: list[Tensor] = []

    def catch_and_amplify(_module: Module, _args: Any, out: Any) -> Any:
        caught.append(out.last_hidden_state)
        out.last_hidden_state = out.last_hidden_state * amplitude
        return out

    with model.get_decoder().register_forward_hook(catch_and_amplify):
        own = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0].float()  # [8, V]
    return caught[0][0], own
