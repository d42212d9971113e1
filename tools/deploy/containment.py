"""Container made of Linux namespaces only: its own root, read-only except for some tmpfs, a /dev/shm of 64 MB, its own
processes, and an unprivileged user. For machines without a container runtime.

Used by `rehearsal.py` and by the tests. Needs `unshare` (util-linux 2.38), and user namespaces for users other than root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

# The mounts end with their mount namespace.
_SCRIPT = """
set -e
root=$1 binds=$2 memory=$3
shift 3
mount --rbind "$root" "$root"
for place in $memory; do mount -t tmpfs -o mode=1777 tmpfs "$root$place"; done
while read -r to from; do
  [ -z "$to" ] || { mkdir -p "$root$to"; mount --rbind "$from" "$root$to"; mount -o remount,bind,ro "$root$to"; }
done <<<"$binds"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -o remount,bind,ro "$root"
exec "$@"
"""


def contained(
    root: Path,
    command: Iterable[str],
    *,
    user: int,
    directory: str = "/",
    environment: Mapping[str, str],
    binds: Mapping[str, str] | None = None,
    memory: Iterable[str] = ("/tmp",),
    is_root: bool = False,
) -> list[str]:
    """Return the command line that runs `command` in `root` as its first process.

    `environment`: all its variables. `memory`: existing places in `root` that are writable. `binds`: places, outer ones first,
    and the directories of this machine that are mounted there read-only. With `is_root`, the caller is root and `user` is that
    user; otherwise it is another name for the caller, who owns the files in `root`.
    """
    variables = [f"{name}={value}" for name, value in environment.items()]
    if is_root:
        rights = [f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        entering = ["unshare", f"--root={root}", f"--wd={directory}", "setpriv", *rights]
    else:
        entering = ["unshare", f"--root={root}", f"--wd={directory}", "--user", f"--map-user={user}", f"--map-group={user}"]
    spaces = ["--mount", "--pid", "--fork", "--kill-child", *([] if is_root else ["--user", "--map-root-user"])]
    lines = "\n".join(f"{place} {source}" for place, source in (binds or {}).items())
    shell = ["bash", "-c", _SCRIPT, "bash", str(root), lines, " ".join(memory)]
    return ["unshare", *spaces, *shell, *entering, "env", "-i", *variables, *command]
