"""Cycles and accepted drafts of a load, as SGLang's and vLLM's answers tell them."""

from tests.engines.misbehaving_server import Fake, Streamed
from tests.measuring.loads import SCHEDULE, add_sglang_pages, make_requests, run_load


def test_sglangs_histogram_becomes_our_counts() -> None:
    """9 tokens: the prefill's, cycles of 3, 1 and 4, of which a bonus is cut: so the last accepted 4."""
    figures = {
        "spec_accept_histogram": [1, 0, 1, 0, 1],
        "spec_verify_ct": 3,
        "spec_accept_length": 3.0,
        "num_retractions": 0,
    }
    with add_sglang_pages(Fake(lambda *_: Streamed(SCHEDULE, meta=figures))) as fake:
        found = run_load(fake.url, make_requests(2, [1]), engine="sglang")
    assert [r.counts for r in found.records] == [(3, 6, [1, 0, 1, 0, 1])] * 2
    assert found.records[0].engine_meta["spec_accept_length"] == 3.0 and found.engine_figures == {
        "avg_spec_accept_length": 2.5
    }
    assert not found.counting_errors


def test_vllm_tells_each_request_itself() -> None:
    """One of the steps had no draft."""
    figures = {
        "num_spec_steps": 3, "num_accepted_draft_tokens": 4, "num_draft_tokens": 15, "num_spec_tokens": 5,
        "acceptance_histogram": [1, 0, 2, 0, 0, 0], "mean_acceptance_length": 2.333, "per_step_accepted": None,
    }  # fmt: skip
    with Fake(lambda *_: Streamed(SCHEDULE, metrics=figures)) as fake:
        found = run_load(fake.url, make_requests(3, [1]), warmup=make_requests(1, [1]), engine="vllm")
    assert [r.counts for r in found.records] == [(4, 4, [2, 0, 2, 0, 0, 0])] * 3
    assert not found.counting_errors
    assert fake.bodies[0]["stream_options"]["continuous_usage_stats"] is fake.bodies[0]["return_token_ids"] is True
