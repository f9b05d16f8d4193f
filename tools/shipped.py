"""Every check that ships, as a table of docs/kernels.md: errors in roundings of the output's format, and verdicts.

python -m tools.shipped [NAME …]        # a minute a kernel on a free core; interpret mode: products are a CPU's

A number is ‖error‖ over what rounding FP64 once to the format leaves, 1 at best, kernel : plain float32; backward the
worst gradient. Plain inputs of one seed; below the table what is wrong, and with inputs that have a name, too.
"""

import argparse
from importlib import import_module

from precaudit.checks.gradients.case import KERNEL, REFERENCE
from precaudit.checks.gradients.check import gradcheck
from precaudit.checks.gradients.shipped import shipped_checks


def worst(found, phase):
    """Return the largest errors in roundings, kernel : reference; none where nothing is differentiated."""
    each = {
        side: [f.distance.roundings for f in found if f.side == side and f.record.phase == phase and f.distance]
        for side in (KERNEL, REFERENCE)
    }
    return " : ".join(f"{max(held):.3g}" for held in each.values() if held) or "none"


def rows(check):
    """Print a row a format of one kernel, and return what is wrong with it."""
    module, name = import_module(check.name), check.name.rpartition(".")[2]
    c = gradcheck(module.kernel, module.reference, module.inputs, argnums=module.ARGNUMS, seeds=1, hostile=False)
    for form in check.formats:
        plain = [f for f in c.found if f.case == f"{form}-seed0"]
        failed = [f.array for f in plain if f.verdict.status != "pass"]
        verdict = f"more in {', '.join(failed)}" if failed else "as float32 leaves it"
        print(f"| {name} | {form} | {worst(plain, 'forward')} | {worst(plain, 'backward')} | {verdict} |", flush=True)
    return [f"{name}: {text}" for text in c.conclusions]


def main(names):
    """Print the rows of all checks, or of some, then what is wrong."""
    print("| kernel | format | forward | backward | verdict |\n| --- | --- | --- | --- | --- |")
    told = []
    for check in shipped_checks():
        name = check.name.rpartition(".")[2]
        if names and name not in names:
            continue
        if check.runs:
            told += rows(check)
        else:
            print(f"| {name} | | | | {check.here} |")
    print(*told, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the checks, by default all")
    main(parser.parse_args().names)
