"""Check the size budgets of the package (lines of a file, lines and arguments of a function), and print violations."""

from __future__ import annotations

import ast
import pathlib
import sys

ROOTS = ("src", "tests", "benchmarks", "examples", "scripts")
FILE, FUNCTION, ARGUMENTS = 450, 60, 8
# signatures that are fixed from outside: the public functions and those of other libraries
PUBLIC = {
    "grouped_matmul",
    "transposed_grouped_matmul",
    "gmm",
    "tgmm",
    "grouped_gemm",
    "grouped_dense",
    "show",
    "trained",
    "moe_mlp",
    "expert_parallel",
    "route",
}


def over_budget(path: pathlib.Path) -> list[str]:
    """Return one line per violation of a budget in a file."""
    text = path.read_text()
    found = [f"{path}: {lines} lines"] if (lines := text.count("\n")) > FILE else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or 0) - node.lineno + 1
            doc = ast.get_docstring(node, clean=False)
            size -= doc.count("\n") + 1 if doc else 0
            arguments = len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
            if size > FUNCTION:
                found.append(f"{path}:{node.lineno} {node.name}: {size} lines")
            fixtures = path.parts[0] == "tests"  # arguments of tests are fixtures and cases
            launched = any(ast.unparse(each) == "triton.jit" for each in node.decorator_list)  # arrays and constants
            if arguments > ARGUMENTS and node.name not in PUBLIC and not fixtures and not launched:
                found.append(f"{path}:{node.lineno} {node.name}: {arguments} arguments")
    return found


def main() -> int:
    """Print all violations; the exit code is 0 if there are none."""
    files = sorted(path for root in ROOTS for path in pathlib.Path(root).rglob("*.py"))
    found = [line for path in files for line in over_budget(path)]
    lines = sum(path.read_text().count("\n") for path in files)
    print(*found, f"{lines} lines in {len(files)} files", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
