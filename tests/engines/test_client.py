"""The client against a server that does all a server can do wrong."""

import asyncio
import random
from typing import Any

import pytest

from stages.engines import client, http_session
from stages.engines.chat_answer import ChatAnswer
from stages.engines.protocol import SamplingOptions
from tests.engines.misbehaving_server import Fake, completion, echo

BODY = {"messages": [{"role": "user", "content": "hello"}], "seed": 1}


def send_requests(urls: list[str], bodies: list[dict[str, Any]], **settings: Any) -> Any:
    """Return each answer, or the exception instead of it, and the client."""

    async def run() -> tuple[list[Any], client.ChatClient]:
        options = {"concurrency": 16, "timeout_s": 60.0, "attempts": 6, "first_backoff_s": 0.02} | settings
        async with client.ChatClient(urls, "tiny", **options) as http:
            return await asyncio.gather(*(http.complete(b) for b in bodies), return_exceptions=True), http

    return asyncio.run(run())


def make_bodies(count: int) -> list[dict[str, Any]]:
    return [{**BODY, "seed": n} for n in range(count)]


@pytest.mark.parametrize("failure", [429, "half", "drip", {"choices": []}, None], ids=str)
def test_transient_failures_are_retried(failure: Any) -> None:
    with Fake(lambda body, index: failure if index == 0 else echo(body, index)) as fake:
        (answer,), http = send_requests([fake.url], [BODY], timeout_s=0.5 if failure == "drip" else 60.0)
    assert answer.text.startswith("place: ")
    assert answer.finish_reason == "stop"
    assert len(fake.bodies) == 2 and fake.bodies[0] == fake.bodies[1]
    assert sum(http.retries_by_reason.values()) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, http_session.RequestRefusedError), (422, http_session.RequestRefusedError), (401, ValueError)],
)
def test_refused_requests_are_not_retried_and_what_concerns_all_stops_the_run(
    status: int, kind: type[Exception]
) -> None:
    with Fake(lambda *_: status) as fake:
        (answer,), _ = send_requests([fake.url], [BODY])
    assert isinstance(answer, kind) and f"HTTP {status}" in str(answer)
    assert len(fake.bodies) == 1


def test_a_server_of_another_model_is_refused_before_anything_is_asked() -> None:
    with Fake(models={"data": [{"id": "other", "owned_by": "vllm"}]}) as fake:
        with pytest.raises(ValueError, match=r"serves other, expected tiny; correct sample_target.server.base_urls"):
            send_requests([fake.url], [BODY])
        assert not fake.bodies


def test_an_engine_is_known_by_its_models_and_gets_its_own_fields() -> None:
    plain = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    by_id = {"prompt": [1, 2], "repeat_penalty": 1.0, "return_tokens": True, "cache_prompt": False}
    fields = {"vllm": {**plain, "return_token_ids": True, "tool_choice": "none"}, "llama.cpp": plain | by_id}
    options = SamplingOptions([1, 2], False, True, 0.0, 8, [0], 0)

    async def run(url: str) -> ChatAnswer:
        async with client.ChatClient([url], "tiny", 4, 1.0, 2) as http:
            return await http.complete(BODY, options)

    of_llama_cpp = {"content": "hi", "tokens": [4, 5], "stop_type": "eos", "tokens_evaluated": 2, "tokens_predicted": 2}
    of_vllm = completion("hi", choice={"token_ids": [4, 5]}, prompt_token_ids=[1, 2])
    for owner, engine, reply in (("vllm", "vllm", of_vllm), ("llamacpp", "llama.cpp", of_llama_cpp)):
        with Fake(lambda *_, reply=reply: reply, models={"data": [{"id": "tiny", "owned_by": owner}]}) as fake:
            answer = asyncio.run(run(fake.url))
        assert (answer.text, answer.answer_ids, answer.finish_reason) == ("hi", [4, 5], "stop")
        assert answer.prompt_ids == [1, 2] or answer.prompt_tokens == 2
        assert fake.bodies == [{"model": "tiny", **BODY, **fields[engine]}]


def test_no_answer_is_lost_to_broken_cut_and_hung_replies() -> None:
    """Issue 3's faults: 10% of responses 500, 5% reset in the middle, 2% hang."""
    rng = random.Random(1)
    faults = ["reset"] * 3 + ["cut"] * 2 + ["hang"] * 2 + [500] * 10

    def reply(body: dict[str, Any], index: int) -> Any:
        percent = rng.randrange(100)
        return faults[percent] if percent < len(faults) else echo(body, index)

    with Fake(reply) as first, Fake(reply) as second:
        answers, http = send_requests([first.url, second.url], make_bodies(200), timeout_s=1.0)
    assert [a.text for a in answers] == [
        echo({"model": "tiny", **b}, 0)["choices"][0]["message"]["content"] for b in make_bodies(200)
    ]
    assert sum(http.retries_by_reason.values()) > 10


def test_a_failing_server_is_avoided_and_used_again_once_it_answers() -> None:
    down = {"now": True}
    with Fake(lambda b, n: 500 if down["now"] else echo(b, n)) as failing, Fake(delay_s=0.01) as healthy:
        answers, http = send_requests([failing.url, healthy.url], make_bodies(100), first_backoff_s=60.0)
        assert all(isinstance(a, ChatAnswer) for a in answers)
        # 8 of the 16 at once go there first; after three failures in a row nobody else does.
        assert len(failing.bodies) <= 16
        down["now"] = False
        answers, http = send_requests([failing.url, healthy.url], make_bodies(100))
        answer_counts = {e.url: e.answered for e in http.endpoints}
        assert answer_counts[failing.url] > 20 and answer_counts[healthy.url] > 0  # the one that is well is the slower


def test_the_api_key_is_sent_and_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "swordfish")
    with Fake(lambda *_: 401) as fake:
        (answer,), http = send_requests(
            [fake.url], [BODY], key=http_session.read_api_key("MY_KEY", "sample_target.server")
        )
    assert "authorization: bearer swordfish" in fake.headers[0].lower()
    assert "swordfish" not in f"{answer} {answer!r} {http!r} {vars(http)}"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match="MY_KEY, but that variable is not set"):
        http_session.read_api_key("MY_KEY", "sample_target.server")


def test_a_proxy_of_the_environment_is_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    assert http_session.find_proxy("http://gpu1:8000") is None
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "gpu2,.local")
    urls = [
        "http://gpu1:8000", "http://gpu2:8000", "http://a.local:1", "http://127.0.0.1:1", "http://localhost:1",
        "https://b",
    ]  # fmt: skip
    assert [http_session.find_proxy(url) for url in urls] == ["http://proxy:3128", None, None, None, None, None]
    with Fake() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        (answer,), _ = send_requests(["http://nowhere.invalid:8000"], [BODY])
    assert isinstance(answer, ValueError | ChatAnswer) and proxy.paths[0].startswith("http://nowhere.invalid:8000/")
