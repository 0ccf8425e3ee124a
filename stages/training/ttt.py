"""Training-time test: L draft steps from every supervised position, each fed with its own earlier states.

EAGLE-3, section 3.1, https://arxiv.org/abs/2503.01840. Step k of position p takes the embedding of token p+1+k and
the state of step k-1, and is taught the target's distribution of token p+2+k (the last hidden state of p+1+k through
the target's head), renormalised over the draft vocabulary.

Which labels count (`mask: aligned`): token p+2+k lies in an assistant span and token p+1 is at or after its start,
which is just where serving asks. With span tokens s..e-1:

    step 0 learns s+1 .. e-1        step 2 learns s+3 .. e-1        (token s itself comes from the target's prefill)

`mask: eagle` keeps the papers' gate, mask[p+k], which is two tokens early (research/specforge.md 2.4): for comparison.

Rows lie end to end in a `TrainingPack`, nothing is padded. Keys of step 0 are needed of every token; queries, the layer and
both heads run on supervised positions alone, and a step on those alone that it or a later one teaches: the others' keys
serve nobody else. A query of step k sees the prefix of its own row, and its own earlier steps:

                 tokens of its row 0 .. p      own steps 1 .. k
    step 0:      1 1 1 1 . .                   -
    step 2:      1 1 1 1 . .                   1 1

so attention is a causal one whose mask is the same for all L steps (with a sliding window, each step's own), and a few
products more, merged by log-sum-exp.
Letters as in `draft`; T tokens of a pack, P supervised positions in it, L steps, N pairs of (step, position) taught.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import Eagle3Draft
from stages.training import attention_mask, chunked_loss
from stages.training.compile_on_cuda import compile_on_cuda


@dataclass(frozen=True)
class TrainingObjective:
    """What is learned; part of train_draft's parameters."""

    steps: int  # L
    decay: float = 0.8  # step k weighs decay**k
    mask: str = "aligned"  # aligned or eagle
    loss: str = "ce"  # ce, lk_alpha or lk_lambda: see heads.ROWS


@dataclass
class TrainingPack:
    """Rows end to end, and what is taught at which of their tokens; made on the CPU, then moved whole."""

    ids: Tensor  # [T] int64
    features: Tensor  # [T, 3H]; [T, 0] until a live target has been asked
    last: Tensor  # [T, H] the target's last hidden state, after its final norm
    row: Tensor  # [T] int64: the row a token belongs to
    place: Tensor  # [T] int64: its position in that row
    asked: Tensor  # [P] int64: tokens from which something is drafted; those of the most steps first
    pair_state: Tensor  # [N] int64: index into all steps' states, one step after the other; sorted by label
    pair_label: Tensor  # [N] int64: index into labels
    labels: Tensor  # [U] int64: tokens whose last hidden state teaches
    widths: list[int]  # L: step k runs on asked[:widths[k]]
    counts: list[int]  # L: positions that step k teaches
    chunks: list[tuple[int, int, int, int]]  # pairs from .. to, and the range of labels that they are taught
    lengths: list[int]  # of its rows
    positions: Tensor | None = None  # [T, 3] rotary positions; this and what follows for targets that see
    visual: Tensor | None = None  # [M, H] embeddings of pictures' pieces
    piece: Tensor | None = None  # [T] int64: the piece that a token stands for, -1 for a text's
    view: Any = None  # target.View: what a live target that sees is to be given

    @classmethod
    def of(cls, rows: Sequence[Any], steps: int, mask: str, pinned: bool = False) -> "TrainingPack":
        """From rows, each with ids [t], features [t, 3H], last [t, H] and mask [t]; in pinned memory, for a GPU.

        Rows of a target that sees have positions [t, 3], pictured [t] and visual [m, H] too.
        """
        lengths = torch.tensor([len(r.ids) for r in rows])
        row = torch.arange(len(rows)).repeat_interleave(lengths)
        place = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        gates = build_supervision_mask(torch.cat([r.mask for r in rows]), row, steps, mask)  # [L, T]
        # How many steps a position runs: to the last that teaches it. Sorted so, a step's positions are a prefix of all.
        depth = (gates * torch.arange(1, steps + 1)[:, None]).amax(0)  # [T]
        asked = torch.sort(depth, descending=True, stable=True).indices[: int((depth > 0).sum())]
        widths = [int((depth > k).sum()) for k in range(steps)]
        before = torch.tensor([0, *widths]).cumsum(0)
        step, index = gates[:, asked].nonzero(as_tuple=True)
        label, order = torch.sort(asked[index] + 1 + step, stable=True)
        labels, pair_label = torch.unique_consecutive(label, return_inverse=True)
        return cls(
            ids=torch.cat([r.ids for r in rows]).to(torch.int64),
            features=_concatenate([r.features for r in rows], pinned),
            last=_concatenate([r.last for r in rows], pinned),
            row=row,
            place=place,
            asked=asked,
            pair_state=(before[step] + index)[order],
            pair_label=pair_label,
            labels=labels,
            widths=widths,
            counts=gates.sum(1).tolist(),
            chunks=_cut_chunks(label, pair_label),
            lengths=lengths.tolist(),
            **_pack_multimodal(rows, pinned),
        )

    def to(self, device: torch.device | str) -> "TrainingPack":
        """Without waiting for the copies, where the memory is pinned."""
        return replace(self, **{name: t.to(device, non_blocking=True) for name, t in self._tensors()})

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Its memory on the GPU may be given to others only when `stream` has got past here."""
        for _, tensor in self._tensors():
            tensor.record_stream(stream)

    def muted(self) -> "TrainingPack":
        """The same, teaching nothing."""
        return replace(self, chunks=[], counts=[0] * len(self.counts))

    def step(self, number: int) -> "TrainingPack":
        """What step `number` alone teaches, as a pack of one step."""
        begin = sum(self.widths[:number])
        mine = (self.pair_state >= begin) & (self.pair_state < begin + self.widths[number])
        label = self.labels[self.pair_label[mine]]
        labels, pair_label = torch.unique_consecutive(label, return_inverse=True)
        cuts = _cut_chunks(label, pair_label)
        return replace(
            self, asked=self.asked[: self.widths[number]], pair_state=self.pair_state[mine] - begin, pair_label=pair_label,
            labels=labels, widths=self.widths[number : number + 1], counts=self.counts[number : number + 1], chunks=cuts,
        )  # fmt: skip

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]


def _pack_multimodal(rows: Sequence[Any], pinned: bool) -> dict[str, Tensor]:
    """What rows of a target that sees add to a pack; nothing for text."""
    if getattr(rows[0], "positions", None) is None:
        return {}
    pictured = torch.cat([r.image_token_mask for r in rows])
    return {
        "positions": torch.cat([r.positions for r in rows]),
        "visual": _concatenate([r.image_embeddings for r in rows], pinned),
        "piece": number_image_tokens(pictured),
    }


def _cut_chunks(label: Tensor, pair_label: Tensor) -> list[tuple[int, int, int, int]]:
    """Of pairs by label: from .. to of each chunk, and the range of labels that it is taught."""
    ends = [
        (a, min(a + chunked_loss.PAIRS_PER_CHUNK, len(label)))
        for a in range(0, len(label), chunked_loss.PAIRS_PER_CHUNK)
    ]
    return [(a, b, int(pair_label[a]), int(pair_label[b - 1]) + 1) for a, b in ends]


def number_image_tokens(pictured: Tensor) -> Tensor:
    """pictured [T] bool -> the piece that each token stands for, -1 for a text's."""
    return torch.where(pictured, pictured.cumsum(0) - 1, -1)


def _concatenate(parts: list[Tensor], pinned: bool) -> Tensor:
    whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pinned)
    return torch.cat(parts, out=whole)


@dataclass
class LossOutput:
    """Per step, nothing of it brought to the host."""

    total: Tensor  # what backward starts from: sum over steps of decay**k times the step's mean loss
    loss: Tensor  # [L] sum over the positions taught
    hits: Tensor  # [L, P] bool: the draft's argmax is the target's; False where nothing is taught


def build_supervision_mask(mask: Tensor, row: Tensor, steps: int, kind: str) -> Tensor:
    """mask [T] of assistant tokens, row [T] -> [L, T] bool: is position p taught at step k?"""

    def ahead(x: Tensor, n: int) -> Tensor:
        """x[p + n] where that is a token of the same row, else False."""
        inside = nn.functional.pad(row[n:], (0, min(n, len(row))), value=-1) == row
        return nn.functional.pad(x[n:], (0, min(n, len(x)))) & inside

    gates: list[Tensor] = []
    for k in range(steps):
        if kind == "eagle":
            gate = ahead(mask, k) & ahead(torch.ones_like(mask), k + 2)  # the label must exist, whatever its span
        else:
            # Token p+1 at or after the start of the span of p+2+k: all of p+1 .. p+2+k are assistant tokens.
            gate = ahead(mask, k + 2) & (gates[-1] if gates else ahead(mask, 1))
        gates.append(gate)
    return torch.stack(gates)


def compute_loss(
    draft: Eagle3Draft,
    pack: TrainingPack,
    embedding: Tensor,  # [V, H] the target's, frozen
    head: Tensor,  # [V, H] the target's, frozen
    objective: TrainingObjective,
    counts: Tensor | None = None,  # [L] positions each step teaches in the whole batch; None: in this pack
) -> LossOutput:
    """All L steps of a pack. Summed over a batch's packs, `total` is the batch's loss: each step's mean over it."""
    dtype, steps = draft.fc.weight.dtype, objective.steps
    if not pack.chunks:
        return compute_zero_loss(draft, pack, steps)
    features = draft.fuse(pack.features.to(dtype))  # [T, H]
    turning = draft.turning(pack.place, pack.positions)
    embed = partial(embed_tokens, pack, nn.functional.pad(pack.ids, (0, steps + 1)), embedding)
    keys, values = _compute_keys_values(draft, embed(slice(1, len(pack.ids) + 1)), features, turning)
    visible = attention_mask.build_pack_attention(pack, keys, values, draft.config.sliding_window)
    hidden = features.index_select(0, pack.asked)  # [P, H]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    states: list[Tensor] = []
    for k, width in enumerate(pack.widths):
        asked, hidden = pack.asked[:width], hidden[:width]
        embeds, positions = embed(asked + 1 + k), turning[asked] + k
        if k == 0:  # its own key is the prefix key of p
            query = _compute_queries(draft, embeds, hidden, positions)
        else:
            query, key, value = _compute_queries_keys_values(draft, embeds, hidden, positions)
            own_keys, own_values = [x[:width] for x in own_keys] + [key], [x[:width] for x in own_values] + [value]
        attended = visible.attend(query, own_keys, own_values)  # [Q, A, E]
        hidden = _finish_layer(draft, hidden, attended.to(dtype))
        states.append(hidden)
    decay = objective.decay ** torch.arange(steps, device=head.device)
    weights = decay / (torch.tensor(pack.counts, device=head.device) if counts is None else counts).clamp(min=1)
    return LossOutput(*chunked_loss.compute_chunked_loss(draft, states, pack, head, weights, objective.loss))


def compute_zero_loss(draft: nn.Module, pack: TrainingPack, steps: int) -> LossOutput:
    """Of a pack that teaches nothing: yet every weight has a gradient, as whoever sums gradients expects."""
    total = torch.stack([p.sum() * 0 for p in draft.parameters()]).sum()
    return LossOutput(total, pack.last.new_zeros(steps), pack.ids.new_zeros(steps, 0).bool())


def embed_tokens(pack: TrainingPack, ids: Tensor, embedding: Tensor, tokens: slice | Tensor) -> Tensor:
    """Embeddings [n, H] of the pack's tokens, by their index; ids [T + L + 1] has room past the last one."""
    found = embedding[ids[tokens]]
    if pack.visual is None or pack.piece is None or not len(pack.visual):
        return found
    piece = nn.functional.pad(pack.piece, (0, len(ids) - len(pack.piece)), value=-1)[tokens]  # [n]
    return torch.where(piece[:, None] < 0, found, pack.visual[piece.clamp(min=0)].to(found.dtype))


def count_chain_accepted(result: LossOutput, pack: TrainingPack) -> Tensor:
    """[P] drafts that a chain started at each position would have accepted: hits before the first miss, in row order.

    On a row of the target's temperature-0 answer this is what decoding accepts, exactly: while every guess so far is
    right, the tokens fed are the draft's own. On a sampled row it counts agreement with the target's argmax along it.
    """
    return result.hits.int().cumprod(0).sum(0)[pack.asked.argsort()]


@compile_on_cuda
def _compute_keys_values(
    draft: Eagle3Draft, embeds: Tensor, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    return draft.keys_values(draft.mix(embeds, hidden), draft.rope(positions))


@compile_on_cuda
def _compute_queries(draft: Eagle3Draft, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    return draft.queries(draft.mix(embeds, hidden), draft.rope(positions))


@compile_on_cuda
def _compute_queries_keys_values(
    draft: Eagle3Draft, embeds: Tensor, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    mixed, rope = draft.mix(embeds, hidden), draft.rope(positions)
    return draft.queries(mixed, rope), *draft.keys_values(mixed, rope)


@compile_on_cuda
def _finish_layer(draft: Eagle3Draft, hidden: Tensor, attended: Tensor) -> Tensor:
    return draft.finish(hidden, attended)
