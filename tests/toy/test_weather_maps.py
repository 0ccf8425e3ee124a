"""Weather maps contain their answers, and the target learns to read them."""

import datetime as dt
import itertools
import random

import torch

from stages.toy import multimodal_target, text_targets, weather, weather_maps


def test_every_pair_of_days_looks_different() -> None:
    days = [
        weather.WeatherDay("2026-01-01", low, low + more, rain, sky)
        for sky in weather_maps.SKY_COLOURS
        for low in weather_maps.NIGHT_TEMPERATURES
        for more in (4, 6, 8, 10)
        for rain in range(0, 100, 10)
    ]
    assert len({weather_maps.draw_map((day,)).tobytes() for day in days}) == len(days)


def test_a_target_learns_to_read_maps() -> None:
    """Three maps, one question: the answer depends on the map alone. A long test covers maps outside the training data."""
    torch.set_num_threads(1)
    rng, first = random.Random(3), dt.date(2026, 3, 1)
    corpus = []
    for _ in range(3):
        days = weather_maps._make_days(rng, first, 2)
        talk = [{"role": "user", "content": f"{weather_maps.IMAGE_PLACEHOLDER}Forecast?"},
                {"role": "assistant", "content": weather.format_toon(weather.WeatherForecast("Lyon", "C", days))}]  # fmt: skip
        corpus.append((talk, [weather_maps.draw_map(days)]))
    tokenizer = multimodal_target.build_tokenizer(list(itertools.islice(weather_maps.generate_conversations(7), 200)))
    model = multimodal_target.build_model(tokenizer, 7)
    rows = multimodal_target.encode_conversations(tokenizer, multimodal_target.build_processor(), corpus)
    more = multimodal_target.make_image_inputs(rows, model.config.image_token_id)
    losses = [
        loss for _, loss in text_targets.train_target(model, [(r.ids, r.labels) for r in rows], 7, 50, 1024, 0.02, more)
    ]
    assert losses[-1] < losses[0] / 50
    begin = int((rows[0].labels != -100).nonzero()[0]) + 2  # behind the header's last two tokens
    inputs = more(list(range(3)))
    prompts = torch.stack([row.ids[:begin] for row in rows])
    assert (prompts == prompts[0]).all()
    marks = inputs["mm_token_type_ids"][:, :begin]
    output = model.eval().generate(prompts, max_new_tokens=80, do_sample=False, **inputs | {"mm_token_type_ids": marks})
    for row, ids in zip(rows, output, strict=True):
        assert torch.equal(ids[: len(row.ids) - 1], row.ids[:-1])  # less the line break behind the end
