"""Write .dvc/plots/page.html, in which `dvc plots show` draws without a network.   python -m benchmarks.plots_page

DVC's own page loads Vega from a CDN. This one contains it: the three scripts of the npm packages, compressed so that the file
stays small enough for a commit, with the digest of each uncompressed script and the licences that must be kept. Needs npm.
"""

import base64
import gzip
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / ".dvc/plots/page.html"
PACKAGES = {"vega": "5.33.1", "vega-lite": "5.23.0", "vega-embed": "6.29.0"}
HELD = """<!-- {name} {version}, build/{name}.min.js of the npm package, sha256 {digest}, gzip in base64 -->
<script type="application/gzip">{packed}</script>
"""
# DVC's scripts call vegaEmbed while the page loads; a placeholder makes them wait for the real one.
TEMPLATE = """<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
{refresh_tag}
<title>DVC plots</title>
<style>body { font: 14px system-ui, sans-serif; margin: 1.5rem; } body > div { display: inline-block; margin: 0 2rem 2rem 0; }
table { border-spacing: 15px; }</style>
<!-- Made by benchmarks/plots_page.py.

vega, vega-lite and vega-embed, and the d3 modules inside vega, are under the licences that follow.

LICENCES
-->
HELD<script>
const unpacked = (async () => {
  for (const held of document.querySelectorAll('script[type="application/gzip"]')) {
    const bytes = Uint8Array.from(atob(held.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    (0, eval)(await new Response(stream).text());
  }
})();
window.vegaEmbed = (...given) => unpacked.then(() => window.vegaEmbed(...given));
</script>
</head>
<body>
{plot_divs}
</body>
</html>
"""
D3 = """d3: Copyright 2010-2023 Mike Bostock

Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby granted,
provided that the above copyright notice and this permission notice appear in all copies.

THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES WITH REGARD TO THIS SOFTWARE INCLUDING ALL IMPLIED
WARRANTIES OF MERCHANTABILITY AND FITNESS. IN NO EVENT SHALL THE AUTHOR BE LIABLE FOR ANY SPECIAL, DIRECT, INDIRECT, OR
CONSEQUENTIAL DAMAGES OR ANY DAMAGES WHATSOEVER RESULTING FROM LOSS OF USE, DATA OR PROFITS, WHETHER IN AN ACTION OF CONTRACT,
NEGLIGENCE OR OTHER TORTIOUS ACTION, ARISING OUT OF OR IN CONNECTION WITH THE USE OR PERFORMANCE OF THIS SOFTWARE.
"""


def main() -> None:
    held, licences = "", []
    with tempfile.TemporaryDirectory() as folder:
        for name, version in PACKAGES.items():
            subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=folder, check=True)
            with tarfile.open(f"{folder}/{name}-{version}.tgz") as package:
                script = _read(package, f"package/build/{name}.min.js")
                names = package.getnames()
                if "package/LICENSE" in names:  # vega's has none: it is under vega-lite's, by the same authors
                    licences.append(f"{name}: {_read(package, 'package/LICENSE').decode().strip()}")
            packed = base64.b64encode(gzip.compress(script, 9, mtime=0)).decode()
            held += HELD.format(name=name, version=version, digest=hashlib.sha256(script).hexdigest(), packed=packed)
    licences[0] = licences[0].replace("vega-lite:", "vega and vega-lite:")
    text = TEMPLATE.replace("LICENCES", "\n\n".join([*licences, D3.strip()]).replace("--", "-")).replace(
        "HELD", held, 1
    )
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE}: {PAGE.stat().st_size} bytes")


def _read(package: tarfile.TarFile, name: str) -> bytes:
    found = package.extractfile(name)
    assert found
    return found.read()


if __name__ == "__main__":
    main()
