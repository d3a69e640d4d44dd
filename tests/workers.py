"""The worker pools of `dualmesh.testing`, under the names that tests use."""

from dualmesh._support.ports import free_port as free_port
from dualmesh.errors import WorkerError as WorkerError
from dualmesh.testing.pools import DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S
from dualmesh.testing.pools import Pool as Pool
