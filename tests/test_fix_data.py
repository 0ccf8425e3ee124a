"""fix_data in a project of its own: every row is kept or counted as dropped, and every error says what to do."""

import base64
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import toon_format
import toons

from stages import fix_data
from stages.data import conversations, readers
from stages.data.table_schema import load_table_file
from stages.runtime import atomic
from stages.toy import damaged_exports, weather
from tests.data.test_images import png_of

ROOT = Path(__file__).parents[1]
RAW = Path("data/raw/weather_toon.jsonl")
TABLE = weather.format_toon(
    weather.WeatherForecast("Oslo", "C", (weather.WeatherDay("2026-01-01", -9, -2, 40, "snow"),))
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project with the real params.yaml and the real raw file."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    RAW.parent.mkdir(parents=True)
    shutil.copy(ROOT / RAW, RAW)
    shutil.copytree(ROOT / "data/tables", "data/tables")
    load_table_file.cache_clear()  # of a relative path, which is another file in each test
    return tmp_path


def set_params(**changes: str) -> None:
    """Change keys of fix_data in params.yaml, one line each."""
    path = Path("params.yaml")
    text = path.read_text()
    for key, value in changes.items():
        text, found = re.subn(rf"^(  {key}: )\S+", rf"\g<1>{value}", text, count=1, flags=re.MULTILINE)
        assert found == 1, key
    path.write_text(text)


def write_raw(rows: list[Any]) -> None:
    RAW.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def row(*turns: str, system: str | None = "Weather desk.", **more: Any) -> dict[str, Any]:
    """Return a ShareGPT row of alternating turns, starting with the human."""
    head = [{"from": "system", "value": system}] if system is not None else []
    names = ("human", "gpt")
    return {"conversations": head + [{"from": names[i % 2], "value": turn} for i, turn in enumerate(turns)], **more}


def questions(count: int) -> list[dict[str, Any]]:
    """Return rows that differ in their question only."""
    return [row(f"Forecast {n} for Oslo, 1 day.", TABLE, id=f"q{n}") for n in range(count)]


def outcome() -> tuple[pl.DataFrame, pl.DataFrame, dict[str, Any]]:
    fix_data.main()
    train, evaluation = (
        conversations.read_table(path, conversations.FIXED_SCHEMA, "fix_data")
        for path in (fix_data.TRAIN_FILE, fix_data.EVAL_FILE)
    )
    return train, evaluation, atomic.read_json(fix_data.REPORT, "fix_data")


# --- the committed file ----------------------------------------------------------------------------------------------


def test_counts_add_up_on_the_committed_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, evaluation, report = outcome()
    lines = RAW.read_text().splitlines()
    assert report["rows_in"] == len(lines) == report["clean"] + report["repaired"] + report["dropped"]
    assert report["rows_out"] == report["clean"] + report["repaired"] == train.height + evaluation.height
    assert (report["train"], report["eval"]) == (train.height, evaluation.height)
    assert sum(report["dropped_reasons"].values()) == report["dropped"] > 0

    # Counted again from the tables, not from the report.
    kept = pl.concat([train, evaluation])
    rules = Counter(rule for v in kept["verdict"] if v != "clean" for rule in v.removeprefix("repaired:").split(","))
    assert report["rules"] == rules and set(report["examples"]) == set(rules)
    assert all(example["before"] != example["after"] for example in report["examples"].values())
    assert 0.10 < report["eval"] / report["rows_out"] < 0.20 and report["seconds"] > 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 1

    for table in (train, evaluation):
        assert table["source_row"].to_list() == sorted(table["source_row"])
    assert kept["id"].is_unique().all() and kept["source_row"].is_unique().all()


def test_every_kept_row_equals_the_undamaged_conversation(home: Path) -> None:
    """Compared by both decoders with the conversations before the export damaged them."""
    train, evaluation, _ = outcome()
    stream = weather.generate_conversations(damaged_exports.EXPORT_SEED)
    clean = [next(stream) for _ in range(damaged_exports.EXPORT_ROWS)]
    trimmed = []
    for identifier, messages, verdict in pl.concat([train, evaluation]).select("id", "messages", "verdict").iter_rows():
        truth = clean[int(identifier.split("-")[1])]
        if "opening_answer" in verdict:
            trimmed.append(identifier)
            truth = [truth[0], *truth[1 - len(messages) :]]
        if "closing_question" in verdict:
            trimmed.append(identifier)
            truth = truth[: len(messages)]
        assert [m["role"] for m in messages] == [m["role"] for m in truth], identifier
        for message, was in zip(messages, truth, strict=True):
            if message["role"] != "assistant":
                assert message == was
                continue
            decoded = toon_format.loads(message["content"])
            assert decoded == toons.loads(message["content"]) == toon_format.loads(was["content"]), identifier
    assert len(trimmed) == 2  # of 18 exports that lost a turn; the others lost one in the middle, or all but one


def test_no_prompt_is_in_both_splits(home: Path) -> None:
    """The prompts of a conversation are its prefixes up to a question: none may be in both splits."""

    def prompts(table: pl.DataFrame) -> set[str]:
        return {
            json.dumps(messages[: place + 1])
            for messages in table["messages"].to_list()
            for place, message in enumerate(messages)
            if message["role"] == "user"
        }

    # The same questions with other answers and other second turns, which alone would hash differently.
    rows = questions(200)
    twins = [
        row(r["conversations"][1]["value"], TABLE, f"And the next 1 days? ({i})", TABLE) for i, r in enumerate(rows)
    ]
    write_raw([item for pair in zip(rows, twins, strict=True) for item in pair])
    train, evaluation, report = outcome()
    assert report["rows_out"] == 400 and not prompts(train) & prompts(evaluation)


def test_adding_rows_moves_none_to_the_other_split(home: Path) -> None:
    rows = questions(300)
    write_raw(rows[100:200])
    train, evaluation, _ = outcome()
    write_raw([rows[0], *rows[250:], *reversed(rows[100:200]), *rows[200:250]])
    later_train, later_evaluation, _ = outcome()
    assert set(train["id"]) <= set(later_train["id"]) and set(evaluation["id"]) <= set(later_evaluation["id"])
    assert later_evaluation.height > evaluation.height > 0


def test_the_split_is_a_hash_of_the_opening_and_stays_so(home: Path) -> None:
    """The hash is repeated here, since changing it would move the rows of every user."""
    write_raw(questions(100))
    _, evaluation, _ = outcome()
    expected = []
    for n in range(100):
        opening = f'[["system", "Weather desk."], ["user", "Forecast {n} for Oslo, 1 day."]]'
        if int(hashlib.sha256(opening.encode()).hexdigest()[:16], 16) / 2**64 < 0.15:
            expected.append(f"q{n}")
    assert evaluation["id"].to_list() == expected


# --- one row, one verdict --------------------------------------------------------------------------------------------

ASK = "Forecast for Oslo, 1 day."
CUT = TABLE.removesuffix(",snow")
SAY_HELLO = {"from": "gpt", "value": "Hello! Which place?"}
ROWS = [
    ("clean", row(ASK, TABLE), "clean"),
    ("no system message", row(ASK, TABLE, system=None), "clean"),
    ("fenced", row(ASK, f"```toon\n{TABLE}\n```"), "repaired:fence"),
    ("both answers repaired", row(ASK, f"```\n{TABLE}\n```", "1 more day?", TABLE.replace("  ", "\t")),
     "repaired:fence,indent"),
    ("first answer cut", row(ASK, CUT, "1 more day?", TABLE), "row_width"),
    ("second answer cut", row(ASK, TABLE, "1 more day?", CUT), "row_width"),
    ("another horizon than asked", row("Forecast for Oslo, 2 days.", TABLE), "row_count"),
    ("empty answer", row(ASK, ""), "empty_turn"),
    ("blank question", row(" \n", TABLE), "empty_turn"),
    ("empty system message", row(ASK, TABLE, system=""), "empty_turn"),
    ("no answer", row(ASK), "wrong_turns"),
    ("ends in a question", row(ASK, TABLE, "1 more day?"), "repaired:closing_question"),
    ("ends in a blank question", row(ASK, TABLE, " "), "repaired:closing_question"),
    ("begins with a greeting", {"conversations": [SAY_HELLO, *row(ASK, TABLE, system=None)["conversations"]]},
     "repaired:opening_answer"),
    ("all three", {"conversations": [SAY_HELLO, *row(ASK, f"```\n{TABLE}\n```", "Thanks!", system=None)["conversations"]]},
     "repaired:closing_question,opening_answer,fence"),
    ("only a system message", row(), "wrong_turns"),
    ("no turns", row(system=None), "wrong_turns"),
    ("answer first", {"conversations": row(ASK, TABLE)["conversations"][:0:-1]}, "wrong_turns"),
    ("system in the middle", {"conversations": row(ASK, TABLE)["conversations"] + row(ASK, TABLE)["conversations"]},
     "wrong_turns"),
    ("unknown role", {"conversations": [{"from": "narrator", "value": "x"}]}, "unknown_role"),
    ("a tool result without a call", {"conversations": [{"from": "tool", "value": "x"}]}, "wrong_turns"),
    ("no format at all", {"text": "Once upon a time"}, "unknown_format"),
    ("no role", {"conversations": [{"value": "x"}]}, "unknown_role"),
    ("text is a list", {"conversations": [{"from": "human", "value": ["x"]}]}, "not_text"),
    ("turn is text", {"conversations": ["x"]}, "not_text"),
    ("half an emoji", row("Oslo \ud83d?", TABLE), "not_text"),
    ("too long", row(ASK + "!" * 8_000, TABLE), "too_long"),
    ("too long only with its prose", row(ASK, TABLE + "\n" + "Bye! " * 2_000), "repaired:prose"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "verdict"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_verdict_of_a_row(home: Path, raw: dict[str, Any], verdict: str) -> None:
    write_raw([*questions(30), raw])
    train, evaluation, report = outcome()
    kept = pl.concat([train, evaluation]).filter(pl.col("source_row") == 30)
    assert report["rows_in"] == 31 and report["rows_out"] == 30 + kept.height
    if verdict == "clean" or verdict.startswith("repaired"):
        assert kept["verdict"].to_list() == [verdict] and report["dropped_reasons"] == {}
        assert [m["content"] for m in kept["messages"].to_list()[0] if m["role"] == "assistant"][-1] == TABLE
    else:
        assert kept.height == 0 and report["dropped_reasons"] == {verdict: 1}


def test_where_turns_have_other_roles_the_message_says_what_was_found_and_expected(home: Path) -> None:
    """Bug: users whose turns have the roles of their own export were advised to change the schema of tables."""
    unknown = [{"messages": [{"role": "customer", "content": f"{n}?"}]} for n in range(30)]
    write_raw(unknown)
    told = r"row 0: the role of turn 1 is a text, 'customer', expected under the key role \(or from\) one of system, developer"
    with pytest.raises(ValueError, match=rf"found none \(unknown_role 30\); first .*{told}"):
        fix_data.main()
    write_raw([*unknown, *questions(25)])
    with pytest.raises(ValueError, match=rf"30 of 55 rows .*:\n  unknown_role 30, first .*{told}"):
        fix_data.main()


def test_a_closing_thanks_and_an_opening_greeting_are_cut_off_and_counted(home: Path) -> None:
    """Bug: a conversation that ends in "thanks", as half of some chat exports do, was dropped whole as wrong_turns."""
    thanks, greeted = row(ASK, TABLE, "Thanks!"), {"conversations": [SAY_HELLO, *row(ASK, TABLE)["conversations"][1:]]}
    write_raw([*questions(30), thanks, greeted])
    train, evaluation, report = outcome()
    found = dict(pl.concat([train, evaluation]).select("source_row", "messages").iter_rows())
    asked = [{"role": "user", "content": ASK}, {"role": "assistant", "content": TABLE}]
    assert found[30] == [{"role": "system", "content": "Weather desk."}, *asked] and found[31] == asked
    assert report["rules"] == {"closing_question": 1, "opening_answer": 1} and report["dropped"] == 0
    assert report["examples"]["closing_question"] == {"before": "Thanks!", "after": ""}
    set_params(dangling_turns="drop")
    train, evaluation, report = outcome()
    assert report["dropped_reasons"] == {"wrong_turns": 2} and report["rules"] == {}


def test_duplicates_are_found_after_repair(home: Path) -> None:
    write_raw([*questions(30), *questions(30)[:2], row(ASK, TABLE), row(ASK, f"```\n{TABLE}\n```"), row(ASK, CUT)])
    _, _, report = outcome()
    assert report["dropped_reasons"] == {"duplicate": 3, "row_width": 1} and report["rules"] == {}


def test_ids_are_unique_and_never_missing(home: Path) -> None:
    rows = questions(30)
    rows[3]["id"], rows[4]["id"], rows[5]["id"], rows[6]["id"] = "q2", None, 7, "\ud83d"
    del rows[7]["id"]
    write_raw(rows)
    train, evaluation, _ = outcome()
    names = dict(pl.concat([train, evaluation]).select("source_row", "id").iter_rows())
    assert [names[n] for n in range(2, 9)] == ["q2", "q2@3", "line-4", "7", "line-6", "line-7", "q8"]


def test_keep_and_text_leave_the_surroundings(home: Path) -> None:
    fenced = f"Here:\n```toon\n{TABLE}\n```"
    write_raw([*questions(30), row(ASK, fenced), row("Say more.", CUT)])
    for changes, verdicts in (
        ({"surrounding_text": "keep"}, {30: "clean"}),  # the cut table is dropped
        ({"answers": "text"}, {30: "clean", 31: "clean"}),  # no TOON work at all
    ):
        set_params(**changes)
        train, evaluation, _ = outcome()
        kept = pl.concat([train, evaluation]).filter(pl.col("source_row") >= 30).sort("source_row")
        assert dict(kept.select("source_row", "verdict").iter_rows()) == verdicts
        assert kept["messages"].to_list()[0][-1]["content"] == fenced


def test_messages_format(home: Path) -> None:
    turns = [{"role": "user", "content": "Forecast {} for Oslo, 1 day."}, {"role": "assistant", "content": TABLE}]
    write_raw([{"messages": [{**turns[0], "content": turns[0]["content"].format(n)}, turns[1]]} for n in range(40)])
    set_params(format="messages")
    train, evaluation, report = outcome()
    assert report["clean"] == 40
    assert pl.concat([train, evaluation]).sort("source_row")["messages"].to_list()[39][0] == {
        "role": "user",
        "content": "Forecast 39 for Oslo, 1 day.",
    }


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"id": "a", "conversations": [', '\'{"id": "a", "conversations": [\''),
        ("[1, 2]", "'[1, 2]'"),
        ('{"messages": []}', "'{\"messages\": []}'"),
        ('{"conversations": "hello"}', '\'{"conversations": "hello"}\''),
    ],
)
def test_a_line_that_is_no_conversation_stops_the_stage(home: Path, line: str, found: str) -> None:
    set_params(format="sharegpt")
    write_raw([*questions(4), line, *questions(2)])
    with pytest.raises(ValueError, match="line 5: expected") as error:
        fix_data.main()
    assert str(RAW) in str(error.value) and f"found {found}" in str(error.value) and "mend" in str(error.value)
    assert not fix_data.TRAIN_FILE.exists() and not fix_data.REPORT.exists()


def test_all_broken_lines_are_named_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a file with several broken lines stopped the stage once for each of them, with two "line"s in the message."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2_000)  # the second and third are in later chunks
    cut = json.dumps(row("Cut?", TABLE))[:-3]
    write_raw([*questions(4), cut, *questions(30), "[1]", "7", *questions(3)])
    with pytest.raises(ValueError, match="line 5: expected one JSON object per line") as error:
        fix_data.main()
    message = str(error.value)
    assert (
        re.search(r"found '\{.*…' \(Expecting ',' delimiter at character \d+\); ", message)
        and message.count("line ") == 1
    )
    assert "3 of 40 lines are broken: 5, 36, 37; mend them, or write a copy without: sed '5d;36d;37d' " in message
    command = message.rpartition("without: ")[2].removesuffix(", and put that in its place")
    subprocess.run(command, shell=True, check=True)
    Path(f"{RAW}.whole").replace(RAW)
    assert outcome()[2]["rows_in"] == 37


def test_blank_lines_are_no_rows(home: Path) -> None:
    """Bug: a blank last line, as many files have, was a broken one."""
    write_raw([*questions(20), " ", *questions(20), "", ""])
    assert outcome()[2]["rows_in"] == 40


def test_one_broken_line_is_enough(home: Path) -> None:
    write_raw([*questions(4), '{"a": 1,}'])
    with pytest.raises(ValueError, match=r"line 5: .* at character \d+\); mend that line, or write a copy") as error:
        fix_data.main()
    assert "lines are broken" not in str(error.value)


def test_tables_of_any_schema(home: Path) -> None:
    """Bug: tables of other schemas than the weather's were all dropped."""
    users = "users[2]{id,name}:\n  1,Ada\n  2,Bo"
    damaged = f"Here you go:\n```\n{users.replace('  ', chr(9)).replace('[2]', '[3]')}\n```"
    rows = [row(f"Two users, list {n}", damaged if n % 2 else users) for n in range(40)]
    write_raw(rows)
    with pytest.raises(ValueError, match=r"not of the schema data/tables/weather\.yaml, set fix_data\.tables to null"):
        fix_data.main()
    set_params(tables="null")
    train, evaluation, report = outcome()
    assert (report["clean"], report["repaired"], report["dropped"]) == (20, 20, 0)
    assert set(report["rules"]) == {"fence", "prose", "indent", "count"}
    answers = {messages[-1]["content"] for messages in pl.concat([train, evaluation])["messages"].to_list()}
    assert answers == {users}


def test_json_answers_and_a_schema_of_ones_own(home: Path) -> None:
    Path("data/tables/users.yaml").write_text(
        "root: {type: table, columns: {id: {type: integer, cast: true}, name: {type: text, names: {n: null}}}}"
    )
    set_params(answers="json", tables="data/tables/users.yaml")
    good, other = '[{"id": 1, "name": "Ada"}]', "Sure: \n```json\n[{'id': '1', 'n': 'Ada',},]\n```"
    write_raw([row(f"List {n}", (good, other, '[{"id": "x", "name": "Ada"}]')[n % 3]) for n in range(60)])
    train, evaluation, report = outcome()
    assert report["dropped_reasons"] == {"wrong_value": 20} and report["repaired"] == 20
    assert set(report["rules"]) == {"fence", "prose", "quotes", "trailing_comma", "cast", "columns"}
    answers = {messages[-1]["content"] for messages in pl.concat([train, evaluation])["messages"].to_list()}
    assert answers == {good}


def test_a_broken_schema_stops_the_stage_before_any_work(home: Path) -> None:
    outcome()
    before = fix_data.TRAIN_FILE.read_bytes()
    Path("data/tables/weather.yaml").write_text("keys: {place: {type: txt}}")
    load_table_file.cache_clear()
    with pytest.raises(ValueError, match=r"weather\.yaml: keys\.place: unknown type txt \(did you mean text\?\)"):
        fix_data.main()
    assert fix_data.TRAIN_FILE.read_bytes() == before and not fix_data.WAITING_FOLDER.exists()
    load_table_file.cache_clear()
    Path("data/tables/weather.yaml").unlink()
    with pytest.raises(ValueError, match=r"fix_data\.tables is data/tables/weather\.yaml, which does not exist"):
        fix_data.main()


def test_a_line_that_is_no_utf8_stops_the_stage(home: Path) -> None:
    RAW.write_bytes(b'{"conversations": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="line 1: expected one JSON object per line"):
        fix_data.main()


def test_a_missing_raw_file_is_named_with_its_key(home: Path) -> None:
    RAW.unlink()
    with pytest.raises(ValueError, match=f"fix_data.raw is {RAW}, which does not exist"):
        fix_data.main()


@pytest.mark.parametrize(("share", "split", "change"), [("0.000001", "eval", "raise"), ("0.999999", "train", "lower")])
def test_an_empty_split_names_the_key(home: Path, share: str, split: str, change: str) -> None:
    write_raw(questions(20))
    set_params(eval_share=share)
    with pytest.raises(ValueError, match=f"fix_data.eval_share is .* the {split} split of 20 rows empty; {change} it"):
        fix_data.main()
    assert not fix_data.TRAIN_FILE.exists() and not fix_data.EVAL_FILE.exists()


@pytest.mark.parametrize(
    ("rows", "reasons"), [([], "it has no lines"), ([row(ASK, "I don't know."), row(ASK, CUT)], "row_width 1")]
)
def test_a_file_without_one_usable_row_says_why(home: Path, rows: list[Any], reasons: str) -> None:
    write_raw(rows)
    with pytest.raises(ValueError, match=f"found none .*{reasons}.*set fix_data.answers: text"):
        fix_data.main()


# --- kinds of input files --------------------------------------------------------------------------------------------


def pairs(count: int, of: int = 1, length: int = 400) -> list[dict[str, Any]]:
    """Return rows with random questions and answers."""
    rng = random.Random(of)

    def words(n: int) -> str:
        return "".join(rng.choices("abcdefghijklmnop 雨晴雪", k=n))

    return [{"id": f"{of}-{n}", "prompt": f"{n} {words(60)}", "answer": words(length)} for n in range(count)]


def set_lines(**changes: str) -> None:
    """Set parameters, with answers: text."""
    set_params(answers="text", **changes)


def test_a_folder_of_every_format_gives_the_same_as_one_file(home: Path) -> None:
    """Four formats in four kinds of files: each is detected by its keys and counted."""
    folder = Path("data/mixed")
    folder.mkdir()
    asked = pairs(160)

    def turns(r: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["answer"]}]

    first, second, third, fourth = (asked[i : i + 40] for i in range(0, 160, 40))
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row(r["prompt"], r["answer"], system=None, id=r["id"])) + "\n" for r in first)
    (folder / "b.json").write_text(json.dumps([{"messages": turns(r), "prompt_id": r["id"]} for r in second]))
    pl.DataFrame([{"id": r["id"], "messages": turns(r)} for r in third]).write_parquet(folder / "c.parquet")
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in fourth))
    set_lines(raw="data/mixed")
    train, evaluation, report = outcome()
    assert report["formats"] == {"messages": 40, "prompt_answer": 40, "sharegpt": 40, "ultrachat": 40}
    kept = {i: m for table in (train, evaluation) for i, m in table.select("id", "messages").iter_rows()}
    assert kept == {r["id"]: turns(r) for r in asked}
    assert set(pl.concat([train, evaluation])["source"]) == {"a.jsonl.gz", "b.json", "c.parquet", "d.jsonl"}


def test_one_process_or_several_and_chunks_of_any_size_make_the_same_bytes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pairs(300)
    rows += [{**r, "id": "again"} for r in rows[::40]] + [{"prompt": "?"}] * 5
    rows += [{**r, "answer": r["answer"][:-9] + "different"} for r in rows[5:300:30]]
    write_raw(rows)
    set_lines(near_duplicate_threshold="0.8")
    outcomes = []
    for size, processors in ((1 << 22, 2), (20_000, 2), (20_000, 1), (3_000, 1)):
        monkeypatch.setattr(readers, "CHUNK_BYTES", size)
        monkeypatch.setattr(fix_data.os, "sched_getaffinity", lambda _, n=processors: set(range(n)))
        _, _, report = outcome()
        assert report["dropped_reasons"]["duplicate"] == 8 and report["dropped_reasons"]["unknown_format"] == 5
        timeless = {k: v for k, v in report.items() if k not in ("seconds", "rows_per_second")}
        outcomes.append((fix_data.TRAIN_FILE.read_bytes(), fix_data.EVAL_FILE.read_bytes(), timeless))
    assert all(other == outcomes[0] for other in outcomes[1:])
    assert not fix_data.WAITING_FOLDER.exists()


def test_an_error_in_another_process_is_the_same_message(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2_000)
    write_raw([*questions(40), "no json", *questions(40)])
    with pytest.raises(ValueError, match="line 41: expected one JSON object per line, found 'no json'"):
        fix_data.main()
    assert not fix_data.WAITING_FOLDER.exists() and not fix_data.TRAIN_FILE.exists()


def test_a_spreadsheet_gives_the_rows_of_the_jsonl_with_the_same_columns(home: Path) -> None:
    rows = pairs(60)
    write_raw(rows)
    set_lines()
    wanted = outcome()
    table = pl.DataFrame([{"id": r["id"], "Frage": r["prompt"], "Antwort": r["answer"]} for r in rows])
    for path, write in (("data/a.csv", table.write_csv), ("data/a.parquet", table.write_parquet)):
        write(path)
        set_lines(raw=path, columns='{"prompt":"Frage","answer":"Antwort"}')
        found = outcome()
        for one, other in zip(wanted[:2], found[:2], strict=True):
            assert one.drop("source").equals(other.drop("source"))
        set_lines(columns="null")
    assert found[2]["formats"] == {"prompt_answer": 60}


def test_rows_of_no_known_format_say_which_formats_there_are(home: Path) -> None:
    write_raw([{"Frage": "a", "Antwort": "b"}] * 3)
    with pytest.raises(
        ValueError, match=r"row 0: .*Frage.* sharegpt: a list 'conversations'; .* fix_data.columns, as"
    ) as e:
        fix_data.main()
    assert "toon" not in str(e.value).lower().replace("weather_toon.jsonl", "")


def test_a_datasets_id_as_raw_says_how_it_is_read(home: Path) -> None:
    set_lines(raw="HuggingFaceH4/ultrachat_200k")
    with pytest.raises(
        ValueError, match=r"for the dataset HuggingFaceH4/ultrachat_200k of the Hub write a file NAME\.hub\.yaml"
    ):
        fix_data.main()


def test_a_hub_dataset_in_the_stage(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through datasets.load_dataset, on a folder in place of an id; its images' bytes are refused."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "cache")
    Path("talk").mkdir()
    Path("talk/train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs(60)))
    Path("data/talk.hub.yaml").write_text("dataset: talk\nname: null\nsplit: train\nrevision: null\n")
    set_lines(raw="data/talk.hub.yaml")
    _, _, report = outcome()
    assert report["clean"] == 60 and report["formats"] == {"prompt_answer": 60}
    assert report["hub"]["talk.hub.yaml"] | {"split": "train", "rows": 60} == report["hub"]["talk.hub.yaml"]


def test_tools_reasoning_and_images_are_kept_with_the_messages(home: Path) -> None:
    Path("data/raw/sky.png").touch()
    special = {
        "id": "special", "tools": [{"name": "f"}], "images": ["sky.png"],
        "messages": [
            {"role": "user", "content": "<image>?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": 1}], "reasoning_content": "hm"},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "Rain."},
        ],
    }  # fmt: skip
    write_raw([*pairs(40), special])
    set_lines()
    train, evaluation, _ = outcome()
    (found,) = pl.concat([train, evaluation]).filter(pl.col("id") == "special").to_dicts()
    assert (
        found["images"] == [f"data/fixed/images/{hashlib.sha256().hexdigest()}.png"]
        and found["tools"] == '[{"name": "f"}]'
    )
    assert found["reasoning"] == [None, "hm", None, None] and found["tool_calls"] == [None, '[{"id": 1}]', None, None]
    others = pl.concat([train, evaluation]).filter(pl.col("id") != "special")
    assert others.select("tools", "tool_calls", "reasoning", "images").null_count().row(0) == (40,) * 4


def nested(levels: int) -> str:
    """Return JSON of that depth, which json.dumps could not write."""
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("levels", [900, 100_000])
@pytest.mark.parametrize("kind", ["tools", "tools as text", "calls", "parts"])
def test_a_row_that_is_nested_too_deep_is_dropped_by_that_reason(home: Path, kind: str, levels: int) -> None:
    """Bug: tools nested 900 deep ended the stage by RecursionError."""
    deep = nested(levels)
    messages = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    image_turn = f'{{"role": "user", "content": [{{"type": "image_url", "image_url": {deep}}}]}}'
    called = f'{{"role": "assistant", "content": null, "tool_calls": [{deep}]}}'
    line = {
        "tools": f'{{"messages": {messages}, "tools": [{deep}]}}',
        "tools as text": f'{{"messages": {messages}, "tools": {json.dumps(deep)}}}',
        "calls": f'{{"messages": [{{"role": "user", "content": "a"}}, {called}]}}',
        "parts": f'{{"messages": [{image_turn}, {{"role": "assistant", "content": "b"}}]}}',
    }[kind]
    write_raw([*questions(30), line])
    set_params(answers="text")
    _, _, report = outcome()
    reason = "image_missing" if kind == "parts" and levels == 900 else "nested_too_deep"
    assert report["dropped_reasons"] == {reason: 1} and report["rows_out"] == 30
    assert report["dropped_first"] == {reason: "weather_toon.jsonl, row 30"}


@pytest.mark.parametrize("levels", [900, 100_000])
def test_an_answer_that_is_nested_too_deep_is_no_table(home: Path, levels: int) -> None:
    """Bug: such JSON was parsed to convert it to a table."""
    write_raw([*questions(30), row("Forecast for Oslo, 1 day.", nested(levels)), row("And?", "[" * levels)])
    set_params(max_chars="9000000")
    assert outcome()[2]["dropped_reasons"] == {"not_toon": 2}


def test_unknown_keys_may_be_nested(home: Path) -> None:
    """Unknown keys are ignored, and a dropped row with one can be shown."""
    write_raw([*questions(30), json.dumps(row("a", " "))[:-1] + f', "meta": {nested(900)}}}'])
    set_params(answers="text")
    assert outcome()[2]["dropped_reasons"] == {"empty_turn": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_brackets_without_end_are_no_rows(home: Path, name: str) -> None:
    Path("data/deep").mkdir()
    Path("data/deep", name).write_text("[" * 100_000 + "\n")
    set_params(raw="data/deep")
    with pytest.raises(ValueError, match=rf"data/deep/{name}.*expected"):
        fix_data.main()


def png(n: int) -> bytes:
    """Return the magic bytes of a PNG and a distinct tail; it is not decoded."""
    return b"\x89PNG\r\n\x1a\n" + bytes([n]) * (n + 1)


def test_images_given_as_bytes_become_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As structs in Parquet, as the Hub's datasets have them, and as data URLs; equal images are one file."""
    monkeypatch.setattr(readers, "CHUNK_ROWS", 16)  # several processes
    folder = Path("data/seen")
    folder.mkdir()
    (folder / "own.png").touch()
    struct = [
        {
            "id": f"p{n}",
            "prompt": f"<image>Picture {n}?",
            "answer": "Rain.",
            "image": {"bytes": png(n // 2), "path": "x.png"},
        }
        for n in range(60)
    ]
    struct[7]["image"] = {"bytes": b"BM and more", "path": "own.png"}
    struct[8]["image"] = {"bytes": None, "path": "own.png"}
    struct[9]["answer"] = " "  # dropped, so its image is no file: row 8, with the same image, has another
    pl.DataFrame(struct).write_parquet(folder / "a.parquet")

    def url(n: int) -> dict[str, Any]:
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(png(n)).decode()}"},
        }

    asked = [[url(n), {"type": "text", "text": f"Which {n}?"}, url(100)] for n in range(20, 40)]
    lines = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": "This."}]} for a in asked]
    (folder / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    set_lines(raw="data/seen")
    train, evaluation, report = outcome()
    assert report["dropped_reasons"] == {"empty_turn": 1, "image_bytes": 1} and report["rows_out"] == 78
    kept = {
        (s, r): i for t in (train, evaluation) for s, r, i in t.select("source", "source_row", "images").iter_rows()
    }
    own = kept.pop(("a.parquet", 8))
    assert own == [f"data/fixed/images/{hashlib.sha256().hexdigest()}.png"]  # of an empty file
    for (source, place), images in kept.items():
        expected = [png(place // 2)] if source == "a.parquet" else [png(20 + place), png(100)]
        assert [Path(image).read_bytes() for image in images] == expected
        assert images == [f"data/fixed/images/{hashlib.sha256(data).hexdigest()}.png" for data in expected]
    files = {path.as_posix() for path in fix_data.IMAGES_FOLDER.iterdir()}
    assert files == {image for images in [own, *kept.values()] for image in images}
    assert report["pictures_written"] == len(files) == 41  # 0 to 39 but for 4, and 100; and the file
    set_lines(raw=str(RAW))
    outcome()
    assert fix_data.IMAGES_FOLDER.is_dir() and not list(fix_data.IMAGES_FOLDER.iterdir())  # the old ones are gone


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_row_whose_image_has_too_many_pixels_is_dropped_and_counted(home: Path) -> None:
    """Bug: such an image, of half a megabyte, took 2.6 GB of memory in every later stage."""
    folder = Path("data/seen")
    folder.mkdir()
    (folder / "own.png").write_bytes(png_of(13000, 13000))
    rows = [
        {"prompt": f"<image>Picture {n}?", "answer": "Rain.", "image": {"bytes": png_of(9, n + 1), "path": None}}
        for n in range(30)
    ]
    rows[4]["image"] = {"bytes": png_of(8193, 8192), "path": None}
    rows[5]["image"] = {"bytes": None, "path": "own.png"}
    pl.DataFrame(rows).write_parquet(folder / "a.parquet")
    set_lines(raw="data/seen")
    _, _, report = outcome()
    assert report["dropped_reasons"] == {"image_too_large": 2} and report["rows_out"] == 28
    assert report["pictures_written"] == 28


def test_another_image_under_the_same_name_changes_the_rows(home: Path) -> None:
    """Bug: rows held the user's path, so replacing an image on disk reran fix_data only, and later stages were stale."""
    folder = Path("data/seen")
    folder.mkdir()
    rows = [{"id": f"p{n}", "prompt": f"<image>Picture {n}?", "answer": "Rain.", "image": "sky.png"} for n in range(40)]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    set_lines(raw="data/seen")
    found = []
    for data in (png(1), png(2), b"BM and more"):
        (folder / "sky.png").write_bytes(data)
        tables = outcome()[:2]
        (image,) = {image for table in tables for images in table["images"] for image in images}
        assert Path(image).read_bytes() == data
        assert [file.as_posix() for file in fix_data.IMAGES_FOLDER.iterdir()] == [image]
        found.append(image)
    assert len(set(found)) == 3


def test_too_many_dropped_rows_stop_the_stage_with_reasons(home: Path) -> None:
    """Other tools drop half the data with a line in a log, and train the draft on the rest."""
    write_raw([*questions(30), *[row(f"{n} {ASK}", CUT) for n in range(9)], *[{"text": "once"}] * 11])
    train, _, _ = outcome()  # 40% lost
    set_params(max_dropped_share="0.39")
    before = fix_data.TRAIN_FILE.read_bytes()
    with pytest.raises(ValueError, match=r"20 of 50 rows \(40%\) are dropped, expected at most 39%") as error:
        fix_data.main()
    lines = str(error.value).splitlines()
    assert lines[1] == f'  unknown_format 11, first {RAW.name}, row 39: \'{{"text": "once"}}\''
    assert lines[2].startswith(f"  row_width 9, first {RAW.name}, row 30: 'place: Oslo")
    assert "raise max_dropped_share" in lines[3]
    assert fix_data.TRAIN_FILE.read_bytes() == before and not fix_data.WAITING_FOLDER.exists()
    for passes in ("0.4", "null"):
        set_params(max_dropped_share=passes)
        assert outcome()[0].height == train.height


def test_length_filters(home: Path) -> None:
    write_raw([*pairs(40, length=100), *pairs(5, 2, length=900), *pairs(5, 3, length=2)])
    set_lines(min_chars="100", max_chars="500")
    _, _, report = outcome()
    assert report["dropped_reasons"] == {"too_long": 5, "too_short": 5}
    assert report["dropped_first"]["too_long"] == "weather_toon.jsonl, row 40"


# --- near duplicates, and the split ----------------------------------------------------------------------------------


def altered(r: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a nearly equal conversation."""
    return {**r, "answer": r["answer"][:200] + "#" + r["answer"][201:], **more}


def test_the_first_of_near_duplicates_is_kept(home: Path) -> None:
    rows = pairs(60)
    write_raw([*rows, *(altered(r, id=f"near {r['id']}") for r in rows[:20])])
    set_lines()
    _, _, report = outcome()
    assert report["rows_out"] == 80 and report["near_duplicates"] is None and report["overlap"]["near"] is None
    set_lines(near_duplicate_threshold="0.8")
    train, evaluation, report = outcome()
    # The question, and so the split, is that of the first.
    assert report["dropped_reasons"] == {"near_duplicate": 20} and report["near_duplicates"]["dropped"] == 20
    assert not any(name.startswith("near") for name in [*train["id"], *evaluation["id"]])
    assert all(0.8 <= e["likeness"] < 1 and e["first"] != e["second"] for e in report["near_duplicates"]["examples"])


@pytest.mark.parametrize("policy", ["remove", "keep"])
def test_near_duplicates_across_the_hash_split(home: Path, policy: str) -> None:
    """The questions differ by a letter, so the hash may assign the two to different splits: the eval row is kept."""
    rows = pairs(100)
    twins = [{**r, "id": f"near {r['id']}", "prompt": r["prompt"] + "!"} for r in rows]
    write_raw([*rows, *twins])
    set_lines()
    train, evaluation, _ = outcome()
    side = dict.fromkeys(train["id"], "train") | dict.fromkeys(evaluation["id"], "eval")
    apart = sum(side[r["id"]] != side[f"near {r['id']}"] for r in rows)
    assert apart > 5
    set_lines(near_duplicate_threshold="0.8", eval_overlap=policy)
    train, evaluation, report = outcome()
    assert report["overlap"] == {"policy": policy, "exact": 0, "near": apart}
    if policy == "remove":
        assert report["dropped_reasons"] == {"near_duplicate": 100 - apart, "near_eval": apart}
        assert report["rows_out"] == 100
    else:
        assert report["dropped_reasons"] == {"near_duplicate": 100 - apart} and report["rows_out"] == 100 + apart
    assert set(evaluation["id"]) >= {r["id"] for r in rows if side[r["id"]] == "eval"}


def test_the_first_rows_of_the_raw_file_for_evaluation(home: Path) -> None:
    """The first rows are eval; the others are training rows, without those that open like an eval row."""
    rows = pairs(120)
    write_raw(
        [*rows, {**rows[3], "id": "same"}, {**rows[4], "id": "asks the same", "answer": "Other."}, altered(rows[5])]
    )
    set_lines(eval_file="weather_toon.jsonl", eval_rows="30", near_duplicate_threshold="0.8")
    train, evaluation, report = outcome()
    assert evaluation["id"].to_list() == [r["id"] for r in rows[:30]]
    assert train["id"].to_list() == [r["id"] for r in rows[30:]]
    assert report["overlap"] == {"policy": "remove", "exact": 3, "near": 0}
    assert report["dropped_reasons"] == {"in_eval": 3}


@pytest.mark.parametrize("policy", ["remove", "keep"])
def test_a_given_eval_file_wins_over_training_rows_that_come_before_it(home: Path, policy: str) -> None:
    folder = Path("data/both")
    folder.mkdir()
    rows = pairs(90)
    near = {**rows[3], "id": "near", "prompt": "Please: " + rows[3]["prompt"]}
    for name, some in (("a_train.jsonl", [*rows[:10], near, *rows[30:]]), ("z_test.jsonl", [*rows[:30], rows[0]])):
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in some))
    set_lines(raw="data/both", eval_file="z_test.jsonl", eval_overlap=policy, near_duplicate_threshold="0.8")
    train, evaluation, report = outcome()
    assert evaluation["id"].to_list() == [r["id"] for r in rows[:30]]
    assert (
        report["rows_in"] == 102 and report["overlap"] == {"policy": policy, "exact": 10, "near": 1}
    ) or policy == "keep"
    if policy == "remove":
        assert train["id"].to_list() == [r["id"] for r in rows[30:]]
        assert report["dropped_reasons"] == {"duplicate": 1, "in_eval": 10, "near_eval": 1}
    else:
        assert report["overlap"]["exact"] == 10 and train.height >= 60
    assert set(evaluation["source"]) == {"z_test.jsonl"}


def test_an_eval_file_that_leaves_a_split_empty(home: Path) -> None:
    write_raw(pairs(20))
    set_lines(eval_file="weather_toon.jsonl")
    with pytest.raises(
        ValueError, match=r"eval_file weather_toon.jsonl \(eval_rows None\) leaves the train split of 20"
    ):
        fix_data.main()


def test_a_process_that_is_killed_is_one_message(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a process killed by the kernel for memory ended in a traceback."""

    class Pool(fix_data.ProcessPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Any:
            return super().submit(os._exit, 9)

    monkeypatch.setattr(fix_data, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(fix_data.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2_000)
    write_raw(questions(40))
    with pytest.raises(ValueError, match=r"one of 2 processes was killed, expected .* fewer cores"):
        fix_data.main()
    assert not fix_data.WAITING_FOLDER.exists()
