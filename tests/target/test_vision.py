"""Pictures: what the target is given for them is what transformers' own processor gives it."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from stages.target import chat_template, generation, loading, vision
from tests.target.multimodal_targets import KINDS, picture, save

every_kind = pytest.mark.parametrize("kind", KINDS)


def make_conversation(*turns: list[str] | str) -> list[dict[str, Any]]:
    """A user's turn as a list, in which what ends in a picture's extension is one; an answer as a text."""
    return [
        {"role": "assistant", "content": turn}
        if isinstance(turn, str)
        else {
            "role": "user",
            "content": [
                {"type": "image", "image": one} if one.endswith((".png", ".jpg")) else {"type": "text", "text": one}
                for one in turn
            ],
        }
        for turn in turns
    ]


@pytest.fixture
def conversations(tmp_path: Path) -> list[list[dict[str, Any]]]:
    wide = picture(tmp_path / "wide.png", 40, 150, 1)
    tall = picture(tmp_path / "tall.jpg", 90, 33, 2)
    large = picture(tmp_path / "large.png", 300, 400, 3)  # is made smaller
    small = picture(tmp_path / "small.png", 9, 11, 4)  # is made larger
    return [
        make_conversation([wide, "what is it?"]),
        make_conversation([small, "and ", tall, " both?"], "rain", ["then ", large, wide]),
        make_conversation(["no picture here"]),
        make_conversation([large]),
    ]


def list_images(messages: list[dict[str, Any]]) -> list[str]:
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def encode_by_transformers(processor: Any, messages: list[dict[str, Any]]) -> Any:
    return processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def encode_by_aerie(eyes: vision.CachedImageProcessor, tok: Any, messages: list[dict[str, Any]]) -> list[int]:
    return vision.expand_image_tokens(
        chat_template.encode_prompt(tok, messages), eyes.image_token_id, eyes.count_image_tokens(list_images(messages))
    )


@every_kind
def test_prompts_and_patches_are_transformers_own(kind: str, conversations: Any, tmp_path: Path) -> None:
    _, processor = save(kind, tmp_path / "target")
    eyes = vision.CachedImageProcessor(tmp_path / "target", False)
    for messages in conversations:
        expected = encode_by_transformers(processor, messages)
        assert encode_by_aerie(eyes, processor.tokenizer, messages) == expected["input_ids"][0].tolist()
        if paths := list_images(messages):
            seen = eyes.load_patches(paths)
            assert torch.equal(seen.pixel_values, expected["pixel_values"]) and seen.pixel_values.dtype == torch.float32
            assert (
                torch.equal(seen.image_grid_thw, expected["image_grid_thw"])
                and seen.image_grid_thw.dtype == torch.int64
            )
            assert eyes.count_image_tokens(paths) == (seen.image_grid_thw.prod(-1) // 4).tolist()


@every_kind
def test_a_batch_with_pictures_is_answered_as_each_prompt_alone(kind: str, conversations: Any, tmp_path: Path) -> None:
    """Prompts of other lengths, pictures of other sizes, none at all; against `generate` on the processor's own output."""
    _, processor = save(kind, tmp_path / "target")
    model = loading.load_target(str(tmp_path / "target"), "float32", "cpu")
    eyes, eos = vision.CachedImageProcessor(tmp_path / "target", False), model.config.get_text_config().eos_token_id
    prompts = [encode_by_aerie(eyes, processor.tokenizer, messages) for messages in conversations]
    seen = eyes.load_patches([path for messages in conversations for path in list_images(messages)])
    found = generation.generate_answers(model, prompts, 12, 0.0, 1.0, [eos], eos, 1, seen)
    blind = generation.generate_answers(
        model, prompts[2:3], 12, 0.0, 1.0, [eos], eos, 1
    )  # after pictures: nothing of them is left
    for messages, (ids, _) in zip(conversations, found, strict=True):
        inputs = encode_by_transformers(processor, messages)
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=eos)
        alone = out[0, inputs["input_ids"].shape[1] :].tolist()
        assert ids == generation._cut_at_end_token(alone, [eos])[0]
    assert blind == found[2:3]
    other = vision.ImagePatches(seen.pixel_values.flip(0), seen.image_grid_thw)
    assert generation.generate_answers(model, prompts, 12, 0.0, 1.0, [eos], eos, 1, other) != found  # it looks at them


@pytest.mark.parametrize(
    ("name", "mode", "as_it_is"), [("p.jpg", "RGB", True), ("p.png", "RGBA", False), ("p.gif", "P", False)]
)
def test_a_server_is_sent_what_is_seen_here(name: str, mode: str, as_it_is: bool, tmp_path: Path) -> None:
    save("qwen3-vl", tmp_path / "target")
    path = picture(tmp_path / name, 50, 70, 3, mode)
    head, _, data = vision.CachedImageProcessor(tmp_path / "target", False).build_data_url(path).partition(";base64,")
    sent = base64.b64decode(data)
    assert (sent == Path(path).read_bytes()) == as_it_is
    assert head == f"data:image/{Image.open(io.BytesIO(sent)).format.lower()}"  # type: ignore[union-attr]
    assert Image.open(io.BytesIO(sent)).convert("RGB").tobytes() == load_image(path).tobytes()


def test_a_picture_on_its_side_is_turned_upright_here_and_for_servers(tmp_path: Path) -> None:
    """Cameras write so. A server that doesn't look at the tag would see another picture, of other size."""
    _, processor = save("qwen3-vl", tmp_path / "target")
    exif = Image.Exif()
    exif[vision.EXIF_ORIENTATION] = 6
    path = picture(tmp_path / "side.jpg", 32, 96, 3, exif=exif)
    eyes = vision.CachedImageProcessor(tmp_path / "target", False)
    assert eyes.load_patches([path]).image_grid_thw.tolist() == [[1, 6, 2]]
    expected = encode_by_transformers(processor, make_conversation([path]))
    assert torch.equal(eyes.load_patches([path]).pixel_values, expected["pixel_values"])
    sent = Image.open(io.BytesIO(base64.b64decode(eyes.build_data_url(path).partition(",")[2])))
    assert sent.size == (32, 96) and not sent.getexif()


def test_broken_pictures_are_told_from_missing_ones(tmp_path: Path) -> None:
    save("qwen3-vl", tmp_path / "target")
    eyes = vision.CachedImageProcessor(tmp_path / "target", False)
    whole = Path(picture(tmp_path / "a.png", 64, 64)).read_bytes()
    jpeg = Path(picture(tmp_path / "a.jpg", 64, 64)).read_bytes()
    damaged = bytearray(whole)
    damaged[45] ^= 0xFF  # inside a chunk: its sum is wrong
    cases = {"cut.png": whole[:-40], "cut.jpg": jpeg[: len(jpeg) // 2], "none.png": b"\x89PNG\r\n\x1a\nno", "sum.png": damaged,
             "empty.png": b"", "text.gif": b"GIF89a, it says"}  # fmt: skip
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        for look in (eyes.count_image_tokens, eyes.load_patches, lambda paths: eyes.build_data_url(paths[0])):
            with pytest.raises(vision.UnreadableImageError, match=rf"{name} can't be decoded as an image"):
                look([str(tmp_path / name)])
    with pytest.raises(vision.UnreadableImageError, match=r"thin\.png can't be cut into patches .*aspect ratio"):
        eyes.count_image_tokens([picture(tmp_path / "thin.png", 2, 900)])
    with pytest.raises(ValueError, match=r"gone\.png not found, expected an image; run: dvc repro fix_data") as error:
        eyes.load_patches([str(tmp_path / "gone.png")])
    assert not isinstance(error.value, vision.UnreadableImageError)


def test_settings_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    """Bug: a processor whose images have at least a billion pixels took 6 GiB and a minute of each stage, for one of 64 x 64."""
    save("qwen3-vl", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"min_pixels": 10**9}))
    with pytest.raises(ValueError, match=r"patches needs more than 512 MiB of memory.*preprocessor_config\.json"):
        vision.CachedImageProcessor(tmp_path, False).load_patches([picture(tmp_path / "a.png", 64, 64)])
