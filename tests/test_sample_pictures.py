"""sample_target on conversations with pictures, from an export's `data:` URLs to rows, by every backend."""

import base64
import io
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image
from transformers import AutoTokenizer

from stages import fix_data, prepare_target, sample_target
from stages.target import loading
from tests.conftest import ROOT, copy_project, edit_params
from tests.engines.misbehaving_server import Fake, completion
from tests.sampling.sampled_project import answers, report, set_backend
from tests.target.multimodal_targets import save

PAD = "<|image_pad|>"
ROWS = {"train_rows": 12, "eval_rows": 4, "max_new_tokens": 6, "shard_size": 5, "batch_size": 3}


@pytest.fixture(scope="session")
def sampled_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose random target sees maps, and its answers by the transformers backend. Copy it to change it."""
    project = copy_project(tmp_path_factory.mktemp("seen"))
    with (ROOT / "data/raw/weather_maps.jsonl").open() as file:
        (project / "data/raw/maps.jsonl").write_text("".join(itertools.islice(file, 60)))
    save("qwen3-vl", project / "tiny")
    edit_params(project, {
        "target": {"model": "tiny", "num_threads": 1},
        "fix_data": {"raw": "data/raw/maps.jsonl"},
        "init_draft": {"draft_vocab_size": 100},
        "sample_target": ROWS,
    })  # fmt: skip
    before = Path.cwd()
    os.chdir(project)
    try:
        fix_data.main()
        prepare_target.main()
        sample_target.main()
    finally:
        os.chdir(before)
    return project


@pytest.fixture
def project(sampled_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(sampled_project, tmp_path / "project", ignore=shutil.ignore_patterns(".git", ".dvc"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def read_fixed_rows(split: str) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in pl.read_parquet(f"data/fixed/{split}.parquet").to_dicts()}


def test_rows_name_their_pictures_and_hold_a_token_for_each_embedding(project: Path) -> None:
    """Of a later turn, the pictures of earlier turns too. A map has an embedding for each tile of 32 pixels."""
    tokenizer, several = AutoTokenizer.from_pretrained("tiny"), 0
    for split, source in (("train", "train"), ("eval", "eval"), ("eval_t", "eval")):
        data = read_fixed_rows(source)
        rows = answers(project, split).to_dicts()
        assert len(rows) == (12 if split == "train" else 4)
        for row in rows:
            name, _, turn = row["id"].rpartition(".")
            assert row["images"] == data[name]["images"][: int(turn) + 1]
            several += len(row["images"]) > 1
            tiles = [Image.open(path).size for path in row["images"]]
            written = tokenizer.decode(row["prompt_ids"])
            for width, height in tiles:
                mark = f"<|vision_start|>{PAD * (width * height // 1024)}<|vision_end|>"
                assert mark in written
                written = written.replace(mark, "", 1)
            assert PAD not in written and "<image>" not in written
    assert several
    assert "<|image_pad|>×" in report(project)["preview"][0]["prompt"]


def test_the_target_saw_them(project: Path) -> None:
    """Each eval answer is `generate`'s on the processor's own output; and another one with the picture's colours inverted."""
    _, processor = save("qwen3-vl", project / "again")
    model = loading.load_target("tiny", "float32", "cpu")
    end, changed = model.config.get_text_config().eos_token_id, 0
    for row in answers(project, "eval").to_dicts():
        text = processor.tokenizer.decode(row["prompt_ids"])
        while PAD + PAD in text:
            text = text.replace(PAD + PAD, PAD)
        contents = []
        for pictures in (
            [Image.open(p).convert("RGB") for p in row["images"]],
            [Image.open(p).convert("RGB").point(lambda x: 255 - x) for p in row["images"]],
        ):
            inputs = processor(images=pictures, text=[text], return_tensors="pt")
            assert inputs["input_ids"][0].tolist() == row["prompt_ids"]
            out = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=end)
            contents.append(out[0, len(row["prompt_ids"]) :].tolist())
        assert row["answer_ids"] == contents[0]
        changed += contents[0] != contents[1]
    assert changed


@pytest.mark.parametrize("says", ["nothing", "count", "rendered ids", "expanded ids"])
def test_a_server_is_shown_the_pictures_and_prompted_as_we_say(project: Path, says: str) -> None:
    """Servers tell a prompt as they rendered it or as their processor made it longer; both are ours."""
    own = {split: answers(project, split) for split in ("train", "eval")}
    tokenizer = AutoTokenizer.from_pretrained("tiny")

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        messages = as_parts(body["messages"])
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        rendered = tokenizer.encode(text)
        head, *rest = text.split(PAD)
        longer = "".join(PAD * n + words for n, words in zip(tiles(body["messages"]), rest, strict=True))
        whole = tokenizer.encode(head + longer)
        more = {
            "nothing": {},
            "count": {"usage": {"prompt_tokens": len(whole)}},
            "rendered ids": {"prompt_token_ids": rendered},
            "expanded ids": {"prompt_token_ids": whole},
        }[says]
        return completion("hi", body["model"], **more)

    with Fake(reply) as fake:
        set_backend(project, "server", {"base_urls": [fake.url]}, temperature=0.0)
        sample_target.main()
    for split, before in own.items():
        columns = ["id", "prompt_ids", "images"]
        assert answers(project, split).select(columns).equals(before.select(columns))
    assert report(project)["dropped"] == {}


def as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As servers hand OpenAI's messages to a template."""
    kinds = {"image_url": "image"}
    return [
        {**m, "content": [{**part, "type": kinds.get(part["type"], part["type"])} for part in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]


def tiles(messages: list[dict[str, Any]]) -> list[int]:
    """Of each picture that was sent."""
    found = []
    for part in (part for m in messages if isinstance(m["content"], list) for part in m["content"]):
        if part["type"] == "image_url":
            head, _, data = part["image_url"]["url"].partition(",")
            assert head == "data:image/png;base64"
            width, height = Image.open(io.BytesIO(base64.b64decode(data))).size
            found.append(width * height // 1024)
    return found


def test_a_server_that_cuts_pictures_otherwise_stops_the_run(project: Path) -> None:
    with Fake(lambda b, n: completion("hi", b["model"], usage={"prompt_tokens": 7})) as fake:
        set_backend(project, "server", {"base_urls": [fake.url]})
        with pytest.raises(
            ValueError, match=r"was prompted with 7 tokens.*this row has images, which the server may cut"
        ):
            sample_target.main()


@pytest.mark.parametrize("backend", ["keep", "server"])
def test_what_can_not_be_shown_is_dropped_and_counted(
    project: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken picture, with the turns after it; a text that holds the picture's token; a picture in an answer.

    Bug: broken pictures were counted, and none was named.
    """
    set_backend(project, backend, **ROWS | {"train_rows": None, "eval_rows": 1})
    table = pl.read_parquet("data/fixed/train.parquet")
    rows = table.to_dicts()
    two = [row for row in rows if len(row["images"]) == 2]
    one = [row for row in rows if len(row["images"]) == 1]
    for path in two[0]["images"][:1]:
        Path(path).write_bytes(Path(path).read_bytes()[:100])
    one[0]["messages"][1]["content"] += PAD
    one[1]["messages"][1]["content"] = one[1]["messages"][1]["content"].removeprefix("<image>")
    one[1]["messages"][2]["content"] = "<image>" + one[1]["messages"][2]["content"]
    chosen = [two[0], one[0], two[1], one[1], one[2]]
    pl.DataFrame(chosen, schema=table.schema).write_parquet("data/fixed/train.parquet")
    with Fake(lambda b, n: completion("hi", b["model"])) as fake:
        if backend == "server":
            set_backend(project, backend, {"base_urls": [fake.url]})
        sample_target.main()
    found = report(project)
    assert found["dropped"] == {"image_in_answer": 1, "image_unreadable": 2, "picture_token_in_text": 1}
    named = f"2 rows dropped as image_unreadable, the first: row {two[0]['id']}.0 (maps.jsonl, row {two[0]['source_row']}): "
    assert f"{named}{two[0]['images'][0]} can't be decoded as an image (" in capsys.readouterr().out
    assert answers(project, "train")["id"].to_list() == [f"{two[1]['id']}.0", f"{two[1]['id']}.1", f"{one[2]['id']}.0"]


def test_a_target_whose_images_no_later_stage_takes_is_not_sampled(project: Path) -> None:
    """Bug: a class without positions on three axes answered all questions, and extract_hiddens refused the images then."""
    found = project / "artifacts/target/target.json"
    found.write_text(json.dumps({**json.loads(found.read_text()), "image_token_id": None}))
    with pytest.raises(
        ValueError, match=r"^sample_target: \d+ conversations of .* tiny has no positions on three axes"
    ):
        sample_target.main()
