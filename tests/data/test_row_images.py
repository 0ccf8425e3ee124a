"""Images of a row: by path, as bytes and as data: URLs, and a row for each reason to drop one by its images."""

import os
from pathlib import Path
from typing import Any

import pytest

from stages.data import chat_formats, images
from stages.data.row_images import DroppedRowError
from tests.data.test_chat_formats import PLAIN, SAY, read, save_file_only
from tests.data.test_images import png_of


def parts(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}, PLAIN[1]]}


BMP = b"BM and more"
FILE = "a file; a relative path starts at the data file's folder"


BASE64 = "data:image/png;base64,iVBORw0KGgo"  # its padding is cut off
SVG, TEXT = "data:image/svg+xml,<svg/>", "DATA:text/plain;base64,aGVsbG8="
LARGE = {"bytes": png_of(8193, 8192), "path": "sky.png"}
MARKED = {**PLAIN[0], "content": "<image>" * 3}


@pytest.mark.parametrize(
    ("row", "reason", "found"),
    [
        (parts("nowhere.png"), "image_missing", "image 1 of 1, 'data/nowhere.png', is no file here"),
        (parts(None), "image_missing", "image 1 of 1 is an object, '{\"url\": null}'"),
        (parts("a\0b"), "image_missing", "image 1 of 1, 'a\\x00b', is no path"),
        (parts("https://example.org/sky.png"), "image_url", "image 1 of 1, 'https://example.org/sky.png', is a URL"),
        (parts(BASE64), "image_bytes", f"image 1 of 1, '{BASE64}', is no valid base64"),
        (parts(TEXT), "image_bytes", f"image 1 of 1, '{TEXT}', has 5 bytes that begin with 68 65 6c 6c 6f"),
        ({"messages": PLAIN, "image": {"bytes": BMP, "path": "sky.png"}}, "image_bytes", "image 1 of 1, 'sky.png', has 11 bytes"),
        ({"messages": PLAIN, "images": [LARGE]}, "image_too_large", "image 1 of 1, 'sky.png', has more than 67,108,864 pixels"),
        ({"messages": PLAIN, "images": ["sky.png"]}, "image_count", "1 image(s), the first, 'sky.png', and 0 mark(s) <image> in"),
        ({"messages": [MARKED, PLAIN[1]], "images": []}, "image_count", ""),
        ({"messages": [MARKED, PLAIN[1]], "images": ["sky.png", "sky.png", "b.png"]}, "image_missing", "image 3 of 3, "),
    ],
)  # fmt: skip
def test_a_row_is_dropped_by_an_image_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], reason: str, found: str
) -> None:
    """Bug: the beginning of the row was shown, or the file's path alone: neither which image nor why."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/sky.png").touch()
    with pytest.raises(DroppedRowError, match=f"^{reason}$") as dropped:
        read(row, "data")
    assert str(dropped.value.found).startswith(found) and dropped.value.expected


@pytest.mark.parametrize(
    "given", ["{secret}", "file://{secret}", "../secret.png", "link.png", "folder/secret.png", "/proc/self/environ"]
)
def test_a_row_copies_no_other_file_of_its_reader(tmp_path: Path, given: str) -> None:
    """Bug: a row's `image` copied any readable file of the owner into the run, and `dvc push` shared it."""
    secret, data = tmp_path / "secret.png", tmp_path / "data"
    secret.write_bytes(png_of(3, 2))
    data.mkdir()
    (data / "link.png").symlink_to(secret)
    (data / "folder").symlink_to(tmp_path)
    row = {"messages": [{**PLAIN[0], "content": "<image>?"}, PLAIN[1]], "image": given.format(secret=secret)}
    with pytest.raises(DroppedRowError, match="image_outside") as dropped:
        read(row, str(data))
    assert "image_folders" in dropped.value.expected
    if "proc" not in given:
        found = chat_formats.parse_conversation(row, "messages", str(data), save_file_only, image_roots=[tmp_path])
        assert found.images is not None  # its folder is named in params.yaml


@pytest.mark.parametrize("kind", ["pipe", "device", "text"])
def test_only_a_plain_file_that_decodes_is_copied(tmp_path: Path, kind: str) -> None:
    """Bug: a pipe was waited for, a device read without end, and a text under the name of an image was copied."""
    path = tmp_path / "sky.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("password: secret")
    row = {
        "messages": [{**PLAIN[0], "content": "<image>?"}, PLAIN[1]],
        "image": "/dev/zero" if kind == "device" else "sky.png",
    }
    roots, save = [Path("/dev")], lambda data, extension: images.save_image(data, tmp_path, extension)
    with pytest.raises(DroppedRowError, match="image_bytes" if kind == "text" else "image_missing") as dropped:
        chat_formats.parse_conversation(row, "messages", str(tmp_path), save, image_roots=roots)
    assert "70 61" not in str(dropped.value.found)  # nothing of a file's content is shown


def test_images_by_path(tmp_path: Path) -> None:
    """Bug: rows held the user's path, so replacing an image on disk changed no row, and only fix_data reran."""
    path = (tmp_path / "sky.png").as_posix()
    Path(path).write_bytes(b"a sky")
    kept = ["b'a sky'.png"]
    human = {"from": "human", "value": "<image>\nWhat is this?"}
    for image in ({"image": "sky.png"}, {"images": ["sky.png"]}, {"images": [{"path": path, "bytes": None}]}):
        found = read({"conversations": [human, PLAIN[1] | {"from": "gpt", "value": SAY}], **image}, str(tmp_path))
        assert found.images == kept and found.messages[0]["content"] == human["value"]
    part = [{"type": "image_url", "image_url": {"url": f"file://{path}"}}, {"type": "text", "text": "What?"}]
    found = read({"messages": [{"role": "user", "content": part}, PLAIN[1]]}, str(tmp_path))
    assert found.images == kept and found.messages[0]["content"] == "<image>What?"
