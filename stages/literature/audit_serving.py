"""Audits of published/qwen3-coder-h100.yaml: a server under load in three scenarios, and its memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from stages.literature.audit_findings import (
    AGREES,
    DEPENDS,
    OPEN,
    Finding,
    PublishedCell,
    get_number,
    group_cells,
    select_cells,
)
from stages.literature.published import Publication
from stages.params.tree_shape import count_candidates

CHANGE_METRICS = ("total_tok_s", "ttft_mean_ms", "tpot_mean_ms", "tpot_p99_ms")
FP16_BYTES = 2


def list_serving_findings(publications: dict[str, Publication]) -> Iterator[tuple[Publication, Finding]]:
    """Yield the findings; those on memory and experts use the target's shape, published/qwen3-30b-a3b-shape.yaml."""
    coder, target = publications["qwen3-coder-h100"], publications["qwen3-30b-a3b-shape"]
    for audit in (
        _audit_changes,
        _audit_accept_rate,
        _audit_requests_in_flight,
        _audit_arrival_ceiling,
        _audit_tpot_by_concurrency,
        _audit_speedup,
        _audit_claims,
        _audit_other_methods,
        _audit_memory_sums,
    ):
        yield coder, audit(coder)
    for audit_against in (_audit_memory_flags, _audit_draft_size, _audit_experts):
        yield coder, audit_against(coder, target)


@dataclass(frozen=True)
class ServingScenario:
    """A scenario on one of its two servers, in seconds and tokens."""

    name: str
    server: str
    prompts: float
    inputs: float
    outputs: float
    rate: float  # requests per second
    concurrency: float
    tok_s: float
    ttft_s: float
    tpot_s: float

    @property
    def request_s(self) -> float:
        """Return the seconds of a request: the first token, and a step for each of the others."""
        return self.ttft_s + self.tpot_s * (self.outputs - 1)

    def in_flight(self, counted: float) -> float:
        """Return the requests in flight by Little's law, if the throughput counts `counted` tokens of each."""
        return self.tok_s / counted * self.request_s

    @property
    def arrivals_s(self) -> tuple[float, float]:
        """Return mean and standard deviation of the last request's arrival, with exponential gaps."""
        gaps = self.prompts - 1
        return gaps / self.rate, sqrt(gaps) / self.rate

    def ceiling(self, counted: float, arrivals_s: float) -> float:
        """Return the highest tokens/s, if the last request comes after `arrivals_s` seconds and no request waits."""
        return self.prompts * counted / (arrivals_s + self.request_s)


def _list_scenarios(coder: Publication) -> list[ServingScenario]:
    return [_build_scenario(cell) for cell in select_cells(coder, "total_tok_s")]


def _build_scenario(cell: PublishedCell) -> ServingScenario:
    s, n = cell.setting, cell.numbers
    prompts, inputs, outputs, rate, concurrency = (
        cell.get_setting(key) for key in ("prompts", "input_tokens", "output_tokens", "request_rate", "concurrency")
    )
    ttft_s, tpot_s = n["ttft_mean_ms"] / 1000, n["tpot_mean_ms"] / 1000
    return ServingScenario(
        str(s.label), str(s.method), prompts, inputs, outputs, rate, concurrency, n["total_tok_s"], ttft_s, tpot_s
    )


def _pair_plain_and_speculative(coder: Publication) -> Iterator[tuple[str, PublishedCell, PublishedCell]]:
    """Yield (scenario, its plain cell, its speculative one)."""
    plain = {c.setting.label: c for c in select_cells(coder, "total_tok_s") if c.setting.method == "plain"}
    for c in select_cells(coder, "total_tok_s", "tau"):
        yield str(c.setting.label), plain[c.setting.label], c


def _audit_changes(coder: Publication) -> Finding:
    right, wrong = 0, []
    for name, plain, fast in _pair_plain_and_speculative(coder):
        for metric in CHANGE_METRICS:
            change = 100 * (fast.numbers[metric] / plain.numbers[metric] - 1)
            printed = get_number(coder, f"{metric}_change", label=name)
            right += round(change) == printed
            if round(change) != printed:
                wrong.append(f"{name} {metric} {change:+.1f}%, printed {printed:+g}%")
    return Finding(
        "Changes against their columns",
        DEPENDS if wrong else AGREES,
        f"{right} of {right + len(wrong)} printed changes follow from the two columns beside them"
        + ("." if not wrong else f"; not {'; '.join(wrong)}."),
    )


def compute_chain_tau(rate: float, steps: int) -> float:
    """Return the accept length, bonus counted, of a chain whose drafts are each accepted at `rate` if those before are."""
    return sum(rate**i for i in range(steps + 1))


def _audit_accept_rate(coder: Publication) -> Finding:
    """Compare with a chain: at the same rate per draft a tree of more nodes accepts at least as much."""
    lines, fits = [], []
    for name, _, fast in _pair_plain_and_speculative(coder):
        rate, tau = fast.numbers["accept_rate"], fast.numbers["tau"]
        steps, tokens = fast.shape.num_steps, fast.shape.num_draft_tokens
        later = tau - 1 - rate  # drafts 2 to num_steps must add this; each is accepted at most as often as the first
        fits.append(0 <= later <= (steps - 1) * rate)
        rates = (tau - 1) / steps, (tau - 1) / (tokens - 1), tau / tokens, compute_chain_tau(rate, steps)
        most = f"{later:.2f} of at most {(steps - 1) * rate:.2f}"
        lines.append((name, f"{rate:g}", f"{tau:g}", *(f"{reading:.2f}" for reading in rates), most))
    return Finding(
        "Accept rate against accept length",
        DEPENDS if all(fits) else OPEN,
        "Neither is defined. By the definitions of docs/metrics.md the printed lengths give other rates, and a chain whose every "
        "draft is accepted at the printed rate gives other lengths, though a tree would give more than a chain:",
        "The share of cycles that accept at least their first draft would fit: the last column is what the later drafts then "
        "add. So would a rate from another tree or run."
        if all(fits)
        else "",
        (
            ("scenario", "rate", "length", "(length − 1) / num_steps", "(length − 1) / (tokens − 1)", "length / tokens",
             "a chain at the rate", "length − 1 − rate"),
            *lines,
        ),
    )  # fmt: skip


def _audit_requests_in_flight(coder: Publication) -> Finding:
    limit = get_number(coder, "flag_max_total_tokens")
    lines = []
    for load in _list_scenarios(coder):
        whole, half = load.inputs + load.outputs, load.inputs + load.outputs / 2
        lines.append(
            (
                f"{load.name}, {load.server}", f"{load.concurrency:.0f}", f"{load.concurrency / load.tpot_s:,.0f}",
                f"{load.tok_s:,.0f}", f"{load.in_flight(load.outputs):.1f}", f"{load.in_flight(whole):.1f}",
                f"{limit / whole:.1f}", f"{limit / half:.1f}",
            )
        )  # fmt: skip
    return Finding(
        "Throughput against concurrency and TPOT",
        DEPENDS,
        "By Little's law the requests under way are throughput / tokens of a request · (TTFT + TPOT · (outputs − 1)); at most "
        f"--max-concurrency, and as many as --max-total-tokens {limit:,.0f} holds, at whole length and halfway through:",
        "If only output tokens count, all slots of Code Gen are busy, and Completion has more under way than the memory holds. "
        "If input tokens count too, Code Gen meets the memory's bound, but Completion, sent all at once, leaves nine tenths of "
        "its slots empty. Neither fits all three. With lengths drawn from 1 up, as bench_serving does by default, "
        "about as many would be under way and twice as many would fit.",
        (
            ("scenario", "--max-concurrency", "concurrency / TPOT", "printed tokens/s", "under way, outputs counted",
             "inputs too", "fit at whole length", "fit halfway"),
            *lines,
        ),
    )  # fmt: skip


def _audit_arrival_ceiling(coder: Publication) -> Finding:
    loads = [load for load in _list_scenarios(coder) if load.rate != float("inf")]
    lines, above = [], []
    head = (
        "server",
        "last arrival, s",
        "a request, s",
        "ceiling, outputs",
        "two deviations early",
        "inputs too",
        "printed",
    )
    for load in loads:
        mean, deviation = load.arrivals_s
        ceilings = [load.ceiling(load.outputs, mean), load.ceiling(load.outputs, max(0.0, mean - 2 * deviation))]
        above.append(load.tok_s > ceilings[1])
        whole = load.ceiling(load.inputs + load.outputs, mean)
        shown = (f"{tok_s:,.0f}" for tok_s in (*ceilings, whole, load.tok_s))
        lines.append((load.server, f"{mean:.1f} ± {deviation:.1f}", f"{load.request_s:.2f}", *shown))
    rate, outputs = loads[0].rate, loads[0].outputs
    return Finding(
        "The arrival rate's ceiling",
        DEPENDS if any(above) else AGREES,
        f"{loads[0].name}'s {rate:g} requests per second of {outputs:.0f} output tokens are {rate * outputs:,.0f} tokens/s for "
        "as long as they last; and no server ends before the last has come and been answered, so all output tokens over that "
        "time are a ceiling, also where the last comes two standard deviations early:",
        "With input tokens counted there is room. Another rate or number of prompts than the scenario's would do it too; lengths "
        "drawn from 1 up would nearly halve the ceilings."
        if any(above)
        else "",
        (head, *lines),
    )


def _audit_tpot_by_concurrency(coder: Publication) -> Finding:
    loads = [load for load in _list_scenarios(coder) if load.server == "plain"]

    def rises(busy: Callable[[ServingScenario], float]) -> bool:
        ordered = sorted(loads, key=busy)
        return all(a.tpot_s <= b.tpot_s for a, b in pairwise(ordered))

    allowed, whole = (
        rises(lambda load: load.concurrency),
        rises(lambda load: load.in_flight(load.inputs + load.outputs)),
    )
    lines = [
        (
            load.name, f"{load.concurrency:.0f}", f"{1000 * load.tpot_s:g}", f"{load.in_flight(load.outputs):.1f}",
            f"{load.in_flight(load.inputs + load.outputs):.1f}",
        )
        for load in sorted(loads, key=lambda load: load.concurrency)
    ]  # fmt: skip
    return Finding(
        "TPOT against concurrency",
        AGREES if allowed else DEPENDS if whole else OPEN,
        "A step of more requests takes no less time. Plain decoding's TPOT "
        + ("rises" if allowed else "doesn't rise")
        + " with --max-concurrency:",
        "It does rise with the requests under way if the throughput counts input tokens, which the arrival ceiling asks for too; "
        "why so few would then be under way isn't stated."
        if whole and not allowed
        else "",
        (("scenario", "--max-concurrency", "TPOT, ms", "under way, outputs counted", "inputs too"), *lines),
    )


def _audit_speedup(coder: Publication) -> Finding:
    lines = []
    for name, plain, fast in _pair_plain_and_speculative(coder):
        total = fast.numbers["total_tok_s"] / plain.numbers["total_tok_s"]
        tpot = plain.numbers["tpot_mean_ms"] / fast.numbers["tpot_mean_ms"]
        printed, tau = get_number(coder, "speedup", label=name), fast.numbers["tau"]
        lines.append((name, f"{printed:g}", f"{total:.2f}", f"{tpot:.2f}", f"{tau:g}", f"{tau / tpot:.2f}"))
    rounded = all(line[1] == line[2] for line in lines)
    return Finding(
        "Speedup against throughput, TPOT and accept length",
        AGREES if rounded and all(float(line[-1]) > 1 for line in lines) else DEPENDS,
        "The printed speedups are the throughputs' ratio, and stay below the accept lengths:",
        "",
        (("scenario", "printed", "throughput", "TPOT", "accept length", "a cycle, in plain steps"), *lines),
    )


def _audit_claims(coder: Publication) -> Finding:
    steps, topk, tokens = (int(get_number(coder, f"flag_{name}")) for name in ("num_steps", "topk", "num_draft_tokens"))
    flags = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    named = dict(zip(flags, (steps, topk, tokens), strict=True))
    advice = {flag: [get_number(coder, f"advice_{end}", label=flag) for end in ("low", "high")] for flag in named}
    taus = [fast.numbers["tau"] for _, _, fast in _pair_plain_and_speculative(coder)]
    gains = sorted(
        (fast.get_setting("concurrency"), get_number(coder, "speedup", label=name))
        for name, _, fast in _pair_plain_and_speculative(coder)
    )
    return Finding(
        "Flags against claims",
        DEPENDS,
        "Flags and their advised ranges: "
        + ", ".join(f"{flag} {named[flag]} ({low:g} to {high:g})" for flag, (low, high) in advice.items())
        + f". {topk} + {steps - 1}·{topk}² = {count_candidates(steps, topk)} nodes are proposed, {tokens - 1} verified. The "
        f"algorithm is given as EAGLE for an EAGLE-3 draft; accept lengths are {min(taus):g} to {max(taus):g}. Section 4.3 has "
        f"the gain narrow above batch {get_number(coder, 'batch_that_narrows'):g}; by --max-concurrency it is "
        + ", ".join(f"{gain:g} at {concurrency:.0f}" for concurrency, gain in gains)
        + ".",
        "Later SGLang runs an EAGLE-3 draft under that name without its fused features, at an accept length of 1.00, so the "
        "version measured did not, or the flag was another. The command's data set, random, is no code, so it "
        "doesn't measure the claims about code.",
    )


def _audit_other_methods(coder: Publication) -> Finding:
    cells = {str(c.setting.method): c.numbers for c in select_cells(coder, "accept_rate", "extra_memory_gb")}
    rates = {method: numbers["accept_rate"] for method, numbers in cells.items()}
    best = rates["EAGLE-3"]
    low, high = (get_number(coder, f"accept_rate_gain_{end}") for end in ("low", "high"))
    gains = {method: 100 * (best / rate - 1) for method, rate in rates.items() if method != "EAGLE-3"}
    inside = [method for method, gain in gains.items() if low <= gain <= high]
    return Finding(
        "Against other methods",
        DEPENDS,
        f"EAGLE-3's accept rate is {low:g}–{high:g}% above that of methods that draft tokens, says section 1.2; by the table of "
        "4.2 it is above " + ", ".join(f"{method} by {gain:.0f}%" for method, gain in gains.items()) + f": inside for "
        f"{', '.join(inside)}. EAGLE's extra memory is {cells['EAGLE']['extra_memory_gb']:g} GB, EAGLE-2's "
        f"{cells['EAGLE-2']['extra_memory_gb']:g} GB, and EAGLE-2 "
        "runs EAGLE's weights.",
        "Which methods are meant, where their figures come from, and what besides weights is in the memory isn't stated.",
    )


def _audit_memory_sums(coder: Publication) -> Finding:
    lines, whole = [], True
    for c in select_cells(coder, "memory_total_gb"):
        parts = [c.numbers[k] for k in ("memory_weights_gb", "memory_draft_gb", "memory_kv_gb") if k in c.numbers]
        printed = c.numbers["memory_total_gb"]
        whole = whole and abs(sum(parts) - printed) < 0.05
        added = " + ".join(f"{part:g}" for part in parts)
        lines.append(f"{c.setting.method}: {added} = {sum(parts):.1f}, printed {printed:.1f} GB")
    return Finding("Memory, its sums", AGREES if whole else OPEN, "; ".join(lines) + ".")


def compute_kv_bytes(tokens: float, target: Publication) -> float:
    """Return the bytes of keys and values of all heads and layers."""
    layers, heads, width = (get_number(target, name) for name in ("layers", "kv_heads", "head_dim"))
    return tokens * 2 * layers * heads * width * FP16_BYTES


def _audit_memory_flags(coder: Publication, target: Publication) -> Finding:
    tokens, share, gpu = (
        get_number(coder, k) for k in ("flag_max_total_tokens", "flag_mem_fraction_static", "gpu_memory_gb")
    )
    plain = next(
        c for c in group_cells(coder) if "memory_total_gb" in c.numbers and c.setting.method == "plain"
    ).numbers
    kv, params = compute_kv_bytes(tokens, target), get_number(target, "params_b")
    weights = params * FP16_BYTES
    return Finding(
        "Memory against flags",
        DEPENDS,
        f"--max-total-tokens {tokens:,.0f} at {compute_kv_bytes(1, target) / 1024:.0f} KiB a token is {kv / 1e9:.1f} GB of "
        f"KV cache, {kv / 2**30:.1f} GiB; printed with buffers: {plain['memory_kv_gb']:g}. "
        f"--mem-fraction-static {share:g} of {gpu:g} is "
        f"{share * gpu:.0f} GB for weights and KV cache; {plain['memory_weights_gb']:g} and {kv / 2**30:.1f} are "
        f"{plain['memory_weights_gb'] + kv / 2**30:.1f}, {plain['memory_weights_gb']:g} and {plain['memory_kv_gb']:g} are "
        f"{plain['memory_total_gb']:g}. {params:g}e9 parameters of {FP16_BYTES} bytes are {weights:.1f} GB or "
        f"{weights * 1e9 / 2**30:.1f} GiB; printed: {plain['memory_weights_gb']:g}.",
        f"Buffers of {plain['memory_kv_gb'] - kv / 2**30:.0f} GB would close the gap (activations, graphs, compiled code). With "
        "a fixed number of tokens there is no KV cache to give up for a draft, though; those would be the buffers too.",
    )


def _audit_draft_size(coder: Publication, target: Publication) -> Finding:
    memory = next(c for c in select_cells(coder, "memory_draft_gb")).numbers["memory_draft_gb"]
    about = get_number(coder, "draft_params_b")
    hidden, width, experts = (get_number(target, name) for name in ("hidden", "expert_width", "experts"))
    layer = experts * 3 * hidden * width * FP16_BYTES
    return Finding(
        "The draft's size",
        DEPENDS,
        f"{memory:g} GB at {FP16_BYTES} bytes are {memory / FP16_BYTES:.1f}e9 parameters, printed as about {about:g}e9, which "
        f"are {about * FP16_BYTES:.1f} GB. The experts of one layer are {experts:.0f} · 3 · {hidden:.0f} · {width:.0f} · "
        f"{FP16_BYTES} B = {layer / 1e9:.2f} GB.",
        "A layer that reuses the target's experts needs no memory for them; one that copies them needs what is printed. EAGLE-3 "
        "as published has one dense layer.",
    )


def count_touched_experts(tokens: float, experts: float, each: float) -> float:
    """Return the expected number of experts used by at least one token, if each draws `each` of them uniformly."""
    return experts * (1 - (1 - each / experts) ** tokens)


def _audit_experts(coder: Publication, target: Publication) -> Finding:
    tokens, experts, each = (
        get_number(coder, "flag_num_draft_tokens"),
        get_number(target, "experts"),
        get_number(target, "experts_of_a_token"),
    )
    touched = count_touched_experts(tokens, experts, each)
    batch = min(load.concurrency for load in _list_scenarios(coder))
    return Finding(
        "Experts read to verify a tree",
        DEPENDS,
        f"One token reads {each:g} of a layer's {experts:g} experts; {tokens:g} tokens of evenly spread choices "
        f"{experts:g} · (1 − (1 − {each:g}/{experts:g})^{tokens:g}) = {touched:.0f}, {touched / each:.0f} times as many. A batch "
        f"of {batch:g} reads {count_touched_experts(batch, experts, each):.0f} without any tree.",
        "So at batch 1 verifying costs a mixture of experts far more than a dense target, and at these batches hardly more in "
        "weights read; tokens of one text share experts, so measure it.",
    )
