"""``precaudit audit``: trace, compare and gate from precaudit.toml: the command for CI."""

from pathlib import Path

import click

from precaudit.cli._options import cache_option, progress_bar, references


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default="precaudit.toml", show_default=True)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="One policy key, such as scores=float32.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML here.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write Markdown for a pull request here.")
@click.option("--github", is_flag=True, envvar="GITHUB_ACTIONS", help="Print GitHub annotations.")
@click.option("--json", "as_json", is_flag=True, help="Print every verdict that is no pass as JSONL.")
@cache_option
def command(
    config: Path,
    settings: tuple[str, ...],
    junit: Path | None,
    markdown: Path | None,
    github: bool,
    as_json: bool,
    no_cache: bool,
) -> int:
    """Trace, compare and judge as precaudit.toml says; exit codes as of gate."""
    from precaudit.audit import audit
    from precaudit.cli._judged import show
    from precaudit.policies import parse_settings

    with progress_bar() as advance, references(no_cache) as cache:
        found = audit(config, parse_settings(settings), advance, cache)
    return show(found.judgement, str(found.run), junit, markdown, github, as_json)
