"""Checks what no linter knows: sizes, a test per loss and reward, no paths of one machine.

    python tools/check_house_rules.py [folder of the repository]

Prints each breach as `file:line: what is wrong` and exits with 1 if there is one.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 500
FUNCTION_LINES = 80
# Longest first match wins, so a more particular pattern stands above a more general one.
FILE_LINES = {
    "recipes/*/train.py": 150,
    "README.md": 200,
    "CONTRIBUTING.md": 100,
    "*.py": MODULE_LINES,
}
# Folders of which each module needs a test of its own.
ONE_TEST_PER_MODULE = ("losses", "advantages", "rewards")
# Home folders and the like: such a path works on one machine only.
MACHINE_PATH = re.compile(r"(?<![\w.$}~<>-])/(?:home|root|Users|work)/[\w.]")


def main() -> int:
    """0 if the repository keeps the rules."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    breaches = list(check_repository(root))
    for breach in breaches:
        print(breach)
    print(f"house rules: {len(breaches)} broken" if breaches else "house rules: kept")
    return 1 if breaches else 0


def check_repository(root: Path) -> Iterator[str]:
    """Every breach of a rule in the repository at `root`."""
    for path in tracked_files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from check_text(name, text)
    yield from check_tests_exist(root)


def tracked_files(root: Path) -> list[Path]:
    """What git tracks or would track: neither ignored files nor deleted ones."""
    # A container may run this as another user than the one who owns the checkout.
    git = ["git", "-c", "safe.directory=*"]
    command = [*git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    paths = (root / name for name in listed.split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def check_text(name: str, text: str) -> Iterator[str]:
    """Breaches in one file, named by its path in the repository."""
    lines = text.splitlines()
    limit = next((n for pattern, n in FILE_LINES.items() if Path(name).match(pattern)), None)
    if limit is not None and len(lines) > limit:
        yield f"{name}:{limit}: {len(lines)} lines, at most {limit}: split it"
    for number, line in enumerate(lines, start=1):
        if found := MACHINE_PATH.search(line):
            yield f"{name}:{number}: '{found[0]}...' is a path of one machine: take it out"
    if name.endswith(".py"):
        yield from check_functions(name, text)


def check_functions(name: str, text: str) -> Iterator[str]:
    """Functions that are too long, decorators not counted."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield (
                    f"{name}:{node.lineno}: {node.name} has {length} lines, "
                    f"at most {FUNCTION_LINES}: split it"
                )


def check_tests_exist(root: Path) -> Iterator[str]:
    """Modules of losses, advantages and rewards without a unit test file."""
    for package in ONE_TEST_PER_MODULE:
        for module in sorted((root / "rl_megatron" / package).glob("[!_]*.py")):
            test = f"tests/unit/{package}/test_{module.stem}.py"
            if not (root / test).exists():
                yield f"{module.relative_to(root).as_posix()}:1: has no {test}: add it"


if __name__ == "__main__":
    sys.exit(main())
