"""Rules of the code base, checked on the sources: allowed imports, size limits, and claims in the documents.

The tests parse the sources and import nothing of agentspec, so they also cover modules that need a GPU or an optional
package. A failure names the line, the rule and the remedy.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agentspec"

FOUNDATION = ("errors", "types", "config", "wire", "files", "fair_queue", "heap")
"""All loose modules. Every module may import them; they import only each other."""

ROOMS: dict[str, tuple[str, ...]] = {
    "text": FOUNDATION,
    "kernels": FOUNDATION,
    "cache": FOUNDATION,
    "replay": ("errors", "types", "files"),
    "server": ("__init__", *FOUNDATION, "text"),
    "models": (*FOUNDATION, "kernels"),
    "mtp": (*FOUNDATION, "models"),
    "runtime": (*FOUNDATION, "text", "kernels", "models", "cache", "mtp"),
    "engine": (*FOUNDATION, "text", "kernels", "models", "cache", "mtp", "runtime", "server"),
    "simulate": (*FOUNDATION, "cache", "mtp", "runtime"),
    "commands": (
        "__init__",
        *FOUNDATION,
        "kernels",
        "models",
        "replay",
        "runtime",
        "server",
        "engine",
        "simulate",
    ),
}
"""What each room may import besides itself."""

PUBLIC_NAMES = ("config", "engine.in_process", "errors", "types", "wire")
"""Modules whose names the package exports."""

ENGINE_ROOMS = (*ROOMS["runtime"], "runtime", "engine.bundled", "engine.settings", "engine.fit")
"""Rooms that an engine consists of. Its process loads no server."""

NARROW: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(FOUNDATION, FOUNDATION),
    "__init__": PUBLIC_NAMES,
    "engine.bundled": (),
    "engine.heap": (),
    "engine.link": FOUNDATION,
    "engine.streams": FOUNDATION,
    "engine.start": (),
    "engine.remote": (*FOUNDATION, "engine.link", "engine.start", "engine.streams"),
    "engine.text_link": (*FOUNDATION, "engine.link", "text"),
    "engine.text_process": (*FOUNDATION, "engine.heap", "engine.link", "text", "engine.text_link"),
    "engine.remote_text": (*FOUNDATION, "engine.link", "engine.remote", "server", "text", "engine.text_link"),
    "engine.settings": (*ROOMS["runtime"], "runtime"),
    "engine.fit": (*ROOMS["runtime"], "runtime", "engine.settings"),
    "engine.rank_link": (*FOUNDATION, "runtime"),
    "engine.ranks": (*ENGINE_ROOMS, "engine.rank_link"),
    "engine.rank_process": (*ENGINE_ROOMS, "engine.assembly", "engine.link", "engine.rank_link", "engine.ranks"),
    "engine.assembly": (*ENGINE_ROOMS, "engine.rank_link", "engine.ranks"),
    "engine.thread": (*ENGINE_ROOMS, "engine.assembly", "engine.streams"),
    "engine.process": (*ENGINE_ROOMS, "engine.assembly", "engine.link", "engine.thread"),
    "simulate.model_costs": FOUNDATION,
    "commands.config_file": FOUNDATION,
    "commands.flags": FOUNDATION,
    "commands.cli": ("__init__", *FOUNDATION, "replay", "commands.config_file", "commands.flags"),
}
"""Modules that may import less than their room, or that are in no room."""

TORCH_FREE = (
    *FOUNDATION,
    "__init__",
    "engine.bundled",
    "engine.link",
    "engine.streams",
    "engine.remote",
    "engine.start",
    "engine.text_link",
    "engine.text_process",
    "engine.remote_text",
    "commands.cli",
    "commands.config_file",
    "commands.flags",
    "commands.serve",
    "commands.replay",
    "simulate",
    "text",
    "server",
    "replay",
    "cache",
    "mtp.acceptance",
    "mtp.window_policy",
    "mtp.draft_vocab",
    "mtp.token_counts",
    "runtime.admission",
    "runtime.memory_plan",
    "runtime.metrics",
    "runtime.plan",
    "runtime.prefill_plan",
    "runtime.request",
    "runtime.scheduler",
    "runtime.step_loop",
)
"""Rooms and modules that must not import torch, directly or indirectly."""

ONLY_IN = {"triton": "kernels", "flashinfer": "kernels", "xgrammar": "runtime.grammar"}
"""Optional packages, and the only place that may import each."""

LATE_LOADERS = {
    ("__init__", "__getattr__"),
    ("commands.cli", "_load"),
    ("engine.start", "main"),
    ("engine.start", "import_with_deferred"),
    ("kernels", "_exchange_group"),
    ("kernels", "backend"),
    ("kernels", "compiler"),
}
"""Functions that may import a module late: commands load their dependencies, an engine's process prepares its imports,
and Triton needs CUDA."""

ENGINE_FLAG_FUNCTIONS = (
    "add_engine_arguments",
    "_add_draft_arguments",
    "_add_limit_arguments",
)
"""Functions of commands/flags.py that add engine flags."""

ENGINE_FLAGS = {
    "--model",
    "--device",
    "--dtype",
    "--tensor-parallel",
    "--draft-tokens",
    "--copy-drafts",
    "--state-form",
    "--draft-vocab",
    "--draft-precision",
    "--kv-dtype",
    "--token-counts",
    "--no-prefix-cache",
    "--no-overlap",
    "--no-graphs",
    "--max-running",
    "--prefill-budget",
    "--max-gap",
    "--fair-cost",
    "--max-context",
    "--memory",
    "--host-memory",
    "--seed",
    "--random-weights",
    "--force-acceptance",
    "--allow-forced-output",
}
"""The engine flags of `serve`, `warm` and `replay`. A new flag must be documented, tested and supported for good."""

MAX_FILE_LINES = 500
MAX_KERNEL_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MAX_PACKAGE_LINES = 34_830
"""Logical lines of code. Docstrings, comments and blank lines don't count."""


@dataclass(frozen=True, kw_only=True)
class Module:
    name: str
    """Dotted, without the leading `agentspec.`; the top-level package is `__init__`."""
    path: Path
    source: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


@dataclass(frozen=True, kw_only=True)
class Import:
    target: str
    """Dotted path of the imported module, or of the package for names that aren't modules."""
    line: int
    function: str | None
    """The enclosing function; None at module level."""
    for_types_only: bool
    """Whether it is under `if TYPE_CHECKING`."""


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


@functools.cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = module_name(path)
        found[name] = Module(name=name, path=path, source=source, tree=ast.parse(source, filename=str(path)))
    return found


def python_files() -> list[Path]:
    folders = (PACKAGE, ROOT / "tests", ROOT / "workloads", ROOT / "benchmarks", ROOT / "scripts")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def imports_of(tree: ast.Module) -> list[Import]:
    """All imports of a module, including late and typing-only ones."""
    found: list[Import] = []

    def visit(node: ast.AST, function: str | None, for_types_only: bool) -> None:
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            targets = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}".removeprefix("agentspec.") in modules() else base
                for alias in node.names
            ]
        found.extend(
            Import(target=t, line=node.lineno, function=function, for_types_only=for_types_only)
            for t in targets
            if hasattr(node, "lineno")
        )
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for_types_only = True
        for child in ast.iter_child_nodes(node):
            visit(child, function, for_types_only)

    visit(tree, None, False)
    return found


@functools.cache
def imports_by_module() -> dict[str, list[Import]]:
    return {name: imports_of(module.tree) for name, module in modules().items()}


def inner(target: str) -> str | None:
    """The name of an agentspec module, None for anything else."""
    if target == "agentspec":
        return "__init__"
    return target.removeprefix("agentspec.") if target.startswith("agentspec.") else None


def inner_imports(name: str, *, with_packages: bool = False) -> Iterator[tuple[str, Import]]:
    """(imported module, import) for each import of agentspec's modules by module `name`. with_packages: also the
    packages above each imported module."""
    for found in imports_by_module()[name]:
        target = inner(found.target)
        if target is None:
            continue
        yield target, found
        if with_packages:
            for package in packages_above(target):
                yield package, found


def packages_above(name: str) -> list[str]:
    """The packages that Python imports before a module."""
    parts = name.split(".")
    return ["__init__", *(".".join(parts[:depth]) for depth in range(1, len(parts)))]


def lies_in(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def report(rule: str, failures: list[str]) -> None:
    if failures:
        pytest.fail(rule + "\n  " + "\n  ".join(failures), pytrace=False)


def test_every_module_belongs_to_a_room_or_to_the_foundation() -> None:
    assert set(FOUNDATION) <= set(modules())
    assert {module.room for module in modules().values() if "." in module.name} <= set(ROOMS), (
        "a new room needs its place in ROOMS"
    )
    loose = {name for name, module in modules().items() if module.path.parent == PACKAGE}
    assert loose <= {"__init__", "__main__", *FOUNDATION}, "every module is in a room, except the foundation"


def test_imports_are_absolute() -> None:
    failures = [
        f"{module.at(found.line)} imports {found.target}"
        for name, module in modules().items()
        for found in imports_by_module()[name]
        if found.target.startswith(".")
    ]
    report(
        "Imports must name the full path. Write agentspec.…:",
        failures,
    )


def test_rooms_import_only_what_they_may() -> None:
    failures = []
    for name, module in modules().items():
        if name == "__main__":
            continue
        allowed = NARROW[name] if name in NARROW else (*ROOMS[module.room], module.room)
        for target, found in inner_imports(name):
            if not lies_in(target, allowed):
                failures.append(
                    f"{module.at(found.line)} imports agentspec.{target}; "
                    f"{name} may import {', '.join(allowed) or 'nothing'}"
                )
    report(
        "An import breaks the order of rooms (docs/design.md). Move the shared part down, or pass it in as an argument "
        "or a Protocol:",
        failures,
    )


def test_no_import_cycles() -> None:
    graph = {
        name: sorted({target for target, found in inner_imports(name) if not found.for_types_only and target != name})
        for name in modules()
    }
    done: set[str] = set()
    failures: list[str] = []

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            failures.append(" -> ".join([*path[path.index(name) :], name]))
            return
        if name in done or name not in graph:
            return
        for target in graph[name]:
            walk(target, [*path, name])
        done.add(name)

    for name in graph:
        walk(name, [])
    report("Modules import each other in a cycle. Move the shared part into a third module:", failures)


def test_no_late_imports() -> None:
    failures = [
        f"{module.at(found.line)} imports {found.target} inside {found.function}()"
        for name, module in modules().items()
        for found in imports_by_module()[name]
        if found.function is not None and inner(found.target) is not None
    ]
    for name, module in modules().items():
        excused = {
            node
            for function in functions_of(module.tree)
            if (name, function.name) in LATE_LOADERS
            for node in ast.walk(function)
        }
        failures += [
            f"{module.at(node.lineno)} calls {ast.unparse(node.func)}"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Call)
            and node not in excused
            and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
        ]
    loaders = ", ".join(".".join(loader) for loader in sorted(LATE_LOADERS))
    report(
        f"Imports of agentspec must be at the top of a module; only {loaders} load late. "
        "Move the import up, or break the cycle:",
        failures,
    )


def way_to_torch(name: str) -> str | None:
    """The shortest chain of imports from a module to torch, including package __init__ files; None if there is none."""
    trail: dict[str, str] = {
        start: f"agentspec.{start}" for start in (name, *packages_above(name)) if start in modules()
    }
    queue = list(trail)
    while queue:
        current = queue.pop(0)
        for found in imports_by_module()[current]:
            if found.target.partition(".")[0] == "torch" and not found.for_types_only:
                return f"{trail[current]} -> torch ({modules()[current].at(found.line)})"
        for target, found in inner_imports(current, with_packages=True):
            if target in modules() and target not in trail and not found.for_types_only:
                trail[target] = f"{trail[current]} -> {target}"
                queue.append(target)
    return None


def test_torch_free_modules_do_not_import_torch() -> None:
    failures = [way for name in modules() if lies_in(name, TORCH_FREE) and (way := way_to_torch(name))]
    report(
        "These modules must load where torch isn't installed. Move the tensor work to its own module:",
        failures,
    )


@pytest.mark.parametrize("package", ONLY_IN)
def test_optional_packages_are_imported_in_one_place_only(package: str) -> None:
    failures = [
        f"{module.at(found.line)} imports {found.target}"
        for name, module in modules().items()
        for found in imports_by_module()[name]
        if found.target.partition(".")[0] == package and not lies_in(name, (ONLY_IN[package],))
    ]
    report(f"Only agentspec/{ONLY_IN[package].replace('.', '/')} imports {package}. Call it through there:", failures)


def test_workloads_do_not_import_agentspec() -> None:
    failures = []
    for path in sorted((ROOT / "workloads").rglob("*.py")):
        for found in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            if found.target.partition(".")[0] == "agentspec":
                failures.append(f"{path.relative_to(ROOT)}:{found.line} imports {found.target}")
    report(
        "workloads/ may use only files and HTTP, so that it works with any server. Copy the code that it needs:",
        failures,
    )


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_and_functions_are_below_their_caps() -> None:
    failures = []
    for module in modules().values():
        lines = module.source.count("\n")
        cap = MAX_KERNEL_FILE_LINES if module.room == "kernels" else MAX_FILE_LINES
        if lines > cap:
            failures.append(f"{module.path.relative_to(ROOT)} has {lines} lines, the cap is {cap}")
        for function in functions_of(module.tree):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                failures.append(
                    f"{module.at(function.lineno)} {function.name}() has {length} lines, "
                    f"the cap is {MAX_FUNCTION_LINES}"
                )
    report("Too long. Split it by responsibility:", failures)


def code_lines(module: Module) -> int:
    """Logical lines of code: a statement, or the header of a compound statement, counts once, however it is wrapped.
    Docstrings, comments and blank lines don't count, so that they aren't removed to stay below a cap."""
    tokens = tokenize.generate_tokens(io.StringIO(module.source).readline)
    docstrings = sum(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for node in ast.walk(module.tree)
    )
    return sum(token.type == tokenize.NEWLINE for token in tokens) - docstrings


def test_the_package_is_below_its_line_cap() -> None:
    rooms: Counter[str] = Counter()
    for module in modules().values():
        rooms[module.room if "." in module.name or module.room in ROOMS else "top level"] += code_lines(module)
    if rooms.total() > MAX_PACKAGE_LINES:
        cap = f"{MAX_PACKAGE_LINES:,}"
        report(
            f"agentspec/ has {rooms.total():,} lines of code, the cap is {cap}. Remove code, or raise the cap in a "
            "separate commit:",
            [f"{lines:6,} {room}" for room, lines in rooms.most_common()],
        )


def test_every_module_has_a_docstring() -> None:
    failures = [
        str(module.path.relative_to(ROOT))
        for module in modules().values()
        if module.source.strip() and not (ast.get_docstring(module.tree) or "").strip()
    ]
    report(
        "A module starts with a docstring: its responsibility and its limits (an empty __init__.py needs none):",
        failures,
    )


def test_the_docstring_of_errors_draws_every_exception() -> None:
    tree = modules()["errors"].tree
    drawn = re.findall(r"^ *[│├└─ ]*(\w+(?:Error))\b", ast.get_docstring(tree) or "", re.MULTILINE)
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert sorted(drawn) == sorted(defined), (
        "the module docstring of agentspec/errors.py must draw exactly its public exceptions"
    )


def test_the_engine_flags_are_frozen() -> None:
    flags = {
        argument.value
        for function in functions_of(modules()["commands.flags"].tree)
        if function.name in ENGINE_FLAG_FUNCTIONS
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".add_argument", "_add_number"))
        for argument in node.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--")
    }
    assert flags == ENGINE_FLAGS, (
        "the engine's flags changed: update ENGINE_FLAGS, README.md and CHANGELOG.md in the same commit, "
        "or revert the change"
    )


UNOWNED_MARK = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b(?!\(#\d+\))")
DEVELOPER_PATH = re.compile(r"(?<![\w.:/])/(?:home|Users|root|work|mnt|data)/\w")


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        pytest.param(UNOWNED_MARK, "A mark for later must name its issue, as in TO" + "DO(#12):", id="unowned-marks"),
        pytest.param(
            DEVELOPER_PATH,
            "A path of one machine. Make it relative to the repository, or a flag:",
            id="developer-paths",
        ),
    ],
)
def test_sources_have_no_unowned_marks_and_no_developer_paths(pattern: re.Pattern[str], rule: str) -> None:
    files = [
        *python_files(),
        *documents(),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(ROOT / "scripts").glob("*.sh"),
        ROOT / ".ci" / "run",
    ]
    failures = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    report(rule, failures)


def outside_code(markdown: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL))


def anchor(heading: str) -> str:
    """The fragment that Markdown viewers derive from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_in_documents_resolve() -> None:
    failures = []
    for path in documents():
        for link in re.findall(r"\]\(([^)\s]+)\)", outside_code(path.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, fragment = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists():
                failures.append(f"{path.relative_to(ROOT)} links to {link}, which isn't there")
            elif fragment and fragment not in map(
                anchor, re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            ):
                failures.append(f"{path.relative_to(ROOT)} links to {link}, which has no such heading")
    report("A link between documents is broken. Correct it:", failures)


def test_documents_name_files_that_exist() -> None:
    """A path in backquotes under a folder of this repository must exist."""
    claim = re.compile(r"`((?:agentspec|tests|docs|workloads|benchmarks|scripts)/[\w./-]+)`")
    rooms = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+\.py)`")
    failures = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        claims = [(name, ROOT / name) for name in claim.findall(text)] + [
            (name, PACKAGE / name) for name in rooms.findall(text)
        ]
        failures += [f"{path.relative_to(ROOT)} names {name}" for name, target in claims if not target.exists()]
    report("The documents name files that don't exist. Correct the name, or remove the path:", failures)


def test_documents_name_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    failures = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        commands = re.findall(r"^```.*?^```|`[^`\n]+`", text, flags=re.MULTILINE | re.DOTALL)
        for arguments in re.findall(r"(?:^|[`$;&|]|\n) *make((?: +[\w-]+(?!\S*=))+)", "\n".join(commands)):
            failures += [
                f"{path.relative_to(ROOT)} says make {target}" for target in arguments.split() if target not in targets
            ]
    report(f"No such make target; there are {', '.join(sorted(targets))}:", failures)
