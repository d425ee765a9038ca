"""Lines of the product by folder: code, and comments with docstrings apart. Blank lines do not count.

Usage: count_lines.py [TREE ...]     (default: this checkout; several trees are columns beside each other)

The product is every Python file that git tracks, without tests, generated files and the tools of the repository itself
(tools/bench, tools/house, tools/train, docs).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

NOT_PRODUCT = ("tests/", "docs/", "tools/bench/", "tools/house/", "tools/train/", ".ci/")


def product_files(tree: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=tree, check=True, capture_output=True, text=True).stdout
    return [
        Path(name) for name in listed.splitlines() if not name.startswith(NOT_PRODUCT) and not name.endswith("_pb2.py")
        and not name.endswith("_pb2_grpc.py") and (tree / name).is_file()
    ]  # fmt: skip


def count(source: str) -> tuple[int, int]:
    """(lines of code, lines of comments and docstrings)."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_place = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_place and ast.get_docstring(node, clean=False) is not None:
            told = node.body[0]
            prose.update(range(told.lineno, (told.end_lineno or told.lineno) + 1))
    code = words = 0
    for number, line in enumerate(source.splitlines(), 1):
        if not line.strip():
            continue
        if number in prose or line.lstrip().startswith("#"):
            words += 1
        else:
            code += 1
    return code, words


def folders(tree: Path) -> dict[str, tuple[int, int]]:
    """(code, prose) by package and the folder in it."""
    code: Counter[str] = Counter()
    prose: Counter[str] = Counter()
    for path in product_files(tree):
        parts = path.parts[:-1]
        start = next((at for at, part in enumerate(parts) if part.startswith("sluice_")), len(parts) - 1)
        name = "/".join(parts[start : start + 2])
        told = count((tree / path).read_text())
        code[name] += told[0]
        prose[name] += told[1]
    return {name: (code[name], prose[name]) for name in sorted(code)}


def main(argv: list[str]) -> None:
    trees = [Path(name) for name in argv] or [Path(__file__).resolve().parents[2]]
    counted = [folders(tree) for tree in trees]
    names = sorted({name for each in counted for name in each})
    print(f"{'folder':<36}" + "".join(f"{tree.name or str(tree):>22}" for tree in trees))
    for name in names:
        print(f"{name:<36}" + "".join("{:>12} +{:>7}".format(*each.get(name, (0, 0))) for each in counted))
    totals = [tuple(sum(values) for values in zip(*each.values(), strict=True)) for each in counted]
    print(f"{'in all (code + prose)':<36}" + "".join("{:>12} +{:>7}".format(*total) for total in totals))


if __name__ == "__main__":
    main(sys.argv[1:])
