"""The audit of published/: what its numbers say of each other, by arithmetic alone. docs/published.md shows it."""

from collections.abc import Iterator

from stages.literature import audit_serving, audit_tables, audit_trees
from stages.literature.audit_findings import Finding
from stages.literature.published import Publication


def audit_publications(publications: dict[str, Publication]) -> list[Finding]:
    """Every finding, those of a publication together. Raises ValueError where a number that is needed is missing."""

    def each() -> Iterator[Finding]:
        yield from audit_trees.audit_tree_tables(publications)
        yield from audit_tables.audit_all_tables(publications)
        yield from audit_serving.audit_serving_tables(publications)

    order = list(publications)
    return sorted(each(), key=lambda finding: order.index(finding.what))
