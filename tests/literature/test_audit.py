"""The audit: its arithmetic against simulations and slow counts, its verdicts on numbers that were changed, its page."""

import csv
import random
from dataclasses import replace
from itertools import product
from statistics import mean

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.literature import audit, audit_findings, audit_serving, audit_tables, audit_trees, published
from stages.literature.audit_findings import AGREES, DEPENDS, OPEN, Finding
from stages.literature.published import Publication, PublishedRow
from tests.conftest import ROOT

PUBLISHED = published.read_publications(ROOT / "published")
TARGET = PUBLISHED["qwen3-30b-a3b-shape"]


def found(publications: dict[str, Publication], what: str, about: str) -> Finding:
    (one,) = (f for f in audit.audit_publications(publications)[what] if f.heading == about)
    return one


def changed(what: str, metric: str, value: float, **settings: object) -> dict[str, Publication]:
    """The publications, with the one number of that metric under these settings another."""

    def is_it(row: PublishedRow) -> bool:
        return row.metric == metric and all(getattr(row.setting, key) == to for key, to in settings.items())

    rows = PUBLISHED[what].rows
    assert sum(map(is_it, rows)) == 1
    return PUBLISHED | {
        what: replace(PUBLISHED[what], rows=tuple(replace(r, value=value) if is_it(r) else r for r in rows))
    }


def test_the_committed_page_is_what_the_code_writes() -> None:
    committed = (ROOT / audit.PAGE).read_text(encoding="utf-8")
    assert committed == audit.render_page(PUBLISHED), "run: python -m stages.literature.audit"


def test_every_publication_with_results_is_audited_and_every_verdict_known() -> None:
    findings = audit.audit_publications(PUBLISHED)
    assert {name for name in findings if findings[name]} == set(PUBLISHED) - {TARGET.name}
    every = [(name, f) for name, found in findings.items() for f in found]
    assert {f.verdict for _, f in every} == set(audit_findings.VERDICTS)
    for name, f in every:
        assert f.reading or f.verdict == AGREES, f"{name}: {f.heading} doesn't say what could explain it"
        assert len({len(line) for line in f.table}) <= 1


# The arithmetic


def test_chain_is_the_mean_over_all_outcomes() -> None:
    for rate, steps in ((0.78, 5), (0.5, 3), (1.0, 4), (0.0, 2)):
        length = 0.0
        for outcome in product((True, False), repeat=steps):  # whether each draft would be accepted, were it reached
            probability = 1.0
            for accepted in outcome:
                probability *= rate if accepted else 1 - rate
            length += probability * (1 + ([*outcome, False].index(False)))
        assert audit_serving.compute_chain_tau(rate, steps) == pytest.approx(length)


def load(**changes: float) -> audit_serving.ServingScenario:
    numbers = {
        "prompts": 128, "inputs": 256, "outputs": 256, "rate": 8, "concurrency": 32, "tok_s": 0, "ttft_s": 0.1, "tpot_s": 0.01,
    }  # fmt: skip
    return audit_serving.ServingScenario("a load", "plain", **(numbers | changes))


def test_little_s_law_finds_the_slots_of_a_closed_loop() -> None:
    """Slots that are refilled at once, for so long that ends don't matter."""
    one = load(outputs=64)
    clock = [0.1 * slot for slot in range(32)]  # when each slot is next free
    for _ in range(20_000):
        slot = clock.index(min(clock))
        clock[slot] += 0.1 + 0.01 * 63  # the first token, then 63 more
    tok_s = 20_000 * 64 / max(clock)
    assert replace(one, tok_s=tok_s).in_flight(64) == pytest.approx(32, rel=0.01)


def test_the_arrival_ceiling_is_what_a_server_that_never_queues_reaches() -> None:
    one, draw = load(), random.Random(0)
    last, rates = [], []
    for _ in range(4000):
        now = 0.0
        for _ in range(127):
            now += draw.expovariate(8)
        last.append(now)
        rates.append(128 * 256 / (now + 0.1 + 0.01 * 255))
    middle, deviation = one.arrivals_s
    assert mean(last) == pytest.approx(middle, rel=0.01)
    assert mean((x - middle) ** 2 for x in last) ** 0.5 == pytest.approx(deviation, rel=0.05)
    assert mean(rates) == pytest.approx(one.ceiling(256, middle), rel=0.02)
    early = one.ceiling(256, middle - 2 * deviation)
    assert 0.93 < mean(rate < early for rate in rates) < 1


def test_experts_touched_by_drawing_them() -> None:
    draw = random.Random(0)
    drawn = [len({e for _ in range(32) for e in draw.sample(range(128), 8)}) for _ in range(2000)]
    assert audit_serving.count_touched_experts(32, 128, 8) == pytest.approx(mean(drawn), rel=0.005)


def test_the_target_s_shape_is_one_of_its_number_of_parameters_and_bytes() -> None:
    """transformers builds it (without memory); what config.json says beside is in no sum of ours."""
    value = {row.metric: row.value for row in TARGET.rows}
    config = Qwen3MoeConfig(
        hidden_size=int(value["hidden"]), num_hidden_layers=int(value["layers"]), num_key_value_heads=int(value["kv_heads"]),
        head_dim=int(value["head_dim"]), moe_intermediate_size=int(value["expert_width"]), num_experts=int(value["experts"]),
        num_experts_per_tok=int(value["experts_of_a_token"]), num_attention_heads=32, vocab_size=151936,
        tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(value["params_b"], abs=0.05)
    keys = model.model.layers[0].self_attn.k_proj.out_features
    assert audit_serving.compute_kv_bytes(1, TARGET) == 2 * 48 * keys * 2 == 96 * 1024


def test_a_mean_may_lose_what_rounding_loses_and_no_more() -> None:
    row = next(r for r in PUBLISHED["eagle3-paper"].rows if r.setting.dataset == "GSM8K")
    rows = [replace(row, value=value) for value in (1.00, 1.01, 1.01)]  # up to 1.015 before they were rounded
    assert [audit_tables.is_mean_off(replace(row, value=value), rows) for value in (0.99, 1.00, 1.01, 1.02, 1.03)] == [
        True, False, False, True, True,
    ]  # fmt: skip


# What it finds


def test_speedups_above_accept_length_in_the_sweep() -> None:
    """Counted from the CSV: 25 points, all of one target."""
    with (ROOT / "published/specforge-sweep.csv").open(newline="") as lines:
        above = [r for r in csv.DictReader(lines) if float(r["speedup"]) >= float(r["accept_len"])]
    one = found(PUBLISHED, "specforge-sweep", "Speedup above accept length")
    assert (one.verdict, len(above), {r["target"] for r in above}) == (DEPENDS, 25, {"Llama-4-Scout-17B-16E-Instruct"})
    assert "below one step in 25, of Llama-4-Scout" in one.arithmetic


def test_accept_rate_of_the_weather_table_is_the_share_of_the_depth() -> None:
    """The seed's own rows by hand: 8_1_8 prints 31 and 3.47, so 2.47/8 = 30.9; 10_2_16 28 and 3.86, so 28.6."""
    one = found(PUBLISHED, "qwen3-vl-weather", "Accept rate against accept length")
    assert (one.verdict, one.table[1]) == (AGREES, ("(tau − 1) / num_steps", "0.5", "1.3"))
    assert all(float(line[2]) > 20 for line in one.table[2:])


def test_three_trees_of_the_weather_table_have_too_few_tokens() -> None:
    one = found(PUBLISHED, "qwen3-vl-weather", "Trees that an engine can start")
    assert one.arithmetic.startswith("3 of 25 rows") and "8_2_8 (ep=9, 8 < 9)" in one.arithmetic


def test_what_is_said_of_the_three_scenarios() -> None:
    """The readings are prose; these are the numbers they stand on."""
    under_way = {
        line[0]: [float(number.replace(",", "")) for number in line[1:]]
        for line in found(PUBLISHED, "qwen3-coder-h100", "Throughput against concurrency and TPOT").table[1:]
    }
    for server in ("plain", "EAGLE-3"):
        concurrency, _, _, outputs, whole, fit, _ = under_way[f"Code Gen, {server}"]
        assert outputs == pytest.approx(concurrency, rel=0.02) and whole == pytest.approx(fit, rel=0.02)
        concurrency, _, _, outputs, whole, fit, halfway = under_way[f"Completion, {server}"]
        assert outputs > halfway > fit and whole < 0.1 * concurrency
    arrivals = found(PUBLISHED, "qwen3-coder-h100", "The arrival rate's ceiling")
    assert arrivals.verdict == DEPENDS and "2,048 tokens/s" in arrivals.arithmetic
    ceilings = {line[0]: [int(number.replace(",", "")) for number in line[3:]] for line in arrivals.table[1:]}
    assert ceilings["plain"][3] < ceilings["plain"][0] and ceilings["EAGLE-3"][1] < 2418 < ceilings["EAGLE-3"][2]


@pytest.mark.parametrize(
    ("what", "about", "before", "change", "after"),
    [
        (
            "angelslim-pytorch", "Speedup above accept length", DEPENDS,
            {"metric": "speedup", "value": 1.85, "target": "Qwen3-14B", "dataset": "mean", "temperature": 1.0}, AGREES,
        ),
        (
            "specforge-sweep", "Accept length against depth", AGREES,
            {"metric": "tau", "value": 4.01, "target": "Kimi-K2-Instruct", "dataset": "gsm8k", "tree": "t3_1_4"}, OPEN,
        ),
        (
            "specforge-sweep", "Speedup against its two rates", AGREES,
            {"metric": "speedup", "value": 1.5, "target": "Kimi-K2-Instruct", "dataset": "gsm8k", "tree": "t3_1_4"}, OPEN,
        ),
        (
            "specforge-sweep", "Longer chains", DEPENDS,
            {"metric": "tau", "value": 2.048, "target": "Ling-flash-2.0", "dataset": "financeqa", "tree": "t7_1_8"}, AGREES,
        ),
        (
            "qwen3-coder-h100", "Changes against their columns", AGREES,
            {"metric": "total_tok_s_change", "value": 78, "label": "Code Gen"}, DEPENDS,
        ),
        (
            "qwen3-coder-h100", "Accept rate against accept length", DEPENDS,
            {"metric": "accept_rate", "value": 0.3, "label": "Chat"}, OPEN,
        ),
        (
            "qwen3-coder-h100", "The arrival rate's ceiling", DEPENDS,
            {"metric": "total_tok_s", "value": 1700, "label": "Chat", "method": "EAGLE-3"}, AGREES,
        ),
        (
            "qwen3-coder-h100", "TPOT against concurrency", DEPENDS,
            {"metric": "tpot_mean_ms", "value": 30.0, "label": "Completion", "method": "plain"}, AGREES,
        ),
        ("qwen3-coder-h100", "Memory, its sums", AGREES, {"metric": "memory_total_gb", "value": 78.0, "method": "plain"}, OPEN),
        ("eagle3-paper", "Where vLLM gains most", DEPENDS, {"metric": "batch_of_most", "value": 2, "method": "EAGLE"}, DEPENDS),
        ("dspark-paper", "Accept length against depth", AGREES,
         {"metric": "tau", "value": 8.01, "target": "Qwen3-8B", "method": "DSpark", "dataset": "GSM8K"}, OPEN),
        ("modelopt-2342", "The order of the methods", AGREES,
         {"metric": "tau", "value": 6.3, "method": "DSpark", "dataset": "GSM8K"}, DEPENDS),
        ("angelslim-vllm", "Means against their rows", DEPENDS,
         {"metric": "output_tok_s", "value": 90.0, "target": "Qwen3-32B", "method": "EAGLE-3", "dataset": "mean"}, OPEN),
    ],
)  # fmt: skip
def test_a_verdict_follows_its_numbers(what: str, about: str, before: str, change: dict, after: str) -> None:
    assert found(PUBLISHED, what, about).verdict == before
    other = found(changed(what, **change), what, about)
    assert other.verdict == after and other != found(PUBLISHED, what, about)


def test_what_the_audit_needs_and_can_t_have() -> None:
    with pytest.raises(ValueError, match=r"expected one tau with .*found \[\]"):
        audit_findings.get_number(PUBLISHED["eagle3-paper"], "tau", target="unpublished")
    twice = PUBLISHED["eagle3-paper"]
    with pytest.raises(ValueError, match="is given twice under"):
        audit_findings.group_cells(replace(twice, rows=(*twice.rows, twice.rows[0])))
    cell = audit_findings.group_cells(PUBLISHED["eagle3-paper"])[0]
    with pytest.raises(ValueError, match="no tree, which the audit needs"):
        _ = cell.shape
    with pytest.raises(ValueError, match="expected a number as prompts, found unknown"):
        cell.get_setting("prompts")
    assert audit_trees.compute_cycle_time(0.64, 0.21, 3.47) == pytest.approx(1.4921)
