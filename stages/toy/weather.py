"""Generate weather questions and their true answers as TOON tables.

A question names a place, a first day, a number of days and a unit; the answer is a TOON document whose table has one row per
day. A tiny model can learn the structure (dates count up, columns repeat); temperatures, rain and sky keep enough entropy that
drafts miss. Two-turn conversations ask for the days that follow. Everything follows from one integer seed.
"""

import datetime as dt
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

# Place -> yearly mean (C), half the yearly swing (C), probability of a wet day.
CLIMATES: dict[str, tuple[float, float, float]] = {
    "Lyon": (13, 9, 0.30), "Oslo": (6, 11, 0.35), "Quito": (14, 1, 0.55), "Cairo": (22, 8, 0.03),
    "Osaka": (17, 11, 0.35), "Perth": (19, 6, 0.20), "Lima": (19, 3, 0.05), "Delhi": (25, 9, 0.20),
    "Turin": (12, 10, 0.30), "Bergen": (8, 7, 0.65), "Dakar": (25, 3, 0.10), "Nome": (-2, 13, 0.40),
    "Hanoi": (24, 6, 0.45), "Graz": (10, 11, 0.35), "Porto": (15, 5, 0.40), "Boston": (11, 12, 0.35),
}  # fmt: skip
DAY_COLUMNS = ("date", "low", "high", "rain", "sky")
MAX_DAYS = 6
ANSWER_SYSTEM_MESSAGE = "You are a weather service. Answer in TOON."
SYSTEM_MESSAGES = (ANSWER_SYSTEM_MESSAGE, "Reply with a TOON table only.", "Weather desk. Output: TOON.")
_OPENINGS = (
    "Forecast for {place} from {first}, {days} days, in {unit}.",
    "What is the weather in {place} from {first} for {days} days? Use {unit}.",
    "Weather for {place}, {days} days starting {first}, unit {unit}.",
)
_FOLLOW_UPS = ("And the next {days} days?", "Continue for {days} more days.")


@dataclass(frozen=True)
class WeatherDay:
    """One row of a forecast's table."""

    date: str  # ISO 8601
    low: int  # in the forecast's unit
    high: int
    rain: int  # probability of rain in percent, a multiple of ten
    sky: str


@dataclass(frozen=True)
class WeatherForecast:
    """The content of one answer."""

    place: str
    unit: str  # "C" or "F"
    days: tuple[WeatherDay, ...]


def format_toon(forecast: WeatherForecast) -> str:
    """Return a forecast as canonical TOON, equal to the output of toon-format's encoder (tested)."""
    head = f"place: {forecast.place}\nunit: {forecast.unit}\ndays[{len(forecast.days)}]{{{','.join(DAY_COLUMNS)}}}:"
    return "\n".join([head, *(f"  {d.date},{d.low},{d.high},{d.rain},{d.sky}" for d in forecast.days)])


def _make_days(rng: random.Random, place: str, unit: str, first: dt.date, count: int) -> tuple[WeatherDay, ...]:
    """Return `count` days from `first` on.

    A pressure wave with a period of six days, at each place's own phase, moves temperature, rain and sky. A model can learn
    the wave, so rows differ from day to day even at temperature 0; it can't learn the noise on top.
    """
    mean, swing, wet_chance = CLIMATES[place]
    phase, days = list(CLIMATES).index(place), []
    for offset in range(count):
        date = first + dt.timedelta(days=offset)
        season = -math.cos(2 * math.pi * (date.timetuple().tm_yday - 20) / 365)
        if place in ("Perth", "Lima"):  # southern hemisphere
            season = -season
        wave = math.sin(2 * math.pi * (date.toordinal() + phase) / 6)
        noon = mean + swing * season + 4 * wave + rng.gauss(0, 0.8)
        wetness = wet_chance - 0.35 * wave + rng.gauss(0, 0.12)
        low, high = round(noon - 4), round(noon + (4 if wetness < 0.5 else 2))
        rain = 10 * min(9, max(0, round(10 * wetness)))
        if wetness >= 0.5:
            sky = "snow" if noon < 0 else "storm" if noon > 20 else "rain"
        else:
            sky = "cloudy" if rain >= 20 else "fog" if noon < 8 else "sunny"
        if unit == "F":
            low, high = round(low * 1.8 + 32), round(high * 1.8 + 32)
        days.append(WeatherDay(date.isoformat(), low, high, rain, sky))
    return tuple(days)


def make_conversation(rng: random.Random) -> list[dict[str, str]]:
    """Return one conversation as OpenAI messages: system, user, assistant; a third have a second turn."""
    place, unit = rng.choice(list(CLIMATES)), rng.choice("CCF")
    first = dt.date(2026, 1, 1) + dt.timedelta(days=rng.randrange(365))
    turns = 2 if rng.random() < 1 / 3 else 1
    messages = [{"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}]
    for turn in range(turns):
        count = rng.randrange(2, MAX_DAYS + 1) if turns == 1 else rng.randrange(2, 4)
        wording = rng.choice(_OPENINGS if turn == 0 else _FOLLOW_UPS)
        question = wording.format(place=place, first=first.isoformat(), days=count, unit=unit)
        answer = format_toon(WeatherForecast(place, unit, _make_days(rng, place, unit, first, count)))
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        first += dt.timedelta(days=count)
    return messages


def generate_conversations(seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield conversations without end, the same for the same seed on every machine."""
    rng = random.Random(seed)
    while True:
        yield make_conversation(rng)
