"""``precaudit explain``: what a word means."""

import click

from precaudit.cli._completion import complete_word


@click.command()
@click.argument("term", nargs=-1, metavar="[TERM]", shell_complete=complete_word)
def command(term: tuple[str, ...]) -> None:
    """Say what a word means: a statistic, a status, a point.

    TERM: a statistic of errors.jsonl, a status, a kind of record, a point, a policy key, the heading of a column or
    section, or exit-codes. A printed line: its words. Without TERM: every word in one line.
    """
    from precaudit.cli._options import say, text_width
    from precaudit.reports import words as layout
    from precaudit.schema.glossary import look_up, terms

    width = text_width()
    if not term:
        for line in layout.word_lines(terms(), width):
            say(line)
        return
    for i, entry in enumerate(look_up(" ".join(term))):
        for line in (*("",) * bool(i), *layout.paragraphs(entry, width)):
            say(line)
