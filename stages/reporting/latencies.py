"""How latencies spread over answers: a line for each tree, from its fast answers to its slow ones, plain decoding beside it.

The tables above have means, and percentiles of loads; these are the answers (or requests) themselves, of all repeats.
"""

from functools import partial
from typing import Any

from stages.reporting import plots
from stages.reporting.served import describe_load, format_group_title, get_load
from stages.reporting.text import format_tree
from stages.results import served_records
from stages.results.served_table import SPECULATIVE, ServedTableLine

Row = dict[str, Any]

PERCENTILES = (10, 50, 90, 99)  # percentiles, between two values in proportion
PLAIN_LABEL = "plain decoding"
MAX_PLOT_LINES = 24  # lines of a plot; more could not be told apart


def summarise_torch_cells(cells: list[Row]) -> list[Row]:
    """Of each workload and checkpoint of the torch engine: whole answers, prefills, and the time a token takes after it."""
    found = []
    for workload, checkpoint in dict.fromkeys((c["workload"], c["checkpoint"]) for c in cells):
        mine = [c for c in cells if (c["workload"], c["checkpoint"]) == (workload, checkpoint)]
        fastest = max(mine, key=lambda c: c["metrics"]["baseline_output_tok_s"])
        answers = {format_tree(c["tree"]): [_measure_answer(prompt) for prompt in c["prompts"]] for c in mine}
        answers |= {PLAIN_LABEL: [_measure_answer(prompt, "baseline_") for prompt in fastest["prompts"]]}
        about = f"{workload}, {checkpoint}, {fastest['engine']} engine"
        found.append(
            _summarise_spread(
                about, answers, {"e2e": "answer, s", "ttft": "prefill, ms", "tpot": "a token after it, ms"}
            )
        )
    return found


def _measure_answer(prompt: Row, kind: str = "") -> Row:
    """As of a request: all of it, its first token (s), and what each later one took (ms; None where there is none)."""
    e2e, first = prompt[f"{kind}e2e_latency_s"], prompt[f"{kind}prefill_latency_s"]
    later = prompt[f"{kind}output_tokens"] - 1
    return {"e2e": e2e, "ttft": 1000 * first, "tpot": 1000 * (e2e - first) / later if later > 0 else None}


def summarise_served_lines(lines: list[ServedTableLine]) -> list[Row]:
    """Of each workload and checkpoint at its heaviest load: the longest answers, and of them the most at once."""
    can = [line for line in lines if line.row["status"] == served_records.RAN]
    drafted = [line for line in can if line.row["decoding"] == SPECULATIVE]
    found = []
    for workload, checkpoint in dict.fromkeys((line.row["workload"], line.row["checkpoint"]) for line in drafted):
        mine = [line for line in drafted if (line.row["workload"], line.row["checkpoint"]) == (workload, checkpoint)]
        heaviest = max(mine, key=lambda line: get_load(line.row)).row
        rest = [line for line in can if line not in drafted and line.row["workload"] == workload]
        plain = [line for line in rest if get_load(line.row) == get_load(heaviest)]
        answers = {
            format_tree(line.row["tree"]): _list_latencies(line)
            for line in mine
            if get_load(line.row) == get_load(heaviest)
        }
        if plain:
            answers[PLAIN_LABEL] = _list_latencies(max(plain, key=lambda line: line.row["output_throughput"]))
        about = f"{format_group_title(heaviest)}, {heaviest['engine']}, {describe_load(heaviest)}"
        found.append(_summarise_spread(about, answers, {"e2e": "request, s", "ttft": "TTFT, ms", "tpot": "TPOT, ms"}))
    return found


def _list_latencies(line: ServedTableLine) -> list[Row]:
    return [
        _measure_request(request) for request in (line.point or {"requests": []})["requests"] if not request["failed"]
    ]


def _measure_request(request: Row) -> Row:
    return {name: None if request[key] is None else times * request[key]
            for name, key, times in (("e2e", "e2e_s", 1), ("ttft", "ttft_s", 1000), ("tpot", "tpot_s", 1000))}  # fmt: skip


def _summarise_spread(about: str, answers: dict[str, list[Row]], names: dict[str, str]) -> Row:
    """Percentiles of each kind of latency by tree, and a plot of each kind."""
    import numpy as np  # the terminal's table does without

    rows: list[Row] = []
    for tree, given in answers.items():
        row: Row = {"tree": tree, "answers": len(given)}
        for name in names:
            values = [one[name] for one in given if one[name] is not None]
            row[name] = np.percentile(values, PERCENTILES).tolist() if values else None
        rows.append(row)
    shown = rows[-MAX_PLOT_LINES:]
    drawn = {
        name: plots.render_svg(
            partial(draw_latencies, rows=[r for r in shown if r[name]], name=name, label=label), 1 + len(shown) / 4
        )
        for name, label in names.items()
        if any(row[name] for row in shown)
    }
    return {"about": about, "names": names, "rows": rows, "plots": drawn}


def draw_latencies(axes: Any, rows: list[Row], name: str, label: str) -> None:
    """A line a row, the first on top: from its 10th percentile to its 90th, a dot at the median, a tick at the 99th."""
    places = range(len(rows))
    for place, row in zip(places, rows, strict=True):
        low, middle, high, last = row[name]
        colour = plots.INK_COLOUR if row["tree"] == PLAIN_LABEL else plots.SERIES_COLOURS[0]
        axes.hlines(place, low, high, color=colour, linewidth=2.2)
        axes.plot(middle, place, "o", color=colour, markersize=5)
        axes.plot(last, place, "|", color=colour, markersize=7)
    axes.set_yticks(places, [row["tree"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set(xlabel=label)
