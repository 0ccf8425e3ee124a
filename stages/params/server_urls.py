"""URLs of running servers: `base_urls` of sample_target.server and of benchmark_served.servers."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

# http://host:port; no user:password@, which would be logged
SERVER_URL_PATTERN = r"^https?://[^\s/@?#:]+(:\d{1,5})?(/v1)?/?$"
# The pattern also takes a range of ports: http://host:6000-6007 names a server on each of them.
SERVER_URLS_PATTERN = r"^https?://[^\s/@?#:]+(:\d{1,5}(-\d{1,5})?)?(/v1)?/?$"
MAX_PORT, MAX_RANGE = 65535, 1024


def strip_api_path(url: str) -> str:
    """Return a server's URL without the /v1 that users may write."""
    return re.sub(r"(/v1)?/?$", "", url)


def expand_urls(base_urls: list[str]) -> list[str]:
    """Return one URL per server: http://host:6000-6007 names eight. Raises ValueError for an invalid port or range."""
    return [url for given in base_urls for url in _expand_url(given)]


def _expand_url(given: str) -> list[str]:
    url = strip_api_path(given)
    match = re.fullmatch(r"(https?://[^:/]+):(\d+)(?:-(\d+))?", url)
    if not match:
        return [url]
    first, last = int(match[2]), int(match[3] or match[2])
    if match[3] is None and not 0 < first <= MAX_PORT:
        raise ValueError(f"{given} has no such port, expected one from 1 to {MAX_PORT}")
    if not 0 < first <= last <= MAX_PORT or last - first >= MAX_RANGE:
        raise ValueError(
            f"{given} is no range of ports, expected the lower port first, both from 1 to {MAX_PORT}, at most {MAX_RANGE}"
        )
    return [f"{match[1]}:{port}" for port in range(first, last + 1)]


def _check_each_named_once(base_urls: list[str]) -> list[str]:
    urls = expand_urls(base_urls)
    if twice := sorted({url for url in urls if urls.count(url) > 1}):
        raise ValueError(f"names {', '.join(twice)} twice; name each server once")
    return base_urls


def _check_port(url: str) -> str:
    expand_urls([url])
    return url


def _check_one_configuration_each(base_urls: dict[str, str]) -> dict[str, str]:
    """Return the servers by configuration. Raises ValueError for one of two: a server runs one tree, or none."""
    names: dict[str, list[str]] = {}
    for name, url in base_urls.items():
        names.setdefault(strip_api_path(url), []).append(name)
    if shared := next((url for url, several in names.items() if len(several) > 1), None):
        raise ValueError(f"names {shared} for {' and '.join(names[shared])}, expected a server for each")
    return base_urls


ServerUrl = Annotated[str, Field(pattern=SERVER_URL_PATTERN), AfterValidator(_check_port)]
ServerUrls = Annotated[list[Annotated[str, Field(pattern=SERVER_URLS_PATTERN)]], AfterValidator(_check_each_named_once)]
ConfigurationName = Annotated[str, Field(pattern=r"^(baseline|[A-Za-z]\w*-t\d+_\d+_\d+)$")]
ConfigurationUrls = Annotated[dict[ConfigurationName, ServerUrl], AfterValidator(_check_one_configuration_each)]
