"""What every test shares: eight simulated CPU devices, strict promotion and the meshes to test on.

`mesh8` runs a test once on every mesh in `FACTORISATIONS`, the ways to lay eight devices out along
named axes. A test that needs only some of them, or other names, builds its own mesh.
"""

import contextlib
import functools
import gc
import math
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hypothesis
import jax
import pytest

from manualpar.system.storage import BucketPath
from tests import compiling
from tests.changed import changed_files, reached_tests
from tests.runs.small_runs import run_here
from tests.system.cluster.processes import Processes
from tests.system.storage.s3_server import BUCKET, s3_server, use_server

NUM_DEVICES = 8

FACTORISATIONS: tuple[dict[str, int], ...] = (
    {"data": 8},
    {"data": 8, "model": 1},
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"data": 1, "model": 8},
    {"replica": 2, "data": 2, "model": 2},
)

# A first example compiles, which no deadline allows for; the same examples are drawn on every run.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True, max_examples=25)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option for those who have no time for every case."""
    parser.addoption(
        "--each",
        type=int,
        metavar="N",
        help="of each test function run N cases, the first, the last and some between; "
        "all of one that is marked `every_case`",
    )
    parser.addoption(
        "--fresh",
        type=int,
        default=4,
        metavar="N",
        help="how many programs the test of random programs draws that nobody has drawn before",
    )
    parser.addoption(
        "--changed",
        action="store_true",
        help="run only what a change can reach, by imports; see `tests.changed`. All, if nothing "
        "has changed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the devices, before anything has asked jax for them."""
    if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        jax.config.update("jax_platforms", "cpu")
        # The last of two that set the same counts.
        os.environ["XLA_FLAGS"] = f"{compiling.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # Most of the suite's time is XLA's; tests of what XLA makes of a program are `optimized`.
    for name, value in compiling.CACHE.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    for name, value in compiling.SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)  # for processes that tests start
    if not hasattr(config, "workerinput"):
        compiling.forget_old_programs()
    hypothesis.settings.load_profile("house")
    # Imports and traces allocate much that lives on: collecting garbage less often saves a tenth.
    gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--changed` and `--each` do not ask for, after `-m` and `-k`."""
    if config.getoption("changed") and (changed := changed_files()):
        reached = reached_tests(changed)
        others = [] if reached is None else [x for x in items if x.path not in reached]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    if (number := config.getoption("each")) is None:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        own = item.nodeid if item.get_closest_marker("every_case") else ""
        cases.setdefault(own or item.nodeid.partition("[")[0], []).append(item)
    kept = {item for some in cases.values() for item in _spread(some, number)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _spread(cases: list[pytest.Item], number: int) -> list[pytest.Item]:
    step = (len(cases) - 1) / max(number - 1, 1)
    return [cases[round(i * step)] for i in range(number)] if len(cases) > number else cases


def pytest_collection_finish() -> None:
    """Lets no later collection of garbage search imports: closing a checkpoint asks for one."""
    gc.freeze()


def _mesh_id(axis_sizes: Mapping[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in axis_sizes.items())


@pytest.fixture(autouse=True)
def _optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives tests that are marked `optimized` the compiler that users have."""
    if request.node.get_closest_marker("optimized"):
        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", before)
    else:
        yield


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes, and ends those that are left when the test has ended."""
    with contextlib.closing(Processes(tmp_path)) as processes:
        yield processes


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a server of S3 on the loopback, which ends with the session."""
    pytest.importorskip("moto", reason="pip install -e '.[interop]'")
    pytest.importorskip("s3fs", reason="pip install -e '.[interop]'")
    with s3_server() as port:
        yield port


@pytest.fixture
def use_s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the environment for the server, or with the argument `port` for a proxy before it."""
    return functools.partial(use_server, monkeypatch, port=s3_port)


@pytest.fixture
def bucket_folder(use_s3: Callable[..., None], request: pytest.FixtureRequest) -> BucketPath:
    """A folder of the test's own in a bucket, which is empty."""
    use_s3()
    return BucketPath("s3", BUCKET, re.sub(r"\W", "-", request.node.name))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, devices8: list[jax.Device]) -> Path:
    """The folder of a run that nobody disturbed, to compare others with. Copy it to change it."""
    del devices8
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_here(workdir) == 0
    return workdir


@pytest.fixture(scope="session")
def devices8() -> list[jax.Device]:
    """Eight devices; the test is skipped on a machine made to run on fewer."""
    devices = jax.devices()
    if len(devices) < NUM_DEVICES:
        pytest.skip(f"needs {NUM_DEVICES} devices, JAX_PLATFORMS gives {len(devices)}")
    return devices[:NUM_DEVICES]


@pytest.fixture(params=FACTORISATIONS, ids=_mesh_id)
def mesh8(request: pytest.FixtureRequest, devices8: list[jax.Device]) -> jax.sharding.Mesh:
    """A mesh over all eight devices: the test runs once for each factorisation."""
    axis_sizes: Mapping[str, int] = request.param
    assert math.prod(axis_sizes.values()) == NUM_DEVICES
    return jax.make_mesh(
        tuple(axis_sizes.values()),
        tuple(axis_sizes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(axis_sizes),
        devices=devices8,
    )


@pytest.fixture
def limit_files():
    """A function that has every file of this process take no more than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
