"""Sections of a document that a command writes: between two comments that name the command."""

from pathlib import Path


def write_section(document: Path, command: str, text: str) -> None:
    """Replace what stands between the comments of `command` in a document.

    Args:
        document: A Markdown file with `<!-- begin: COMMAND -->` and `<!-- end: COMMAND -->`.
        command: What makes the section.
        text: The new section.

    Raises:
        ValueError: The document has no such comments.
    """
    before, begin, rest = document.read_text().partition(f"<!-- begin: {command} -->\n")
    _, end, after = rest.partition(f"<!-- end: {command} -->\n")
    if not (begin and end):
        raise ValueError(f"{document}: has no section of {command!r}; add its two comments")
    document.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
