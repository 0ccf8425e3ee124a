"""docs/published.md: what published/ holds, and what its numbers say of each other.   python -m benchmarks.published_page

tests/literature/test_audit.py compares the committed page with what this writes.
"""

from collections import Counter
from pathlib import Path

from stages.literature import audit, published
from stages.literature.audit_findings import VERDICTS, Finding
from stages.literature.published import SETTING_NAMES, UNKNOWN, Publication

PAGE = Path("docs/published.md")
HEAD = """# Published results

<!-- Written by: python -m benchmarks.published_page. Edit published/, stages/literature/audit*.py or that file. -->

`published/*.yaml` holds what others printed, number by number: each with its source, the setting it was measured under, and
its metric's definition: a name of [metrics](metrics.md) where it is ours, else the source's words. `unknown` is what nobody
states, null what can't apply. `stages/literature/published.py` reads and checks them: a column of a table there is a setting, a
metric, or a metric on a data set (`tau @ GSM8K`); add a table, run this page's command, and commit both.

Below, what can be recomputed of them: arithmetic alone, nothing was run. **agrees**: the arithmetic gives what is printed.
**depends**: a definition or setting that isn't stated could explain it, and the text says which. **open**: nothing known here
explains it. None of this says that somebody was wrong; it says what to ask before a number is compared with another.
"""


def table(lines: list[tuple[str, ...]]) -> str:
    head, *rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows]) + "\n"


def overview(publications: dict[str, Publication], findings: list[Finding]) -> str:
    """A line for each publication: how much it holds, what it leaves open, what the audit finds."""
    lines: list[tuple[str, ...]] = [("file", "what", "numbers", "never stated", "findings")]
    for name, publication in publications.items():
        never = [key for key in SETTING_NAMES if all(getattr(r.setting, key) == UNKNOWN for r in publication.rows)]
        undefined = [key for key, metric in publication.metrics.items() if metric.definition == UNKNOWN]
        if undefined:
            never.append(f"what {len(undefined)} of {len(publication.metrics)} metrics mean")
        counts = Counter(finding.verdict for finding in findings if finding.what == name)
        shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        stated = ", ".join(never).replace("_", " ")
        lines.append((f"`{name}`", publication.title, f"{len(publication.rows):,}", stated, shown))
    return table(lines)


def section(publication: Publication, findings: list[Finding]) -> str:
    where = "" if publication.url == UNKNOWN else f" <{publication.url}>"
    parts = [f"## {publication.title}\n", f"{publication.document}; date: {publication.date}.{where}\n"]
    if publication.notes:
        parts.append("\n".join(f"- {note}" for note in publication.notes) + "\n")
    for finding in findings:
        parts.append(f"### {finding.about}: {finding.verdict}\n")
        parts.append(finding.arithmetic + "\n")
        if finding.table:
            parts.append(table(list(finding.table)))
        if finding.reading:
            parts.append(finding.reading + "\n")
    return "\n".join(parts)


def page(publications: dict[str, Publication]) -> str:
    findings = audit.audit_publications(publications)
    sections = [
        section(publication, [finding for finding in findings if finding.what == name])
        for name, publication in publications.items()
    ]
    return "\n".join([HEAD, overview(publications, findings), *sections])


if __name__ == "__main__":
    PAGE.write_text(page(published.read_publications()), encoding="utf-8")
