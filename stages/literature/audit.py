"""The audit of published/: what its numbers say of each other, by arithmetic alone.

    python -m stages.literature.audit    # write docs/published.md; tests/literature/test_audit.py compares the
    committed page

No stage imports this file: the report links the page.
"""

from collections import Counter
from pathlib import Path

from stages.literature import audit_blocks, audit_serving, audit_tables, audit_trees, published
from stages.literature.audit_findings import VERDICTS, Finding
from stages.literature.published import SETTING_NAMES, UNKNOWN, Publication

PAGE = Path("docs/published.md")
HEAD = """# Published results

<!-- Written by: python -m stages.literature.audit. Edit published/ or stages/literature/audit*.py. -->

`published/*.yaml` holds what others printed, number by number: each with its source, the setting it was measured under, and
its metric's definition: a name of [metrics](metrics.md) where it is ours, else the source's words. `unknown` is what no
source states, null what can't apply. `stages/literature/published.py` reads and checks them: a column of a table is a setting,
a metric, or a metric on a data set (`tau @ GSM8K`); add a table, run `python -m stages.literature.audit`, and commit both.

Below, what can be recomputed of them: arithmetic alone, nothing was run. **agrees**: the arithmetic gives what is printed.
**depends**: a definition or setting that isn't stated could explain it, and the text says which. **open**: nothing known here
explains it. None of this says that somebody was wrong; it says what to ask before a number is compared with another.
"""


def audit_publications(publications: dict[str, Publication]) -> dict[str, list[Finding]]:
    """Return each publication's findings. Raises ValueError where a number that an audit needs is missing."""
    found: dict[str, list[Finding]] = {name: [] for name in publications}
    for list_findings in (
        audit_trees.list_tree_findings,
        audit_tables.list_table_findings,
        audit_serving.list_serving_findings,
        audit_blocks.list_block_findings,
    ):
        for publication, finding in list_findings(publications):
            found[publication.name].append(finding)
    return found


def render_page(publications: dict[str, Publication]) -> str:
    """Return docs/published.md."""
    findings = audit_publications(publications)
    sections = [_format_section(publication, findings[name]) for name, publication in publications.items()]
    return "\n".join([HEAD, _format_overview(publications, findings), *sections])


def _format_overview(publications: dict[str, Publication], findings: dict[str, list[Finding]]) -> str:
    """Return a table with a line per publication: how much it holds, what it leaves open, what the audit finds."""
    lines: list[tuple[str, ...]] = [("file", "what", "numbers", "never stated", "findings")]
    for name, publication in publications.items():
        never = [key for key in SETTING_NAMES if all(getattr(r.setting, key) == UNKNOWN for r in publication.rows)]
        undefined = [key for key, metric in publication.metrics.items() if metric.definition == UNKNOWN]
        if undefined:
            never.append(f"what {len(undefined)} of {len(publication.metrics)} metrics mean")
        counts = Counter(finding.verdict for finding in findings[name])
        shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        not_stated = ", ".join(never).replace("_", " ")
        lines.append((f"`{name}`", publication.title, f"{len(publication.rows):,}", not_stated, shown))
    return _format_table(lines)


def _format_section(publication: Publication, findings: list[Finding]) -> str:
    where = "" if publication.url == UNKNOWN else f" <{publication.url}>"
    parts = [f"## {publication.title}\n", f"{publication.document}; date: {publication.date}.{where}\n"]
    if publication.notes:
        parts.append("\n".join(f"- {note}" for note in publication.notes) + "\n")
    for finding in findings:
        parts += [f"### {finding.heading}: {finding.verdict}\n", finding.arithmetic + "\n"]
        if finding.table:
            parts.append(_format_table(list(finding.table)))
        if finding.reading:
            parts.append(finding.reading + "\n")
    return "\n".join(parts)


def _format_table(lines: list[tuple[str, ...]]) -> str:
    head, *rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page(published.read_publications()), encoding="utf-8")
