"""Images of rows: bytes become files, files are named by their content, and some are refused."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stages import fix_data
from stages.data import readers
from tests.data.test_images import encode_image, png_of
from tests.fix_data.raw_rows import RAW, outcome, set_lines


def png(n: int) -> bytes:
    """Return a PNG of a colour of its own."""
    return encode_image("PNG", n)


def test_images_given_as_bytes_become_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As structs in Parquet, as the Hub's datasets have them, and as data URLs; equal images are one file."""
    monkeypatch.setattr(readers, "CHUNK_ROWS", 16)  # several processes
    folder = Path("data/seen")
    folder.mkdir()
    (folder / "own.png").write_bytes(png(200))
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
    struct[9]["prompt"] = " "  # dropped, so its image is no file: row 8, with the same image, has another
    struct[9]["image"] = None
    pl.DataFrame(struct).write_parquet(folder / "a.parquet")

    def url(n: int) -> dict[str, Any]:
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(png(n)).decode()}"},
        }

    questions = [[url(n), {"type": "text", "text": f"Which {n}?"}, url(100)] for n in range(20, 40)]
    lines = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": "This."}]} for a in questions
    ]
    (folder / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    set_lines(raw="data/seen")
    train, evaluation, report = outcome()
    assert report["dropped_reasons"] == {"empty_turn": 1, "image_bytes": 1} and report["rows_out"] == 78
    kept = {
        (s, r): i for t in (train, evaluation) for s, r, i in t.select("source", "source_row", "images").iter_rows()
    }
    own = kept.pop(("a.parquet", 8))
    assert own == [f"data/fixed/images/{hashlib.sha256(png(200)).hexdigest()}.png"]
    for (source, source_row), images in kept.items():
        expected = [png(source_row // 2)] if source == "a.parquet" else [png(20 + source_row), png(100)]
        assert [Path(image).read_bytes() for image in images] == expected
        assert images == [f"data/fixed/images/{hashlib.sha256(data).hexdigest()}.png" for data in expected]
    files = {path.as_posix() for path in fix_data.IMAGES_FOLDER.iterdir()}
    assert files == {image for images in [own, *kept.values()] for image in images}
    assert report["pictures_written"] == len(files) == 41  # 0 to 39 but for 4, and 100; and the file
    set_lines(raw=str(RAW))
    outcome()
    assert [file.name for file in fix_data.IMAGES_FOLDER.iterdir()] == ["no_images"]  # the old ones are gone


def test_a_row_whose_image_has_too_many_pixels_is_dropped_and_counted(home: Path) -> None:
    """Bug: such an image, of half a megabyte, took 2.6 GB of memory in every later stage."""
    folder = Path("data/seen")
    folder.mkdir()
    (folder / "own.png").write_bytes(png_of(13000, 13000))
    rows = [
        {"prompt": f"<image>Picture {n}?", "answer": "Rain.", "image": {"bytes": png(n + 1), "path": None}}
        for n in range(30)
    ]
    rows[4]["image"] = {"bytes": png_of(8193, 8192), "path": None}
    rows[5]["image"] = {"bytes": None, "path": "own.png"}
    pl.DataFrame(rows).write_parquet(folder / "a.parquet")
    set_lines(raw="data/seen")
    _, _, report = outcome()
    assert report["dropped_reasons"] == {"image_too_large": 2} and report["rows_out"] == 28
    assert report["pictures_written"] == 28
    rows[4]["image"] = {"bytes": png(40), "path": None}
    pl.DataFrame(rows).write_parquet(folder / "a.parquet")
    set_lines(max_dropped_share="0.01")
    found = "image 1 of 1, 'data/seen/own.png', has more than 67,108,864 pixels, expected a smaller one"
    with pytest.raises(ValueError, match=rf"\n  image_too_large 1, first a\.parquet, row 5: {found}"):
        fix_data.main()


def test_another_image_under_the_same_name_changes_the_rows(home: Path) -> None:
    """Bug: rows held the user's path, so replacing an image on disk reran fix_data only, and later stages were stale."""
    folder = Path("data/seen")
    folder.mkdir()
    rows = [{"id": f"p{n}", "prompt": f"<image>Picture {n}?", "answer": "Rain.", "image": "sky.png"} for n in range(40)]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    set_lines(raw="data/seen")
    found = []
    for data in (png(1), png(2), encode_image("BMP")):
        (folder / "sky.png").write_bytes(data)
        tables = outcome()[:2]
        (image,) = {image for table in tables for images in table["images"] for image in images}
        assert Path(image).read_bytes() == data
        assert [file.as_posix() for file in fix_data.IMAGES_FOLDER.iterdir()] == [image]
        found.append(image)
    assert len(set(found)) == 3
