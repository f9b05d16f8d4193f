"""``precaudit export``: a compared run's errors for other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precaudit.cli._options import filter_options, say
from precaudit.cli._runs import RunFolder

if TYPE_CHECKING:
    from precaudit.schema.selection import Filters


@click.command()
@click.argument("run", type=RunFolder())
@filter_options()
@click.option("--csv", "as_csv", type=click.Path(path_type=Path), metavar="FILE", help="One row a record.")
@click.option("--parquet", type=click.Path(path_type=Path), metavar="FILE", help="The same; columns keep formats.")
@click.option("--tensorboard", type=click.Path(path_type=Path), metavar="DIR", help="Scalars of points over layers.")
@click.option("--wandb-offline", type=click.Path(path_type=Path), metavar="DIR", help="The same, for: wandb sync DIR.")
def command(
    run: Path,
    filters: "Filters",
    as_csv: Path | None,
    parquet: Path | None,
    tensorboard: Path | None,
    wandb_offline: Path | None,
) -> None:
    """Write what compare recorded of RUN as tables or logs.

    Scalars are the largest of a layer and point: local_rel_l2, excess (what rounding does not explain) and
    forward_rel_l2. The step is the layer, 0 outside layers. Parquet needs the extra frames, logs need tensorboard
    or wandb.
    """
    from precaudit.errors import UserError
    from precaudit.reports import exports

    wanted = {"pyarrow": parquet, "tensorboardX": tensorboard, "wandb": wandb_offline}
    if as_csv is None and not any(wanted.values()):
        raise UserError("nothing to write: give --csv FILE, --parquet FILE, --tensorboard DIR or --wandb-offline DIR")
    errors = _read_errors(run, filters)
    exports.needs(*(name for name, path in wanted.items() if path is not None))
    exports.require_free(*(path for path in (tensorboard, wandb_offline) if path is not None))
    _tables(errors, as_csv, parquet)
    if tensorboard is not None or wandb_offline is not None:
        _logs(run, filters, errors, tensorboard, wandb_offline)
    for path in (as_csv, parquet, tensorboard, wandb_offline):
        if path is not None:
            say(f"{path}: {len(errors):,} records of {run}")


def _read_errors(run: Path, filters: "Filters") -> Any:
    """Return a run's error records that filters select; raises UserError where it was not compared."""
    from precaudit.judging.looks import look_by
    from precaudit.judging.recalled import recall_any

    found = recall_any(run)
    look = look_by(found.run, filters)
    return found.errors if look is None else look.of(found.errors)


def _tables(errors: Any, as_csv: Path | None, parquet: Path | None) -> None:
    from precaudit.reports import exports
    from precaudit.writing import whole

    for path, write in ((as_csv, exports.write_csv), (parquet, exports.write_parquet)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole(path) as f:
                write(f, errors)


def _logs(run: Path, filters: "Filters", errors: Any, tensorboard: Path | None, wandb_offline: Path | None) -> None:
    """Write the logs, which hold the verdict of the default rules; of a table alone nothing is judged."""
    from precaudit.judging.gate import Criteria, gate_selected
    from precaudit.reports import exports
    from precaudit.reports.gate import gate_report

    judgement = gate_selected(run, Criteria(filters=filters))
    told = gate_report(judgement, str(run)).lines
    if tensorboard is not None:
        exports.tensorboard(tensorboard, errors, told)
    if wandb_offline is not None:
        exports.wandb_offline(wandb_offline, judgement.name, errors, told)
