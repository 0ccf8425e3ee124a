"""Audits of tables of trees: published/qwen3-vl-weather.yaml and published/specforge-sweep.yaml."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from statistics import median

from stages.literature.audit_findings import (
    AGREES,
    DEPENDS,
    OPEN,
    Finding,
    PublishedCell,
    get_number,
    select_cells,
)
from stages.literature.published import Publication
from stages.params.tree_shape import TreeShape


def list_tree_findings(publications: dict[str, Publication]) -> Iterator[tuple[Publication, Finding]]:
    weather, sweep = publications["qwen3-vl-weather"], publications["specforge-sweep"]
    for audit in (
        _audit_accept_rate,
        _audit_startable_trees,
        _audit_prefill,
        _audit_cycle_time,
        _audit_epochs,
        _audit_wider_trees,
        _audit_engines,
    ):
        yield weather, audit(weather)
    for audit_sweep in (_audit_speedup_ratio, _audit_longer_chains, _audit_chains_against_trees, _audit_baselines):
        yield sweep, audit_sweep(sweep)


def _read_epoch(cell: PublishedCell) -> str:
    return cell.where[-4:]  # "ep=3" or "ep=9"


def _audit_accept_rate(weather: Publication) -> Finding:
    cells = select_cells(weather, "tau", "accept_rate")
    readings: dict[str, Callable[[float, TreeShape], float]] = {
        "(tau − 1) / num_steps": lambda tau, tree: (tau - 1) / tree.num_steps,
        "(tau − 1) / (num_draft_tokens − 1), SGLang's request": lambda tau, tree: (
            (tau - 1) / (tree.num_draft_tokens - 1)
        ),
        "tau / num_draft_tokens, SGLang's log": lambda tau, tree: tau / tree.num_draft_tokens,
    }
    gaps = {}
    for name, read in readings.items():
        found = [abs(100 * read(c.numbers["tau"], c.shape) - c.numbers["accept_rate"]) for c in cells]
        gaps[name] = (median(found), max(found))
    nearest = min(gaps, key=lambda name: gaps[name][1])
    return Finding(
        "Accept rate against accept length",
        AGREES,
        f"{len(cells)} rows print both. By three readings of accept rate, in points away from what is printed:",
        f"accept rate there is {nearest}, and compress ratio counts the bonus token. The points left over are more than rounding "
        "alone gives, so the two may not be pooled alike.",
        (
            ("accept rate as", "median gap", "largest gap"),
            *((name, f"{mid:.1f}", f"{most:.1f}") for name, (mid, most) in gaps.items()),
        ),
    )


def _audit_startable_trees(weather: Publication) -> Finding:
    rows = select_cells(weather, "tau")
    short = [c for c in rows if c.shape.num_draft_tokens < c.shape.num_steps + 1]
    chains = [c for c in rows if c.shape.topk == 1]
    return Finding(
        "Trees that an engine can start",
        DEPENDS,
        f"{len(short)} of {len(rows)} rows verify fewer tokens than num_steps + 1: "
        + ", ".join(
            f"{c.setting.label} ({_read_epoch(c)}, {c.shape.num_draft_tokens} < {c.shape.num_steps + 1})" for c in short
        )
        + f". {len(chains)} are chains: "
        + ", ".join(f"{c.setting.label} ({_read_epoch(c)}) verifies {c.shape.num_draft_tokens}" for c in chains)
        + ".",
        "SGLang 0.5.17 and later refuse the former; there they can be replayed, not served. Chains are named without the root.",
    )


def _audit_prefill(weather: Publication) -> Finding:
    rows = select_cells(weather, "prefill_latency_s")
    usual, count = Counter(c.numbers["prefill_latency_s"] for c in rows).most_common(1)[0]
    other = [c for c in rows if c.numbers["prefill_latency_s"] != usual]
    return Finding(
        "Prefill against tree",
        OPEN,
        f"The prefill comes before any tree, so it can't depend on one. It is {usual:g} s in {count} of {len(rows)} rows; in the "
        "others: " + ", ".join(f"{c.setting.label} {c.numbers['prefill_latency_s']:g} s" for c in other) + ".",
        "A cold start, a shared machine or another load would do it; the end-to-end times of these rows hold it too.",
    )


def compute_cycle_time(e2e_s: float, prefill_s: float, tau: float) -> float:
    """Return the time of a cycle times the mean answer length, which all rows share."""
    return (e2e_s - prefill_s) * tau


def _audit_cycle_time(weather: Publication) -> Finding:
    rows = select_cells(weather, "prefill_latency_s", "e2e_latency_s", "tau")
    times = [compute_cycle_time(*(c.numbers[k] for k in ("e2e_latency_s", "prefill_latency_s", "tau"))) for c in rows]
    usual = median(times)
    far = sorted(
        ((time, c) for time, c in zip(times, rows, strict=True) if time > 1.25 * usual), key=lambda pair: -pair[0]
    )
    by_label = {c.setting.label: time for time, c in zip(times, rows, strict=True)}
    narrow, wide = by_label["10_2_32"], by_label["10_3_32"]
    return Finding(
        "End-to-end time against cycles",
        OPEN,
        "Answers to the same prompts at temperature 0 take cycles in proportion to 1 / tau, so (e2e − prefill) · tau is "
        f"proportional to the time of a cycle. Its median is {usual:.2f}; more than a quarter above it: "
        + ", ".join(f"{c.setting.label} {time:.2f}" for time, c in far)
        + f". 10_2_32 and 10_3_32 verify as many tokens over as many steps, and the wider drafts more, yet {narrow:.2f} and "
        f"{wide:.2f}: the narrower's cycle {narrow / wide:.1f} times as long.",
        "Not the trees' doing: something else ran in those rows, or answers differed (temperature isn't stated). Rank these "
        "trees by accept length, not by time.",
    )


def _audit_epochs(weather: Publication) -> Finding:
    by_tree: dict[str, dict[str, float]] = {}
    for c in select_cells(weather, "tau"):
        by_tree.setdefault(c.setting.label or "", {})[_read_epoch(c)] = c.numbers["tau"]
    pairs = {label: found for label, found in by_tree.items() if len(found) == 2}
    early = sum(found["ep=3"] > found["ep=9"] for found in pairs.values())
    return Finding(
        "Two epochs, the same trees",
        DEPENDS,
        f"{len(pairs)} trees were measured at both epochs; ep=3 accepts more in {early}: "
        + ", ".join(f"{label} {found['ep=3']:g} and {found['ep=9']:g}" for label, found in pairs.items())
        + ".",
        "Later epochs may overfit, or two trees are too few: choose the epoch by tau over all trees. The trees of the two blocks "
        "can't be ranked against each other.",
    )


def _audit_wider_trees(weather: Publication) -> Finding:
    """Compare trees that differ in topk alone: the table's source asks why wider ones accept less."""
    lines = []
    for pair in combinations(select_cells(weather, "tau"), 2):
        narrow, wide = sorted(pair, key=lambda c: c.shape.topk)
        alike, other = ((c.shape.num_steps, c.shape.num_draft_tokens, _read_epoch(c)) for c in pair)
        if alike == other and 1 < narrow.shape.topk < wide.shape.topk:
            before, after = narrow.numbers["tau"], wide.numbers["tau"]
            name = f"{narrow.setting.label} → {wide.setting.label} ({_read_epoch(narrow)})"
            proposed = f"{narrow.shape.num_candidates}, {wide.shape.num_candidates}"
            verified = str(wide.shape.num_draft_tokens - 1)
            lines.append((name, f"{before:g} → {after:g}", f"{after - before:+.2f}", proposed, verified))
    more = sum(float(line[2]) > 0 for line in lines)
    return Finding(
        "Wider trees of the same depth and size",
        DEPENDS,
        f"Of {len(lines)} pairs that differ in topk alone, the wider accepts more in {more}, less in {len(lines) - more}. Most "
        "candidates aren't verified, so a wider tree may verify the same nodes:",
        "No rule in either direction follows. A wider beam finds nodes of a higher score in sum, so it loses by chance, or where "
        "scores promise more than the target keeps and shallow nodes crowd out deep ones; replay tells which.",
        (("pair", "tau", "change", "candidates", "drafts verified"), *lines),
    )


def _audit_engines(weather: Publication) -> Finding:
    eagle, medusa = (get_number(weather, "output_tok_s", method=method) for method in ("EAGLE-3", "Medusa"))
    most = max(c.numbers["tau"] for c in select_cells(weather, "tau"))
    return Finding(
        "EAGLE-3 in SGLang against Medusa",
        DEPENDS,
        f"{eagle:g} / {medusa:g} = {eagle / medusa:.1f} times; the highest accept length printed is {most:g}. So acceptance "
        "alone can't give it, not even if Medusa accepted nothing and the cycles of both took as long.",
        "Part of the factor is then the engine, as the remark itself says; method and engine changed together, and Medusa's "
        "engine isn't stated.",
    )


# SpecForge's sweep


def _audit_speedup_ratio(sweep: Publication) -> Finding:
    rows = select_cells(sweep, "speedup", "output_tok_s", "baseline_output_tok_s")
    gap = max(abs(c.numbers["output_tok_s"] / c.numbers["baseline_output_tok_s"] - c.numbers["speedup"]) for c in rows)
    return Finding(
        "Speedup against its two rates",
        AGREES if gap < 1e-4 else OPEN,
        f"spec_tps / base_tps is speedup in all of {len(rows)} points, within {gap:.0e}.",
    )


def _group_by_tree(sweep: Publication) -> dict[tuple[str, ...], dict[TreeShape, PublishedCell]]:
    """Return the points by (target, draft, data set, batch), then by tree."""
    groups: dict[tuple[str, ...], dict[TreeShape, PublishedCell]] = {}
    for c in select_cells(sweep, "tau", "speedup"):
        draft = (c.setting.draft or "").replace(" ", "").lower()  # one is misspelt with spaces
        key = (c.setting.target or "", draft, c.setting.dataset or "", str(c.setting.batch))
        groups.setdefault(key, {})[c.shape] = c
    return groups


def _audit_longer_chains(sweep: Publication) -> Finding:
    """Check that a longer chain accepts no less: at temperature 0 it begins with the shorter one."""
    steps, shorter_wins = 0, []
    for group in _group_by_tree(sweep).values():
        chain = sorted((c for c in group.values() if c.shape.topk == 1), key=lambda c: c.shape.num_steps)
        for shorter, longer in pairwise(chain):
            steps += 1
            before, after = shorter.numbers["tau"], longer.numbers["tau"]
            if after < before:
                shorter_wins.append(f"not {longer.name}: {before:g} → {after:g}")
    return Finding(
        "Longer chains",
        AGREES if not shorter_wins else DEPENDS,
        "At temperature 0 a longer chain begins with the shorter one, so from the same position it accepts at least as much. "
        + "; ".join([f"{steps - len(shorter_wins)} of {steps} steps from 3 to 5 to 7 do", *shorter_wins])
        + ".",
        "Their next cycles begin at other positions, and batched bfloat16 answers may part." if shorter_wins else "",
    )


def _audit_chains_against_trees(sweep: Publication) -> Finding:
    groups = _group_by_tree(sweep)
    best = [max(group.values(), key=lambda c: c.numbers["speedup"]) for group in groups.values()]
    chains = sum(c.shape.topk == 1 for c in best)
    pair = TreeShape(5, 1, 6), TreeShape(5, 3, 6)
    tau_pairs = [[group[tree].numbers["tau"] for tree in pair] for group in groups.values() if set(pair) <= set(group)]
    wider = sum(wide > narrow for narrow, wide in tau_pairs)
    return Finding(
        "Chains against trees",
        AGREES,
        f"A chain is the fastest configuration in {chains} of {len(best)} triples of target, draft and data set. With 6 tokens "
        f"over 5 steps, topk 3 accepts more than topk 1 in {wider} of {len(tau_pairs)}.",
        "The trees here spend no more tokens than the chains, so they trade depth for width; what trees of 16 to 60 tokens gain "
        "isn't in it.",
    )


def _audit_baselines(sweep: Publication) -> Finding:
    rates: dict[str, dict[str, set[float]]] = {}
    for c in select_cells(sweep, "baseline_output_tok_s"):
        by_set = rates.setdefault(c.setting.target or "", {})
        by_set.setdefault(c.setting.dataset or "", set()).add(c.numbers["baseline_output_tok_s"])
    shared = all(len(found) == 1 for by_set in rates.values() for found in by_set.values())
    lines = []
    for target, by_set in rates.items():
        flat = {dataset: max(found) for dataset, found in by_set.items()}
        low, high = min(flat, key=lambda d: flat[d]), max(flat, key=lambda d: flat[d])
        lines.append(
            (target, f"{flat[low]:.0f} ({low})", f"{flat[high]:.0f} ({high})", f"{flat[high] / flat[low]:.2f}")
        )
    lines.sort(key=lambda line: -float(line[-1]))
    return Finding(
        "Baselines over data sets",
        DEPENDS,
        f"{'One baseline' if shared else 'More than one baseline'} for each target and data set, shared by all drafts and trees. "
        "Fastest over slowest data set, of each target:",
        "A target whose baseline is slow on some data sets alone gets its largest speedups there; prompts' length and how many "
        "requests were in flight would explain it, and aren't stated.",
        (("target", "slowest, tokens/s", "fastest, tokens/s", "ratio"), *lines),
    )
