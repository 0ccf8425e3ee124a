"""Start this machine's Chromium, without a window's own parts that are themselves pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
# Suggestions below the address bar are two pages of each window, in a renderer of their own: half a second of a core.
SUGGESTIONS = ("WebUIOmniboxPopup", "WebUIOmniboxAimPopup")
# What Playwright 1.65 disables on Linux: a second --disable-features replaces the first.
BY_PLAYWRIGHT = (
    "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable",
    "LensOverlay", "MediaRouter", "PaintHolding", "ThirdPartyStoragePartitioning", "AvoidCorsURLLoaderRestartOnRedirect",
    "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled", "PreconnectToSearch",
)  # fmt: skip


@contextmanager
def launch_chromium(*arguments: str) -> Iterator[Any]:
    """Yield Playwright's browser; its contexts share no cookies."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        disabled = ",".join([*BY_PLAYWRIGHT, *SUGGESTIONS])
        words = ["--no-sandbox", f"--disable-features={disabled}", *arguments]
        browser = started.chromium.launch(executable_path=CHROMIUM, args=words)
        yield browser
        browser.close()
