"""EAGLE: one decoder layer that predicts the target's next hidden state (https://arxiv.org/abs/2401.15077, 2406.16858).

    position p:   embed(token p+1), last hidden of p   --fc, layer-->   predicted hidden of p+1   --head-->   guess for p+2
    next step:    embed(guess),     that hidden        --fc, layer-->   ...                                   guess for p+3

Its input is the target's last hidden state after the final norm; its layer has no norm before the attention, and logits are
the target's head of its output. The loss is SmoothL1 to the target's hidden state of p+1, plus a tenth of the soft
cross-entropy between the logits of both; one step, on the target's own hidden states, without the authors' noise.
Decoding: `eagle_proposer`.

Letters as in `draft/eagle3.py`; P supervised positions, L steps.
"""

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import DraftMLP, Eagle3Draft, RMSNorm
from stages.draft.eagle3_config import DraftConfig
from stages.training import attention_mask, chunked_loss, packed_rows, ttt

CROSS_ENTROPY_WEIGHT = 0.1  # SmoothL1 has weight 1


class EagleDraft(Eagle3Draft):
    """A draft over the target's whole vocabulary. `head` [V, H] is the target's: frozen, not registered as a parameter.

    Its states are the target's last hidden states, so its logits have the target's `logits_scale`.
    """

    def __init__(self, config: DraftConfig, head: Tensor, logits_scale: float = 1.0):
        super().__init__(config)
        self.head = (head,)  # a tuple, so that the module does not register it
        self.logits_scale = logits_scale

    def _add_layers(self, c: DraftConfig) -> None:
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size)
        self.midlayer = nn.Module()
        self.midlayer.self_attn = nn.Module()
        for name, heads_ in (("q", c.num_attention_heads), ("k", c.num_key_value_heads), ("v", c.num_key_value_heads)):
            linear = nn.Linear(c.hidden_size, heads_ * c.head_dim, bias=False)
            self.midlayer.self_attn.add_module(f"{name}_proj", linear)
        self.midlayer.self_attn.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.midlayer.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.midlayer.mlp = DraftMLP(c)

    @classmethod
    def initialise(cls, config: DraftConfig, head: Tensor, seed: int, logits_scale: float = 1.0) -> "EagleDraft":
        """Return random weights from the seed, with `fc` such that the first prediction for p+1 is near the hidden state of p."""
        torch.manual_seed(seed)
        draft = cls(config, head, logits_scale)
        with torch.no_grad():
            for name, weight in draft.named_parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=0.02)
                if name == "fc.weight":
                    weight[:, config.hidden_size :] += torch.eye(config.hidden_size)
            draft.fc.bias.zero_()
        return draft

    def fuse_features(self, features: Tensor) -> Tensor:
        return features

    def build_layer_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat([embeds, hidden], dim=-1))  # [..., H]

    def select_residual(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        return mixed

    def normalise_output(self, state: Tensor) -> Tensor:
        return state if self.logits_scale == 1 else state * self.logits_scale

    def logits(self, state: Tensor) -> Tensor:
        return self.normalise_output(state) @ self.head[0].T

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def unroll_states(eagle: EagleDraft, pack: ttt.TrainingPack, embedding: Tensor, steps: int) -> list[Tensor]:
    """Return the states [P_k, H] of `steps` steps from every query token, with the row's own tokens and the states before."""
    last = pack.last.to(eagle.fc.weight.dtype)
    positions = eagle.get_rope_positions(pack.position, pack.rope_positions)
    ids = nn.functional.pad(pack.ids, (0, steps + 1))
    mixed = eagle.build_layer_input(ttt.embed_tokens(pack, ids, embedding, slice(1, len(pack.ids) + 1)), last)
    visible = attention_mask.build_pack_attention(
        pack, *eagle.compute_keys_values(mixed, eagle.compute_rope(positions)), None
    )
    hidden = last.index_select(0, pack.query_tokens)  # [P, H]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    states: list[Tensor] = []
    for k, width in enumerate(pack.queries_per_step[:steps]):
        query_tokens = pack.query_tokens[:width]
        mixed = eagle.build_layer_input(ttt.embed_tokens(pack, ids, embedding, query_tokens + 1 + k), hidden[:width])
        rope = eagle.compute_rope(positions[query_tokens] + k)
        if k:  # at step 0 the query's own key is in the prefix
            key, value = eagle.compute_keys_values(mixed, rope)
            own_keys, own_values = [x[:width] for x in own_keys] + [key], [x[:width] for x in own_values] + [value]
        attended = visible.attend(eagle.compute_queries(mixed, rope), own_keys, own_values)
        hidden = eagle.finish_layer(mixed, attended.to(mixed.dtype))
        states.append(hidden)
    return states


def compute_loss(
    eagle: EagleDraft,
    pack: ttt.TrainingPack,
    embedding: Tensor,
    head: Tensor,
    objective: ttt.TrainingObjective,
    counts: Tensor | None = None,
) -> ttt.LossOutput:
    """Return the loss of one step, as ttt.compute_loss does."""
    assert objective.num_steps == 1
    if not pack.chunks:
        return packed_rows.compute_zero_loss(eagle, pack, 1)
    (states,) = unroll_states(eagle, pack, embedding, 1)
    share = 1 / (torch.tensor(pack.supervised_per_step, device=head.device) if counts is None else counts).clamp(
        min=1
    )  # [1]
    all_ids = torch.zeros(len(head), dtype=torch.int64, device=head.device)
    output_head = chunked_loss.OutputHead(eagle.normalise_output, head, all_ids, torch.ones_like(all_ids).bool())
    given = output_head, [states], pack, head, CROSS_ENTROPY_WEIGHT * share, objective.loss, objective.logits_scale
    total, loss, hits = chunked_loss.compute_chunked_loss(*given)
    expected = pack.last[pack.query_tokens + 1].to(states.dtype)  # of the predicted position
    distance = nn.functional.smooth_l1_loss(states, expected, reduction="none").mean(-1).float().sum()
    return ttt.LossOutput(total + distance * share[0], CROSS_ENTROPY_WEIGHT * loss + distance.detach(), hits)


def predict_top_tokens(
    eagle: EagleDraft, pack: ttt.TrainingPack, embedding: Tensor, head: Tensor, steps: int, count: int
) -> list[Tensor]:
    """Return each step's `count` likeliest ids [P_k, count], given the row's own tokens before."""
    states = unroll_states(eagle, pack, embedding, steps)
    return [(state @ head.T).topk(count).indices for state in states]
