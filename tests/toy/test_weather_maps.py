"""Drawn maps: an answer can be read off its map, and the target learns to."""

import datetime as dt
import itertools
import random

import numpy as np
import pytest
import torch
from toon_format import loads

from stages.toy import multimodal_target, text_targets, weather, weather_maps


def read(picture: weather_maps.MapImage) -> list[tuple[str, int, int, int]]:
    """(sky, low, high, rain) of each day, by looking at single pixels."""
    days = []
    for left in range(0, picture.shape[1], 32):
        tile = picture[:, left : left + 32].astype(int)
        (sky,) = [name for name, colour in weather_maps.SKY_COLOURS.items() if tuple(tile[3, 1]) == colour]
        rain = sum(tuple(pixel) == (0, 120, 255) for pixel in tile[31])
        low, high = (sum(tuple(pixel) != (255, 255, 255) for pixel in tile[32:, x]) for x in (0, 31))
        days.append((sky, 2 * low - 14, 2 * high - 14, round(rain / 3.2 + 0.01) * 10))
    return days


def test_an_answer_is_what_its_map_shows() -> None:
    for messages, pictures in itertools.islice(weather_maps.generate_conversations(3), 300):
        said = [loads(m["content"]) for m in messages if m["role"] == "assistant"]
        asked = [m["content"] for m in messages if m["role"] == "user"]
        assert len(pictures) == len(said) and all(text.count(weather_maps.IMAGE_PLACEHOLDER) == 1 for text in asked)
        for table, picture in zip(said, pictures, strict=True):
            assert picture.shape == (64, 32 * len(table["days"]), 3) and picture.dtype == np.uint8
            assert read(picture) == [(day["sky"], day["low"], day["high"], day["rain"]) for day in table["days"]]


def test_every_pair_of_days_looks_different() -> None:
    days = [
        weather.WeatherDay("2026-01-01", low, low + more, rain, sky)
        for sky in weather_maps.SKY_COLOURS
        for low in weather_maps.NIGHT_TEMPERATURES
        for more in (4, 6, 8, 10)
        for rain in range(0, 100, 10)
    ]
    assert len({weather_maps.draw_map((day,)).tobytes() for day in days}) == len(days)


def test_a_target_learns_to_look() -> None:
    """Six maps, one question: what to answer is in the map alone. That it reads maps it never saw, a long test shows."""
    torch.set_num_threads(1)
    rng, first = random.Random(3), dt.date(2026, 3, 1)
    corpus = []
    for _ in range(6):
        days = weather_maps._make_days(rng, first, 2)
        talk = [{"role": "user", "content": f"{weather_maps.IMAGE_PLACEHOLDER}Forecast?"},
                {"role": "assistant", "content": weather.format_toon(weather.WeatherForecast("Lyon", "C", days))}]  # fmt: skip
        corpus.append((talk, [weather_maps.draw_map(days)]))
    tokenizer = multimodal_target.build_tokenizer(list(itertools.islice(weather_maps.generate_conversations(7), 200)))
    model = multimodal_target.build_model(tokenizer, 7)
    rows = multimodal_target.encode_conversations(tokenizer, multimodal_target.build_processor(), corpus)
    more = multimodal_target.make_image_inputs(rows, model.config.image_token_id)
    losses = [
        loss for _, loss in text_targets.train_target(model, [(r.ids, r.labels) for r in rows], 7, 70, 1024, 0.02, more)
    ]
    assert losses[-1] < losses[0] / 50
    begin = int((rows[0].labels != -100).nonzero()[0]) + 2  # behind the header's last two tokens
    inputs = more(list(range(6)))
    prompts = torch.stack([row.ids[:begin] for row in rows])
    assert (prompts == prompts[0]).all()
    marks = inputs["mm_token_type_ids"][:, :begin]
    said = model.eval().generate(prompts, max_new_tokens=80, do_sample=False, **inputs | {"mm_token_type_ids": marks})
    for row, ids in zip(rows, said, strict=True):
        assert torch.equal(ids[: len(row.ids) - 1], row.ids[:-1])  # less the line break behind the end


@pytest.mark.parametrize("seed", [7, 8])
def test_maps_follow_from_the_seed(seed: int) -> None:
    first, again = (list(itertools.islice(weather_maps.generate_conversations(seed), 5)) for _ in range(2))
    assert [messages for messages, _ in first] == [messages for messages, _ in again]
    assert all(
        np.array_equal(a, b) for (_, x), (_, y) in zip(first, again, strict=True) for a, b in zip(x, y, strict=True)
    )
