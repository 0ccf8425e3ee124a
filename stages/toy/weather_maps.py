"""Generate weather maps: small images that hold the answer to a question, and the conversations about them.

A map has a column of two tiles for each day. The upper tile has the colour and sign of the sky, and along its lower edge the
probability of rain as a blue strip. The lower tile has two bars, night and day temperature: height and the blue-to-red hue
grow with temperature, and a green component repeats every ten degrees, so that steps of two degrees are visible. Place and
first day come from the question, everything else from the map; it can't be guessed, since these days ignore climate and
season. Maps are drawn in whole pixels by numpy, so they do not depend on the version of an imaging library.

Shapes: D days, TILE = TILE_PIXELS.
"""

import datetime as dt
import random
from collections.abc import Iterator

import numpy as np

from stages.toy import weather

TILE_PIXELS = 32  # the image area of one embedding: two by two patches of 16 pixels
MAX_DAYS = 5
NIGHT_TEMPERATURES = range(-10, 32, 2)  # in C, even degrees only: a tile's height is 32 pixels, at two degrees a pixel
DRY_SKY_SIGNS, WET_SKY_SIGNS = (
    {"sunny": "sun", "cloudy": "cloud", "fog": "mist"},
    {"rain": "drops", "storm": "bolt", "snow": "flakes"},
)
SKY_COLOURS = {
    "sunny": (120, 190, 255), "cloudy": (170, 180, 190), "fog": (225, 225, 215),
    "rain": (90, 110, 150), "storm": (60, 50, 80), "snow": (200, 215, 240),
}  # fmt: skip
# All end alike: the place is one token of about a hundred in an answer, too weak a signal to learn where to look for it.
_OPENINGS = tuple(
    opening + " {place} from {first}, {days} days, in C."
    for opening in ("Forecast for", "The weather in", "Read the map of")
)
_FOLLOW_UPS = ("And the next {days} days?", "Continue for {days} more days.")
IMAGE_PLACEHOLDER = "<image>"  # marks a map's position in a question, as in an export

MapImage = np.ndarray  # [2 * TILE, D * TILE, 3] uint8


def draw_map(days: tuple[weather.WeatherDay, ...]) -> MapImage:
    """Return the map of some days: [2 * TILE, D * TILE, 3] uint8."""
    return np.concatenate([np.concatenate([_draw_sky(day), _draw_temperature_bars(day)]) for day in days], axis=1)


def _draw_sky(day: weather.WeatherDay) -> MapImage:
    """Return the upper tile of a day: [TILE, TILE, 3]."""
    tile = np.full((TILE_PIXELS, TILE_PIXELS, 3), SKY_COLOURS[day.sky], dtype=np.uint8)
    y, x = np.mgrid[:TILE_PIXELS, :TILE_PIXELS]
    sign, colour = {
        "sun": ((y - 12) ** 2 + (x - 16) ** 2 < 81, (255, 220, 40)),
        "cloud": (4 * (y - 13) ** 2 + (x - 16) ** 2 < 144, (250, 250, 250)),
        "mist": ((y % 6 < 2) & (y < 24), (150, 150, 140)),
        "drops": ((x % 8 < 2) & (y > 4) & (y < 22), (30, 60, 220)),
        "bolt": (abs(x - 22 + y) < 3, (255, 250, 120)),
        "flakes": ((x % 8 < 3) & (y % 8 < 3) & (y < 24), (255, 255, 255)),
    }[(DRY_SKY_SIGNS | WET_SKY_SIGNS)[day.sky]]
    tile[sign] = colour
    tile[26:] = 20
    tile[26:, : day.rain * TILE_PIXELS // 100] = (0, 120, 255)
    return tile


def _draw_temperature_bars(day: weather.WeatherDay) -> MapImage:
    """Return the lower tile of a day: [TILE, TILE, 3]."""
    tile = np.full((TILE_PIXELS, TILE_PIXELS, 3), 255, dtype=np.uint8)
    for left, degrees in ((0, day.low), (TILE_PIXELS // 2, day.high)):
        height = (degrees - NIGHT_TEMPERATURES[0] + 4) // 2  # two degrees a pixel
        warmth = min(255, (degrees - NIGHT_TEMPERATURES[0]) * 5)
        tile[TILE_PIXELS - height :, left : left + TILE_PIXELS // 2] = (warmth, 50 * (degrees // 2 % 5), 255 - warmth)
    return tile


def _make_days(rng: random.Random, first: dt.date, count: int) -> tuple[weather.WeatherDay, ...]:
    days = []
    for offset in range(count):
        wet = rng.random() < 0.5
        sky = rng.choice(list(WET_SKY_SIGNS if wet else DRY_SKY_SIGNS))
        low = rng.choice(NIGHT_TEMPERATURES)
        high, rain = low + rng.choice((4, 6, 8, 10)), 10 * rng.randrange(*((5, 10) if wet else (0, 5)))
        days.append(weather.WeatherDay((first + dt.timedelta(days=offset)).isoformat(), low, high, rain, sky))
    return tuple(days)


def make_conversation(rng: random.Random) -> tuple[list[dict[str, str]], list[MapImage]]:
    """Return (messages with IMAGE_PLACEHOLDER where a question has a map, the maps in that order)."""
    place, first = rng.choice(list(weather.CLIMATES)), dt.date(2026, 1, 1) + dt.timedelta(days=rng.randrange(365))
    turns = 2 if rng.random() < 1 / 3 else 1
    messages, maps = [{"role": "system", "content": rng.choice(weather.SYSTEM_MESSAGES)}], []
    for turn in range(turns):
        count = rng.randrange(2, MAX_DAYS + 1) if turns == 1 else rng.randrange(2, 4)
        days = _make_days(rng, first, count)
        wording = rng.choice(_OPENINGS if turn == 0 else _FOLLOW_UPS)
        question = wording.format(place=place, first=first.isoformat(), days=count)
        answer = weather.format_toon(weather.WeatherForecast(place, "C", days))
        messages += [
            {"role": "user", "content": IMAGE_PLACEHOLDER + question},
            {"role": "assistant", "content": answer},
        ]
        maps.append(draw_map(days))
        first += dt.timedelta(days=count)
    return messages, maps


def generate_conversations(seed: int) -> Iterator[tuple[list[dict[str, str]], list[MapImage]]]:
    """Yield conversations without end, the same for the same seed on every machine."""
    rng = random.Random(seed)
    while True:
        yield make_conversation(rng)
