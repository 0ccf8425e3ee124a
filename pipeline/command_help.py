"""The overview of `aerie --help`: the commands grouped by what one wants to do."""

from typing import Any

from typer.core import TyperGroup

# A command that is in none of these is listed under the last group.
GROUPS: dict[str, tuple[str, ...]] = {
    "Run the pipeline": ("doctor", "preview", "write-questions", "stale", "estimate", "run"),
    "Read the results": ("table", "launch", "export"),
    "Use a recipe": ("use", "fetch", "reproduce"),
    "Runs started in the pages": ("ui", "promote", "drop"),
    "Several hosts": ("worker", "pull"),
}


class GroupedCommands(TyperGroup):
    """Lists its commands by GROUPS, in the order of that table."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        grouped = {name for names in GROUPS.values() for name in names}
        groups = {title: [name for name in names if name in self.commands] for title, names in GROUPS.items()}
        groups[next(reversed(groups))] += [name for name in self.commands if name not in grouped]
        width = max(map(len, self.commands))
        limit = formatter.width - 6 - width
        for title, names in groups.items():
            with formatter.section(title):
                rows = [(f"{name:<{width}}", self.commands[name].get_short_help_str(limit)) for name in names]
                formatter.write_dl(rows)
