"""Damage clean conversations as real exports do: fences, prose, wrong counts, lost rows, empty turns, duplicates.

    python -m tests.toy.damaged_exports > data/raw/weather_toon.jsonl          # the committed file, byte for byte
    python -m tests.toy.damaged_exports maps > data/raw/weather_maps.jsonl     # equal but for the compression of its PNGs

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

TABLE_ROW = r"^[ \t]*\d{4}-\d\d-\d\d,[^\r\n]*"

Message = dict[str, Any]
Corruption = Callable[[random.Random, str], str]


def _find_rows(text: str) -> list[re.Match[str]]:
    """Return the table's rows with indentation, without line ends."""
    return list(re.finditer(TABLE_ROW, text, re.MULTILINE))


def _change_each_row(text: str, change: Callable[[str], str]) -> str:
    return re.sub(TABLE_ROW, lambda m: change(m[0]), text, flags=re.MULTILINE)


def _change_one_row(rng: random.Random, text: str, change: Callable[[str], str]) -> str:
    rows = _find_rows(text)
    if not rows:
        return text
    row = rng.choice(rows)
    return text[: row.start()] + change(row[0]) + text[row.end() :]


def _change_value(rng: random.Random, text: str, choose: Callable[[], str]) -> str:
    """Replace the first whole number of one row by a pattern that is chosen after the row."""
    return _change_one_row(rng, text, lambda row: re.sub(r",(\d+),", choose(), row, count=1))


SURROUNDING_CORRUPTIONS: dict[str, Corruption] = {
    "fence": lambda rng, text: f"```{rng.choice(('toon', 'toon', 'text', ''))}\n{text}\n```",
    # A strict decoder reads the first sentence, which ends in a colon, as a key.
    "prose_before": lambda rng, text: (
        rng.choice(("Here is the forecast:\n", "Sure! Here you go:\n\n", "Of course.\n")) + text
    ),
    "prose_after": lambda rng, text: (
        text + rng.choice(("\nHope this helps!", "\n\nLet me know if you need more days."))
    ),
    # A decoder reads a note as one more key.
    "note_after": lambda rng, text: (
        text + rng.choice(("\nNote: temperatures are rounded.", "\n\nNote: rain is a chance in percent"))
    ),
}


def _write_as_word_processor(rng: random.Random, text: str) -> str:
    """Write the minus sign U+2212, and sometimes curly quotes around the place."""
    text = text.replace(",-", ",\N{MINUS SIGN}")
    return re.sub(r"^place: (\w+)$", r"place: “\1”", text, flags=re.MULTILINE) if rng.random() < 0.5 else text


def _write_as_json(rng: random.Random, text: str) -> str:
    try:
        return json.dumps(toon_format.loads(text), indent=rng.choice((None, 2)))
    except toon_format.ToonDecodeError:  # another corruption was applied before
        return text


SPELLING_CORRUPTIONS: dict[str, Corruption] = {
    "wrong_count": lambda rng, text: re.sub(
        r"days\[(\d+)\]", lambda m: f"days[{max(0, int(m[1]) + rng.choice((-1, 1, 2)))}]", text
    ),
    # [N], as echoed from an instruction, or no count.
    "literal_count": lambda rng, text: re.sub(r"days\[\d+\]", rng.choice(("days[N]", "days")), text),
    "old_dialect": lambda rng, text: re.sub(r"days\[(\d+)\]", rng.choice((r"days[#\1]", r"days[\1,]")), text),
    "header_space": lambda rng, text: re.sub(r"days(\[[^\]\n]*\]){", rng.choice((r"days \1{", r"days\1 {")), text),
    "missing_colon": lambda rng, text: text.replace("}:", "}"),
    "tab_indent": lambda rng, text: _change_each_row(text, lambda row: "\t" + row.strip()),
    "wide_indent": lambda rng, text: _change_each_row(text, lambda row: "    " + row.strip()),
    "no_indent": lambda rng, text: _change_each_row(text, str.strip),
    "blank_lines": lambda rng, text: _change_each_row(text, lambda row: row + "\n"),
    "carriage_returns": lambda rng, text: text.replace("\r\n", "\n").replace("\n", "\r\n"),
    "trailing_commas": lambda rng, text: _change_each_row(text, lambda row: row + ","),
    "comment": lambda rng, text: text.replace("\ndays", "\n# one row per day\ndays"),
    "typography": _write_as_word_processor,
    "as_json": _write_as_json,
}


def _cut_row(rng: random.Random, text: str) -> str:
    """Cut inside the last row, as a token limit does."""
    rows = _find_rows(text)
    return text[: rng.randrange(rows[-1].start() + 1, rows[-1].end())] if rows else text


def _cut_table(rng: random.Random, text: str) -> str:
    """Cut between two rows."""
    rows = _find_rows(text)
    return text[: rng.choice(rows).start()].rstrip() if rows else text


def _drop_value(rng: random.Random, text: str) -> str:
    word = rng.choice(("N/A", "None", "True", "null", "true"))
    return _change_value(rng, text, lambda: f",{word},")


def _lose_cell(rng: random.Random, row: str) -> str:
    cells = row.split(",")
    del cells[rng.randrange(len(cells))]
    return ",".join(cells)


LOSS_CORRUPTIONS: dict[str, Corruption] = {
    "cut_row": _cut_row,
    "cut_table": _cut_table,
    "lost_cell": lambda rng, text: _change_one_row(rng, text, lambda row: _lose_cell(rng, row)),
    "extra_cell": lambda rng, text: _change_one_row(rng, text, lambda row: row.rstrip(",") + f",{rng.randrange(100)}"),
    "decimal_comma": lambda rng, text: _change_value(rng, text, lambda: rf",\1,{rng.randrange(10)},"),
    "unit_in_cell": lambda rng, text: _change_value(rng, text, lambda: rng.choice((r",\1 C,", r",\1%,"))),
    "no_value": _drop_value,
    "lost_row": lambda rng, text: _change_one_row(rng, text, lambda row: ""),
    "repeated_row": lambda rng, text: _change_one_row(rng, text, lambda row: f"{row}\n{row}"),
    "repeated_document": lambda rng, text: f"{text}\n{text}",
}


def _empty_one_turn(rng: random.Random, messages: list[Message]) -> list[Message]:
    turn = rng.randrange(1, len(messages))
    return [{**m, "content": rng.choice(("", " "))} if i == turn else m for i, m in enumerate(messages)]


def _lose_one_turn(rng: random.Random, messages: list[Message]) -> list[Message]:
    """Remove a question or an answer."""
    turn = rng.randrange(1, len(messages))
    return messages[:turn] + messages[turn + 1 :]


def damage_conversation(rng: random.Random, messages: list[Message]) -> list[Message]:
    """Damage a conversation in one turn, most often with one or two corruptions of an answer."""
    chance = rng.random()
    if chance < 0.04:
        return _empty_one_turn(rng, messages)
    if chance < 0.07:
        return _lose_one_turn(rng, messages)
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
