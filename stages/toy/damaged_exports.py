"""Damage clean conversations as real exports do: fences, prose, wrong counts, lost rows, empty turns, duplicates.

    python -m stages.toy.damaged_exports > data/raw/weather_toon.jsonl          # the committed file, byte for byte
    python -m stages.toy.damaged_exports maps > data/raw/weather_maps.jsonl     # equal but for the compression of its PNGs

Each corruption is a pure function (rng, text) -> text of an answer, in one of three tables: SURROUNDING leaves the TOON table
as it is, SPELLING writes the same data differently, LOSS removes data or makes it ambiguous. A corruption that does not apply
returns its text unchanged. All randomness is random.Random. The shares of the kinds are guesses: no public count was found.
"""

import base64
import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import toon_format
from PIL import Image

from stages.toy import weather, weather_maps

EXPORT_SEED = 23  # not prepare_target.seed: the target was not trained on the questions of the export
EXPORT_ROWS = 2_000
MAPS_EXPORT_SEED, MAPS_EXPORT_ROWS = 29, 320
DAMAGED_SHARE = 0.35  # share of conversations that are damaged

Message = dict[str, Any]
Corruption = Callable[[random.Random, str], str]


# --- SURROUNDING: around the table -----------------------------------------------------------------------------------


def fence(rng: random.Random, text: str) -> str:
    return f"```{rng.choice(('toon', 'toon', 'text', ''))}\n{text}\n```"


def prose_before(rng: random.Random, text: str) -> str:
    """Put a sentence before the table. A strict decoder reads the first, which ends in a colon, as a key."""
    return rng.choice(("Here is the forecast:\n", "Sure! Here you go:\n\n", "Of course.\n")) + text


def prose_after(rng: random.Random, text: str) -> str:
    return text + rng.choice(("\nHope this helps!", "\n\nLet me know if you need more days."))


def note_after(rng: random.Random, text: str) -> str:
    """Append a note, which a decoder reads as one more key."""
    return text + rng.choice(("\nNote: temperatures are rounded.", "\n\nNote: rain is a chance in percent"))


# --- SPELLING: the same data, written differently --------------------------------------------------------------------


def wrong_count(rng: random.Random, text: str) -> str:
    return re.sub(r"days\[(\d+)\]", lambda m: f"days[{max(0, int(m[1]) + rng.choice((-1, 1, 2)))}]", text)


def literal_count(rng: random.Random, text: str) -> str:
    """Write [N], as echoed from an instruction, or no count."""
    return re.sub(r"days\[\d+\]", rng.choice(("days[N]", "days")), text)


def old_dialect(rng: random.Random, text: str) -> str:
    return re.sub(r"days\[(\d+)\]", rng.choice((r"days[#\1]", r"days[\1,]")), text)


def header_space(rng: random.Random, text: str) -> str:
    return re.sub(r"days(\[[^\]\n]*\]){", rng.choice((r"days \1{", r"days\1 {")), text)


def missing_colon(rng: random.Random, text: str) -> str:
    return text.replace("}:", "}")


def tab_indent(rng: random.Random, text: str) -> str:
    return _change_each_row(text, lambda row: "\t" + row.strip())


def wide_indent(rng: random.Random, text: str) -> str:
    return _change_each_row(text, lambda row: "    " + row.strip())


def no_indent(rng: random.Random, text: str) -> str:
    return _change_each_row(text, str.strip)


def blank_lines(rng: random.Random, text: str) -> str:
    return _change_each_row(text, lambda row: row + "\n")


def carriage_returns(rng: random.Random, text: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def trailing_commas(rng: random.Random, text: str) -> str:
    return _change_each_row(text, lambda row: row + ",")


def comment(rng: random.Random, text: str) -> str:
    return text.replace("\ndays", "\n# one row per day\ndays")


def typography(rng: random.Random, text: str) -> str:
    """Write as a word processor does: the minus sign U+2212, sometimes curly quotes around the place."""
    text = text.replace(",-", ",−")
    return re.sub(r"^place: (\w+)$", r"place: “\1”", text, flags=re.MULTILINE) if rng.random() < 0.5 else text


def as_json(rng: random.Random, text: str) -> str:
    try:
        return json.dumps(toon_format.loads(text), indent=rng.choice((None, 2)))
    except toon_format.ToonDecodeError:  # another corruption was applied before
        return text


# --- LOSS: data lost or ambiguous ------------------------------------------------------------------------------------


def cut_row(rng: random.Random, text: str) -> str:
    """Cut inside the last row, as a token limit does."""
    rows = _find_rows(text)
    return text[: rng.randrange(rows[-1].start() + 1, rows[-1].end())] if rows else text


def cut_table(rng: random.Random, text: str) -> str:
    """Cut between two rows."""
    rows = _find_rows(text)
    return text[: rng.choice(rows).start()].rstrip() if rows else text


def lost_cell(rng: random.Random, text: str) -> str:
    def lose(row: str) -> str:
        cells = row.split(",")
        del cells[rng.randrange(len(cells))]
        return ",".join(cells)

    return _change_one_row(rng, text, lose)


def extra_cell(rng: random.Random, text: str) -> str:
    return _change_one_row(rng, text, lambda row: row.rstrip(",") + f",{rng.randrange(100)}")


def decimal_comma(rng: random.Random, text: str) -> str:
    return _change_one_row(rng, text, lambda row: re.sub(r",(\d+),", rf",\1,{rng.randrange(10)},", row, count=1))


def unit_in_cell(rng: random.Random, text: str) -> str:
    return _change_one_row(rng, text, lambda row: re.sub(r",(\d+),", rng.choice((r",\1 C,", r",\1%,")), row, count=1))


def no_value(rng: random.Random, text: str) -> str:
    word = rng.choice(("N/A", "None", "True", "null", "true"))
    return _change_one_row(rng, text, lambda row: re.sub(r",(\d+),", f",{word},", row, count=1))


def lost_row(rng: random.Random, text: str) -> str:
    return _change_one_row(rng, text, lambda row: "")


def repeated_row(rng: random.Random, text: str) -> str:
    return _change_one_row(rng, text, lambda row: f"{row}\n{row}")


def repeated_document(rng: random.Random, text: str) -> str:
    return f"{text}\n{text}"


SURROUNDING_CORRUPTIONS: dict[str, Corruption] = {f.__name__: f for f in (fence, prose_before, prose_after, note_after)}
SPELLING_CORRUPTIONS: dict[str, Corruption] = {
    f.__name__: f
    for f in (
        wrong_count, literal_count, old_dialect, header_space, missing_colon, tab_indent, wide_indent, no_indent,
        blank_lines, carriage_returns, trailing_commas, comment, typography, as_json,
    )
}  # fmt: skip
LOSS_CORRUPTIONS: dict[str, Corruption] = {
    f.__name__: f
    for f in (
        cut_row, cut_table, lost_cell, extra_cell, decimal_comma, unit_in_cell, no_value, lost_row, repeated_row,
        repeated_document,
    )
}  # fmt: skip


def _find_rows(text: str) -> list[re.Match[str]]:
    """Return the table's rows with indentation, without line ends."""
    return list(re.finditer(r"^[ \t]*\d{4}-\d\d-\d\d,[^\r\n]*", text, re.MULTILINE))


def _change_each_row(text: str, change: Callable[[str], str]) -> str:
    return re.sub(r"^[ \t]*\d{4}-\d\d-\d\d,[^\r\n]*", lambda m: change(m[0]), text, flags=re.MULTILINE)


def _change_one_row(rng: random.Random, text: str, change: Callable[[str], str]) -> str:
    rows = _find_rows(text)
    if not rows:
        return text
    row = rng.choice(rows)
    return text[: row.start()] + change(row[0]) + text[row.end() :]


# --- conversations ---------------------------------------------------------------------------------------------------


def empty_turn(rng: random.Random, messages: list[Message]) -> list[Message]:
    turn = rng.randrange(1, len(messages))
    return [{**m, "content": rng.choice(("", " "))} if i == turn else m for i, m in enumerate(messages)]


def lost_turn(rng: random.Random, messages: list[Message]) -> list[Message]:
    """Remove a question or an answer."""
    turn = rng.randrange(1, len(messages))
    return messages[:turn] + messages[turn + 1 :]


def damage_conversation(rng: random.Random, messages: list[Message]) -> list[Message]:
    """Damage a conversation in one turn, most often with one or two corruptions of an answer."""
    chance = rng.random()
    if chance < 0.04:
        return empty_turn(rng, messages)
    if chance < 0.07:
        return lost_turn(rng, messages)
    if chance < 0.30:
        changes = [rng.choice(list(SURROUNDING_CORRUPTIONS.values()))]
    elif chance < 0.70:
        changes = [rng.choice(list(SPELLING_CORRUPTIONS.values()))]
    elif chance < 0.85:
        changes = [rng.choice(list(SPELLING_CORRUPTIONS.values())), rng.choice(list(SURROUNDING_CORRUPTIONS.values()))]
    else:
        changes = [rng.choice(list(LOSS_CORRUPTIONS.values()))]
    turn = rng.choice([i for i, m in enumerate(messages) if m["role"] == "assistant"])
    answer = messages[turn]["content"]
    for change in changes:
        answer = change(rng, answer)
    return [{**m, "content": answer} if i == turn else m for i, m in enumerate(messages)]


def export_weather(seed: int, rows: int) -> Iterator[dict[str, Any]]:
    """Yield ShareGPT rows. `weather-000042` is conversation 42 of the seed; `weather-000042-again` is its exact copy."""
    rng = random.Random(seed + 1)  # not the stream of the conversations
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    num_rows = 0
    for number, messages in enumerate(weather.generate_conversations(seed)):
        if rng.random() < DAMAGED_SHARE:
            messages = damage_conversation(rng, messages)
        turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
        copy = f"weather-{number:06d}-again" if rng.random() < 0.015 else None
        for identifier in filter(None, (f"weather-{number:06d}", copy)):
            if num_rows == rows:
                return
            yield {"id": identifier, "conversations": turns}
            num_rows += 1


def export_maps(seed: int, rows: int) -> Iterator[dict[str, Any]]:
    """Yield rows of OpenAI messages with the maps as `data:` URLs in the content parts of questions; ids as `map-000042`."""
    rng = random.Random(seed + 1)
    for number, (messages, maps) in zip(range(rows), weather_maps.generate_conversations(seed), strict=False):
        urls = iter([_encode_data_url(image) for image in maps])
        parts = [
            _build_question_parts(m, urls) if weather_maps.IMAGE_PLACEHOLDER in m["content"] else m for m in messages
        ]
        if rng.random() < DAMAGED_SHARE:
            parts = damage_conversation(rng, parts)
        yield {"id": f"map-{number:06d}", "messages": parts}


def _build_question_parts(message: Message, urls: Iterator[str]) -> dict[str, Any]:
    """Return a question that begins with a map, as content parts."""
    text = {"type": "text", "text": message["content"].removeprefix(weather_maps.IMAGE_PLACEHOLDER)}
    return {**message, "content": [{"type": "image_url", "image_url": {"url": next(urls)}}, text]}


def _encode_data_url(image: weather_maps.MapImage) -> str:
    """Return an image as a PNG in a `data:` URL. The bytes depend on Pillow's zlib, so tests compare pixels."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def main(*arguments: str) -> None:
    rows = {
        (): lambda: export_weather(EXPORT_SEED, EXPORT_ROWS),
        ("maps",): lambda: export_maps(MAPS_EXPORT_SEED, MAPS_EXPORT_ROWS),
    }
    if arguments not in rows:
        raise SystemExit(f"expected no argument or maps, found {' '.join(arguments)}")
    for row in rows[arguments]():
        sys.stdout.write(json.dumps(row) + "\n")  # ASCII: independent of the terminal's encoding


if __name__ == "__main__":
    main(*sys.argv[1:])
