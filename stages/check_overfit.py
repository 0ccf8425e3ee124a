"""check_overfit: can this draft learn one row by heart?   python -m stages.check_overfit

If a copy of e000 can't reach nearly whole accepted chains on a single row it was trained on, then features, masks,
rotation or vocabulary disagree, and no amount of data will help (research/users.md 1.1). Its report is an input of
train_draft, so nothing longer starts before this passes; it holds no clock, so that a rerun that changes nothing
retrains nothing.
"""

from pathlib import Path

import torch
from tqdm import trange

from stages import params
from stages.drafting import acceptance, ttt
from stages.drafting.draft import Draft
from stages.formats import atomic, checkpoint, hiddens, manifest

HIDDENS, REPORT = Path("data/hiddens/train"), Path("results/overfit_report.json")


def main() -> None:
    p = params.load()
    torch.set_num_threads(p.target.num_threads)
    made = manifest.read()
    embedding, head = (t.to(p.target.device) for t in manifest.tables(made))
    config, tensors = checkpoint.read_draft(checkpoint.folder(params.ROOT_CHECKPOINT), "init_draft")
    draft = Draft.of(config, tensors).to(p.target.device)
    rows = list(hiddens.read(HIDDENS))
    row = sorted(rows, key=lambda r: len(r.ids))[len(rows) // 2]  # of middling length
    batch = ttt.Batch.of([row], p.target.device)

    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=p.check_overfit.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses: list[float] = []
    for _ in trange(p.check_overfit.steps, desc=f"learn row {row.id} by heart", unit="step", mininterval=2):
        result = ttt.forward(draft, batch, embedding, head, p.train_draft.ttt_steps, p.train_draft.mask)
        loss = ttt.weighted(result.loss, p.train_draft.ttt_decay)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), p.train_draft.grad_clip)
        optimizer.step()
        losses.append(loss.item())
    tau = chain_tau(draft, batch, embedding, head, p.train_draft.ttt_steps, row)
    report = {
        "row": row.id,
        "tau": tau,
        "min_tau": p.check_overfit.min_tau,
        "perfect_tau": p.train_draft.ttt_steps + 1,
        "steps": p.check_overfit.steps,
        "losses": [round(x, 5) for x in losses[:: max(1, len(losses) // 40)]],
    }
    print(
        f"one row by heart: chain accept length {tau:.2f} of {report['perfect_tau']}, loss {losses[0]:.2f} -> {losses[-1]:.2f}"
    )
    if tau < p.check_overfit.min_tau:
        raise ValueError(
            f"check_overfit: after {p.check_overfit.steps} steps on row {row.id} a chain of {p.train_draft.ttt_steps} drafts "
            f"is accepted {tau:.2f} tokens long, expected at least {p.check_overfit.min_tau} (check_overfit.min_tau). Loss went "
            f"{losses[0]:.3f} -> {losses[-1]:.3f}: if it fell, raise check_overfit.steps; if not, look at "
            "results/vocab_report.json (coverage), target.feature_layers, and the row's loss span"
        )
    atomic.write_json(REPORT, report)


@torch.no_grad()
def chain_tau(draft: Draft, batch: ttt.Batch, embedding, head, steps: int, row: hiddens.Row) -> float:
    """The accept length of chains of `steps` drafts over the row's answer, walked as decoding would."""
    result = ttt.forward(draft, batch, embedding, head, steps, "aligned")
    accepted = ttt.chain_accepted(result)[0].tolist()  # at each supervised position, in order: the answer's own
    place, total, cycles = 0, 0, 0
    while place < len(accepted):
        total, cycles, place = total + accepted[place], cycles + 1, place + accepted[place] + 1
    return acceptance.tau(torch.tensor([total]).numpy(), torch.tensor([cycles]).numpy())


if __name__ == "__main__":
    params.run_stage(main)
