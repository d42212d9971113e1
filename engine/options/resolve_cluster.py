"""Options of an engine that routers on other machines may use. Used by `engine/options/resolve.py`."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Any

from engine.cluster.key import read_key_file
from engine.cluster.membership import parse_address
from engine.errors import OptionError


def resolve_cluster(values: dict[str, Any], model: Path) -> dict[str, Any]:
    """Return the fields of an engine's configuration. Raises OptionError for a key file that cannot be used, and for a public
    address without one."""
    listen, key_file = values["cluster_listen"], values["cluster_key_file"]
    if not listen:
        for option in ("cluster_key_file", "cluster_checkpoints"):
            if values[option]:
                named = option.replace("_", "-")
                raise OptionError(f"--{named} has no effect without an address for routers; add --cluster-listen")
        return {}
    if not key_file and not is_loopback(parse_address(listen).host):
        raise OptionError(
            f"--cluster-listen {listen}: other machines could use this engine without a key; add --cluster-key-file FILE "
            "(`tokamak key FILE` makes one), or listen on 127.0.0.1"
        )
    if key_file:
        read_key_file(key_file)
    checkpoints = tuple(map(_directory, values["cluster_checkpoints"])) or (str(model.absolute().parent),)
    return {"cluster_listen": listen, "cluster_key_file": key_file, "cluster_checkpoints": checkpoints}


def _directory(name: str) -> str:
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        raise OptionError(f"--cluster-checkpoints {name} is no directory; name directories with weights or adapters")
    return str(path)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; names are not looked up."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
