"""URLs of running servers: `base_urls` of sample_target.server and of benchmark_served.servers."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

# http://host:port; no user:password@, which would be logged
SERVER_URL_PATTERN = r"^https?://[^\s/@?#:]+(:\d{1,5})?(/v1)?/?$"
# The pattern also takes a range of ports: http://host:6000-6007 names a server on each of them.
SERVER_URLS_PATTERN = r"^https?://[^\s/@?#:]+(:\d{1,5}(-\d{1,5})?)?(/v1)?/?$"
MAX_RANGE = 1024


def strip_api_path(url: str) -> str:
    """Return a server's URL without the /v1 that users may write."""
    return re.sub(r"(/v1)?/?$", "", url)


def expand_urls(base_urls: list[str]) -> list[str]:
    """Return one URL per server: http://host:6000-6007 names eight. Raises ValueError for an invalid range."""
    urls = []
    for url in map(strip_api_path, base_urls):
        host, first, last = re.fullmatch(r"(.*?)(?::(\d+)-(\d+))?", url).groups()  # type: ignore[union-attr]
        ports = range(int(first), int(last) + 1) if first else None
        if ports is not None and not 0 < len(ports) <= MAX_RANGE:
            raise ValueError(f"{url} is no range of ports, expected the lower port first, at most {MAX_RANGE}")
        urls += [url] if ports is None else [f"{host}:{port}" for port in ports]
    return urls


def _check_ranges(base_urls: list[str]) -> list[str]:
    expand_urls(base_urls)
    return base_urls


ServerUrls = Annotated[list[Annotated[str, Field(pattern=SERVER_URLS_PATTERN)]], AfterValidator(_check_ranges)]
ConfigurationName = Annotated[str, Field(pattern=r"^(baseline|[A-Za-z]\w*-t\d+_\d+_\d+)$")]
ConfigurationUrls = dict[ConfigurationName, Annotated[str, Field(pattern=SERVER_URL_PATTERN)]]
