"""Tests run in forks of a process that has imported everything but headprune: a mutant costs its tests, not torch's import.

Cosmic-ray's own runner starts a new interpreter for every mutant, which takes eight seconds here before the first test.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

POLL = 0.05  # seconds
_ELSEWHERE = 71  # exit status
MEMORY = 16 << 30  # bytes of address space: a mutant may ask for any amount


class Tree:
    """A copy of the checkout, in which mutants are written: nothing happens to the checkout, whatever ends the run."""

    def __init__(self, root: Path, path: Path, all_of_it: bool = False) -> None:
        self.root, self.path = root, path
        self.files = path / ".files"
        shutil.rmtree(path, ignore_errors=True)
        leave = shutil.ignore_patterns(
            "__pycache__", ".*_cache", "*.egg-info", ".git", ".venv", ".cache", ".headprune", "build", "dist"
        )
        if all_of_it:
            shutil.copytree(root, path, ignore=leave)
            self.files.mkdir()
            return
        for name in ("headprune", "tests", "benchmarks", "tools", "docs"):
            shutil.copytree(root / name, path / name, ignore=leave)
        for file in root.glob("*.*"):
            if file.is_file() and file.suffix in (".py", ".toml", ".md"):
                shutil.copy2(file, path)
        self.files.mkdir()

    @contextlib.contextmanager
    def written(self, module: str, text: str) -> Iterator[None]:
        """A module with another text, for a while; Python's compiled copies of it go, since they are told apart by the second."""
        path = self.path / module
        before = path.read_bytes()
        try:
            path.write_text(text, encoding="utf-8")
            self._forget(path)
            yield
        finally:
            path.write_bytes(before)
            self._forget(path)

    def _forget(self, path: Path) -> None:
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    def clear(self) -> None:
        shutil.rmtree(self.files)
        self.files.mkdir()


def prepare(tree: Tree) -> None:
    """What must be set before torch and transformers are imported, and pytest with its plugins."""
    os.environ |= {
        "CI": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        "HF_MODULES_CACHE": str(tree.files / "modules"), "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    for name in ("coverage", "pytest", "hypothesis", "torch"):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def warm_up(modules: Sequence[str]) -> None:
    """Import what the tests will: all but headprune and the tests themselves."""
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def in_child(tree: Tree, work: Callable[[], int], cpu: float) -> tuple[str, int]:
    """Run something in a fork: ("exit", code), or ("signal", number), or ("time", 0).

    Limits are of processor time and of polls, not of the clock: a busy machine, or one that halts us both, changes nothing.
    """
    tree.clear()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 5))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            log = os.open(tree.path / ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(tree.path)
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(tree.path))
            tempfile.tempdir = str(tree.files)
            code = work()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    try:
        for _ in range(int(10 * cpu / POLL)):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                break
            time.sleep(POLL)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "time", 0
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        raise
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests started
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return ("time", 0) if number == signal.SIGXCPU else ("signal", number)
    return "exit", os.WEXITSTATUS(status)


class _Plugin:
    """Hypothesis looks for no smaller example: that one fails is enough."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        name = "headprune, no shrinking"
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(name, settings.get_profile("headprune"), phases=phases)
        settings.load_profile(name)


class Watched(_Plugin):
    """Notes which test runs which lines, and how long each takes.

    What tests share (fixtures of a session or module, functions that remember results) counts for each of them that uses it.
    """

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.shared: dict[str, list[str]] = {}
        self.failed: list[str] = []

    def pytest_runtest_protocol(self, item: Any) -> None:
        ours = [module for name, module in list(sys.modules.items()) if name.startswith("tests.")]
        for each in (value for module in ours for value in vars(module).values()):
            if isinstance(each, functools._lru_cache_wrapper):
                each.cache_clear()
        for name in item.fixturenames:
            self.shared.setdefault(f"fixture {name}", []).append(item.nodeid)
        self.item = item.nodeid
        self.coverage.switch_context(item.nodeid)

    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        if fixturedef.scope != "function":
            self.coverage.switch_context(f"fixture {fixturedef.argname}")

    def pytest_runtest_call(self, item: Any) -> None:
        self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)


class Chosen(_Plugin):
    """Runs some tests, in a given order, and says which one failed."""

    def __init__(self, tests: Sequence[str], told: Path) -> None:
        self.place = {test: i for i, test in enumerate(tests)}
        self.told = told

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda item: self.place[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.told.write_text(report.nodeid, encoding="utf-8")


def foreign(path: Path) -> list[str]:
    """Modules that are imported now and are neither headprune's nor its tests'."""
    ours = ("headprune", "tests", "conftest", "__main__", "transformers_modules")
    return [
        name
        for name, module in sys.modules.items()
        if not name.startswith(ours) and not (getattr(module, "__file__", None) or "").startswith(str(path))
    ]


OPTIONS = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "-W", "ignore"]


def baseline(tree: Tree, files: Sequence[str]) -> dict[str, Any]:
    """The tests of some files without any change: seconds by test, tests by module and line, and what they import.

    Raises:
        RuntimeError: A test fails.
    """
    told = tree.path / ".baseline"

    def work() -> int:
        import coverage
        import pytest

        watch = coverage.Coverage(data_file=None, config_file=False, source=[str(tree.path / "headprune")])
        watch.start()
        plugin = Watched(watch)
        code = pytest.main([*OPTIONS, f"--basetemp={tree.files}/t", *files], plugins=[plugin])
        watch.stop()
        data, lines = watch.get_data(), {}
        for path in data.measured_files():
            by_line = data.contexts_by_lineno(path)
            lines[str(Path(path).relative_to(tree.path))] = {
                str(line): sorted({test for c in contexts for test in plugin.shared.get(c, [c] if c else [])})
                for line, contexts in by_line.items()
            }
        modules = foreign(tree.path)
        told.write_text(json.dumps({"seconds": plugin.seconds, "lines": lines, "modules": modules}), encoding="utf-8")
        return int(code)

    how, code = in_child(tree, work, 3600)
    if (how, code) != ("exit", 0):
        log = (tree.path / ".log").read_text(errors="replace")
        raise RuntimeError(f"The tests fail without any change ({how} {code}):\n{log[-3000:]}")
    return dict(json.loads(told.read_text(encoding="utf-8")))


def killed_by(tree: Tree, tests: Sequence[str], seconds: float, before: Callable[[], bool] = lambda: True) -> str:
    """What noticed the change: a test's name, "import" (the tests could not begin), "time" or "crash"; "" if nothing did.

    Args:
        before: Called in the fork; "elsewhere" is returned where it says no.
    """
    told = tree.path / ".told"
    told.write_text("")
    files = sorted({test.partition("::")[0] for test in tests})

    def work() -> int:
        import pytest

        if not before():
            return _ELSEWHERE
        code = pytest.main([*OPTIONS, f"--basetemp={tree.files}/t", *files], plugins=[Chosen(tests, told)])
        return int(code)

    how, code = in_child(tree, work, 30 + 5 * seconds)
    if how != "exit":
        return "time" if how == "time" else "crash"
    if code == 0:
        return ""
    return "elsewhere" if code == _ELSEWHERE else told.read_text() or "import"


class Collected:
    """A fork that has imported headprune and the tests as well: functions are changed there in place, which saves their import.

    What a test file computes while it is imported, it computes without the change. So this may notice less than `killed_by`, never more.
    """

    def __init__(self, tree: Tree, files: Sequence[str]) -> None:
        sys.stdout.flush()
        mine, asked = os.pipe()
        answers, its = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(asked), os.close(answers)
                self._serve(tree, files, mine, its)
                code = 0
            finally:
                os._exit(code)
        os.close(mine), os.close(its)
        self._asked, self._answers = os.fdopen(asked, "w"), os.fdopen(answers)

    def killed_by(self, module: str, function: str, text: str, tests: Sequence[str], seconds: float) -> str:
        """As `killed_by`; "elsewhere" if the function is not found."""
        self._asked.write(json.dumps([module, function, text, list(tests), seconds]) + "\n")
        self._asked.flush()
        if not (line := self._answers.readline()):
            raise RuntimeError("The process with the tests has ended.")
        return str(json.loads(line))

    def close(self) -> None:
        self._asked.close()
        os.waitpid(self.pid, 0)

    @staticmethod
    def _serve(tree: Tree, files: Sequence[str], asked: int, answers: int) -> None:
        import pytest

        log = os.open(tree.path / ".collected", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree.path)
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(tree.path))
        pytest.main([*OPTIONS, "--collect-only", *files])
        gc.collect()
        gc.freeze()
        with os.fdopen(asked) as lines, os.fdopen(answers, "w") as out:
            for line in lines:
                module, function, text, tests, seconds = json.loads(line)
                by = killed_by(tree, tests, seconds, functools.partial(_changed_in_place, module, function, text))
                out.write(json.dumps(by) + "\n")
                out.flush()


def _changed_in_place(module: str, function: str, text: str) -> bool:
    """Give a function that is already imported the code of a module's other text; whether it was found."""
    there = sys.modules.get(module.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    if there is None:
        return False
    codes: dict[str, types.CodeType] = {}

    def collect(code: types.CodeType) -> None:
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                codes.setdefault(each.co_qualname, each)
                collect(each)

    collect(compile(text, there.__file__ or module, "exec"))
    found = False
    for each in _functions(vars(there), there):
        name = each.__qualname__
        if (
            f"{function}.".startswith(f"{name}.")
            and name in codes
            and codes[name].co_freevars == each.__code__.co_freevars
        ):
            each.__code__, found = codes[name], True
    return found


def _functions(inside: Mapping[str, Any], module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Functions and methods of a module, also those inside of decorators."""
    for each in list(inside.values()):
        if isinstance(each, type) and each.__module__ == module.__name__:
            yield from _functions(vars(each), module)
        each = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
        while isinstance(each, types.FunctionType):
            if each.__code__.co_filename == module.__file__:
                yield each
            each = getattr(each, "__wrapped__", None)
