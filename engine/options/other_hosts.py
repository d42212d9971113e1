"""Options by which other engines (vLLM, FastDeploy) use several hosts. They are known here, so that a user of such an option
gets an explanation and not just "unknown option". Used by `engine/options/read.py`."""

from __future__ import annotations

from engine.errors import OptionError

_ONE_HOST = {"nnodes": "1", "node_rank": "0"}  # values that mean one host
_HOSTS = "an engine runs on 1 host; start one engine per host with --cluster-listen, and `tokamak router` in front of them"
_REPLICAS = "all replicas run on 1 host; use only --data-parallel-size"
_RANKS = "ranks are processes on 1 host; remove it"

OTHER_HOSTS: dict[str, str] = {  # key -> the situation here, and the remedy
    "nnodes": _HOSTS,
    "node_rank": _HOSTS,
    "master_addr": _HOSTS,
    "master_port": _HOSTS,
    "ips": _HOSTS,
    "headless": _HOSTS,
    "data_parallel_address": _HOSTS,
    "data_parallel_rpc_port": _HOSTS,
    "data_parallel_size_local": _REPLICAS,
    "data_parallel_start_rank": _REPLICAS,
    "data_parallel_rank": "all replicas belong to 1 engine; remove it, requests choose a replica with X-data-parallel-rank",
    "data_parallel_backend": _RANKS,
    "data_parallel_hybrid_lb": _REPLICAS,
    "data_parallel_external_lb": _REPLICAS,
    "distributed_executor_backend": _RANKS,
}

FLAGS = frozenset(("headless", "data_parallel_hybrid_lb", "data_parallel_external_lb"))  # take no value


def refuse_other_hosts(key: str, value: str, source: str) -> None:
    """Reject values that mean more than one host. Raises OptionError; `source`: where the option was given."""
    if value != _ONE_HOST.get(key):
        raise OptionError(f"{source} {value}".rstrip() + f": {OTHER_HOSTS[key]}")
