"""Audits of any table (means over data sets, accept length against depth and speedup), and of AngelSlim's and EAGLE-3's."""

from collections.abc import Iterator

from stages.literature.audit_findings import (
    AGREES,
    DEPENDS,
    OPEN,
    Finding,
    PublishedCell,
    format_setting,
    get_number,
    group_cells,
    group_means,
    select_cells,
)
from stages.literature.published import Publication, PublishedRow
from stages.params.tree_shape import TreeShape


def list_table_findings(publications: dict[str, Publication]) -> Iterator[tuple[Publication, Finding]]:
    for publication in publications.values():
        for audit in (_audit_means, _audit_tau_by_depth, _audit_speedup):
            if finding := audit(publication):
                yield publication, finding
    vllm, paper, pytorch = (publications[name] for name in ("angelslim-vllm", "eagle3-paper", "angelslim-pytorch"))
    issue, tool = publications["angelslim-issue-163"], publications["angelslim-tool"]
    yield vllm, _audit_vllm_speedups(vllm)
    yield vllm, _audit_vllm_text(vllm)
    yield issue, _audit_issue_engines(issue, pytorch)
    yield issue, _audit_issue_latency(issue)
    yield tool, _audit_default_tree(tool, pytorch)
    yield paper, _audit_paper_engines(paper)
    yield paper, _audit_paper_batches(paper)


def is_mean_off(printed: PublishedRow, rows: list[PublishedRow]) -> bool:
    """Return whether the rows' mean differs from the printed one by more than rounding: half a digit of each."""
    mean = sum(row.value for row in rows) / len(rows)
    return abs(mean - printed.value) > 10**-printed.decimals * 1.001


def _audit_means(publication: Publication) -> Finding | None:
    """Check printed means. No weighted mean lies outside the range of its rows."""
    every = list(group_means(publication))
    if not every:
        return None
    wrong = [(printed, rows) for printed, rows in every if is_mean_off(printed, rows)]
    head = ("row", "metric", "its data sets", "their mean", "printed", "outside their range")
    lines = []
    for printed, rows in wrong:
        values = [row.value for row in rows]
        outside = "no" if min(values) <= printed.value <= max(values) else "yes"
        name = format_setting(printed.setting, printed.setting.target, printed.setting.method)
        listed = ", ".join(f"{value:g}" for value in values)
        lines.append((name, printed.metric, listed, f"{sum(values) / len(values):.3f}", f"{printed.value:g}", outside))
    return Finding(
        "Means against their rows",
        OPEN if any(line[-1] == "yes" for line in lines) else DEPENDS if lines else AGREES,
        f"{len(every)} means over data sets are printed; {len(every) - len(wrong)} are the plain mean of their rows, to "
        f"the last digit or one beside it; {len(wrong)} are not.",
        "A mean of another kind (over questions, weighted by tokens) can't lie outside its rows' range; where it lies "
        "inside, that may be what was printed."
        if wrong
        else "",
        (head, *lines) if lines else (),
    )


def _audit_tau_by_depth(publication: Publication) -> Finding | None:
    """Check that tau is at most num_steps + 1: a cycle accepts one draft per depth at most, and the bonus token."""
    bounded = [(cell, shape) for cell in select_cells(publication, "tau") if (shape := cell.setting.shape)]
    if not bounded:
        return None
    above = [cell for cell, tree in bounded if not 1 <= cell.numbers["tau"] <= tree.num_steps + 1]
    nearest, shape = max(bounded, key=lambda pair: pair[0].numbers["tau"] / (pair[1].num_steps + 1))
    return Finding(
        "Accept length against depth",
        OPEN if above else AGREES,
        f"Accept length must lie between 1 and num_steps + 1. {len(bounded) - len(above)} of {len(bounded)} do; the nearest "
        f"to its bound is {nearest.numbers['tau']:g} of {shape.num_steps + 1} ({nearest.name}).",
        "; ".join(cell.name for cell in above),
    )


def _audit_speedup(publication: Publication) -> Finding | None:
    """Check that speedup is below tau: a cycle runs the target and the draft, so it takes longer than a plain step."""
    cells = select_cells(publication, "speedup", "tau")
    if not cells:
        return None
    above = [cell for cell in cells if cell.numbers["speedup"] >= cell.numbers["tau"]]
    targets = sorted({cell.setting.target or "" for cell in above})
    most = sorted(above, key=lambda cell: cell.numbers["tau"] / cell.numbers["speedup"])
    head = ("row", "speedup", "tau", "a cycle, in plain steps")
    return Finding(
        "Speedup above accept length",
        DEPENDS if above else AGREES,
        f"tau / speedup is what a cycle costs in plain steps of the same engine. Of the {len(cells)} points that print both, it "
        f"is below one step in {len(above)}"
        + (f", of {', '.join(targets)}." if above else ".")
        + (" The five furthest:" if len(above) > 5 else ""),
        "A baseline run under other conditions (another version, flags, load or answers), or an accept length of another "
        "definition or run, would explain it; which isn't stated."
        if above
        else "",
        (head, *(_format_cycle_cost(cell) for cell in most[:5])) if above else (),
    )


def _format_cycle_cost(cell: PublishedCell) -> tuple[str, ...]:
    speedup, tau = cell.numbers["speedup"], cell.numbers["tau"]
    return cell.name, f"{speedup:g}", f"{tau:g}", f"{tau / speedup:.2f}"


def _list_vllm_cells(
    publication: Publication,
) -> tuple[list[PublishedCell], dict[tuple[str | None, str | None], float]]:
    """Return the cells of the main table, and plain decoding's tokens/s by (target, data set)."""
    main = [cell for cell in group_cells(publication) if cell.setting.label != "README v0.3"]
    plain = {
        (cell.setting.target, cell.setting.dataset): cell.numbers["output_tok_s"]
        for cell in main
        if cell.setting.method == "plain"
    }
    return main, plain


def _audit_vllm_speedups(publication: Publication) -> Finding:
    """Compute speedups, which the table does not print, from its throughputs."""
    (main, plain), lines, costs = _list_vllm_cells(publication), [], []
    for cell in main:
        key = (cell.setting.target, cell.setting.dataset)
        if cell.setting.method == "plain" or key not in plain:
            continue
        speedup = cell.numbers["output_tok_s"] / plain[key]
        costs.append(cell.numbers["tau"] / speedup)
        if cell.setting.dataset == "mean":
            lines.append(
                (str(key[0]), f"{speedup:.2f}", f"{cell.numbers['tau']:g}", f"{cell.numbers['tau'] / speedup:.2f}")
            )
    return Finding(
        "Speedup from the two throughputs",
        AGREES if min(costs) >= 1 else DEPENDS,
        f"Speedup isn't printed; Eagle3 / Vanilla gives it. A cycle then costs {min(costs):.2f} to {max(costs):.2f} plain steps "
        f"over {len(costs)} pairs. Of the means:",
        "",
        (("target", "speedup", "tau", "a cycle, in plain steps"), *lines),
    )


def _audit_vllm_text(publication: Publication) -> Finding:
    _, plain = _list_vllm_cells(publication)
    slow = {
        target: (plain[target, "MATH-500"], plain[target, "HumanEval"])
        for target, dataset in plain
        if dataset == "MATH-500"
    }
    ratios = [human / maths for maths, human in slow.values()]
    return Finding(
        "Plain decoding of text at two speeds",
        DEPENDS,
        "MATH-500 is text, as HumanEval is, but plain decoding of it by the same target is "
        f"{min(ratios):.1f} to {max(ratios):.1f} times slower: "
        + "; ".join(f"{target} {maths:g} and {human:g} tokens/s" for target, (maths, human) in slow.items())
        + ". At batch 1 a step costs the same whatever it is about.",
        "The two groups of columns may have been run by different scripts (CUDA graphs on and off, or a wall clock with more "
        "in it); compare columns within a group only.",
    )


def _audit_issue_engines(user: Publication, table: Publication) -> Finding:
    """Compare the same draft in SGLang, as a user measured it, and in AngelSlim's own table."""
    rows = select_cells(user, "output_tok_s")
    plain = {cell.get_setting("batch"): cell.numbers["output_tok_s"] for cell in rows if cell.setting.method == "plain"}
    lines = []
    for cell in select_cells(user, "tau"):
        batch, tau = cell.get_setting("batch"), cell.numbers["tau"]
        ratio = cell.numbers["output_tok_s"] / plain[batch]
        lines.append((f"{batch:g}", str(cell.setting.tree), f"{ratio:.2f}", f"{tau:g}", f"{tau / ratio:.2f}"))
    own = [
        cell
        for cell in select_cells(table, "speedup", "tau")
        if (cell.setting.target, cell.setting.temperature) == (rows[0].setting.target, 0.0)
    ]
    speedups, taus = ([cell.numbers[metric] for cell in own] for metric in ("speedup", "tau"))
    return Finding(
        "The same draft in two engines",
        DEPENDS,
        f"AngelSlim's PyTorch table has speedups of {min(speedups):g} to {max(speedups):g} at accept lengths of {min(taus):g} to "
        f"{max(taus):g} for this target at temperature 0. Here, over the plain decoding of the same batch:",
        "In an engine whose plain step is fast, a cycle of a mixture of experts costs a few of its steps. Trees, data "
        "sets and GPUs differ too, and those of the table aren't all stated.",
        (("batch", "tree", "throughput ratio", "accept length", "a cycle, in plain steps"), *lines),
    )


def _audit_issue_latency(user: Publication) -> Finding:
    rows = select_cells(user, "output_tok_s")
    tokens = [cell.numbers["run_s"] * cell.numbers["output_tok_s"] for cell in rows]
    spread = max(tokens) / min(tokens) - 1
    return Finding(
        "Latency against throughput",
        AGREES if spread < 0.1 else DEPENDS,
        f"latency · throughput is {min(tokens):,.0f} to {max(tokens):,.0f} in all {len(rows)} rows, {100 * spread:.0f}% apart.",
        "Nearly one number of tokens: latency is the whole run's time, not a request's."
        if spread < 0.1
        else "Answers differ in length, or latency isn't the whole run's time.",
    )


def _audit_default_tree(tool: Publication, table: Publication) -> Finding:
    depth, topk, total = (
        int(get_number(tool, f"flag_{name}", label="default")) for name in ("depth", "top_k", "total_token")
    )
    tree = TreeShape(depth + 1, topk, total)
    highest = max((cell for cell in select_cells(table, "tau")), key=lambda cell: cell.numbers["tau"])
    return Finding(
        "The default tree",
        AGREES,
        f"depth {depth} runs the draft {tree.num_steps} times; top-k {topk} then proposes {topk} + {depth}·{topk}² = "
        f"{tree.num_candidates} nodes, of which total-token {total}, root counted, keeps {total - 1}: {tree.name}. Its accept "
        f"length is at most {tree.num_steps + 1}; the highest of the PyTorch table is {highest.numbers['tau']:g}.",
        "So the table may have been made with it; that isn't stated.",
    )


def _audit_paper_engines(paper: Publication) -> Finding:
    llama: dict[str, object] = {"target": "Llama-3.1-8B-Instruct", "dataset": "MT-bench"}
    plain = get_number(paper, "output_tok_s", method="plain", **llama)
    lines = []
    for method in ("EAGLE-2", "EAGLE-3"):
        own, tau = (get_number(paper, metric, method=method, temperature=0.0, **llama) for metric in ("speedup", "tau"))
        tok_s = get_number(paper, "output_tok_s", method=method, **llama)
        lines.append((method, f"{own:g}", f"{tok_s:g} / {plain:g} = {tok_s / plain:.2f}", f"{tau:g}"))
    return Finding(
        "One speedup in two engines",
        DEPENDS,
        f"{llama['target']} on {llama['dataset']}, at batch 1: Table 1 in the authors' engine, Table 4 in SGLang:",
        "A speedup belongs to its engine: a baseline that waits for Python makes a cycle look cheap. Table 4's tree, "
        "temperature and accept length aren't stated.",
        (("method", "speedup, Table 1", "speedup, from Table 4", "tau, Table 1"), *lines),
    )


def _audit_paper_batches(paper: Publication) -> Finding:
    batches = {
        method: {
            cell.get_setting("batch"): cell.numbers["throughput_ratio"]
            for cell in select_cells(paper, "throughput_ratio")
            if cell.setting.engine == "vLLM" and cell.setting.method == method
        }
        for method in ("EAGLE", "EAGLE-3")
    }
    stated = {method: get_number(paper, "batch_of_most", method=method) for method in batches}
    best = {method: max(found, key=lambda batch: found[batch]) for method, found in batches.items()}
    last = {method: max(batch for batch in found if found[batch] >= 1) for method, found in batches.items()}
    return Finding(
        "Where vLLM gains most",
        AGREES if stated == best else DEPENDS,
        "; ".join(
            f"{method}: the text's batch of the maximum improvement is {stated[method]:g}, Table 5's highest ratio "
            f"{batches[method][best[method]]:g} is at {best[method]:g}, and the last of at least 1 at {last[method]:g} "
            f"({batches[method][last[method]]:g})"
            for method in batches
        )
        + ".",
        "The text's batches are the largest that still gain, if that is what is meant."
        if stated == last
        else "The text's batches are neither.",
    )
