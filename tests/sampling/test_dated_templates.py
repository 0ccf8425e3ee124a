"""Templates that show today's date: one date for a target's whole life, and prompts rendered already."""

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from stages import prepare_target, sample_target
from stages.target import chat_template, manifest, prompt_encoder, template_facts
from stages.toy import text_targets
from tests.conftest import edit_params
from tests.engines.misbehaving_server import Fake, completion
from tests.sampling.sampled_project import answers, report, set_backend

DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + text_targets.CHAT_TEMPLATE
FIRST = date.today()


class LaterDate(date):
    """Five days after the first."""

    @classmethod
    def today(cls) -> date:
        return FIRST + timedelta(5)


@pytest.fixture
def dated(project: Path) -> Path:
    """The project with a dated template, prepared on the first day."""
    (project / "templates").mkdir(exist_ok=True)
    (project / "templates/dated.jinja").write_text(DATED)
    edit_params(project, {"target": {"chat_template": "dated.jinja"}})
    prepare_target.main()
    return project


def list_days(project: Path) -> set[str]:
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
    texts = [tokenizer.decode(ids) for split in ("train", "eval") for ids in answers(project, split)["prompt_ids"]]
    return {text.removeprefix("Today: ")[:11] for text in texts}


def test_a_target_has_one_date_for_its_whole_life(
    dated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Bug: prompts of two days were in one set, and a run that went on after midnight stopped for good."""
    assert manifest.read_manifest().date == FIRST.isoformat()
    whole = Path("artifacts/target/target.json").read_bytes()
    monkeypatch.setattr(prompt_encoder.datetime, "date", LaterDate)
    Path("artifacts/target/target.json").unlink()  # as DVC does before a rerun
    prepare_target.main()
    assert Path("artifacts/target/target.json").read_bytes() == whole
    assert f"shows today's date: {FIRST.isoformat()} in every prompt" in capsys.readouterr().out
    set_backend(dated, "transformers", train_rows=4, max_new_tokens=4)
    sample_target.main()
    assert list_days(dated) == {FIRST.strftime("%d %b %Y")}


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_run_that_goes_on_on_another_day_keeps_answers_with_their_prompts(
    dated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, with_ids: bool
) -> None:
    """Bug: the journal's key had no prompt, so an answer of yesterday came back behind a prompt of today."""
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
    served: list[date] = []
    limit = 5

    def reply(body: dict[str, Any], number: int) -> Any:
        if number >= limit:
            return 401
        served.append(prompt_encoder.datetime.date.today())
        tokenizer.chat_template = template_facts.fix_date(DATED, served[-1])
        ids = chat_template.encode_prompt(tokenizer, body["messages"])
        if with_ids:
            return completion("hi", body["model"], prompt_token_ids=ids)
        return completion("hi", body["model"], usage={"prompt_tokens": len(ids)})

    with Fake(reply, models={"data": [{"id": "tiny", "owned_by": "vllm"}]}) as fake:
        set_backend(
            dated, "server", {"base_urls": [fake.url], "model": "tiny", "attempts": 1, "concurrency": 1}, train_rows=9
        )
        with pytest.raises(ValueError, match="401"):
            sample_target.main()
        monkeypatch.setattr(prompt_encoder.datetime, "date", LaterDate)
        limit = 10**9
        sample_target.main()
    found = report(dated)
    assert len(served) == found["rows_in"] and not found["dropped"]  # none is asked for twice
    days = {day.strftime("%d %b %Y") for day in served}
    assert list_days(dated) == days if with_ids else list_days(dated) <= days  # its count of tokens alone may tell
    assert f"shows a date, {FIRST.isoformat()} for this target" in capsys.readouterr().out
