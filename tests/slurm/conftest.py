"""The cluster that the tests of this folder share."""

from __future__ import annotations

import faulthandler
from collections.abc import Generator, Iterator

import pytest

from tests.slurm import cluster as slurm
from tests.slurm.cluster import Cluster
from tests.slurm.training import LARGE, SMALL, Shape, Training


@pytest.fixture(scope="session")
def the_cluster() -> Iterator[Cluster]:
    """Four nodes of eight GPUs that are none, until the session ends."""
    if why := slurm.obstacle():
        pytest.skip(why)
    with slurm.running(nodes=4, gpus=8) as cluster:
        yield cluster


@pytest.fixture(scope="session", params=[SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    """The size of the runs of a test."""
    found: Shape = request.param
    return found


@pytest.fixture(scope="session")
def undisturbed(the_cluster: Cluster, shape: Shape) -> Training:
    """A run from its start to its end that nothing happened to, its ranks started by torchrun; it has ended."""
    training = Training.submit(the_cluster, "undisturbed", shape, launcher="torchrun")
    the_cluster.wait(training.job)
    return training


@pytest.fixture
def cluster(the_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, all nodes idle; what the test leaves of jobs is cancelled, and what it broke repaired."""
    the_cluster.submitted.clear()
    yield the_cluster
    the_cluster.login("scancel", "--state=PENDING", "--user=root")  # what jobs have queued themselves
    for job in the_cluster.submitted:
        the_cluster.cancel(job)
    the_cluster.repair()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Take off the limit for a whole test: every wait has its own, with a message that is clearer than a stack."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the cluster was at when a test failed."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and call.when == "call" and cluster is not None:
        report.sections.append(("Slurm", cluster.reported()))
    return report
