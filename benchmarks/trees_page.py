"""Write docs/trees.md: which tree, and why, with figures of our own.   python -m benchmarks.trees_page

The page is written from the last record of benchmarks/trees_record.py; tests/test_trees_page.py compares the committed page
with the output.
"""

from collections.abc import Iterable
from typing import Any

from benchmarks.trees_record import (
    BUDGETS,
    EASY,
    HARD,
    MIDDLE,
    ROOT,
    THREE,
    TOPKS,
    TWO,
    WIDE,
    Record,
    Shape,
    last_record,
    short,
)
from stages.literature import published
from stages.params.tree_shape import TreeShape, count_candidates

PAGE = ROOT / "docs/trees.md"
CHAIN: Shape = (10, 1, 11)
KINDS = ("structure", "letters", "digits")


def table(*lines: Iterable[Any]) -> str:
    head, *rows = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([head, "|" + "---|" * head.count(" | ") + "---|", *rows])


def question(r: Record, drafts: Iterable[tuple[str, str]]) -> str:
    head = ("draft", "tau of 10_2_32", "tau of 10_3_32", "10_2_32 less 10_3_32, 95%", "depth of 10_2_32", "of 10_3_32",
            "accepted / expected, 10_3_32")  # fmt: skip
    lines = []
    for draft, called in drafts:
        less, low, high = r.difference(draft, TWO, THREE)
        depths = [f"{r.trees[draft][shape]['mean_depth']:.1f}" for shape in (TWO, THREE)]
        taus = [f"{r.tau(draft, shape):.2f}" for shape in (TWO, THREE)]
        lines.append(
            (called, *taus, f"{less:+.2f} ({low:+.2f} to {high:+.2f})", *depths, f"{r.kept(draft, THREE):.2f}")
        )
    return table(head, *lines)


def flattened(r: Record) -> list[tuple[float, str]]:
    """Return (temperature, draft), sorted; e009 itself is at temperature 1."""
    return sorted([(1.0, EASY), *((float(d.split("@")[1]), d) for d in r.trees if d.startswith(f"{EASY}@"))])


def tabulate_tree_sizes(r: Record) -> str:
    head = ("tree", "candidates k + (s − 1)k²", "nodes", "depth reached, e001", "e009", "tau, e001", "e009")
    shapes: list[Shape] = [(8, 2, 16), TWO, (8, 3, 16), THREE, (12, 3, 32), WIDE]
    return table(
        head,
        *(
            (short(s), f"{s[1]} + {s[0] - 1}·{s[1] ** 2} = {count_candidates(*s[:2])}", s[2] - 1,
             *(f"{r.trees[draft][s]['mean_depth']:.1f} of {s[0]}" for draft in (HARD, EASY)),
             *(f"{r.tau(draft, s):.2f}" for draft in (HARD, EASY)))
            for s in shapes
        ),
    )  # fmt: skip


def widths(r: Record) -> str:
    """Return a table of the mean number of nodes at each depth."""
    deepest = max(s for s, _, _ in (TWO, THREE, WIDE))
    lines = []
    for draft in (HARD, EASY):
        for shape in (TWO, THREE, WIDE):
            at, cycles = r.buckets(draft, shape, "depth"), r.total(draft, shape, "cycles")
            counts = [at.get(str(d), {"nodes": 0})["nodes"] / cycles for d in range(1, deepest + 1)]
            lines.append((short(shape), draft, *(f"{n:.1f}" if n else "" for n in counts)))
    return table(("tree", "draft", *range(1, deepest + 1)), *lines)


def above(r: Record, draft: str, shape: Shape) -> float:
    """Return the share of nodes of rank above topk within their depth: no beam could hold them."""
    levels = r.buckets(draft, shape, "level")
    beyond = sum(row["nodes"] for rank, row in levels.items() if int(rank) > shape[1])
    return beyond / sum(row["nodes"] for row in levels.values())


def budgets(r: Record) -> str:
    lines = []
    for draft in (HARD, MIDDLE, EASY):
        for budget in BUDGETS:
            taus = [best_tau(r, draft, topk, budget) for topk in TOPKS]
            lines.append((draft, budget, *(f"**{t:.2f}**" if t == max(taus) else f"{t:.2f}" for t in taus)))
    return table(("draft", "tokens, at most", *(f"topk {k}" for k in TOPKS)), *lines)


def best_tau(r: Record, draft: str, topk: int, budget: int) -> float:
    return max(row["tau"] for (_, k, m), row in r.trees[draft].items() if k == topk and m <= budget)


def lost(r: Record, draft: str, budget: int) -> float:
    """Return the share of the best tau that is lost with topk at most 3."""
    taus = {topk: best_tau(r, draft, topk, budget) for topk in TOPKS}
    return 1 - max(tau for topk, tau in taus.items() if topk <= 3) / max(taus.values())


def lost_lines(r: Record) -> str:
    lines = [(draft, *(f"{100 * lost(r, draft, b):.0f}%" for b in BUDGETS)) for draft in (HARD, MIDDLE, EASY)]
    return table(("lost with topk ≤ 3", *(f"{b} tokens" for b in BUDGETS)), *lines)


def best_tree(r: Record, draft: str) -> str:
    return short(max(r.trees[draft], key=lambda shape: r.tau(draft, shape)))


def sibling_lines(r: Record, chosen: Iterable[tuple[Shape, str]]) -> str:
    """Return a table: shares of the nodes verified and of the drafts accepted, by rank among siblings."""
    lines = []
    for shape, draft in chosen:
        found = r.buckets(draft, shape, "sibling")
        totals = {k: sum(row[k] for row in found.values()) for k in ("nodes", "accepted")}
        shares = []
        for first, last in ((1, 1), (2, 2), (3, 3), (4, 99)):
            some = [row for rank, row in found.items() if first <= int(rank) <= last]
            nodes, accepted = (sum(row[k] for row in some) / totals[k] for k in totals)
            shares.append(f"{100 * nodes:.0f}% → {100 * accepted:.1f}%" if some else "")
        lines.append((short(shape), draft, *shares))
    return table(("tree", "draft", "first guess", "second", "third", "later"), *lines)


def kind_lines(r: Record) -> str:
    """Return a table: the share of the answers' tokens of each class that were accepted drafts."""
    lines = []
    for draft in (HARD, MIDDLE, EASY):
        found = r.buckets(draft, THREE, "token")
        totals = {kind: row["cycles"] + row["accepted"] for kind, row in found.items()}
        lines.append((draft, *(f"{100 * found[kind]['accepted'] / totals[kind]:.0f}%" for kind in KINDS)))
    return table(("10_3_32 with", *(f"{kind}, {totals[kind]:.0f} tokens" for kind in KINDS)), *lines)


def past_the_first(r: Record, draft: str, shape: Shape) -> float:
    """Return the share of cycles that accept at least one draft."""
    return r.buckets(draft, shape, "depth")["1"]["accepted"] / r.total(draft, shape, "cycles")


RANKS = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 23), (24, 31))


def rank_lines(r: Record) -> str:
    lines = []
    for shape in (TWO, THREE, WIDE):
        for draft in (HARD, EASY):
            found = r.buckets(draft, shape, "rank")
            total = sum(row["accepted"] for row in found.values())
            shares = [sum(found[str(n)]["accepted"] for n in range(low, high + 1)) / total for low, high in RANKS]
            lines.append((short(shape), draft, *(f"{100 * share:.1f}%" for share in shares)))
    return table(("tree", "draft", *(f"{a}" if a == b else f"{a}–{b}" for a, b in RANKS)), *lines)


def path_probability_lines(r: Record, drafts: Iterable[str]) -> str:
    """Return a table by path probability: number of nodes, mean probability, share accepted."""
    drafts = list(drafts)
    found = [r.buckets(draft, THREE, "path_probability") for draft in drafts]
    lines = []
    for bucket in sorted({b for of in found for b in of}, key=lambda b: float(b.split("-")[0])):
        cells: list[str] = []
        for of in found:
            row = of.get(bucket, {"nodes": 0})
            promised, kept = (
                100 * row[k] / row["nodes"] if row["nodes"] else 0 for k in ("expected_accepted", "accepted")
            )
            cells.append(f"{row['nodes']:.0f}: {promised:.3g}% → {kept:.3g}%" if row["nodes"] else "")
        lines.append((bucket.replace("-", " to "), *cells))
    return table(("path_probability", *drafts), *lines)


def sums(r: Record, draft: str, shape: Shape) -> tuple[float, float]:
    """Return the drafts that are expected to be accepted and those accepted, per cycle."""
    cycles = r.total(draft, shape, "cycles")
    return r.total(draft, shape, "expected_accepted") / cycles, r.total(draft, shape, "accepted") / cycles


def seed(*shapes: Shape, draft: str) -> list[str]:
    """Return the published accept lengths of these trees."""
    rows = published.read_publications(ROOT / "published")["qwen3-vl-weather"].rows
    found = {r.setting.shape: r.value for r in rows if r.metric == "tau" and r.setting.draft == draft}
    return [f"{found[TreeShape(*shape)]:g}" for shape in shapes]


def page(r: Record) -> str:
    """Return the page. Its sentences were written for the record of 2026-11-21; `claims` checks them for another."""
    claims(r)
    temperatures = flattened(r)
    flattest, flat = temperatures[-1]
    turns = min(t for t, draft in temperatures if r.difference(draft, TWO, THREE)[1] > 0)
    hard, easy = ([f"{x:.2f}" for x in sums(r, draft, THREE)] for draft in (HARD, EASY))
    two9, three9 = seed(TWO, THREE, draft="the team's, ep=9")
    two3, three3 = seed((12, 2, 32), (12, 3, 32), draft="the team's, ep=3")
    of_pool = {shape: f"{100 * (shape[2] - 1) / count_candidates(*shape[:2]):.0f}%" for shape in (TWO, THREE)}
    past = [f"{100 * past_the_first(r, EASY, shape):.0f}%" for shape in (TWO, THREE)]
    beyond = [f"{100 * above(r, EASY, shape):.0f}%" for shape in (TWO, THREE)]
    falls = [f"{100 * (1 - r.tau(flat, shape) / r.tau(EASY, shape)):.0f}%" for shape in (TWO, THREE)]
    trusted = [(shape, draft) for shape in (TWO, THREE, WIDE) for draft in (HARD, EASY)]
    cpu, threads = r.about["hardware"]["cpu"], r.about["hardware"]["threads"]
    return f"""# Trees

<!-- Written by: python -m benchmarks.trees_page, from docs/results/{r.name}. Edit that file. -->

Which tree should you launch, and why? The Qwen3-VL weather table ([as published](published.md);
`num_steps_topk_num_draft_tokens`) raises the question: there 10_2_32 accepts {two9} tokens per cycle and 10_3_32 {three9},
although both verify the same number of drafts over the same number of steps. A third branch doesn't always cost tau: in the
same table 12_3_32 ({three3}) beats 12_2_32 ({two3}).

All other figures below are ours: `{r.about["model"]}`, replayed exactly on the {answers(r)} answers of its eval split
at temperature 0 ([metrics](metrics.md)), {r.about["date"]}, {cpu}, {threads} threads, float32. Three drafts of one training run:
`{HARD}`, after one epoch, is poor, `{EASY}`, after nine, is good, and `{MIDDLE}`, after three, is between them. The target is
small and its tables are short, so effects may be larger or smaller on yours; your own report shows them ("Inside some trees").

## What the three numbers do

The draft runs `num_steps` times. The first step records k = `topk` candidates, each later step expands a beam of k nodes by
k tokens each: **k + (num_steps − 1)·k²** candidates in total. A candidate's score is the product of the draft's probabilities on
its path. The best `num_draft_tokens − 1` of all candidates are verified: the nodes of the tree, its root not counted.

{tabulate_tree_sizes(r)}

So `num_steps` is the maximum depth of a tree, not its actual depth. Among trees with the same number of nodes, a larger `topk`
means more candidates, and here a shallower tree.

**topk isn't the tree's width.** A depth may hold up to k² nodes, of which the beam keeps k; a depth whose nodes have low scores
holds fewer than k. Mean number of nodes at each depth:

{widths(r)}

With `{EASY}`, {beyond[0]} of 10_2_32's nodes rank below the two best of their depth, and {beyond[1]} of 10_3_32's below the
three best.

## Is 10_2_32 better than 10_3_32?

Not with any of our three drafts. The third branch costs depth, as the table's authors say, but gains more than it costs:

{question(r, [(d, d) for d in (HARD, MIDDLE, EASY)])}

The interval resamples answers, the same ones for both trees. A miss at depth 1 ends the cycle, whatever the tree holds below:
with `{EASY}`, 10_2_32 gets past depth 1 in {past[0]} of its cycles and 10_3_32 in {past[1]}. Share of the nodes verified →
of the drafts accepted, by a node's rank among its parent's children:

{sibling_lines(r, trusted)}

## When it is

Divide the logits of `{EASY}` by a temperature when trees are built. The order of its guesses after each token stays the same
(a chain of ten accepts {r.tau(EASY, CHAIN):.2f} at every temperature), but its probabilities become too low or too high:

{question(r, [(d, f"{EASY} at {t:g}") for t, d in temperatures])}

From temperature {turns:g} on 10_2_32 is ahead, as in the published table, and for the reason its authors give: third guesses
displace deeper nodes.
At {flattest:g} (`{flat}`) the tree of 10_3_32 ends at depth {r.trees[flat][THREE]["mean_depth"]:.1f}.

{sibling_lines(r, [(shape, draft) for shape in (TWO, THREE) for draft in (EASY, flat)])}

10_3_32 loses {falls[1]} of its tau, but 10_2_32 only {falls[0]}, because it has little choice:
its {TWO[2] - 1} nodes are {of_pool[TWO]} of its
{count_candidates(*TWO[:2])} candidates, those of 10_3_32 {of_pool[THREE]} of {count_candidates(*THREE[:2])}.

**So a small topk protects against miscalibrated scores.** The sum of a tree's scores is the number of accepted drafts that the
draft expects. If the scores are calibrated, a third guess becomes a node only where it is worth more than the node it displaces.
With 10_3_32 `{HARD}` expects {hard[0]} accepted drafts per cycle, and {hard[1]} are accepted, `{EASY}` {easy[0]} and {easy[1]}.
Nodes by their path probability: number, mean probability → share accepted.

{path_probability_lines(r, (HARD, EASY, flat))}

`{HARD}` and `{EASY}` expect fewer drafts to be accepted than are (at temperature 0 the target always chooses its likeliest token,
and the draft was trained on all its probabilities), but a higher path probability means more acceptance nearly everywhere. The
probabilities of `{flat}` predict little: many nodes with a very low one are accepted too.

The published table has no scores and no intervals, so it can't show whether this explains its numbers. A replay of that draft
would.

## When topk ≤ 3 is right

The highest tau over all num_steps up to 12, by topk and by the limit on num_draft_tokens:

{budgets(r)}

{lost_lines(r)}

- **When few tokens are verified**, as at high concurrency: at {BUDGETS[0]} a topk above 3 gains at most
  {100 * max(lost(r, d, BUDGETS[0]) for d in (HARD, MIDDLE, EASY)):.0f}%. The more nodes, the larger the best topk;
  topk 2 can't fill more than {count_candidates(12, 2)} nodes in twelve steps.
- **When the draft is good**: up to {BUDGETS[1]} tokens topk ≤ 3 costs `{EASY}` {100 * lost(r, EASY, BUDGETS[1]):.0f}% and
  `{HARD}` {100 * lost(r, HARD, BUDGETS[1]):.0f}%. This is the "simple data" of the published
  table; it no longer holds with many nodes.
- **When scores are miscalibrated**: see above.
- **When draft steps are expensive**: k nodes a step aren't free, and tau ignores time. Compare speedups on your engine.

Easy data needs depth: of all trees tried `{HARD}` accepts most with {best_tree(r, HARD)}, `{MIDDLE}` with
{best_tree(r, MIDDLE)}, `{EASY}` with {best_tree(r, EASY)}.

## Which nodes, and which tokens

Share of the accepted drafts by rank in the tree: the best node, the next two, and so on. The last column is roughly the gain of
32 tokens over 24:

{rank_lines(r)}

Share of the answers' tokens that were accepted drafts, by class (structure is punctuation and white space; letters are a
table's keys and words, digits most of its values):

{kind_lines(r)}

## Trees of block drafts

A block draft (DFlash, DFlash2, DSpark; [drafts](drafts.md)) proposes a whole block in one forward. What it drafts at a token
depends on the tokens and features up to there, not on earlier blocks nor on how many drafts are verified, so replay is exact
for it too, and one forward at every place gives every tree. `replay_trees` grows them over the same grid, with the same names:

- `t{{m}}_1_{{m+1}}` is the chain of the first m drafts of a block.
- Trees deeper than a block's drafts (block_size − 1 of DFlash and DFlash2, block_size of DSpark) are left out, of the grid and of
  `trace_trees`, where a note names them. The chain of the whole block is replayed even if the grid lacks it.
- A tree of topk > 1 holds the best paths over the block: DFlash's slots are independent, so a path's probability is the
  product of its slots'; with DSpark's Markov head or DFlash2's selector a node's children depend on its own
  token. A topk above DFlash2's `selector_top_k` is refused here, and left out of cells. Whatever the tree, the draft costs
  one forward.

SGLang and vLLM run **the chain of the whole block only**. Trees of topk > 1 run in the torch engine only, and the report marks
them. A shorter chain is the block cut after m drafts, which engines do not offer: told another width, they run a block of another
size, whose slots see another number of mask tokens. That is another draft, of another tau. So `aerie launch` and the verdict
name the whole chain alone.

Above temperature 0 there are two ways, whose tau differ (`draft_sampling` in cells and in `results/replay.csv`):

- `greedy`: the most probable tokens, in the torch engine, SGLang's DFLASH and vLLM. A draft is accepted if the target samples
  it. Every tree is replayed, on the target's sampled answers as at temperature 0.
- `sampled`: drawn slot by slot from q, the softmax of logits / temperature, in SGLang's DSPARK, SGLang with DFlash2, with vLLM's
  `draft_sample_method: probabilistic`, and in the torch engine with `benchmark.draft_sampling: sampled`. A draft is accepted
  with probability min(1, p / q); else the token is drawn from (p − q)+. Chains are replayed, by their expected counts on the same
  answers ([metrics](metrics.md#of-a-replay)).

p is the target's distribution after temperature, top-k and top-p, which both keep exactly
([metrics](metrics.md#above-temperature-0)). At temperature 0 they are the same.

A block draft needs a text target (its rotary positions have one axis), and its feature layers must be among those stored.

## Your own trees

`results/replay.csv` has every tree of the grid. For the trees of `replay_trees.trace_trees`, the report shows expected and
accepted drafts by path probability, length of context, position in the answer and class of token ([metrics](metrics.md)).

To reproduce this page's figures: `e001: {{from: e000, epochs: 1}}` in `train_draft.checkpoints`, `dvc repro train_draft`,
`python -m benchmarks.trees_record DATE`, `python -m benchmarks.trees_page`.
"""


def claims(r: Record) -> None:
    """Check the page's sentences.

    Raises:
        ValueError: naming those that the record contradicts; they must be rewritten.
    """
    flat = flattened(r)[-1][1]
    drafts = (HARD, MIDDLE, EASY)
    borne_out = {
        "10_3_32 is ahead of 10_2_32 with every draft": all(r.difference(d, TWO, THREE)[2] < 0 for d in drafts),
        "10_2_32 is ahead where probabilities are flat": r.difference(flat, TWO, THREE)[1] > 0,
        "temperatures keep the order of guesses": len({r.tau(d, CHAIN) for _, d in flattened(r)}) == 1,
        "a larger topk is less deep": all(
            r.trees[d][s, 3, m]["mean_depth"] < r.trees[d][s, 2, m]["mean_depth"]
            for d in drafts
            for s, m in ((8, 16), (10, 32))
        ),
        "10_3_32 gets past depth 1 more often": past_the_first(r, EASY, THREE) > past_the_first(r, EASY, TWO),
        "drafts expect less than is accepted": all(r.kept(d, THREE) > 1 for d in (HARD, EASY)),
        "a good draft loses less with a small topk": lost(r, EASY, BUDGETS[1]) < lost(r, HARD, BUDGETS[1]),
        "better drafts want deeper trees": len({int(best_tree(r, d).split("_")[0]) for d in drafts}) == len(drafts),
    }
    if wrong := [claim for claim, holds in borne_out.items() if not holds]:
        raise ValueError(
            f"docs/trees.md says {'; '.join(wrong)}, which {r.name} doesn't bear out; write the page again"
        )


def answers(r: Record) -> int:
    return len(r.buckets(EASY, THREE, "row"))


if __name__ == "__main__":
    PAGE.write_text(page(Record(last_record())), encoding="utf-8")
