"""Fixtures that several test modules share, the order of the tests, and the list of skips."""

import os

# Each worker computes in one thread, as in a run; more would fight over the cores that tests share.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What `device: auto` stands for: only tests of a GPU name one.
os.environ.setdefault("TRAMONTANE_DEVICE", "cpu")
# The number type that `dtype: auto` stands for: tests have one result on all processors.
os.environ.setdefault("TRAMONTANE_CPU_DTYPE", "float32")
# Whoever compiles for what /proc/cpuinfo lists does not first try it with three programs.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import gc
import importlib.util
import re
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# A busy machine makes any example slow: no property is about time.
settings.register_profile("tramontane", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tramontane")

MEMORY_EACH = 3 << 30  # bytes that a process of tests and those that it starts may take
EXPECTED_SKIPS = Path(__file__).with_name("expected_skips.txt")


@pytest.fixture(scope="session")
def ray_actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A process that has made the imports of Ray's actors, which are its forks in a cluster whose
    processes have these variables."""
    pytest.importorskip("ray", reason="Ray is not installed: 'tramontane-rl[ray]'")
    from tests.placement import warm_actors

    server = warm_actors.start(tmp_path_factory.mktemp("ray"))
    yield {warm_actors.SOCKET: os.environ[warm_actors.SOCKET]}
    server.kill()


@pytest.fixture(scope="session")
def ray_cluster(ray_actors: dict[str, str]) -> Iterator[Any]:
    """One Ray cluster for all tests of a process that use Ray: it takes 4 to 6 s to start. Its
    `add_node` and `remove_node` change the machines that it seems to have. Its actors are forks of
    the process of `ray_actors`."""
    import ray
    from ray.cluster_utils import Cluster

    from tests.placement import warm_actors

    os.environ.setdefault("RAY_worker_niceness", "0")  # as in a cluster of ours
    # No processes for actors that no test asks for.
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

    class Warm(Cluster):
        def add_node(self, **options: Any) -> Any:
            return super().add_node(setup_worker_path=warm_actors.LAUNCHER, **options)

    head = {"num_cpus": 4, "object_store_memory": 1 << 30}
    # Neither a dashboard, nor the processes that add machines and carry logs to the driver.
    head |= {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    cluster = Warm(initialize_head=True, head_node_args=head)
    ray.init(cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> str:
    """The folder of `tests.one_layer`'s model, which is made once for all processes of tests."""
    from tests import one_layer

    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "one_layer"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            one_layer.make(folder)
            (folder / "done").touch()
    return str(folder)


@pytest.fixture(scope="session")
def vllm_environment() -> Any:
    """vLLM's environment; one that was set up and does not work fails the test."""
    from tramontane.generator.vllm import environment

    if not environment.expected():
        pytest.skip("needs vLLM's environment (make vllm)")
    return environment.find(None)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in forks of `tests.fork_server`, which has imported torch, instead of fresh ones."""
    from tests import forked

    monkeypatch.setattr("tramontane.placement.ranks.START_METHOD", forked.START_METHOD)


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Workers, and runs of studies, in forks of a process that has imported torch."""
    from tests import forked_workers

    with forked_workers.served():
        yield


def uses_ray(item: pytest.Item) -> bool:
    """True for a test with the actors of `ray_actors`, by its fixtures or a parameter."""
    callspec = getattr(item, "callspec", None)
    named = {"ray", "actor", "nixl"} & {*map(str, callspec.params.values())} if callspec else set()
    return bool(named) or "ray_actors" in getattr(item, "fixturenames", ())


def seconds(item: pytest.Item) -> float:
    """About how long a slow test takes: what its mark says, or the mean of those without."""
    mark = item.get_closest_marker("slow")
    return (mark.args or (5,))[0] if mark else 0


@pytest.hookimpl(tryfirst=True)  # before xdist adds the names of groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Ray go to one process, which starts one cluster. They and the slowest files come
    first, so that no process is left alone with one."""
    slow: Counter[Path] = Counter()
    for item in items:
        slow[item.path] += seconds(item)
    on_ray = {item for item in items if uses_ray(item)}
    for item in on_ray:
        item.add_marker(pytest.mark.xdist_group("ray"))
    items.sort(key=lambda item: (item not in on_ray, -slow[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep garbage collection off while tests are collected, which saves a sixth of the time, and
    leave what libraries and tests made out of later collections, as a run does: little of it is or
    becomes garbage, and to find that takes another twentieth."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("loadgroup", False) and item.get_closest_marker("xdist_group"):
        # xdist 3.8 with pytest 9.2 spreads groups over processes.
        assert "@" in item.nodeid, "xdist has not named the group of this test"
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


class ByFile(LoadScopeScheduling):
    """Sends a file's tests to one process, but those of a group to the process of the group."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        group = name.rpartition("@")[2] if name.rfind("@") > name.rfind("]") else ""
        return group or file


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """The processes of tests are forks of one that makes their imports. Meanwhile the bytecode of
    tests is written, which in a fresh clone each of them would make by itself."""
    from tests import fork_server

    for spec in specs:
        spec.python = fork_server.python()
    if config.getoption("assertmode") == "rewrite":
        paths = [Path(arg.partition("::")[0]) for arg in config.args]
        tests = [[path] if path.is_file() else path.rglob("test_*.py") for path in paths]
        for test in chain.from_iterable(tests):
            write_bytecode(test, config.pluginmanager.rewrite_hook)


def write_bytecode(test: Path, loader: Any) -> None:
    """Import a test as far as its first import. The loader writes its bytecode before."""
    spec = importlib.util.spec_from_file_location(test.stem, test, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = {}  # it cannot import
    with suppress(ImportError):
        loader.exec_module(module)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


class SkipList:
    """Counts skipped tests by what would run them, as `expected_skips.txt` says, and fails the
    session where one was skipped for a reason that it lacks, or, with `--no-skips`, for any."""

    def __init__(self, none: bool) -> None:
        lines = EXPECTED_SKIPS.read_text().splitlines()
        rules = [line.split(" -> ") for line in lines if line and not line.startswith("#")]
        self.expected = {re.compile(pattern): remedy for pattern, remedy in rules if not none}
        self.remedies: Counter[str] = Counter()
        self.unexpected: list[str] = []

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            found = [remedy for rule, remedy in self.expected.items() if rule.search(str(reason))]
            self.remedies.update(found[:1])
            if not found:
                self.unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for remedy, count in self.remedies.most_common():
            terminalreporter.line(f"skipped {count}, which would run with: {remedy}")
        for line in self.unexpected:
            terminalreporter.line(f"skipped, and not in {EXPECTED_SKIPS.name}: {line}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if a test is skipped")


def pytest_xdist_auto_num_workers() -> int | None:
    """Three processes for two cores, as tests wait for Ray, timers and kills a good part of their
    time, if the machine has the memory that one and what it starts take."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(cores, min(cores + cores // 2, memory // MEMORY_EACH))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that xdist reports to, or the only one
        config.pluginmanager.register(SkipList(config.getoption("no_skips")))
