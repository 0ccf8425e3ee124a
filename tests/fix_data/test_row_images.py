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
from tests.data.test_images import encode_image
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
